"""What `router.placement_engine.PlacementEngine` is asked, and what it decides. Data only."""

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.core.program import Hints, Prediction
from cluster.core.replica_snapshot import Home as Home


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn that needs a replica."""

    key: str
    """The program, unique in the cluster; for a turn of no program, a name that nothing else has."""
    tenant: str
    prompt_tokens: int
    """Length of the whole prompt; an estimate where the prompt is text."""
    prefix: tuple[int, ...] = ()
    """`cluster.core.replica_snapshot.prefix_blocks` of its prompt."""
    single_turn: bool = False
    """It belongs to no program."""
    first: bool = False
    """Its program probably begins with it, so that its home is not looked up before the turn is placed."""
    last: bool = False
    """Its program ends with it."""
    parent_key: str | None = None
    """The program that started this one."""
    avoid: frozenset[str] = frozenset()
    """Replicas that have failed this turn."""
    hints: Hints = field(default_factory=Hints)
    forecast: Prediction | None = None
    """The predictor's values, for what the hints leave open."""


class Placed(StrEnum):
    """Why a turn is sent where it is sent. Label of a metric."""

    NEW = "new"
    """A program's first turn goes to the replica with the best score."""
    STAYED = "stayed"
    MOVED_FOR_LOAD = "moved_for_load"
    """Another replica is better by more than the cost of the migration."""
    MOVED_FROM_LOST = "moved_from_lost"
    """The program's replica is gone."""
    MOVED_FROM_DRAINING = "moved_from_draining"
    JOINED = "joined"
    """Another ingress had placed the program."""
    FOUND = "found"
    """The store is unavailable, and a replica's snapshot names the program."""
    HASHED = "hashed"
    """The store is unavailable, or no snapshot is fresh: rendezvous hashing."""


class Refused(StrEnum):
    """Why a turn is rejected: the error code, and the label of a metric."""

    NO_REPLICA = "no_replica"
    """503: no replica serves this model now."""
    QUEUE_TIMEOUT = "queue_timeout"
    """503: its wait would exceed the limit, or its own deadline."""
    TENANT_SHARE = "tenant_share"
    """429: its tenant has more turns waiting than its share while others wait."""
    QUEUE_FULL = "queue_full"
    """503: too many turns wait."""
    LOAD_SHED = "load_shed"
    """503: on every replica admitted turns wait for long, and a program of so much work would wait as long."""


@dataclass(frozen=True, slots=True)
class Go:
    """The turn is sent to its program's home."""

    home: Home
    reason: Placed
    moved_from: str | None = None
    """The program's previous home, which may free its KV."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The turn's program waits for admission; `PlacementEngine.admitted` returns the turn when the wait is over."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The turn is rejected."""

    reason: Refused
    retry_after_s: float


Decision = Go | Wait | Refuse
