"""The dashboards of Caesura's own metrics, and the list of all dashboards.

A metric of the catalogue that no panel here queries gets a default panel at the end of its dashboard.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from cluster.observing import catalogue as m
from cluster.observing.catalogue import CATALOGUE, Dashboard, Metric
from cluster.offline.dashboards.board import (
    WIDTH,
    Board,
    Panel,
    Row,
    Shape,
    Unit,
    Variable,
    distribution,
    lines,
    mean_and_p95,
    panel,
)
from cluster.offline.dashboards.engine_boards import ENGINE, RAY, or_idle
from cluster.offline.dashboards.foreign import VLLM_GENERATED, VLLM_RUNNING, VLLM_WAITING
from cluster.offline.dashboards.promql import (
    CLUSTER,
    PROCESS,
    REPLICAS,
    Scope,
    observed,
    or_zero,
    per,
    quantile,
    rate,
    total,
)

GOOD = 'verdict="good"'
OBJECTIVE = 0.95
PANELS_IN_A_ROW = 3
"""Number of panels with the default width in a row."""
PROCESS_LEGEND = "{{process}}"

cluster_panel = partial(panel, scope=CLUSTER)
cluster_rate = partial(rate, scope=CLUSTER)
cluster_total = partial(total, scope=CLUSTER)
over_range = partial(rate, scope=CLUSTER, over="$__range")
replica_panel = partial(panel, scope=REPLICAS)
replica_rate = partial(rate, scope=REPLICAS)
replica_total = partial(total, scope=REPLICAS)
by_process = partial(total, scope=REPLICAS, by=(PROCESS,))
number = partial(lines, shape=Shape.NUMBER, width=6)

# --- overview ---------------------------------------------------------------------------------------------------------

GOODPUT = Row(
    "Goodput",
    (
        number(
            "Program goodput",
            "Programs per second that ended with all turns within their SLO.",
            {"": or_zero(cluster_rate(m.PROGRAM_ENDS, GOOD))},
            Unit.PER_S,
        ),
        number(
            "Turn goodput",
            "Turns per second that succeeded and met every bound of their SLO.",
            {"": or_zero(cluster_rate(m.GOOD_REQUESTS))},
            Unit.PER_S,
        ),
        number(
            "Program SLO attainment",
            "Share of good programs among those that ended in the time range.",
            {"": per(over_range(m.PROGRAM_ENDS, GOOD), over_range(m.PROGRAM_ENDS))},
            Unit.SHARE,
            good_from=OBJECTIVE,
        ),
        number(
            "Turn SLO attainment",
            "Share of good turns among those that ended in the time range.",
            {"": per(over_range(m.GOOD_REQUESTS), over_range(m.REQUESTS))},
            Unit.SHARE,
            good_from=OBJECTIVE,
        ),
        lines(
            "Programs: offered and ended",
            "The load exceeds the capacity within the SLO where good programs fall behind offered ones.",
            {"offered": cluster_rate(m.PROGRAMS), "{{verdict}}": cluster_rate(m.PROGRAM_ENDS, by=("verdict",))},
            Unit.PER_S,
        ),
        lines(
            "Turns by outcome",
            "Every turn has one outcome. A turn with the outcome ok may have missed its SLO; good ones have not.",
            {"{{outcome}}": cluster_rate(m.REQUESTS, by=("outcome",)), "good": cluster_rate(m.GOOD_REQUESTS)},
            Unit.PER_S,
        ),
        cluster_panel(m.SLO_MISSES, "SLO misses by bound"),
    ),
)

LATENCY = Row(
    "Latency",
    (
        cluster_panel(m.TTFT, "Time to first token", width=6),
        cluster_panel(m.TPOT, "Time per output token", width=6),
        cluster_panel(m.E2E, "End-to-end latency", width=6),
        mean_and_p95(m.NORMALIZED, "Normalised latency", scope=CLUSTER, width=6),
    ),
)

HTTP = Row(
    "HTTP",
    (
        lines(
            "HTTP answers by status",
            "Of the ingresses. Rejections for overload are not included; see the rejected turns by reason.",
            {"{{status}}": observed(m.HTTP_REQUEST_S, by=("status",))},
            Unit.PER_S,
            Shape.STACKED,
            width=8,
        ),
        lines(
            "HTTP errors by route and code",
            "Requests that were answered with an error. The route is none where it was refused before the routing.",
            {"{{route}} {{status}} {{code}}": or_zero(rate(m.HTTP_REFUSALS, by=("route", "status", "code")))},
            Unit.PER_S,
            Shape.STACKED,
            width=8,
        ),
        lines(
            "HTTP latency by route, p95",
            "From a request's arrival at an ingress to the last byte of its answer.",
            {"{{route}}": quantile(0.95, m.HTTP_REQUEST_S, by=("route",))},
            Unit.SECONDS,
            width=8,
        ),
    ),
)

CLUSTER_STATE = Row(
    "Cluster",
    (
        cluster_panel(m.REPLICAS, "Replicas", by=("model", "state"), aggregate="max", width=6),
        lines(
            "Turns in flight",
            "Running and waiting at the replicas, and waiting in the admission queues of the ingresses.",
            {
                "running": or_zero(cluster_total(VLLM_RUNNING)),
                "waiting": or_zero(cluster_total(VLLM_WAITING)),
                "admission queue": cluster_total(m.WAITING_TURNS),
            },
            shape=Shape.STACKED,
            width=6,
        ),
        lines(
            "KV cache usage",
            "Share of all KV blocks: used by running turns, and held for paused programs.",
            {
                "running": f"1 - ({cluster_total(m.FREE_BLOCKS)}\n+ {cluster_total(m.HELD_BLOCKS)})"
                f"\n/ {cluster_total(m.TOTAL_BLOCKS)}",
                "held": per(cluster_total(m.HELD_BLOCKS), cluster_total(m.TOTAL_BLOCKS)),
            },
            Unit.SHARE,
            Shape.STACKED,
            width=6,
        ),
        panel(m.STORE_UP, "Store reachable", aggregate="min", shape=Shape.BARS, width=6, good_from=1),
    ),
)

DEGRADED = Row(
    "Replica states and degraded operation",
    (
        cluster_panel(m.REPLICA_UP, "Replica states", by=("model", "state"), shape=Shape.BARS, width=6),
        cluster_panel(m.REPLICA_STARTS, "Replica starts", by=("model",), width=6),
        cluster_panel(m.DEGRADED_DECISIONS, "Degraded decisions", width=6),
        panel(
            m.SCRAPE_FAILURES,
            "Scrape failures",
            text="Nodes that a scrape through an ingress could not read; 0 where Prometheus scrapes the nodes itself.",
            width=6,
        ),
    ),
)

# --- agents and tools -------------------------------------------------------------------------------------------------

PROGRAMS = Row(
    "Programs",
    (
        cluster_panel(m.PROGRAM_S, "Job completion time without tools"),
        cluster_panel(m.PROGRAM_WALL_S, "Job completion time with tools"),
        mean_and_p95(m.PROGRAM_TURNS, "Turns per program", scope=CLUSTER),
        cluster_panel(
            m.PROGRAM_ENDS,
            "Programs by verdict",
            text="Late: a turn missed the SLO. Failed: a turn failed. Abandoned: the client left.",
            shape=Shape.STACKED,
            width=6,
        ),
        cluster_panel(
            m.QUEUE_S,
            "Scheduling bubble",
            'turn="resumed"',
            text="Queueing time at the replica of turns that resume a program: the cost of a pause on top of its tool.",
            by=(),
            width=6,
        ),
        lines(
            "Programs at the replicas",
            "Programs that have not ended, and those of them that are paused with their KV held.",
            {"known": cluster_total(m.KNOWN_PROGRAMS), "held": cluster_total(m.HELD_PROGRAMS)},
            width=6,
        ),
        cluster_panel(m.PROGRAMS_COMPLETED, "Programs that ended at a replica", by=("model",), width=6),
    ),
)

SERVER_SIDE = Row(
    "Server-side programs",
    (
        panel(m.OPEN_PROGRAMS, "Open programs"),
        panel(m.PROGRAM_EVENTS, "Started, taken over, ended"),
        cluster_panel(
            m.TURN_PROMPTS,
            "Prompt rendering",
            text="Continued: rendered from the token ids of the turn before, so that its KV can be reused.",
        ),
    ),
)

TOOL = ("tool",)
TOOLS = Row(
    "Tools",
    (
        cluster_panel(m.TOOL_CALLS, "Calls by tool", text="Calls per second that ended.", by=TOOL),
        cluster_panel(m.TOOL_CALLS, "Failed calls", 'outcome!="ok"', text="Calls with another outcome than ok."),
        lines(
            "Success rate",
            "Share of calls with the outcome ok in the time range.",
            {"{{tool}}": per(over_range(m.TOOL_CALLS, 'outcome="ok"', by=TOOL), over_range(m.TOOL_CALLS, by=TOOL))},
            Unit.SHARE,
            Shape.BARS,
            good_from=0.8,
        ),
        cluster_panel(m.TOOL_SECONDS, "Run time, p95"),
        cluster_panel(
            m.TOOL_QUEUE_SECONDS,
            "Queueing time, p95",
            text="Time that a call waits for its tool. Add actors, or raise the limit, where it grows.",
        ),
        distribution(m.TOOL_SECONDS, "Run time distribution", scope=CLUSTER),
    ),
)

# --- KV memory and scheduling -----------------------------------------------------------------------------------------

FREE, HELD, CACHED = replica_total(m.FREE_BLOCKS), replica_total(m.HELD_BLOCKS), replica_total(m.CACHED_BLOCKS)

KV_MEMORY = Row(
    "KV memory",
    (
        lines(
            "KV blocks by use",
            "Running: of turns in the batch. Held: of paused programs. Cached: free, but reusable by the prefix cache.",
            {
                "running": f"{replica_total(m.TOTAL_BLOCKS)}\n- {FREE}\n- {HELD}",
                "held": HELD,
                "cached": CACHED,
                "free": f"{FREE}\n- {CACHED}",
            },
            shape=Shape.STACKED,
            width=12,
        ),
        lines(
            "Held share by replica",
            "Share of a replica's KV blocks that it holds for paused programs.",
            {PROCESS_LEGEND: per(by_process(m.HELD_BLOCKS), by_process(m.TOTAL_BLOCKS))},
            Unit.SHARE,
            width=6,
        ),
        lines(
            "Held tokens and host tier",
            "Tokens held on the device, tokens with a copy in host memory, and the capacity of the host tier.",
            {
                "held": replica_total(m.HELD_TOKENS),
                "host tier": replica_total(m.HOST_USED_TOKENS),
                "host tier capacity": replica_total(m.HOST_TOKENS),
            },
            width=6,
        ),
        replica_panel(
            m.WASTED,
            "Wasted KV memory",
            text="Mean bytes that did nothing: held through a tool call, or of a batch that recomputed.",
            shape=Shape.STACKED,
            width=12,
        ),
        replica_panel(m.KV_DISK_BYTES, "KV written to disk and read", width=12),
        replica_panel(m.KV_DISK_TROUBLES, "Failures of the disk tier", width=12),
        replica_panel(m.KV_DISK_S, "Time of transfers to disk and back", width=12),
        replica_panel(m.KV_CARRIED_PROGRAMS, "Programs that arrived with their KV", width=12),
        replica_panel(m.KV_OFFLOAD_BYTES, "Swapped and fetched", width=6),
        lines(
            "Paused programs",
            "With their KV held, and with their KV being fetched from the host tier.",
            {"held": replica_total(m.HELD_PROGRAMS), "fetching": replica_total(m.FETCHING_PROGRAMS)},
            width=6,
        ),
        replica_panel(
            m.GPU_S,
            "GPU time by tenant",
            text="Seconds of replicas for each second. Held is the share of the KV memory that paused programs keep.",
            by=("tenant", "use"),
            shape=Shape.STACKED,
            width=24,
        ),
    ),
)

RETENTION = Row(
    "KV retention",
    (
        replica_panel(m.KV_RETENTION_DECISIONS, "Retention decisions", by=("decision",), shape=Shape.STACKED),
        replica_panel(m.KV_RETENTION_DECISIONS, "Retention decisions by reason"),
        replica_panel(m.KV_PINS_RELEASED, "Releases of held KV by reason", shape=Shape.STACKED),
        lines(
            "Held KV that was reused",
            "Share of the holds that ended in the time range. The others were waste.",
            {
                "": per(
                    replica_rate(m.KV_PINS_RELEASED, 'reason="used"', over="$__range"),
                    replica_rate(m.KV_PINS_RELEASED, over="$__range"),
                )
            },
            Unit.SHARE,
            Shape.NUMBER,
            good_from=0.5,
        ),
        lines(
            "Hold time",
            "Time from a pause to the release of its KV.",
            {f"p{100 * share:g}": or_zero(quantile(share, m.KV_PIN_S, scope=REPLICAS)) for share in (0.5, 0.95, 0.99)},
            Unit.SECONDS,
        ),
        replica_panel(
            m.CONTEXT_TOKENS,
            "Prompt tokens by source",
            text="Reused and fetched tokens cost little or nothing; recomputed ones had been computed before.",
            shape=Shape.STACKED,
        ),
    ),
)

SCHEDULING = Row(
    "Scheduling",
    (
        lines(
            "Waiting turns",
            "Turns that wait at the replicas, and those of them that can no longer meet their SLO.",
            {"waiting": or_zero(replica_total(VLLM_WAITING)), "SLO missed": replica_total(m.WAITING_SLO_MISSED)},
        ),
        replica_panel(m.QUEUE_S, "Queueing time, p95"),
        replica_panel(m.OLDEST_WAITING, "Oldest waiting turn", by=(PROCESS,), aggregate="max", bad_from=60),
        replica_panel(m.STARVED, "Starved turns", by=("model",)),
        lines(
            "Tokens per step",
            "The policy's budget for a step, and the mean number of scheduled tokens.",
            {
                "budget": replica_total(m.BUDGET, aggregate="avg"),
                "scheduled": per(replica_rate(m.SCHEDULED_TOKENS), replica_rate(m.STEPS)),
            },
        ),
        replica_panel(
            m.STEP_TIME_RATIO,
            "Step time ratio",
            text="Measured step time divided by the cost model's. Policies multiply by it.",
            by=(PROCESS,),
            aggregate="max",
        ),
        replica_panel(
            m.POLICY,
            "Policy in force",
            text="Number of replicas by policy.",
            by=("model", "policy"),
            shape=Shape.BARS,
            width=12,
        ),
        replica_panel(m.SCHEDULER_EVENTS, "Other scheduler events", width=12),
    ),
)

# --- routing ----------------------------------------------------------------------------------------------------------

PLACEMENT = Row(
    "Placement",
    (
        cluster_panel(
            m.ROUTING_DECISIONS,
            "Routing decisions by reason",
            text="Stayed: the program's replica has its KV. Moved: the program had to leave it.",
            shape=Shape.STACKED,
            width=12,
        ),
        number(
            "Replica affinity",
            "Share of turns in the time range that went to their program's replica, without first turns.",
            {
                "": per(
                    over_range(m.ROUTING_DECISIONS, 'reason=~"stayed|found"'),
                    over_range(m.ROUTING_DECISIONS, 'reason!="new"'),
                )
            },
            Unit.SHARE,
            good_from=0.9,
        ),
        cluster_panel(
            m.PROGRAM_MIGRATIONS,
            "Program migrations",
            text="Programs that migrate from one replica to another. Each has to recompute or fetch its KV.",
            by=("model",),
            width=6,
        ),
        lines(
            "Running turns by replica",
            "Lines that stay apart show an uneven load.",
            {PROCESS_LEGEND: or_idle(by_process(VLLM_RUNNING), PROCESS)},
        ),
        lines(
            "Waiting turns by replica",
            "Admitted by an ingress, and not yet by the replica's scheduler.",
            {PROCESS_LEGEND: or_idle(by_process(VLLM_WAITING), PROCESS)},
        ),
        replica_panel(VLLM_GENERATED, "Generated tokens by replica", by=("ReplicaId",)),
    ),
)

ADMISSION = Row(
    "Admission",
    (
        cluster_panel(m.WAITING_TURNS, "Admission queue", by=("model",)),
        mean_and_p95(m.ADMISSION_S, "Admission queueing time", scope=CLUSTER),
        cluster_panel(
            m.REQUESTS_REJECTED,
            "Rejected turns by reason",
            text="Queue timeout: the turn would have waited too long. Tenant share: its tenant has too many waiting.",
        ),
        cluster_panel(
            m.SNAPSHOT_AGE,
            "Age of the router's snapshots",
            text="Age of the oldest replica's. Some seconds are normal; with more, a replica does not report.",
            by=("model",),
            aggregate="max",
            bad_from=10,
        ),
        cluster_panel(
            m.DEGRADED_DECISIONS,
            "Degraded routing decisions",
            'component="router"',
            text="Decisions that the router made without the store, or without a snapshot of the replicas.",
            by=("reason",),
        ),
        lines(
            "Replicas by state",
            "Replicas that an ingress can route to, and the smallest number that the configuration allows.",
            {
                "{{model}} {{state}}": cluster_total(m.REPLICAS, by=("model", "state"), aggregate="max"),
                "{{model}} minimum": cluster_total(m.REPLICAS_MIN, by=("model",), aggregate="max"),
            },
            shape=Shape.BARS,
        ),
    ),
)

# --- predictor --------------------------------------------------------------------------------------------------------

QUANTITY = ("quantity",)
ABSOLUTE_ERROR = rate(m.PREDICTION_ERROR, by=QUANTITY)
PREDICTIONS = Row(
    "Predictions",
    (
        panel(
            m.PREDICTIONS,
            "Predictions by source",
            text="The service, the ingress's statistics, or the reason why statistics replaced the service.",
            shape=Shape.STACKED,
        ),
        lines(
            "Prediction latency",
            "Time that a turn waits for its prediction. `predictor.deadline_s` bounds it.",
            {
                f"{{{{mode}}}} p{100 * share:g}": quantile(share, m.PREDICTION_SECONDS, by=("mode",))
                for share in (0.5, 0.99)
            },
            Unit.SECONDS,
        ),
        distribution(m.PREDICTION_SECONDS, "Prediction latency distribution"),
    ),
)

ERRORS = Row(
    "Prediction errors",
    (
        lines(
            "Relative error",
            "Sum of the absolute errors divided by the sum of the actual values. It rises with new kinds of programs.",
            {"{{quantity}}": or_zero(per(ABSOLUTE_ERROR, rate(m.PREDICTION_ACTUAL, by=QUANTITY)))},
            Unit.SHARE,
        ),
        lines(
            "Mean absolute error",
            "Tokens or seconds per prediction.",
            {"{{quantity}}": or_zero(per(ABSOLUTE_ERROR, rate(m.PREDICTIONS_COMPARED, by=QUANTITY)))},
        ),
        panel(m.PREDICTIONS_COMPARED, "Compared predictions"),
    ),
)

STORE = Row(
    "Store",
    (
        panel(m.STORE_UP, "Store reachable", aggregate="min", shape=Shape.BARS, good_from=1),
        panel(m.STORE_FAILURES, "Failed exchanges", width=16),
    ),
)

# --- all --------------------------------------------------------------------------------------------------------------


def board(uid: str, title: str, text: str, variables: tuple[Variable, ...], *rows: Row) -> Board:
    """Make a dashboard from ``rows``, and add default panels for its metrics that no row queries."""
    queried = "".join(query.expression for row in rows for one in row.panels for query in one.queries)
    missing = [metric for metric in CATALOGUE if metric.dashboard == uid and metric.exported not in queried]
    more = (Row("More", default_panels(missing, variables)),) if missing else ()
    return Board(uid, f"Caesura / {title}", text, variables, (*rows, *more))


def default_panels(missing: Sequence[Metric], variables: Sequence[Variable]) -> tuple[Panel, ...]:
    """Make a panel for each of these metrics, filtered by the variables of their dashboard."""
    scope = Scope(tuple((label, matcher) for label, matcher in CLUSTER.matchers if label in variables))
    panels = [panel(metric, metric.name.replace("_", " ").capitalize(), scope=scope) for metric in missing]
    last = len(panels) % PANELS_IN_A_ROW
    return (*panels[: len(panels) - last], *(replace(one, width=WIDTH // last) for one in panels[len(panels) - last :]))


MODEL, TENANT = Variable.MODEL, Variable.TENANT

BOARDS: tuple[Board, ...] = (
    board(
        Dashboard.OVERVIEW,
        "Overview",
        "Goodput, latency and the state of the cluster.",
        (MODEL, TENANT),
        *(GOODPUT, LATENCY, HTTP, CLUSTER_STATE, DEGRADED),
    ),
    board(
        Dashboard.AGENTS,
        "Agents and tools",
        "Programs from their arrival to their end, and the tools that they call.",
        (MODEL, TENANT, Variable.TOOL),
        *(PROGRAMS, SERVER_SIDE, TOOLS),
    ),
    board(
        Dashboard.MEMORY,
        "KV memory and scheduling",
        "Use of the KV blocks, retention decisions at pauses, and their cost.",
        (MODEL, Variable.REPLICA),
        *(KV_MEMORY, RETENTION, SCHEDULING),
    ),
    board(
        Dashboard.ROUTING,
        "Routing",
        "Routing decisions, the admission queue, and rejected turns.",
        (MODEL, Variable.REPLICA),
        *(PLACEMENT, ADMISSION),
    ),
    board(
        Dashboard.PREDICTOR,
        "Predictor",
        "Source, latency and accuracy of predictions.",
        (),
        *(PREDICTIONS, ERRORS, STORE),
    ),
    ENGINE,
    RAY,
)
"""All dashboards, in reading order."""
