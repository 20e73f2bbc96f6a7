"""The placement of a turn as the ingress sees it, and the placer for Ray's own routers."""

import math
from enum import StrEnum
from typing import Any, Protocol

from cluster.core.errors import Overloaded, TooManyRequests
from cluster.core.replica_snapshot import Home, ReplicaSnapshot
from router.decisions import Refused, TurnRequest


class Fallback(StrEnum):
    """Why a placement was degraded. Label of a metric."""

    STORE_GONE = "store_gone"
    """The store did not answer."""
    FENCED = "fenced"
    """A replica knew a later epoch than this ingress."""
    MOVE_UNACKNOWLEDGED = "move_unacknowledged"
    """A replica did not acknowledge that a program has left it, and is notified again."""


_REJECTIONS: dict[Refused, tuple[type[Overloaded], str]] = {
    Refused.NO_REPLICA: (Overloaded, "no replica serves this model now"),
    Refused.QUEUE_TIMEOUT: (Overloaded, "the wait for admission would exceed the limit"),
    Refused.TENANT_SHARE: (TooManyRequests, "this tenant has more turns waiting than its share"),
    Refused.QUEUE_FULL: (Overloaded, "too many turns wait for admission"),
    Refused.LOAD_SHED: (Overloaded, "programs of so much work wait for too long on every replica"),
}


class Placement:
    """A turn's place, until `end`. As a context manager it ends at the exit."""

    def __init__(
        self,
        placer: "Placer",
        request: TurnRequest,
        session: str,
        home: Home | None,
        turn_id: str,
        reason: str | None = None,
    ) -> None:
        self.request = request
        self.session = session
        """The `session_id` for the call by the handle."""
        self.home = home
        """None with one of Ray's routers: the home is unknown."""
        self.turn_id = turn_id
        self.reason = reason
        """Why it goes there; None with one of Ray's routers."""
        self._placer = placer
        self._ended = False

    @property
    def epoch(self) -> int | None:
        """The epoch that the replica checks; None: it is unknown, and not checked."""
        return None if self.home is None or self.request.single_turn else self.home.epoch or None

    def end(self, *, context_tokens: int | None = None, complete: bool = False) -> None:
        """The turn is over, or given up. A second call does nothing.

        Args:
            context_tokens: the KV of its program now, where that is known.
            complete: it ended without a failure.
        """
        if not self._ended:
            self._ended = True
            self._placer.ended(self, context_tokens=context_tokens, complete=complete)

    def __enter__(self) -> "Placement":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Placer(Protocol):
    """Places turns: `router.program_placer.ProgramPlacer`, or `SessionPlacer` with one of Ray's routers."""

    async def place(self, request: TurnRequest) -> Placement:
        """A place for a turn. It may wait for admission.

        Raises:
            Overloaded: the turn is rejected, with the time after which it may be retried.
        """
        ...

    def ended(self, placement: Placement, *, context_tokens: int | None, complete: bool) -> None:
        """Called by `Placement.end`, once."""
        ...

    async def fenced(self, placement: Placement, epoch: int | None) -> None:
        """The replica refused the placement, because it knows a later ``epoch``; None: it did not report which."""
        ...

    async def session_of(self, key: str, *, fresh: bool = False) -> str | None:
        """The `session_id` for a control call; None: the program is bound to no replica.

        ``fresh``: the store is asked whether the program has moved.
        """
        ...

    def forget(self, key: str) -> None:
        """The program has ended."""
        ...

    def start_s(self) -> float | None:
        """Seconds within which a turn of a new program is expected to start; None: there is no replica."""
        ...

    def view(self) -> dict[str, Any]:
        """For operators."""
        ...


class SessionPlacer:
    """Leaves placement to one of Ray's routers: the program's key is the session, and no turn waits or is rejected.

    Args:
        router: the name of the router.
    """

    def __init__(self, router: str) -> None:
        self._router = router

    async def place(self, request: TurnRequest) -> Placement:
        """The key, by which Ray's router decides."""
        return Placement(self, request, "" if request.single_turn else request.key, None, request.key)

    def ended(self, placement: Placement, *, context_tokens: int | None, complete: bool) -> None:
        """Nothing is kept."""

    async def fenced(self, placement: Placement, epoch: int | None) -> None:
        """Nothing: no epochs are sent."""

    async def session_of(self, key: str, *, fresh: bool = False) -> str | None:
        """The key."""
        return key

    def forget(self, key: str) -> None:
        """Nothing is kept."""

    def start_s(self) -> float | None:
        """0, since the loads are unknown."""
        return 0.0

    def view(self) -> dict[str, Any]:
        """For operators."""
        return {"router": self._router}


def rejection(reason: Refused, retry_after_s: float) -> Overloaded:
    """The error for the client."""
    kind, message = _REJECTIONS[reason]
    return kind(message, code=reason.value, retry_after_s=max(1, math.ceil(retry_after_s)))


def to_public_dict(snapshot: ReplicaSnapshot | None) -> dict[str, Any]:
    """A replica's load for operators."""
    if snapshot is None:
        return {}
    names = (
        "draining",
        "running",
        "waiting",
        "programs",
        "working_set_tokens",
        "kv_tokens",
        "free_tokens",
        "held_tokens",
    )
    return {name: getattr(snapshot, name) for name in (*names, "host_used_tokens", "waiting_tokens")}
