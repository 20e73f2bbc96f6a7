"""Where calls of programs go, as the ingress sees it; and the simplest answer, for routers that are not ours."""

import math
from enum import StrEnum
from typing import Any, Protocol

from cluster.errors import Overloaded, TooManyRequests
from cluster.routing import Home, ReplicaSnapshot
from router.decisions import Refused, TurnRequest


class Fallback(StrEnum):
    """What a placement had to do without. Label of a metric."""

    STORE_GONE = "store_gone"
    """The store did not answer."""
    FENCED = "fenced"
    """A replica knew a later epoch than this ingress."""


_REFUSALS: dict[Refused, tuple[type[Overloaded], str]] = {
    Refused.NO_REPLICA: (Overloaded, "no replica serves this model now"),
    Refused.HOPELESS: (Overloaded, "the wait would be longer than is allowed"),
    Refused.TENANT_SHARE: (TooManyRequests, "more of this tenant waits than its share"),
    Refused.QUEUE_FULL: (Overloaded, "too many programs wait to be admitted"),
}


class Placement:
    """A turn's place, until `end`. As a context manager it ends by itself."""

    def __init__(
        self,
        placer: "Places",
        request: TurnRequest,
        session: str,
        home: Home | None,
        turn_id: str,
        reason: str | None = None,
    ) -> None:
        self.request = request
        self.session = session
        """`session_id` of the handle's call."""
        self.home = home
        """None: the router is not ours, and nothing is known."""
        self.turn_id = turn_id
        self.reason = reason
        """Why it goes there; None: the router is not ours."""
        self._placer = placer
        self._ended = False

    @property
    def epoch(self) -> int | None:
        """What the replica checks; None: nothing, since nobody knows it."""
        return None if self.home is None or self.request.lone else self.home.epoch or None

    def end(self, *, context_tokens: int | None = None, complete: bool = False) -> None:
        """The turn is over, or given up. Again is harmless.

        Args:
            context_tokens: what its program has now, where that is known.
            complete: it came to its proper end.
        """
        if not self._ended:
            self._ended = True
            self._placer.ended(self, context_tokens=context_tokens, complete=complete)

    def __enter__(self) -> "Placement":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Places(Protocol):
    """Where calls of programs go: `router.placer.Placer`, and `KeyedPlaces` for routers that are not ours."""

    async def place(self, request: TurnRequest) -> Placement:
        """A place for a turn; it may take its time.

        Raises:
            Overloaded: the turn is refused, with the time after which it may come again.
        """
        ...

    def ended(self, placement: Placement, *, context_tokens: int | None, complete: bool) -> None:
        """Called by `Placement.end`, once."""
        ...

    async def fenced(self, placement: Placement, epoch: int | None) -> None:
        """The replica refused the placement, because it knows of a later ``epoch`` (None: it did not say which)."""
        ...

    async def session_of(self, key: str, *, fresh: bool = False) -> str | None:
        """`session_id` for a call that concerns a program beside its turns; None: it lives nowhere.

        ``fresh``: the store is asked, too, whether the program has moved.
        """
        ...

    def forget(self, key: str) -> None:
        """The program has ended."""
        ...

    def start_s(self) -> float | None:
        """Seconds within which a turn of a new program is expected to start; None: no replica is there."""
        ...

    def view(self) -> dict[str, Any]:
        """For operators."""
        ...


class KeyedPlaces:
    """Leaves it to Ray's own routers: the program's key is the session, nobody waits, nothing is refused.

    Args:
        router: the name of the router.
    """

    def __init__(self, router: str) -> None:
        self._router = router

    async def place(self, request: TurnRequest) -> Placement:
        """Ray decides."""
        return Placement(self, request, "" if request.lone else request.key, None, request.key)

    def ended(self, placement: Placement, *, context_tokens: int | None, complete: bool) -> None:
        """Nothing is kept."""

    async def fenced(self, placement: Placement, epoch: int | None) -> None:
        """No epochs are sent."""

    async def session_of(self, key: str, *, fresh: bool = False) -> str | None:
        """The key."""
        return key

    def forget(self, key: str) -> None:
        """Nothing is kept."""

    def start_s(self) -> float | None:
        """Nothing is known of loads: as if there were none."""
        return 0.0

    def view(self) -> dict[str, Any]:
        """For operators."""
        return {"router": self._router}


def refusal(reason: Refused, retry_after_s: float) -> Overloaded:
    """What the client is told."""
    kind, message = _REFUSALS[reason]
    return kind(message, code=reason.value, retry_after_s=max(1, math.ceil(retry_after_s)))


def facts(snapshot: ReplicaSnapshot | None) -> dict[str, Any]:
    """What operators see of a replica."""
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
