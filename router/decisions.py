"""What the router is asked and what it answers. Data only.

The router's core is `Front` (events in, decisions out; no clock, no I/O): the cluster's ingress drives it through
`router.placer`, the simulator by itself. So both place programs by the same code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cluster.program import Forecasted, Hints
from cluster.routing import Home as Home
from cluster.routing import ReplicaSnapshot


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn that wants a replica."""

    key: str
    """The program, unique in the cluster; for a turn of no program, a name that nothing else has."""
    tenant: str
    prompt_tokens: int
    """All that it brings; an estimate where the prompt is text."""
    prefix: tuple[int, ...] = ()
    """`cluster.routing.prefix_blocks` of its prompt."""
    lone: bool = False
    """Of no program: it has one turn."""
    last: bool = False
    """Its program ends with it."""
    parent_key: str | None = None
    """The program that began this one."""
    avoid: frozenset[str] = frozenset()
    """Replicas that have failed this turn."""
    hints: Hints = field(default_factory=Hints)
    forecast: Forecasted | None = None
    """For what the hints do not say."""


class Placed(StrEnum):
    """Why a turn goes where it goes. Label of a metric."""

    NEW = "new"
    """A program's first turn: the best score."""
    STAYED = "stayed"
    MOVED_FOR_LOAD = "moved_for_load"
    """Another replica wins by more than the cost of moving."""
    MOVED_FROM_LOST = "moved_from_lost"
    """Its replica is gone."""
    MOVED_FROM_DRAINING = "moved_from_draining"
    JOINED = "joined"
    """Another ingress had placed it."""
    FOUND = "found"
    """The store is gone, and a replica says that the program lives there."""
    HASHED = "hashed"
    """The store is gone, or no snapshot is fresh: bounded-load rendezvous hashing."""


class Refused(StrEnum):
    """Why a turn is refused. Label of a metric."""

    NO_REPLICA = "no_replica"
    """503: none serves this model now."""
    HOPELESS = "hopeless"
    """503: its wait would be longer than is allowed, or than its deadline."""
    TENANT_SHARE = "tenant_share"
    """429: its tenant has more waiting than its share while others wait."""
    QUEUE_FULL = "queue_full"
    """503."""


@dataclass(frozen=True, slots=True)
class Go:
    """Send the turn there."""

    home: Home
    reason: Placed
    moved_from: str | None = None
    """Where the program lived before; what it has there can be given up."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The turn's program waits to be admitted; `Front.admitted` answers when that changes."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The turn is not served."""

    reason: Refused
    retry_after_s: float


Decision = Go | Wait | Refuse


class Front(Protocol):
    """Places programs on replicas of one model and admits them. Every method is given the time, in seconds.

    `turn_id` names a turn from `turn` to `ended`; it is unique in this front.
    """

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot | None], now_s: float) -> None:
        """The replicas that can be reached now, each with its newest snapshot; None: it has not told anything yet."""
        ...

    def turn(self, turn_id: str, request: TurnRequest, now_s: float, *, shared: bool = True) -> Decision:
        """A turn has come. ``shared``: the store answers; False: all must decide alike without it."""
        ...

    def admitted(self, now_s: float) -> Sequence[tuple[str, Go | Refuse]]:
        """Turns whose wait is over, with what became of them; each is told once."""
        ...

    def settle(self, key: str, home: Home, now_s: float) -> None:
        """The store says where the program lives: an answer of this front made known, or another ingress's."""
        ...

    def start_s(self, now_s: float) -> float | None:
        """Seconds within which a turn of a new program is expected to start; None: no replica is there."""
        ...

    def home_of(self, key: str) -> Home | None:
        """Where the program lives, as far as is known here."""
        ...

    def ended(self, turn_id: str, now_s: float, *, context_tokens: int | None = None) -> None:
        """The turn is over, whatever its outcome, or whoever waited for it is gone.

        ``context_tokens``: what its program has now, where that is known.
        """
        ...

    def forget(self, key: str, now_s: float) -> None:
        """The program has ended."""
        ...
