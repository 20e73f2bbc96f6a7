"""Agents and tools: programs from their arrival to their end, what their tools take, and who stands still meanwhile."""

from cluster import metrics as m
from cluster.dashboards.board import Board, Panel, Query, Row, Shape, Unit, Variable
from cluster.dashboards.promql import mean, observed, or_zero, per, quantile, rate, total
from cluster.dashboards.scopes import CLUSTER

TAILS = (0.5, 0.95, 0.99)

PROGRAMS = Row(
    "Programs",
    (
        Panel(
            "Job completion, without tools",
            "Seconds of a program's turns together.",
            Unit.SECONDS,
            tuple(Query(quantile(share, m.PROGRAM_S, scope=CLUSTER), f"p{100 * share:g}") for share in TAILS),
        ),
        Panel(
            "Job completion, with tools",
            "Seconds from a program's arrival to its end.",
            Unit.SECONDS,
            tuple(Query(quantile(share, m.PROGRAM_WALL_S, scope=CLUSTER), f"p{100 * share:g}") for share in TAILS),
        ),
        Panel(
            "Turns of a program",
            "How long programs go on.",
            Unit.COUNT,
            (
                Query(mean(m.PROGRAM_TURNS, scope=CLUSTER), "mean"),
                Query(quantile(0.95, m.PROGRAM_TURNS, scope=CLUSTER), "p95"),
            ),
        ),
        Panel(
            "Ends",
            "Late: a turn did not meet the SLO. Failed: one was not answered. Abandoned: one was not waited for.",
            Unit.PER_S,
            (Query(rate(m.PROGRAM_ENDS, by=("verdict",), scope=CLUSTER), "{{verdict}}"),),
            Shape.STACKED,
        ),
        Panel(
            "Bubble of a pause",
            "Seconds that a turn which resumes a program waits at its replica: what a pause costs on top of its tool.",
            Unit.SECONDS,
            tuple(
                Query(quantile(share, m.QUEUE_S, 'turn="resumed"', scope=CLUSTER), f"p{100 * share:g}")
                for share in TAILS
            ),
        ),
        Panel(
            "Known to the replicas",
            "Programs that have not ended, and of these the ones that are paused with their KV held.",
            Unit.COUNT,
            (
                Query(total(m.KNOWN_PROGRAMS, scope=CLUSTER), "known"),
                Query(total(m.HELD_PROGRAMS, scope=CLUSTER), "held"),
            ),
        ),
    ),
)

SERVER_SIDE = Row(
    "Programs that the cluster runs",
    (
        Panel(
            "Open",
            "Programs whose loop of turns and tools an ingress runs now.",
            Unit.COUNT,
            (Query(total(m.OPEN_PROGRAMS), "open"),),
        ),
        Panel(
            "Started, taken over, ended",
            "Taken over: another ingress went on where the one that ran it was gone.",
            Unit.PER_S,
            (Query(or_zero(rate(m.PROGRAM_EVENTS, by=("kind",))), "{{kind}}"),),
        ),
        Panel(
            "How prompts were made",
            "Continued: from the exact token ids before, so that all KV can be used again.",
            Unit.PER_S,
            (Query(or_zero(rate(m.TURN_PROMPTS, by=("rendering",), scope=CLUSTER)), "{{rendering}}"),),
        ),
    ),
)

TOOLS = Row(
    "Tools",
    (
        Panel(
            "Calls by tool",
            "Calls a second that ended.",
            Unit.PER_S,
            (Query(rate(m.TOOL_CALLS, by=("tool",), scope=CLUSTER), "{{tool}}"),),
        ),
        Panel(
            "Calls that did not end well",
            "By outcome.",
            Unit.PER_S,
            (
                Query(
                    or_zero(rate(m.TOOL_CALLS, 'outcome!="ok"', by=("tool", "outcome"), scope=CLUSTER)),
                    "{{tool}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Share that ended well",
            "Of the calls in the time shown.",
            Unit.SHARE,
            (
                Query(
                    per(
                        rate(m.TOOL_CALLS, 'outcome="ok"', by=("tool",), over="$__range", scope=CLUSTER),
                        rate(m.TOOL_CALLS, by=("tool",), over="$__range", scope=CLUSTER),
                    ),
                    "{{tool}}",
                ),
            ),
            Shape.BARS,
            good_from=0.8,
        ),
        Panel(
            "Run time, p95",
            "Seconds that a tool runs, retries included.",
            Unit.SECONDS,
            (Query(quantile(0.95, m.TOOL_SECONDS, by=("tool",), scope=CLUSTER), "{{tool}}"),),
        ),
        Panel(
            "Queue time, p95",
            "Seconds that a call waits for its tool: more actors, or a higher limit, where it grows.",
            Unit.SECONDS,
            (Query(quantile(0.95, m.TOOL_QUEUE_SECONDS, by=("tool",), scope=CLUSTER), "{{tool}}"),),
        ),
        Panel(
            "Run time",
            "All tools that were chosen.",
            Unit.SECONDS,
            (Query(observed(m.TOOL_SECONDS, part="_bucket", scope=CLUSTER), "{{le}}"),),
            Shape.HEAT,
        ),
    ),
)

BOARD = Board(
    "caesura-agents",
    "Caesura / Agents and tools",
    "Programs from their arrival to their end, and the tools in their pauses.",
    (Variable.MODEL, Variable.TENANT, Variable.TOOL),
    (PROGRAMS, SERVER_SIDE, TOOLS),
)
