"""The protocol of simulated routers, and the routers that know no caches.

A router is notified of each turn that arrives or ends. It looks up by itself what it needs to know of the replicas. A
router that cannot place a turn is asked again whenever a turn ends, so that it loses no time, unlike Ray's routers,
which back off.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.core.program import ProgramIdentity


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """A turn that needs a replica."""

    turn_id: str
    program: str
    """Key of the program, which is unique in the run."""
    index: int
    """0 for a program's first turn."""
    prompt: Sequence[int]
    """Ids of all tokens of the prompt, the context included."""
    identity: ProgramIdentity
    ends_program: bool = False
    """Whether the program is known to have ended when this turn has."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The turn is sent to the replica with this index."""

    replica: int
    reason: str
    moved_from: int | None = None
    """The replica from which the router has migrated the program; None if it has not."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The turn waits at the router, which decides later."""


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """The turn is rejected, and its program ends."""

    reason: str
    retry_after_s: float


Answer = Sent | Waits | TurnedAway


class TurnRouter(Protocol):
    """Routes turns. ``now_s`` never decreases. A turn that was sent ends once, and a rejected turn never ends."""

    tick_s: float | None
    """Seconds between two calls of `tick`; None: it needs none."""

    def route(self, turn: SimulatedTurn, now_s: float) -> Answer:
        """Place a turn that is due."""
        ...

    def waited(self, now_s: float) -> Sequence[tuple[str, Sent | TurnedAway]]:
        """Return the ids and decisions of the turns whose wait is over. Each is returned once."""
        ...

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """Record the end of a turn on ``replica``. Its program now has ``context_tokens`` of prompt and output."""
        ...

    def tick(self, now_s: float) -> None:
        """Called every ``tick_s`` seconds."""
        ...


class RequestRouter(ABC):
    """A router of requests like Ray's: it counts the ongoing turns of each replica, which accepts a bounded number.

    Args:
        replicas: number of replicas.
        max_ongoing: Ray's ``max_ongoing_requests``: a replica with this many turns rejects another one. None: no bound,
            which is Ray LLM's default (a billion).
    """

    tick_s: float | None = None

    def __init__(self, replicas: int, max_ongoing: int | None = None) -> None:
        self.ongoing = [0] * replicas
        self._max_ongoing = max_ongoing
        self._waiting: deque[SimulatedTurn] = deque()

    @abstractmethod
    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Choose a replica for this turn that is not full. Return None if there is none."""

    def sent(self, turn: SimulatedTurn, replica: int) -> None:
        """Count the turn as ongoing on the replica."""
        self.ongoing[replica] += 1

    def full(self, replica: int) -> bool:
        """Return whether the replica accepts no further turn."""
        return self._max_ongoing is not None and self.ongoing[replica] >= self._max_ongoing

    def fewest(self, replicas: Sequence[int]) -> int | None:
        """Return the first of these replicas with the fewest ongoing turns that is not full; None if all are full."""
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
        """See TurnRouter. Turns are tried in the order of their arrival, and none blocks a later one."""
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
    """Sends turns to the replicas in turn, regardless of their program."""

    def __init__(self, replicas: int, max_ongoing: int | None = None) -> None:
        super().__init__(replicas, max_ongoing)
        self._next = 0

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Choose the next replica that is not full."""
        for _ in self.ongoing:
            replica, self._next = self._next, (self._next + 1) % len(self.ongoing)
            if not self.full(replica):
                return Sent(replica, "next")
        return None


class LeastPrograms(RequestRouter):
    """A baseline that counts only programs: a program is bound to the replica with the fewest, and never migrates."""

    def __init__(self, replicas: int, max_ongoing: int | None = None) -> None:
        super().__init__(replicas, max_ongoing)
        self._programs: Counter[int] = Counter()
        self._homes: dict[str, int] = {}

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Choose the program's home; for a new program, the first replica with the fewest programs."""
        home = self._homes.get(turn.program)
        reason = "stayed"
        if home is None:
            home = min(range(len(self.ongoing)), key=self._programs.__getitem__)
            reason = "new"
        return None if self.full(home) else Sent(home, reason)

    def sent(self, turn: SimulatedTurn, replica: int) -> None:
        """Bind the program to the replica of its first turn."""
        super().sent(turn, replica)
        if self._homes.setdefault(turn.program, replica) == replica and turn.index == 0:
            self._programs[replica] += 1

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """Forget the program after its last turn."""
        super().ended(turn, replica, context_tokens, now_s)
        if turn.ends_program:
            self._programs[self._homes.pop(turn.program)] -= 1
