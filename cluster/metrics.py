"""Every metric that Caesura exports, once. Ray's node agents serve them as ``ray_caesura_<name>``, counters ``_total``.

Labels are enums or what the configuration names (model, policy), never ids of programs, requests or tenants. Gauges go
stale in Ray unless they are set about once a second: `ReplicaMetrics.record` is called at each exchange.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from ray.util import metrics

from cluster.tools import ToolResult
from cluster.turn import Rendering

PREFIX = "caesura_"


class Fallback(StrEnum):
    """A way in which a replica goes on although something it would like to use is not there."""

    STORE_UNREACHABLE = "store_unreachable"
    """Tool statistics of other replicas are the last ones known."""
    CONTROL_TIMEOUT = "control_timeout"
    """The scheduler did not answer; its numbers and statistics are those of the last exchange."""


SNAPSHOT_GAUGES = {
    "total_blocks": "KV cache blocks of a replica",
    "free_blocks": "KV cache blocks that are neither held nor used by a request",
    "held_blocks": "KV cache blocks of paused programs that stay allocated",
    "held_tokens": "Tokens whose KV is held for paused programs",
    "held_programs": "Paused programs whose KV is held",
    "host_tokens": "Tokens that the host tier takes",
    "host_used_tokens": "Tokens that the host tier has a copy of",
    "fetching_programs": "Paused programs whose KV is being loaded from the host tier",
    "running": "Turns in the running batch",
    "waiting": "Turns that wait to be admitted",
    "programs": "Programs that a replica knows and that have not ended",
    "concluded_programs": "Programs that have ended since the replica started",
}
"""Numbers of a scheduler's snapshot that are exported as they are, with their description."""

EVENTS = "scheduler_events"
FALLBACKS = "fallbacks"
STORE_FAILURES = "store_failures"
TURN_PROMPTS = "turn_prompts"
OPEN_PROGRAMS = "open_programs"
PROGRAM_EVENTS = "program_events"
PLACEMENTS = "placements"
REFUSALS = "refusals"
WAITING_TURNS = "waiting_turns"
SNAPSHOT_AGE = "snapshot_age_seconds"
PLACEMENT_FALLBACKS = "placement_fallbacks"
TOOL_CALLS = "tool_calls"
TOOL_SECONDS = "tool_seconds"
TOOL_QUEUE_SECONDS = "tool_queue_seconds"

FORECASTS = "forecasts"
FORECAST_SECONDS = "forecast_seconds"
FORECASTS_COMPARED = "forecasts_compared"
FORECAST_ERROR = "forecast_absolute_error"

FORECAST_BOUNDARIES_S = (0.0002, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.1)
TOOL_BOUNDARIES_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class ReplicaMetrics:
    """The metrics of one replica.

    Args:
        model: the model's id, as clients name it.
    """

    def __init__(self, model: str) -> None:
        tags = {"model": model}
        self._gauges = {
            name: metrics.Gauge(PREFIX + name, description=text, tag_keys=("model",))
            for name, text in SNAPSHOT_GAUGES.items()
        }
        self._events = metrics.Counter(
            PREFIX + EVENTS, description="What the scheduler counts, by kind", tag_keys=("model", "kind")
        )
        self._fallbacks = metrics.Counter(
            PREFIX + FALLBACKS, description="Decisions taken without something, by what", tag_keys=("model", "kind")
        )
        self._store_failures = metrics.Counter(
            PREFIX + STORE_FAILURES,
            description="Exchanges with the store that failed, by kind",
            tag_keys=("model", "kind"),
        )
        self._prompts = metrics.Counter(
            PREFIX + TURN_PROMPTS,
            description="Turns of programs that the cluster runs, by how their prompt was made",
            tag_keys=("model", "rendering"),
        )
        for metric in (*self._gauges.values(), self._events, self._fallbacks, self._store_failures, self._prompts):
            metric.set_default_tags(tags)
        self._counted: dict[tuple[metrics.Counter, str], float] = {}

    def record(self, snapshot: Mapping[str, Any]) -> None:
        """Set the gauges, and add to the counters what came since the last snapshot."""
        for name, gauge in self._gauges.items():
            gauge.set(snapshot[name])
        self._add(self._events, snapshot["counters"])

    def record_store(self, failures: Mapping[Any, int]) -> None:
        """Add what failed since the last time."""
        self._add(self._store_failures, failures)

    def fell_back(self, kind: Fallback) -> None:
        """Count one fallback."""
        self._fallbacks.inc(1, {"kind": kind.value})

    def rendered(self, rendering: Rendering) -> None:
        """Count one turn whose prompt is made."""
        self._prompts.inc(1, {"rendering": rendering.value})

    def _add(self, counter: metrics.Counter, totals: Mapping[Any, float]) -> None:
        for kind, total in totals.items():
            grown = total - self._counted.get((counter, kind), 0)
            if grown > 0:
                counter.inc(grown, {"kind": str(kind)})
            self._counted[counter, kind] = total


class ToolMetrics:
    """The metrics of one process that runs tools. The label ``tool`` is the configuration's name of an entry."""

    def __init__(self) -> None:
        self._calls = metrics.Counter(
            PREFIX + TOOL_CALLS, description="Tool calls, by outcome", tag_keys=("tool", "outcome")
        )
        self._run, self._queue = (
            metrics.Histogram(PREFIX + name, description=text, boundaries=list(TOOL_BOUNDARIES_S), tag_keys=("tool",))
            for name, text in (
                (TOOL_SECONDS, "Seconds that a tool ran, retries included"),
                (TOOL_QUEUE_SECONDS, "Seconds that a call waited for its tool"),
            )
        )

    def record(self, tool: str, result: ToolResult) -> None:
        """Count one call that ended."""
        self._calls.inc(1, {"tool": tool, "outcome": result.outcome.value})
        self._queue.observe(result.queue_s, {"tool": tool})
        if result.attempts:
            self._run.observe(result.run_s, {"tool": tool})


class ProgramMetrics:
    """The metrics of one program runner.

    Args:
        model: the model's id, as clients name it.
    """

    def __init__(self, model: str) -> None:
        self._open = metrics.Gauge(
            PREFIX + OPEN_PROGRAMS, description="Programs that an ingress is running", tag_keys=("model",)
        )
        self._events = metrics.Counter(
            PREFIX + PROGRAM_EVENTS,
            description="Programs that were started, taken over from another ingress, and ended, by kind",
            tag_keys=("model", "kind"),
        )
        for metric in (self._open, self._events):
            metric.set_default_tags({"model": model})
        self._counted: dict[str, int] = {}

    def record(self, open_programs: int, totals: Mapping[str, int]) -> None:
        """Set the gauge, and add to the counters what came since the last time."""
        self._open.set(open_programs)
        for kind, total in totals.items():
            if total > self._counted.get(kind, 0):
                self._events.inc(total - self._counted.get(kind, 0), {"kind": kind})
            self._counted[kind] = total


class RouterMetrics:
    """The metrics of one ingress's router, for one model.

    Args:
        model: the model's id, as clients name it.
    """

    def __init__(self, model: str) -> None:
        self._waiting, self._age = (
            metrics.Gauge(PREFIX + name, description=text, tag_keys=("model",))
            for name, text in (
                (WAITING_TURNS, "Turns that wait at an ingress to be admitted to a replica"),
                (SNAPSHOT_AGE, "Age of the oldest replica's newest snapshot"),
            )
        )
        self._placements, self._refusals, self._fallbacks = (
            metrics.Counter(PREFIX + name, description=text, tag_keys=("model", label))
            for name, text, label in (
                (PLACEMENTS, "Turns that were sent to a replica, by why they went there", "reason"),
                (REFUSALS, "Turns that were refused, by why", "reason"),
                (PLACEMENT_FALLBACKS, "Placements that had to do without something, by what", "kind"),
            )
        )
        for metric in (self._waiting, self._age, self._placements, self._refusals, self._fallbacks):
            metric.set_default_tags({"model": model})
        self._counted: dict[tuple[metrics.Counter, str], int] = {}

    def record(
        self,
        *,
        waiting: int,
        ages_s: Sequence[float],
        placements: Mapping[Any, int],
        refusals: Mapping[Any, int],
        fallbacks: Mapping[Any, int],
    ) -> None:
        """Set the gauges, and add to the counters what came since the last time."""
        self._waiting.set(waiting)
        self._age.set(max(ages_s, default=0.0))
        for counter, label, totals in (
            (self._placements, "reason", placements),
            (self._refusals, "reason", refusals),
            (self._fallbacks, "kind", fallbacks),
        ):
            for kind, total in totals.items():
                if (grown := total - self._counted.get((counter, kind), 0)) > 0:
                    counter.inc(grown, {label: str(kind)})
                self._counted[counter, kind] = total


class ForecastMetrics:
    """The metrics of one ingress's forecasts."""

    def __init__(self) -> None:
        self._seconds = metrics.Histogram(
            PREFIX + FORECAST_SECONDS,
            description="Seconds that a turn waited for its forecast",
            boundaries=list(FORECAST_BOUNDARIES_S),
        )
        self._forecasts, self._compared, self._errors = (
            metrics.Counter(PREFIX + name, description=text, tag_keys=(label,))
            for name, text, label in (
                (FORECASTS, "Forecasts, by who made them and why not the service", "answered"),
                (FORECASTS_COMPARED, "Forecasts that could be compared with what came, by of what", "of"),
                (FORECAST_ERROR, "Sum of the absolute errors of those, tokens or seconds", "of"),
            )
        )
        self._counted: dict[tuple[metrics.Counter, str], float] = {}

    def asked(self, seconds: float) -> None:
        """A turn has its forecast, or none."""
        self._seconds.observe(seconds)

    def record(self, answered: Mapping[Any, int], errors: Mapping[str, Sequence[float]]) -> None:
        """Add to the counters what came since the last time. ``errors``: how many, and their sum."""
        for kind, total in answered.items():
            self._add(self._forecasts, "answered", str(kind), total)
        for what, (count, total_error) in errors.items():
            self._add(self._compared, "of", what, count)
            self._add(self._errors, "of", what, total_error)

    def _add(self, counter: metrics.Counter, label: str, value: str, total: float) -> None:
        if (grown := total - self._counted.get((counter, value), 0.0)) > 0:
            counter.inc(grown, {label: value})
        self._counted[counter, value] = total
