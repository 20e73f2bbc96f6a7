"""The catalogue of Caesura's metrics. One entry makes a metric.

Recorders (`cluster.observing`), dashboards and alerts (`cluster.offline.dashboards`), the reference page and the tests
derive from the entry. To add a metric, add an entry and the line that records it. A metric with a ``snapshot`` key
needs no further line: the replica's recorder exports that value of the scheduler's snapshot.

A metric that no hand-written panel queries gets a default panel on its ``dashboard``. Prometheus appends ``_total`` to
a counter. Ray's node agents put ``ray_`` before every name; the scrape configuration and ``/metrics`` remove it. Labels
are enums or names from the configuration (model, tenant, tool, policy), never ids of programs or requests. Ray adds
labels of its own, such as ``ReplicaId``, ``NodeAddress`` and ``WorkerId``.
"""

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "caesura_"


class Kind(StrEnum):
    """The Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


UNITS = ("byte_seconds", "seconds", "bytes", "tokens", "blocks", "ratio")
"""Units of measurement. As in OpenMetrics, a metric's name ends with its unit. Metrics without a unit are counts."""


class Dashboard(StrEnum):
    """The dashboard that shows a metric. The value is the dashboard's uid in Grafana."""

    OVERVIEW = "caesura-overview"
    AGENTS = "caesura-agents"
    MEMORY = "caesura-memory"
    ROUTING = "caesura-routing"
    PREDICTOR = "caesura-predictor"


@dataclass(frozen=True, slots=True)
class Metric:
    """A Prometheus metric that Caesura exports: a counter, a gauge or a histogram, with its labels."""

    name: str
    """The name without ``caesura_`` and ``_total``."""
    kind: Kind
    help: str
    labels: tuple[str, ...]
    dashboard: Dashboard
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without +Inf."""
    snapshot: str = ""
    """Key of the value in the scheduler's snapshot; empty: a recorder records the metric."""

    @property
    def exported(self) -> str:
        """The name in Prometheus; for a histogram without ``_bucket``, ``_sum`` or ``_count``."""
        return f"{PREFIX}{self.name}_total" if self.kind is Kind.COUNTER else f"{PREFIX}{self.name}"

    @property
    def unit(self) -> str:
        """One of `UNITS`, or ``count``."""
        return unit_of(self.name)


def unit_of(name: str) -> str:
    """Return the unit of a metric with this name: one of `UNITS`, or ``count``."""
    return next((unit for unit in UNITS if name.endswith(f"_{unit}")), "count")


OVERVIEW, AGENTS, MEMORY = Dashboard.OVERVIEW, Dashboard.AGENTS, Dashboard.MEMORY
ROUTING, PREDICTOR = Dashboard.ROUTING, Dashboard.PREDICTOR


def _counter(name: str, dashboard: Dashboard, text: str, *labels: str, snapshot: str = "") -> Metric:
    return Metric(name, Kind.COUNTER, text, labels, dashboard, snapshot=snapshot)


def _gauge(name: str, dashboard: Dashboard, text: str, *labels: str, snapshot: str = "") -> Metric:
    return Metric(name, Kind.GAUGE, text, labels, dashboard, snapshot=snapshot)


def _histogram(name: str, dashboard: Dashboard, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, labels, dashboard, buckets)


# --- buckets: latencies have those of vLLM --------------------------------------------------------------------------

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_HTTP_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 240.0, 960.0, 7680.0)
_TOOL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PREDICTION_S = (0.0002, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.1)
_PROGRAM_TURNS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)

# --- the ingress: what clients experience ---------------------------------------------------------------------------

REQUESTS = _counter("requests", OVERVIEW, "Turns that ended, by outcome", "model", "tenant", "outcome")
GOOD_REQUESTS = _counter(
    "good_requests", OVERVIEW, "Turns that succeeded and met every bound of their SLO", "model", "tenant"
)
SLO_MISSES = _counter("slo_misses", OVERVIEW, "SLO bounds missed by turns that succeeded", "model", "tenant", "bound")
PROGRAMS = _counter("programs", OVERVIEW, "Programs whose first turn has ended or was rejected", "model", "tenant")
PROGRAM_ENDS = _counter(
    "program_ends",
    OVERVIEW,
    "Programs that ended: good (all turns met the SLO), late, failed or abandoned",
    "model",
    "tenant",
    "verdict",
)
TTFT = _histogram("ttft_seconds", OVERVIEW, "Time from a turn's arrival to its first token", _TTFT_S, "model", "tenant")
TPOT = _histogram(
    "tpot_seconds", OVERVIEW, "Mean time between a turn's tokens after the first", _TPOT_S, "model", "tenant"
)
E2E = _histogram("e2e_seconds", OVERVIEW, "Time from a turn's arrival to its last token", _REQUEST_S, "model", "tenant")
NORMALIZED = _histogram(
    "normalized_latency_seconds", OVERVIEW, "End-to-end time per generated token of a turn", _TPOT_S, "model", "tenant"
)
PROGRAM_S = _histogram(
    "program_seconds",
    AGENTS,
    "Sum of the end-to-end times of a program's turns, without its tools",
    _REQUEST_S,
    "model",
    "tenant",
)
PROGRAM_WALL_S = _histogram(
    "program_wall_seconds", AGENTS, "Time from a program's arrival to its end", _REQUEST_S, "model", "tenant"
)
PROGRAM_TURNS = _histogram("program_turns", AGENTS, "Turns of a program", _PROGRAM_TURNS, "model", "tenant")
HTTP_REQUEST_S = _histogram(
    "http_request_seconds",
    OVERVIEW,
    "Time from a request's arrival at an ingress to the end of its answer. Rejections for overload do not count",
    _HTTP_S,
    "route",
    "status",
)
HTTP_REFUSALS = _counter(
    "http_refusals",
    OVERVIEW,
    "Requests that were answered with an error, by route, status and error code. Probes do not count",
    "route",
    "status",
    "code",
)
IGNORED_PARTS = _counter(
    "ignored_request_parts",
    OVERVIEW,
    "Parts of requests for responses that had no effect: tools, items, and fields. Their names are in the responses",
    "part",
)
OPEN_PROGRAMS = _gauge("open_programs", AGENTS, "Programs that an ingress runs now", "model")
PROGRAM_EVENTS = _counter(
    "program_events",
    AGENTS,
    "Server-side programs that started, were taken over from another ingress, or ended",
    "model",
    "event",
)
OPEN_BATCHES = _gauge("open_batches", AGENTS, "Batches that an ingress works on now", "tenant")
LEFT_BATCH_LINES = _gauge("left_batch_lines", AGENTS, "Lines without a result of the batches in progress", "tenant")
BATCH_LINES = _counter(
    "batch_lines",
    AGENTS,
    "Lines of batches that completed or failed, or were put back because the replicas had other work or failed",
    "tenant",
    "outcome",
)
SCRAPE_FAILURES = _counter(
    "scrape_failures", OVERVIEW, "Nodes that a scrape through an ingress could not read", "reason"
)
DEGRADED_DECISIONS = _counter(
    "degraded_decisions",
    OVERVIEW,
    "Decisions that a component made without an input that was unavailable",
    "model",
    "component",
    "reason",
)
STORE_UP = _gauge("store_up", OVERVIEW, "1 while a component's last exchange with the store succeeded", "component")
STORE_USED_BYTES = _gauge("store_used_bytes", OVERVIEW, "Memory that Redis uses, read by each ingress")
STORE_MAX_BYTES = _gauge("store_max_bytes", OVERVIEW, "Memory that Redis may use (`maxmemory`); 0: no limit")
STORE_EVICTIONS = _counter(
    "store_evictions", OVERVIEW, "Ended programs that were deleted before their retention time, to free Redis's memory"
)
STORE_FAILURES = _counter("store_failures", PREDICTOR, "Exchanges with the store that failed", "component", "reason")

# --- the router -----------------------------------------------------------------------------------------------------

ROUTING_DECISIONS = _counter(
    "routing_decisions", ROUTING, "Turns sent to a replica, by the reason for its choice", "model", "reason"
)
REQUESTS_REJECTED = _counter("requests_rejected", ROUTING, "Turns rejected, by reason", "model", "reason")
PROGRAM_MIGRATIONS = _counter(
    "program_migrations", ROUTING, "Programs that migrated from one replica to another", "model"
)
WAITING_TURNS = _gauge("waiting_turns", ROUTING, "Turns in an ingress's admission queue", "model")
ADMISSION_S = _histogram(
    "admission_seconds", ROUTING, "Time that a turn spent in an ingress's admission queue", _TTFT_S, "model"
)
SNAPSHOT_AGE = _gauge("snapshot_age_seconds", ROUTING, "Age of the router's oldest replica snapshot", "model")
REPLICAS = _gauge("replicas", ROUTING, "Replicas that an ingress can route to, by state", "model", "state")
REPLICAS_MIN = _gauge("replicas_min", ROUTING, "Smallest number of replicas that the configuration allows", "model")

# --- a replica: memory ----------------------------------------------------------------------------------------------

TOTAL_BLOCKS = _gauge("total_blocks", MEMORY, "KV cache blocks of a replica", "model", snapshot="total_blocks")
FREE_BLOCKS = _gauge(
    "free_blocks",
    MEMORY,
    "KV cache blocks that are neither held nor used by a request",
    "model",
    snapshot="free_blocks",
)
HELD_BLOCKS = _gauge(
    "held_blocks", MEMORY, "KV cache blocks that stay allocated for paused programs", "model", snapshot="held_blocks"
)
CACHED_BLOCKS = _gauge(
    "cached_blocks", MEMORY, "Free blocks whose KV the prefix cache can still reuse", "model", snapshot="cached_blocks"
)
HELD_TOKENS = _gauge(
    "held_tokens", MEMORY, "Tokens whose KV is held for paused programs", "model", snapshot="held_tokens"
)
HELD_PROGRAMS = _gauge("held_programs", MEMORY, "Paused programs whose KV is held", "model", snapshot="held_programs")
HOST_TOKENS = _gauge("host_tokens", MEMORY, "Capacity of the host tier", "model", snapshot="host_tokens")
HOST_USED_TOKENS = _gauge(
    "host_used_tokens", MEMORY, "Tokens whose KV has a copy in the host tier", "model", snapshot="host_used_tokens"
)
FETCHING_PROGRAMS = _gauge(
    "fetching_programs",
    MEMORY,
    "Paused programs whose KV is being loaded from the host tier",
    "model",
    snapshot="fetching_programs",
)
KNOWN_PROGRAMS = _gauge(
    "known_programs", AGENTS, "Programs that a replica tracks and that have not ended", "model", snapshot="programs"
)
PROGRAMS_COMPLETED = _counter(
    "programs_completed", AGENTS, "Programs that ended at a replica", "model", snapshot="programs_completed"
)
KV_RETENTION_DECISIONS = _counter(
    "kv_retention_decisions",
    MEMORY,
    "Pauses of programs, by what happened to their KV and why",
    "model",
    "decision",
    "reason",
)
KV_PINS_RELEASED = _counter(
    "kv_pins_released",
    MEMORY,
    "Held KV that was unpinned: reused, expired, or evicted for a running, a waiting or a starved turn",
    "model",
    "reason",
    snapshot="kv_pins_released",
)
KV_PIN_S = _histogram("kv_pin_seconds", MEMORY, "Time that a program's KV was held", _TOOL_S, "model")
KV_OFFLOAD_BYTES = _counter(
    "kv_offload_bytes", MEMORY, "Bytes of KV copied to the host tier and back", "model", "direction"
)
DISK_TOKENS = _gauge(
    "disk_tokens", MEMORY, "Capacity of the replica's part of the disk tier", "model", snapshot="disk_tokens"
)
DISK_USED_TOKENS = _gauge(
    "disk_used_tokens",
    MEMORY,
    "Tokens whose KV the replica has written to the disk tier",
    "model",
    snapshot="disk_used_tokens",
)
KV_DISK_BYTES = _counter(
    "kv_disk_bytes", MEMORY, "Bytes of KV written to disk and read", "model", "direction", snapshot="disk_bytes"
)
KV_DISK_S = _counter(
    "kv_disk_seconds",
    MEMORY,
    "Time of the transfers of KV to disk and back",
    "model",
    "direction",
    snapshot="disk_seconds",
)
KV_DISK_WRITES = _counter(
    "kv_disk_writes",
    MEMORY,
    "Pauses of programs with a disk tier, by whether the context was written, or why not",
    "model",
    "outcome",
    snapshot="disk_writes",
)
KV_CARRIED_PROGRAMS = _counter(
    "kv_carried_programs",
    MEMORY,
    "Programs that came from another replica, or from one that is gone, and loaded their context from disk",
    "model",
    snapshot="arrived_with_kv",
)
KV_DISK_TROUBLES = _counter(
    "kv_disk_troubles",
    MEMORY,
    "Failures of the disk tier, by what was wrong. A context that cannot be loaded is computed",
    "model",
    "reason",
    snapshot="disk_troubles",
)
KV_DISK_DEGRADED = _gauge(
    "kv_disk_degraded",
    MEMORY,
    "Whether reads or writes of the disk tier are stopped, by what is wrong with the volume",
    "model",
    "reason",
    snapshot="disk_degraded",
)
WASTED = _counter(
    "wasted_kv_byte_seconds",
    MEMORY,
    "KV memory times the time in which it did nothing: held, or of a batch that recomputed",
    "model",
    "reason",
)
BUSY_S = _counter("busy_seconds", MEMORY, "Time that a replica computed", "model", snapshot="busy_s")
GPU_S = _counter(
    "gpu_seconds",
    MEMORY,
    "Time of a replica that a tenant's turns used: computed once, recomputed, generated; held is memory, and not busy",
    "model",
    "tenant",
    "use",
)
CONTEXT_TOKENS = _counter(
    "context_tokens",
    MEMORY,
    "Prompt tokens of admitted turns: new, reused, fetched from the host tier, loaded from disk, recomputed",
    "model",
    "source",
    snapshot="context_tokens",
)
EARLY_PREFILL_TOKENS = _counter(
    "early_prefill_tokens",
    MEMORY,
    "Tokens of next prompts that were computed while a tool ran, by what became of them: used by the turn, or wasted",
    "model",
    "outcome",
    snapshot="early_prefill_tokens",
)
EARLY_PREFILL_REWRITTEN = _counter(
    "early_prefill_rewritten",
    MEMORY,
    "Pauses in which the next prompt does not extend the context, and was computed in the pause",
    "model",
    snapshot="early_prefill_rewritten",
)
EARLY_PREFILL_ENDS = _counter(
    "early_prefill_ends",
    MEMORY,
    "Pauses in which the next prompt was not computed while the tool ran, or not to its end, by reason",
    "model",
    "reason",
    snapshot="early_prefill_ends",
)

# --- a replica: order and budget; vLLM exports how many requests run and wait ---------------------------------------

WAITING_SLO_MISSED = _gauge(
    "waiting_slo_missed",
    MEMORY,
    "Turns that wait at a replica and can no longer meet their SLO",
    "model",
    snapshot="waiting_slo_missed",
)
OLDEST_WAITING = _gauge(
    "oldest_waiting_seconds",
    MEMORY,
    "Waiting time of the turn that has waited longest",
    "model",
    snapshot="oldest_waiting_s",
)
STARVED = _counter(
    "starved_turns",
    MEMORY,
    "Turns that waited longer than the starvation bound before they were admitted",
    "model",
    snapshot="starved_turns",
)
QUEUE_S = _histogram(
    "queue_seconds",
    MEMORY,
    "Time from a turn's arrival at its replica to its admission; for resumed turns the scheduling bubble",
    _TTFT_S,
    "model",
    "turn",
)
BUDGET = _gauge(
    "step_budget_tokens",
    MEMORY,
    "Tokens that the policy allows a step to schedule",
    "model",
    snapshot="step_budget_tokens",
)
STEPS = _counter("steps", MEMORY, "Engine steps that scheduled at least one token", "model", snapshot="steps")
SCHEDULED_TOKENS = _counter(
    "scheduled_tokens", MEMORY, "Tokens scheduled by steps", "model", snapshot="scheduled_tokens"
)
STEP_TIME_RATIO = _gauge(
    "step_time_ratio", MEMORY, "Measured step time divided by the cost model's", "model", snapshot="step_time_ratio"
)
POLICY = _gauge("policy", MEMORY, "1 for the policy in force", "model", "policy")
REPLICA_UP = _gauge("replica_up", OVERVIEW, "1 for the state that a replica is in", "model", "state")
REPLICA_STARTS = _counter("replica_starts", OVERVIEW, "Starts of a replica's process", "model")
REPLICAS_REMOVED = _counter("replicas_removed", OVERVIEW, "Replicas that the autoscaler removed", "model")
SCHEDULER_EVENTS = _counter(
    "scheduler_events", MEMORY, "Other events that the scheduler counts", "model", "event", snapshot="counters"
)
TURN_PROMPTS = _counter(
    "turn_prompts", AGENTS, "Turns of server-side programs, by how their prompt was rendered", "model", "mode"
)

RECORDED_TURNS = _counter(
    "recorded_turns",
    AGENTS,
    "Turns whose tokens were to be recorded: stored, rejected, dropped (no whole answer) or lost (answered)",
    "model",
    "outcome",
)

# --- tools ----------------------------------------------------------------------------------------------------------

TOOL_CALLS = _counter("tool_calls", AGENTS, "Tool calls, by outcome", "tool", "outcome")
TOOL_SECONDS = _histogram("tool_seconds", AGENTS, "Run time of a tool call, retries included", _TOOL_S, "tool")
TOOL_QUEUE_SECONDS = _histogram("tool_queue_seconds", AGENTS, "Time that a call waited for its tool", _TOOL_S, "tool")

TOOL_ANSWERS_CUT = _counter(
    "tool_answers_cut", AGENTS, "Tool answers that were shortened, because they did not fit in the context", "model"
)

# --- predictions ----------------------------------------------------------------------------------------------------

PREDICTIONS = _counter(
    "predictions",
    PREDICTOR,
    "Predictions by the service, by statistics, or by statistics because the service did not answer",
    "source",
)
PREDICTION_SECONDS = _histogram(
    "prediction_seconds", PREDICTOR, "Time that a turn waited for its prediction", _PREDICTION_S, "mode"
)
PREDICTIONS_COMPARED = _counter(
    "predictions_compared", PREDICTOR, "Predictions that were compared with the actual value", "quantity"
)
PREDICTION_ERROR = _counter(
    "prediction_absolute_error",
    PREDICTOR,
    "Sum of the absolute errors of the compared predictions, in tokens or seconds",
    "quantity",
)
PREDICTION_ACTUAL = _counter(
    "prediction_actual",
    PREDICTOR,
    "Sum of the actual values of the compared predictions, in tokens or seconds",
    "quantity",
)

CATALOGUE: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All metrics, in the order of this file."""
