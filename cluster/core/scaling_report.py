"""What the autoscaler of a model reads: the demand that each ingress sees, and the load of each replica.

An ingress sends its `Demand` to one replica about once a second. The replica adds it to its own `ReplicaReport`, which
Ray Serve carries to its controller as a dictionary of numbers, where the autoscaler runs. When the ingress sends it to
another replica, the former one still reports the old demand for a while. So the autoscaler takes the newest demand of
each ingress.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Protocol, Self

from cluster.core.replica_snapshot import ReplicaSnapshot, StepCosts


class ReplicaSpeed(Protocol):
    """What of a replica decides how long its turns take: a `ReplicaSnapshot`, or a `router.candidate.ReplicaLoad`."""

    @property
    def costs(self) -> StepCosts:
        """Costs of its steps."""
        ...

    @property
    def kv_tokens(self) -> float:
        """Number of tokens whose KV fits its memory."""
        ...

    @property
    def max_sequences(self) -> float:
        """Largest number of turns in a batch."""
        ...

    @property
    def step_time_ratio(self) -> float:
        """Time of its steps, divided by that of ``costs``."""
        ...


def turn_work_s(replica: ReplicaSpeed, computed: float, outputs: float, context_tokens: float) -> float:
    """Return the seconds of a fully loaded replica that a turn takes.

    A full batch has as many sequences of the turn's length as fit into the KV memory and into a batch. Each of them has
    its share of the step's constant time and of reading the weights.

    Args:
        replica: the replica.
        computed: prompt tokens that are computed.
        outputs: tokens that are generated.
        context_tokens: mean length of the turn's context meanwhile.
    """
    costs = replica.costs
    batch = max(1.0, min(replica.max_sequences, replica.kv_tokens / max(1.0, context_tokens)))
    output_s = costs.decode_step_s(batch, batch * context_tokens) / batch
    return (computed * costs.token_s + outputs * output_s) * replica.step_time_ratio


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Finite numbers that are not negative."""

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Self:
        """Read the numbers by their names. A number that is missing, negative or not finite counts as 0."""
        known = ((one.name, numbers.get(one.name, 0.0)) for one in fields(cls))
        return cls(**{name: float(number) for name, number in known if isfinite(number) and number > 0})

    def numbers(self) -> dict[str, float]:
        """Return the numbers by their names."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Demand(_Numbers):
    """What one ingress, or all of them together, sees of a model's demand."""

    turn_work: float = 0.0
    """Work of the turns that are sent to replicas: seconds of a fully loaded replica (`turn_work_s`) in each second."""
    program_work: float = 0.0
    """The same of the new programs, with the work of all of their turns."""
    program_s: float = 0.0
    """Mean time from a program's first turn to its last (seconds); 0: no program has come lately."""
    queued_work_s: float = 0.0
    """Work of the turns that wait for admission (seconds of a fully loaded replica)."""
    queued_tokens: float = 0.0
    """KV that their programs need."""
    turns: float = 0.0
    """Number of turns that have ended lately."""
    missed: float = 0.0
    """Number of those that were rejected, failed or exceeded an SLO."""
    at_s: float = 0.0
    """When the ingress measured it, by its own clock; 0 for the demand of several."""

    def plus(self, other: "Demand") -> "Demand":
        """Return the demand of both. The length of a program is that of the larger work."""
        summed = {name: number + getattr(other, name) for name, number in self.numbers().items()}
        longer = self if self.program_work >= other.program_work else other
        return Demand(**{**summed, "program_s": longer.program_s, "at_s": 0.0})

    @classmethod
    def sum(cls, demands: Iterable["Demand"]) -> "Demand":
        """Return the demand of all."""
        total = cls()
        for demand in demands:
            total = total.plus(demand)
        return total


@dataclass(frozen=True, slots=True)
class ReplicaLoadReport(_Numbers):
    """The load of one replica."""

    kv_tokens: float = 0.0
    """Tokens whose KV fits into device memory, with `HOST_SHARE` of those that fit into the host tier."""
    working_set_tokens: float = 0.0
    """`ReplicaSnapshot.working_set_tokens`."""
    waiting_work_s: float = 0.0
    """Work of the turns that wait there, and of the prompts that are being computed (seconds)."""
    turns: float = 0.0
    """Turns that run or wait there."""
    start_s: float = 0.0
    """Seconds from the start of its process until it could serve."""

    @classmethod
    def of_snapshot(cls, snapshot: ReplicaSnapshot, start_s: float) -> "ReplicaLoadReport":
        """Return the load in a replica's newest snapshot."""
        turns = snapshot.running + snapshot.waiting + snapshot.put_off
        waiting_share = (snapshot.waiting + snapshot.put_off) / turns if turns else 0.0
        context = (snapshot.running_tokens + snapshot.waiting_tokens) / max(1, turns)
        work_s = turn_work_s(snapshot, snapshot.waiting_tokens, snapshot.output_tokens * waiting_share, context)
        kv_tokens = snapshot.kv_tokens + HOST_SHARE * snapshot.host_tokens
        return cls(kv_tokens, snapshot.working_set_tokens, work_s, float(turns), start_s)


HOST_SHARE = 0.5
"""Part of the host tier that counts as memory, as for admissions (`router.settings.EngineSettings.host_share`)."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica reports: its load, and the demand that each ingress has sent to it, by the ingress's name."""

    load: ReplicaLoadReport
    demands: Mapping[str, Demand] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """Return all numbers by their names, for Ray."""
        numbers = self.load.numbers()
        for ingress, demand in self.demands.items():
            numbers |= {f"{DEMAND_PREFIX}{name}:{ingress}": number for name, number in demand.numbers().items()}
        return numbers

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> "ReplicaReport":
        """Read what `numbers` returned. Other names are ignored."""
        demands: dict[str, dict[str, float]] = {}
        for key, number in numbers.items():
            if key.startswith(DEMAND_PREFIX):
                name, _, ingress = key.removeprefix(DEMAND_PREFIX).partition(":")
                demands.setdefault(ingress, {})[name] = number
        return cls(ReplicaLoadReport.of(numbers), {ingress: Demand.of(one) for ingress, one in demands.items()})


DEMAND_PREFIX = "demand_"


def total_demand(reports: Iterable[ReplicaReport]) -> Demand:
    """Return the demand of all ingresses, of each the newest."""
    newest: dict[str, Demand] = {}
    for report in reports:
        for ingress, demand in report.demands.items():
            if ingress not in newest or demand.at_s > newest[ingress].at_s:
                newest[ingress] = demand
    return Demand.sum(newest.values())
