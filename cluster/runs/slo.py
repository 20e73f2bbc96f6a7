"""What a run reports of its turns to whoever counts them: one report a turn, however often the turn is tried."""

from typing import Protocol

from cluster.core.clock import Clock
from cluster.core.program import ProgramIdentity
from cluster.core.slo import Outcome
from cluster.runs.events import MAX_WALL_TIME, Ended, RunSpec


class TurnWatch(Protocol):
    """A turn under way."""

    def received(self, tokens: int) -> None:
        """So many have come, all together."""
        ...

    def over(self, outcome: Outcome | None) -> None:
        """What became of it; None: it was no turn. Again is nothing."""
        ...


class Turns(Protocol):
    """Whoever counts turns and programs: `cluster.observing.slo_tracker.SloTracker`."""

    def begin(self, model: str, identity: ProgramIdentity, arrived_s: float) -> TurnWatch:
        """A turn has come."""
        ...

    def program_ended(self, key: str, outcome: Outcome = Outcome.OK) -> None:
        """A program has ended; not OK: for another reason than one of its turns."""
        ...


class NullTurns:
    """Nobody counts."""

    def begin(self, model: str, identity: ProgramIdentity, arrived_s: float) -> "NullTurns":
        """Nothing."""
        return self

    def program_ended(self, key: str, outcome: Outcome = Outcome.OK) -> None:
        """Nothing."""

    def received(self, tokens: int) -> None:
        """Nothing."""

    def over(self, outcome: Outcome | None) -> None:
        """Nothing."""


class RunWatch:
    """The turns of one run. A later turn arrives when its tools have answered.

    Args:
        turns: counts them.
        spec: the run.
        arrived_s: when the run was asked for; None: it goes on here.
        clock: by which turns arrive.
    """

    def __init__(self, turns: Turns, spec: RunSpec, arrived_s: float | None, clock: Clock) -> None:
        identity = ProgramIdentity(spec.program, tenant=spec.tenant)
        self._turns, self._identity, self._model = turns, identity, spec.model
        self._arrived_s = arrived_s
        self._clock = clock
        self._turn: TurnWatch | None = None
        self._left = False

    def turn(self) -> None:
        """One is asked for; again, if the one before has come to nothing."""
        if self._turn is None:
            arrived_s = self._clock.now_s() if self._arrived_s is None else self._arrived_s
            self._turn = self._turns.begin(self._model, self._identity, arrived_s)
            self._arrived_s = None

    def received(self, tokens: int) -> None:
        """Of the turn, so far."""
        if self._turn is not None:
            self._turn.received(tokens)

    def answered(self) -> None:
        """The turn has come to its proper end."""
        self._over(Outcome.OK)

    def refused(self) -> None:
        """The run was not accepted."""
        self.turn()
        self._over(Outcome.REJECTED)
        self._turns.program_ended(str(self._identity.key))

    def ended(self, end: Ended | None) -> None:
        """The run has; None: it goes on elsewhere, and what happens to it here from now on is nothing."""
        if self._left:
            return
        self._left = end is None
        outcome = None if end is None else _outcome(end)
        pending = self._turn is not None
        self._over(outcome)
        if end is not None:
            self._turns.program_ended(str(self._identity.key), outcome if not pending and outcome else Outcome.OK)

    def _over(self, outcome: Outcome | None) -> None:
        if self._turn is not None:
            self._turn.over(outcome)
            self._turn = None


def _outcome(end: Ended) -> Outcome | None:
    """What a run's end means for the turn, or the tool, that was under way; None: what was asked for made no sense."""
    if end.status == "cancelled":
        return Outcome.UNFINISHED
    if end.status == "failed":
        return None if end.fault is not None and end.fault.status < 500 else Outcome.FAILED
    return Outcome.TIMED_OUT if end.reason == MAX_WALL_TIME else Outcome.OK
