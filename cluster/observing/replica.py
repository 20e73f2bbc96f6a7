"""What a replica records: its scheduler's numbers, and what its process counts beside it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from cluster import metrics
from cluster.metrics import Metric
from cluster.observing.meter import Meter
from cluster.turn import Rendering


class Fallback(StrEnum):
    """A way in which a replica goes on although something it would like to use is not there."""

    STORE_UNREACHABLE = "store_unreachable"
    """Tool statistics of other replicas are the last ones known."""
    CONTROL_TIMEOUT = "control_timeout"
    """The scheduler did not answer; its numbers and statistics are those of the last exchange."""


SNAPSHOT_GAUGES = {
    "total_blocks": metrics.TOTAL_BLOCKS,
    "free_blocks": metrics.FREE_BLOCKS,
    "cached_blocks": metrics.CACHED_BLOCKS,
    "held_blocks": metrics.HELD_BLOCKS,
    "held_tokens": metrics.HELD_TOKENS,
    "held_programs": metrics.HELD_PROGRAMS,
    "host_tokens": metrics.HOST_TOKENS,
    "host_used_tokens": metrics.HOST_USED_TOKENS,
    "fetching_programs": metrics.FETCHING_PROGRAMS,
    "running": metrics.RUNNING,
    "oldest_waiting_s": metrics.OLDEST_WAITING,
    "step_budget_tokens": metrics.BUDGET,
    "step_pace": metrics.STEP_PACE,
    "programs": metrics.KNOWN_PROGRAMS,
    "concluded_programs": metrics.CONCLUDED_PROGRAMS,
}
"""Numbers of a scheduler's snapshot that are exported as they are."""

SNAPSHOT_TOTALS = {
    "starved_turns": metrics.STARVED,
    "steps": metrics.STEPS,
    "scheduled_tokens": metrics.SCHEDULED_TOKENS,
}
"""Its totals that are counted as they are."""

LABELLED_TOTALS = {
    "holds_ended": (metrics.HOLDS_ENDED, "how"),
    "context_tokens": (metrics.CONTEXT_TOKENS, "kind"),
    "counters": (metrics.EVENTS, "kind"),
}
"""Its totals by the value of a label."""

OBSERVED = {
    "queue_first": (metrics.QUEUE_S, {"turn": "first"}),
    "queue_resumed": (metrics.QUEUE_S, {"turn": "resumed"}),
    "hold": (metrics.HOLD_S, {}),
}
"""What it observed one by one."""

NO_PAUSE = {"policy": 0}
"""Each decision has a series from the start, under the reason that every policy may have."""

STORE_USER = "replica"


class ReplicaState(StrEnum):
    """Whether a replica takes programs."""

    UP = "up"
    DRAINING = "draining"
    """Programs leave it at their pauses."""


class ReplicaMetrics:
    """The metrics of one replica.

    Args:
        meter: records, with the label ``model``.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._policies: set[str] = set()
        self._meter.begin(metrics.REPLICA_STARTS)

    def started(self) -> None:
        """The model is loaded."""
        self._meter.add(metrics.REPLICA_STARTS, 1)

    def record(self, snapshot: Mapping[str, Any]) -> None:
        """Set the gauges, and add to the counters what came since the last snapshot. To be called once a second.

        Args:
            snapshot: of `replicas.control`.
        """
        for name, gauge in SNAPSHOT_GAUGES.items():
            self._meter.set(gauge, snapshot[name])
        late = snapshot["waiting_late"]
        self._meter.set(metrics.WAITING, snapshot["waiting"] - late, group="in_time")
        self._meter.set(metrics.WAITING, late, group="late")
        self._policies.add(snapshot["policy"])
        for policy in self._policies:
            self._meter.set(metrics.POLICY, float(policy == snapshot["policy"]), policy=policy)
        for name, counter in SNAPSHOT_TOTALS.items():
            self._count(counter, snapshot[name])
        for name, (counter, label) in LABELLED_TOTALS.items():
            for value, total in snapshot[name].items():
                self._count(counter, total, **{label: str(value)})
        for decision, reasons in snapshot["pauses"].items():
            for reason, total in (reasons or NO_PAUSE).items():
                self._count(metrics.PAUSES, total, decision=decision, reason=reason)
        token_bytes = snapshot["token_bytes"]
        for kind, token_seconds in snapshot["wasted_token_seconds"].items():
            self._count(metrics.WASTED, token_seconds * token_bytes, kind=kind)
        for direction in ("stored", "fetched"):
            self._count(metrics.HOST_BYTES, snapshot[f"{direction}_tokens"] * token_bytes, direction=direction)

    def observe(self, observations: Mapping[str, Any]) -> None:
        """Add what was observed since the last time: see `replicas.tally`."""
        for name, (histogram, labels) in OBSERVED.items():
            for seconds in observations[name]:
                self._meter.observe(histogram, seconds, **labels)

    def record_state(self, now: ReplicaState) -> None:
        """Set whether it takes programs. To be called once a second."""
        for state in ReplicaState:
            self._meter.set(metrics.REPLICA_UP, float(state is now), state=state.value)

    def _count(self, counter: Metric, total: float, **labels: str) -> None:
        if not total:
            self._meter.begin(counter, **labels)
        self._meter.count_to(counter, total, **labels)

    def record_store(self, failures: Mapping[Any, int], *, up: bool) -> None:
        """Add what failed since the last time; ``up``: the last exchange went well."""
        self._meter.set(metrics.STORE_UP, float(up), by=STORE_USER)
        for kind, total in failures.items():
            self._meter.count_to(metrics.STORE_FAILURES, total, by=STORE_USER, kind=str(kind))

    def fell_back(self, kind: Fallback) -> None:
        """Count one fallback."""
        self._meter.add(metrics.FALLBACKS, 1, kind=kind.value)

    def rendered(self, rendering: Rendering) -> None:
        """Count one turn whose prompt is made."""
        self._meter.add(metrics.TURN_PROMPTS, 1, rendering=rendering.value)
