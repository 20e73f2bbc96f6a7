"""How many replicas a model should have: the question that an autoscaling policy answers. Pure; times in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from cluster.core.scaling_report import ReplicaReport

State = TypeVar("State")


class Reason(StrEnum):
    """Why a model should have so many replicas."""

    KEEP = "keep"
    MEMORY = "memory"
    """The working set of KV needs so many."""
    WORK = "work"
    """The work that arrives, is expected to arrive, or waits needs so many."""
    SLO = "slo"
    """Turns exceed their SLO, and all replicas have started."""
    UNUSED = "unused"
    """Fewer have sufficed for long enough."""
    IDLE = "idle"
    """No turn runs or waits, and no program is expected back soon."""
    QUEUE = "queue"
    """By the number of turns in the replicas, as Ray's own policy decides."""


@dataclass(frozen=True, slots=True)
class ScalingView:
    """The replicas of a model as of now."""

    now_s: float
    ready: int
    """Replicas that serve."""
    target: int
    """Replicas that were wanted last; those beyond `ready` are starting."""
    least: int
    most: int
    reports: Sequence[ReplicaReport]
    """Newest reports of the replicas that serve. One that has just started may have none yet."""


@dataclass(frozen=True, slots=True)
class ScalingDecision(Generic[State]):
    """The number of replicas that is wanted, and the state for the next decision."""

    replicas: int
    reason: Reason
    state: State


class AutoscalingPolicy(Protocol[State]):
    """Decides the number of replicas of one model."""

    def first(self) -> State:
        """Return the state before the first decision."""
        ...

    def decide(self, view: ScalingView, state: State) -> ScalingDecision[State]:
        """Return the number of replicas that is wanted, from ``view.least`` to ``view.most``.

        It is asked several times a second, and never raises.
        """
        ...
