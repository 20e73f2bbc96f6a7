"""KV memory and decisions: what the blocks are used for, what becomes of pauses, what it costs."""

from cluster import metrics as m
from cluster.dashboards.board import Board, Panel, Query, Row, Shape, Unit, Variable
from cluster.dashboards.promql import PROCESS, or_zero, per, quantile, rate, total
from cluster.dashboards.scopes import REPLICAS

LEGEND = "{{process}}"


def _blocks(*subtracted: str, of: str) -> str:
    return "\n- ".join((of, *subtracted))


FREE, HELD, CACHED, ALL = (
    total(metric, scope=REPLICAS) for metric in (m.FREE_BLOCKS, m.HELD_BLOCKS, m.CACHED_BLOCKS, m.TOTAL_BLOCKS)
)

MEMORY = Row(
    "Memory",
    (
        Panel(
            "KV blocks by use",
            "Running: of turns in the batch. Held: of paused programs. Cached: free, but of use to whoever comes back.",
            Unit.COUNT,
            (
                Query(_blocks(FREE, HELD, of=ALL), "running"),
                Query(HELD, "held"),
                Query(CACHED, "cached"),
                Query(_blocks(CACHED, of=FREE), "free"),
            ),
            Shape.STACKED,
            width=12,
        ),
        Panel(
            "Held, of each replica's blocks",
            "The share of its memory that a replica keeps for paused programs.",
            Unit.SHARE,
            (
                Query(
                    per(
                        total(m.HELD_BLOCKS, by=(PROCESS,), scope=REPLICAS),
                        total(m.TOTAL_BLOCKS, by=(PROCESS,), scope=REPLICAS),
                    ),
                    LEGEND,
                ),
            ),
            width=6,
        ),
        Panel(
            "Host tier",
            "Tokens that have a copy in host memory, and how many fit. Flat at 0 where `replicas.host_bytes` is 0.",
            Unit.COUNT,
            (
                Query(total(m.HOST_USED_TOKENS, scope=REPLICAS), "used"),
                Query(total(m.HOST_TOKENS, scope=REPLICAS), "size"),
            ),
            width=6,
        ),
        Panel(
            "Wasted KV memory",
            "Bytes that did nothing, mean over the window: held through a tool, or of the batch while it recomputed.",
            Unit.BYTES,
            (Query(or_zero(rate(m.WASTED, by=("kind",), scope=REPLICAS)), "{{kind}}"),),
            Shape.STACKED,
            width=12,
        ),
        Panel(
            "Swapped and fetched",
            "KV that moved to the host tier and back.",
            Unit.BYTES_PER_S,
            (Query(or_zero(rate(m.HOST_BYTES, by=("direction",), scope=REPLICAS)), "{{direction}}"),),
            width=6,
        ),
        Panel(
            "Paused programs",
            "Held in memory, and being fetched from the host tier.",
            Unit.COUNT,
            (
                Query(total(m.HELD_PROGRAMS, scope=REPLICAS), "held"),
                Query(total(m.FETCHING_PROGRAMS, scope=REPLICAS), "fetching"),
            ),
            width=6,
        ),
    ),
)

DECISIONS = Row(
    "Decisions",
    (
        Panel(
            "Pauses by decision",
            "What becomes of a program's KV at a tool call.",
            Unit.PER_S,
            (Query(rate(m.PAUSES, by=("decision",), scope=REPLICAS), "{{decision}}"),),
            Shape.STACKED,
        ),
        Panel(
            "Pauses by reason",
            "Why, as the policy says.",
            Unit.PER_S,
            (Query(rate(m.PAUSES, by=("decision", "reason"), scope=REPLICAS), "{{decision}}: {{reason}}"),),
        ),
        Panel(
            "How holds end",
            "Used: the program came back to its KV. Expired: its tool took longer. Broken: memory was needed.",
            Unit.PER_S,
            (Query(or_zero(rate(m.HOLDS_ENDED, by=("how",), scope=REPLICAS)), "{{how}}"),),
            Shape.STACKED,
        ),
        Panel(
            "Holds that were used",
            "Of the holds that ended in the time shown. What is not used was waste.",
            Unit.SHARE,
            (
                Query(
                    per(
                        rate(m.HOLDS_ENDED, 'how="used"', over="$__range", scope=REPLICAS),
                        rate(m.HOLDS_ENDED, over="$__range", scope=REPLICAS),
                    )
                ),
            ),
            Shape.NUMBER,
            good_from=0.5,
        ),
        Panel(
            "How long KV is held",
            "Seconds from a pause to its hold's end.",
            Unit.SECONDS,
            tuple(
                Query(or_zero(quantile(share, m.HOLD_S, scope=REPLICAS)), f"p{100 * share:g}")
                for share in (0.5, 0.95, 0.99)
            ),
        ),
        Panel(
            "Prompt tokens of admitted turns",
            "Reused and fetched ones cost nothing or little; recomputed ones were known before and are paid twice.",
            Unit.PER_S,
            (Query(rate(m.CONTEXT_TOKENS, by=("kind",), scope=REPLICAS), "{{kind}}"),),
            Shape.STACKED,
        ),
    ),
)

ORDER = Row(
    "Order and budget",
    (
        Panel(
            "Waiting turns",
            "At the replicas, by group.",
            Unit.COUNT,
            (Query(total(m.WAITING, by=("group",), scope=REPLICAS), "{{group}}"),),
            Shape.STACKED,
        ),
        Panel(
            "Queue, p95",
            "Seconds from a turn's arrival at its replica to its admission.",
            Unit.SECONDS,
            (Query(quantile(0.95, m.QUEUE_S, by=("turn",), scope=REPLICAS), "{{turn}}"),),
        ),
        Panel(
            "Oldest waiting turn",
            "How long it has waited; starvation is when this goes on growing.",
            Unit.SECONDS,
            (Query(total(m.OLDEST_WAITING, by=(PROCESS,), how="max", scope=REPLICAS), LEGEND),),
            bad_from=60,
        ),
        Panel(
            "Starved turns",
            "Turns that waited longer than the bound before they were admitted.",
            Unit.PER_S,
            (Query(or_zero(rate(m.STARVED, by=("model",), scope=REPLICAS)), "{{model}}"),),
        ),
        Panel(
            "Tokens of a step",
            "What the policy lets a step schedule, and what steps did schedule in the mean.",
            Unit.COUNT,
            (
                Query(total(m.BUDGET, how="avg", scope=REPLICAS), "budget"),
                Query(per(rate(m.SCHEDULED_TOKENS, scope=REPLICAS), rate(m.STEPS, scope=REPLICAS)), "scheduled"),
            ),
        ),
        Panel(
            "Step pace",
            "How many times as long steps take as the cost model says; policies reckon with it.",
            Unit.COUNT,
            (Query(total(m.STEP_PACE, by=(PROCESS,), how="max", scope=REPLICAS), LEGEND),),
        ),
        Panel(
            "Policy in force",
            "Replicas by policy.",
            Unit.COUNT,
            (Query(total(m.POLICY, by=("model", "policy"), scope=REPLICAS), "{{model}}: {{policy}}"),),
            Shape.BARS,
        ),
        Panel(
            "Fallbacks",
            "Decisions taken without something: the store's statistics, or the scheduler's answer.",
            Unit.PER_S,
            (Query(or_zero(rate(m.FALLBACKS, by=("kind",), scope=REPLICAS)), "{{kind}}"),),
        ),
        Panel(
            "What the scheduler counts beside",
            "By kind.",
            Unit.PER_S,
            (Query(or_zero(rate(m.EVENTS, by=("kind",), scope=REPLICAS)), "{{kind}}"),),
        ),
    ),
)

BOARD = Board(
    "caesura-memory",
    "Caesura / KV memory and decisions",
    "What the KV blocks are used for, what becomes of pauses, and what it costs.",
    (Variable.MODEL, Variable.REPLICA),
    (MEMORY, DECISIONS, ORDER),
)
