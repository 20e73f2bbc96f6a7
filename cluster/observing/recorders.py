"""Recorders, each of which exports the numbers of one component as metrics of the catalogue.

`record` of a recorder has to be called about once a second, since Ray drops gauges that are not set.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from cluster.core.program import DEFAULT_TENANT
from cluster.core.tools import Outcome, ToolResult
from cluster.core.turn import PromptMode
from cluster.observing import catalogue as metrics
from cluster.observing.catalogue import CATALOGUE
from cluster.observing.meter import Meter

OTHER_TENANTS = "other"
"""The label of tenants that the configuration does not name, since clients must not create labels."""
USES = ("prefill", "recomputed", "decode", "held")
"""What a turn uses a replica for, in seconds."""


class Fallback(StrEnum):
    """The component without which a replica continues, in a degraded decision."""

    STORE_UNREACHABLE = "store_unreachable"
    """The tool statistics of other replicas are the last known ones."""
    CONTROL_TIMEOUT = "control_timeout"
    """The scheduler did not answer. Its numbers and statistics are those of the last exchange."""


class ReplicaState(StrEnum):
    """Whether a replica accepts programs."""

    UP = "up"
    DRAINING = "draining"
    """The replica is draining: its programs migrate at their next pause."""


class ReplicaMetrics:
    """The metrics of one replica.

    Args:
        meter: records, with the label ``model``.
        tenants: names of the configured tenants. All others have one label together, since clients must not create
            labels.
    """

    COMPONENT = "replica"

    def __init__(self, meter: Meter, tenants: Iterable[str] = ()) -> None:
        self._meter = meter
        self._tenants = {DEFAULT_TENANT, *tenants}
        self._policies: set[str] = set()
        self._meter.begin(metrics.REPLICA_STARTS)

    def started(self) -> None:
        """Count a start of the replica. It is called when the model is loaded."""
        self._meter.add(metrics.REPLICA_STARTS, 1)

    def record(self, snapshot: Mapping[str, Any]) -> None:
        """Export a snapshot of `replicas.control`."""
        for metric in CATALOGUE:
            if metric.snapshot:
                self._meter.record(metric, snapshot[metric.snapshot])
        self._policies.add(snapshot["policy"])
        in_force = {policy: float(policy == snapshot["policy"]) for policy in self._policies}
        self._meter.record(metrics.POLICY, in_force)
        # Each decision has a series from the start, with a reason that every policy may have.
        decisions = {
            decision: reasons or {"policy": 0} for decision, reasons in snapshot["kv_retention_decisions"].items()
        }
        self._meter.record(metrics.KV_RETENTION_DECISIONS, decisions)
        token_bytes = snapshot["token_bytes"]
        wasted = {reason: amount * token_bytes for reason, amount in snapshot["wasted_token_seconds"].items()}
        self._meter.record(metrics.WASTED, wasted)
        self._meter.record(metrics.GPU_S, self._uses(snapshot["gpu_s"]))
        copied = {direction: snapshot[f"{direction}_tokens"] * token_bytes for direction in ("stored", "fetched")}
        self._meter.record(metrics.KV_OFFLOAD_BYTES, copied)

    def _uses(self, times: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """Return the seconds of each tenant's uses, which have no second in common."""
        uses: dict[str, dict[str, float]] = {}
        for tenant, of in times.items():
            own = uses.setdefault(tenant if tenant in self._tenants else OTHER_TENANTS, dict.fromkeys(USES, 0.0))
            own["prefill"] += of["prefill_s"] - of["recomputed_s"]
            for use in USES[1:]:
                own[use] += of[f"{use}_s"]
        return uses

    def observe(self, observations: Mapping[str, Any]) -> None:
        """Add the queue times and hold times since the last call, see `replicas.stats`."""
        for turn in ("first", "resumed"):
            for seconds in observations[f"queue_{turn}"]:
                self._meter.observe(metrics.QUEUE_S, seconds, turn=turn)
        for seconds in observations["hold"]:
            self._meter.observe(metrics.KV_PIN_S, seconds)

    def record_state(self, now: ReplicaState) -> None:
        """Export whether the replica accepts programs."""
        self._meter.record(metrics.REPLICA_UP, {state: float(state is now) for state in ReplicaState})

    def record_store(self, failures: Mapping[Any, int], *, up: bool) -> None:
        """Export the store's failures since the start, and whether the last exchange succeeded."""
        _record_store(self._meter, self.COMPONENT, failures, up)

    def fell_back(self, kind: Fallback) -> None:
        """Count one degraded decision."""
        self._meter.add(metrics.DEGRADED_DECISIONS, 1, component=self.COMPONENT, reason=kind.value)

    def rendered(self, rendering: PromptMode) -> None:
        """Count one turn whose prompt has been rendered."""
        self._meter.add(metrics.TURN_PROMPTS, 1, mode=rendering.value)


class RouterMetrics:
    """The metrics of one ingress's router, for one model.

    Args:
        meter: records, with the label ``model``.
    """

    COMPONENT = "router"

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._meter.begin(metrics.PROGRAM_MIGRATIONS)

    def record(
        self,
        *,
        waiting: int,
        waits_s: Sequence[float],
        ages_s: Sequence[float],
        states: Mapping[Any, int],
        moves: int,
        placements: Mapping[Any, int],
        refusals: Mapping[Any, int],
        fallbacks: Mapping[Any, int],
    ) -> None:
        """Export the router's numbers.

        Args:
            waiting: number of turns in the admission queue.
            waits_s: queueing times of the turns that were admitted since the last call, in seconds.
            ages_s: ages of the replicas' snapshots in seconds.
            states: number of replicas in each state.
            moves: number of programs that migrated, since the start.
            placements: number of routing decisions by reason, since the start.
            refusals: number of rejected turns by reason, since the start.
            fallbacks: number of degraded decisions by reason, since the start.
        """
        self._meter.set(metrics.WAITING_TURNS, waiting)
        for wait_s in waits_s:
            self._meter.observe(metrics.ADMISSION_S, wait_s)
        self._meter.record(metrics.REPLICAS, states)
        self._meter.record(metrics.PROGRAM_MIGRATIONS, moves)
        self._meter.set(metrics.SNAPSHOT_AGE, max(ages_s, default=0.0))
        self._meter.record(metrics.ROUTING_DECISIONS, placements)
        self._meter.record(metrics.REQUESTS_REJECTED, refusals)
        self._meter.record(metrics.DEGRADED_DECISIONS, {self.COMPONENT: fallbacks})

    def record_min(self, replicas: int) -> None:
        """Export the smallest number of replicas that the configuration allows."""
        self._meter.set(metrics.REPLICAS_MIN, replicas)

    def record_store(self, failures: Mapping[Any, int], *, up: bool) -> None:
        """Export the placement store's failures since the start, and whether the last call succeeded."""
        _record_store(self._meter, self.COMPONENT, failures, up)


class ProgramMetrics:
    """The metrics of one program runner.

    Args:
        meter: records, with the label ``model``.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def record_memory(self, used_bytes: int, max_bytes: int, evicted: int) -> None:
        """Export the memory of the store, and the number of runs that were deleted early since the start."""
        self._meter.set(metrics.STORE_USED_BYTES, used_bytes)
        self._meter.set(metrics.STORE_MAX_BYTES, max_bytes)
        self._meter.record(metrics.STORE_EVICTIONS, evicted)

    def record_tokens(self, totals: Mapping[Any, int]) -> None:
        """Export what became of the turns that were to be recorded, since the start."""
        self._meter.record(metrics.RECORDED_TURNS, totals)

    def record(self, open_programs: int, totals: Mapping[str, int], answers_cut: int) -> None:
        """Export the number of programs that run, and the numbers of events and shortened answers since the start."""
        self._meter.set(metrics.OPEN_PROGRAMS, open_programs)
        self._meter.record(metrics.PROGRAM_EVENTS, totals)
        self._meter.record(metrics.TOOL_ANSWERS_CUT, answers_cut)


class BatchMetrics:
    """The metrics of the batches of one ingress.

    Args:
        meter: records.
        tenants: names of the configured tenants. All others have one label together.
    """

    def __init__(self, meter: Meter, tenants: Iterable[str]) -> None:
        self._meter = meter
        self._tenants = {DEFAULT_TENANT, *tenants}
        self._seen = {DEFAULT_TENANT}

    def record(
        self, open_batches: Mapping[str, int], left: Mapping[str, int], lines: Mapping[tuple[str, str], int]
    ) -> None:
        """Export the batches of each tenant.

        Args:
            open_batches: number of batches that this ingress works on.
            left: number of their lines without a result.
            lines: number of lines by tenant and what became of them, since the start.
        """
        self._seen |= {self._label(tenant) for tenant in open_batches}
        for metric, numbers in ((metrics.OPEN_BATCHES, open_batches), (metrics.LEFT_BATCH_LINES, left)):
            for label in self._seen:
                self._meter.set(
                    metric, sum(n for tenant, n in numbers.items() if self._label(tenant) == label), tenant=label
                )
        totals: dict[str, dict[str, int]] = {}
        for (tenant, outcome), number in lines.items():
            of = totals.setdefault(self._label(tenant), {})
            of[outcome] = of.get(outcome, 0) + number
        self._meter.record(metrics.BATCH_LINES, totals)

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self._tenants else OTHER_TENANTS


class ToolMetrics:
    """The metrics of one process that runs tools.

    Args:
        meter: records.
        tools: names of the configured tools. Each has a series of successful calls from the start.
    """

    def __init__(self, meter: Meter, tools: Iterable[str]) -> None:
        self._meter = meter
        for tool in tools:
            meter.begin(metrics.TOOL_CALLS, tool=tool, outcome=Outcome.OK.value)

    def record(self, tool: str, result: ToolResult) -> None:
        """Count one call that ended."""
        self._meter.add(metrics.TOOL_CALLS, 1, tool=tool, outcome=result.outcome.value)
        self._meter.observe(metrics.TOOL_QUEUE_SECONDS, result.queue_s, tool=tool)
        if result.attempts:
            self._meter.observe(metrics.TOOL_SECONDS, result.run_s, tool=tool)


class PredictionMetrics:
    """The metrics of one ingress's predictions.

    Args:
        meter: records.
        mode: `predictor.mode`.
    """

    def __init__(self, meter: Meter, mode: str) -> None:
        self._meter = meter
        self._mode = mode

    def waited(self, seconds: float) -> None:
        """Add the time that a turn waited for its prediction."""
        self._meter.observe(metrics.PREDICTION_SECONDS, seconds, mode=self._mode)

    def record(self, sources: Mapping[Any, int], errors: Mapping[str, Sequence[float]]) -> None:
        """Export the totals since the start.

        Args:
            sources: number of predictions by source.
            errors: by quantity, the number of compared predictions, the sum of their absolute errors, and the sum of
                the actual values.
        """
        self._meter.record(metrics.PREDICTIONS, sources)
        for quantity, (compared, error, actual) in errors.items():
            self._meter.record(metrics.PREDICTIONS_COMPARED, compared, quantity=quantity)
            self._meter.record(metrics.PREDICTION_ERROR, error, quantity=quantity)
            self._meter.record(metrics.PREDICTION_ACTUAL, actual, quantity=quantity)


def _record_store(meter: Meter, component: str, failures: Mapping[Any, int], up: bool) -> None:
    meter.set(metrics.STORE_UP, float(up), component=component)
    meter.record(metrics.STORE_FAILURES, {component: failures})
