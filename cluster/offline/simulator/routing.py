"""Which replica a simulated turn goes to: the question that every simulated router answers, and those without a model.

A router sees every turn that comes and every turn that ends, nothing else; what it knows of replicas it looks
up itself. Peers that cannot place a turn now are asked again whenever a turn has ended: where Ray backs off, they lose
nothing.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.core.program import ProgramIdentity


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """A turn that wants a replica."""

    turn_id: str
    program: str
    """Unique in the run."""
    index: int
    """0 for a program's first turn."""
    prompt: Sequence[int]
    """Token ids."""
    identity: ProgramIdentity


@dataclass(frozen=True, slots=True)
class Sent:
    """To this replica, by its index."""

    replica: int
    reason: str
    moved_from: int | None = None
    """Where its program lived before, if the router has moved it."""


@dataclass(frozen=True, slots=True)
class Waits:
    """At the router, which decides later."""


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """Refused; its program ends."""

    reason: str
    retry_after_s: float


Answer = Sent | Waits | TurnedAway


class TurnRouter(Protocol):
    """Routes turns. ``now_s`` never goes back. A turn that was sent ends once; one that was turned away never does."""

    tick_s: float | None
    """Seconds between two calls of `tick`; None: it needs none."""

    def route(self, turn: SimulatedTurn, now_s: float) -> Answer:
        """A turn is due."""
        ...

    def waited(self, now_s: float) -> Sequence[tuple[str, Sent | TurnedAway]]:
        """Turns, by their ids, whose wait is over; each is returned once."""
        ...

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """The turn has ended on ``replica``; its program has ``context_tokens`` now, prompt and output."""
        ...

    def tick(self, now_s: float) -> None:
        """``tick_s`` have gone by."""
        ...


class RequestRouter(ABC):
    """A router of requests, as Ray's are: it counts those under way on each replica, which takes a bounded number.

    Args:
        replicas: how many there are.
        max_ongoing: Ray's ``max_ongoing_requests``: a replica with so many turns refuses another. None: no bound,
            which is Ray LLM's default (a billion).
    """

    tick_s: float | None = None

    def __init__(self, replicas: int, max_ongoing: int | None = None) -> None:
        self.ongoing = [0] * replicas
        self._max_ongoing = max_ongoing
        self._waiting: deque[SimulatedTurn] = deque()

    @abstractmethod
    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """The replica for this turn, one that is not full; None: none is to be had."""

    def sent(self, turn: SimulatedTurn, replica: int) -> None:
        """The turn is on its way there."""
        self.ongoing[replica] += 1

    def full(self, replica: int) -> bool:
        """It takes no turn now."""
        return self._max_ongoing is not None and self.ongoing[replica] >= self._max_ongoing

    def fewest(self, replicas: Sequence[int]) -> int | None:
        """Of these, the one with the fewest turns under way that is not full, the first one of several."""
        open_ = [replica for replica in replicas if not self.full(replica)]
        return min(open_, key=self.ongoing.__getitem__) if open_ else None

    def route(self, turn: SimulatedTurn, now_s: float) -> Answer:
        """See TurnRouter."""
        sent = self._try(turn)
        if sent is None:
            self._waiting.append(turn)
            return Waits()
        return sent

    def waited(self, now_s: float) -> Sequence[tuple[str, Sent | TurnedAway]]:
        """See TurnRouter. In order of arrival; one that cannot go does not keep the next from going."""
        placed: list[tuple[str, Sent | TurnedAway]] = []
        for _ in range(len(self._waiting)):
            turn = self._waiting.popleft()
            sent = self._try(turn)
            if sent is None:
                self._waiting.append(turn)
            else:
                placed.append((turn.turn_id, sent))
        return placed

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """See TurnRouter."""
        self.ongoing[replica] -= 1

    def tick(self, now_s: float) -> None:  # noqa: B027 - tick_s is None: never called
        """See TurnRouter."""

    def _try(self, turn: SimulatedTurn) -> Sent | None:
        sent = self.choose(turn)
        if sent is not None:
            self.sent(turn, sent.replica)
        return sent


class RoundRobin(RequestRouter):
    """Turns go around, whatever their program."""

    def __init__(self, replicas: int, max_ongoing: int | None = None) -> None:
        super().__init__(replicas, max_ongoing)
        self._next = 0

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """The next one that is not full."""
        for _ in self.ongoing:
            replica, self._next = self._next, (self._next + 1) % len(self.ongoing)
            if not self.full(replica):
                return Sent(replica, "next")
        return None


class LeastPrograms(RequestRouter):
    """A control that knows programs and nothing else: a program lives where there are fewest, and stays."""

    def __init__(self, replicas: int, max_ongoing: int | None = None) -> None:
        super().__init__(replicas, max_ongoing)
        self._programs: Counter[int] = Counter()
        self._homes: dict[str, int] = {}

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Its home; for a new program the replica with the fewest live ones, the first one of several."""
        home = self._homes.get(turn.program)
        reason = "stayed"
        if home is None:
            home = min(range(len(self.ongoing)), key=self._programs.__getitem__)
            reason = "new"
        return None if self.full(home) else Sent(home, reason)

    def sent(self, turn: SimulatedTurn, replica: int) -> None:
        """It lives there from its first turn on."""
        super().sent(turn, replica)
        if self._homes.setdefault(turn.program, replica) == replica and turn.index == 0:
            self._programs[replica] += 1

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """A program's last turn takes it away."""
        super().ended(turn, replica, context_tokens, now_s)
        if turn.identity.last_turn:
            self._programs[self._homes.pop(turn.program)] -= 1
