"""Every metric that Caesura exports, once: what it is called, what it says, which labels and buckets it has.

This is data. `cluster.observing` makes Ray's metrics of it and records them; `cluster.dashboards` asks for them. A
counter is exported with ``_total`` behind its name. Ray's node agents put ``ray_`` before every name; the scrape
configuration and the ingress's ``/metrics`` take it off again.

Labels are enums or what the configuration names (model, tenant, tool, policy), never ids of programs or requests.
Units are seconds, bytes and tokens. Ray adds labels of its own: ``ReplicaId``, ``NodeAddress``, ``WorkerId`` and more.
"""

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "caesura_"


class Kind(StrEnum):
    """What Prometheus takes a metric for."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    """Without ``caesura_`` and ``_total``."""
    kind: Kind
    text: str
    labels: tuple[str, ...] = ("model",)
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's, without +Inf."""

    @property
    def exported(self) -> str:
        """The name by which Prometheus knows it, of a histogram without ``_bucket``, ``_sum`` or ``_count``."""
        return f"{PREFIX}{self.name}_total" if self.kind is Kind.COUNTER else f"{PREFIX}{self.name}"


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, text, labels or ("model",))


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels or ("model",))


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, labels or ("model",), buckets)


# --- buckets, those of latencies as vLLM has them -------------------------------------------------------------------

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TPOT_S = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
TOOL_S = (*(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),)
FORECAST_S = (0.0002, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.1)

# --- at the doors: what clients experience --------------------------------------------------------------------------

SERVED = ("model", "tenant")

REQUESTS = _counter("requests", "Turns that ended, by outcome", *SERVED, "outcome")
GOOD_REQUESTS = _counter("good_requests", "Turns that ended well and met every bound of their SLO", *SERVED)
SLO_MISSES = _counter("slo_misses", "Bounds of the SLO that turns which ended well did not meet", *SERVED, "bound")
PROGRAMS = _counter("programs", "Programs that were offered: their first turn is over, or was refused", *SERVED)
PROGRAM_ENDS = _counter(
    "program_ends", "Programs that ended: good (all turns met the SLO), late, failed or abandoned", *SERVED, "verdict"
)
TTFT = _histogram("ttft_seconds", "Seconds from a turn's arrival to its first token", TTFT_S, *SERVED)
TPOT = _histogram("tpot_seconds", "Mean seconds between a turn's tokens after the first", TPOT_S, *SERVED)
E2E = _histogram("e2e_seconds", "Seconds from a turn's arrival to its last token", REQUEST_S, *SERVED)
NORMALIZED = _histogram("normalized_latency_seconds", "End-to-end seconds for each generated token", TPOT_S, *SERVED)
PROGRAM_S = _histogram(
    "program_seconds", "Seconds of a program's turns together, without its tools", REQUEST_S, *SERVED
)
PROGRAM_WALL_S = _histogram("program_wall_seconds", "Seconds from a program's arrival to its end", REQUEST_S, *SERVED)
PROGRAM_TURNS = _histogram("program_turns", "Turns of a program", (1, 2, 5, 10, 20, 50, 100, 200, 500), *SERVED)
LEDGER_FALLBACKS = _counter("ledger_fallbacks", "Verdicts that other ingresses' parts could not be asked for", "kind")
OPEN_PROGRAMS = _gauge("open_programs", "Programs that an ingress is running")
PROGRAM_EVENTS = _counter(
    "program_events",
    "Server-side programs that were started, taken over from another ingress, and ended",
    "model",
    "kind",
)
SCRAPE_FAILURES = _gauge("scrape_failures", "Nodes that the last scrape through this ingress could not reach", "kind")

# --- placement ------------------------------------------------------------------------------------------------------

PLACEMENTS = _counter("placements", "Turns that were sent to a replica, by why they went there", "model", "reason")
REFUSALS = _counter("refusals", "Turns that were refused, by why", "model", "reason")
MOVES = _counter("moves", "Programs that left one replica for another")
WAITING_TURNS = _gauge("waiting_turns", "Turns that wait at an ingress to be admitted to a replica")
ADMISSION_S = _histogram("admission_seconds", "Seconds that a turn waited at an ingress to be admitted", TTFT_S)
SNAPSHOT_AGE = _gauge("snapshot_age_seconds", "Age of the oldest replica's newest snapshot")
PLACEMENT_FALLBACKS = _counter("placement_fallbacks", "Placements that had to do without something", "model", "kind")
REPLICAS = _gauge("replicas", "Replicas that an ingress can send turns to, by state", "model", "state")

# --- a replica: memory ----------------------------------------------------------------------------------------------

TOTAL_BLOCKS = _gauge("total_blocks", "KV cache blocks of a replica")
FREE_BLOCKS = _gauge("free_blocks", "KV cache blocks that are neither held nor used by a request")
HELD_BLOCKS = _gauge("held_blocks", "KV cache blocks of paused programs that stay allocated")
CACHED_BLOCKS = _gauge("cached_blocks", "Of the free blocks, those whose KV the prefix cache could still use")
HELD_TOKENS = _gauge("held_tokens", "Tokens whose KV is held for paused programs")
HELD_PROGRAMS = _gauge("held_programs", "Paused programs whose KV is held")
HOST_TOKENS = _gauge("host_tokens", "Tokens that the host tier takes")
HOST_USED_TOKENS = _gauge("host_used_tokens", "Tokens that the host tier has a copy of")
FETCHING_PROGRAMS = _gauge("fetching_programs", "Paused programs whose KV is being loaded from the host tier")
KNOWN_PROGRAMS = _gauge("known_programs", "Programs that a replica knows and that have not ended")
CONCLUDED_PROGRAMS = _gauge("concluded_programs", "Programs that have ended since the replica started")
PAUSES = _counter("pauses", "Pauses of programs, by what became of their KV and why", "model", "decision", "reason")
HOLDS_ENDED = _counter(
    "holds_ended", "Holds that ended: used, expired, broken for a running, a waiting or a starved turn", "model", "how"
)
HOLD_S = _histogram("hold_seconds", "Seconds that a program's KV was held", TOOL_S)
HOST_BYTES = _counter("host_bytes", "Bytes of KV moved to the host tier and back", "model", "direction")
WASTED = _counter(
    "wasted_kv_byte_seconds",
    "KV that did nothing, times how long: held, or of the batch while it recomputed",
    "model",
    "kind",
)
CONTEXT_TOKENS = _counter(
    "context_tokens",
    "Prompt tokens of admitted turns: new, reused, fetched from the host tier, recomputed",
    "model",
    "kind",
)

# --- a replica: order and budget ------------------------------------------------------------------------------------

RUNNING = _gauge("running", "Turns in the running batch")
WAITING = _gauge("waiting", "Turns that wait to be admitted", "model", "group")
OLDEST_WAITING = _gauge("oldest_waiting_seconds", "How long the turn that has waited longest has waited")
STARVED = _counter("starved_turns", "Turns that waited longer than the starvation bound before they were admitted")
QUEUE_S = _histogram(
    "queue_seconds",
    "Seconds from a turn's arrival at its replica to its admission; of resumed turns the bubble",
    TTFT_S,
    "model",
    "turn",
)
BUDGET = _gauge("step_budget_tokens", "Tokens that the policy lets a step schedule")
STEPS = _counter("steps", "Steps of the engine that scheduled something")
SCHEDULED_TOKENS = _counter("scheduled_tokens", "Tokens that steps scheduled")
STEP_PACE = _gauge("step_pace", "How many times as long steps take as the cost model says")
POLICY = _gauge("policy", "1 for the policy in force", "model", "policy")
REPLICA_UP = _gauge("replica_up", "1 for the state in which a replica is", "model", "state")
REPLICA_STARTS = _counter("replica_starts", "Starts of a replica's process")
EVENTS = _counter("scheduler_events", "What the scheduler counts beside these, by kind", "model", "kind")
FALLBACKS = _counter("fallbacks", "Decisions of a replica taken without something", "model", "kind")
TURN_PROMPTS = _counter(
    "turn_prompts", "Turns of programs that the cluster runs, by how their prompt was made", "model", "rendering"
)

# --- tools ----------------------------------------------------------------------------------------------------------

TOOL_CALLS = _counter("tool_calls", "Tool calls, by outcome", "tool", "outcome")
TOOL_SECONDS = _histogram("tool_seconds", "Seconds that a tool ran, retries included", TOOL_S, "tool")
TOOL_QUEUE_SECONDS = _histogram("tool_queue_seconds", "Seconds that a call waited for its tool", TOOL_S, "tool")

# --- forecasts and the store ----------------------------------------------------------------------------------------

FORECASTS = _counter("forecasts", "Forecasts, by who made them and why not the service", "answered")
FORECAST_SECONDS = _histogram("forecast_seconds", "Seconds that a turn waited for its forecast", FORECAST_S, "by")
FORECASTS_COMPARED = _counter("forecasts_compared", "Forecasts that could be compared with what came", "of")
FORECAST_ERROR = _counter("forecast_absolute_error", "Sum of the absolute errors of those, tokens or seconds", "of")
FORECAST_ACTUAL = _counter("forecast_actual", "Sum of what came where a forecast was compared, tokens or seconds", "of")
STORE_UP = _gauge("store_up", "1 while the last exchange with the store went well, else 0", "by")
STORE_FAILURES = _counter("store_failures", "Exchanges with the store that failed", "by", "kind")

CATALOGUE: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them."""
