"""Reports a run's turns to the SLO tracker: one report for each turn, however often the turn is tried."""

from typing import Protocol

from cluster.core.clock import Clock
from cluster.core.program import ProgramIdentity
from cluster.core.slo import Outcome
from cluster.runs.events import MAX_WALL_TIME, Ended, RunSpec


class TurnWatch(Protocol):
    """A turn in progress."""

    def received(self, tokens: int) -> None:
        """Record the number of tokens received so far."""
        ...

    def takes_alone(self, alone_s: float | None) -> None:
        """Record the seconds that its first token would take alone. None: they are unknown."""
        ...

    def over(self, outcome: Outcome | None) -> None:
        """Record the outcome of the turn. None: it was no turn. A second call does nothing."""
        ...


class Turns(Protocol):
    """Counts turns and programs: `cluster.observing.slo_tracker.SloTracker`."""

    def begin(self, model: str, identity: ProgramIdentity, arrived_s: float) -> TurnWatch:
        """Record the arrival of a turn."""
        ...

    def rejected(self, reason: str, model: str) -> None:
        """Record a rejection for a reason, an error's code."""
        ...

    def program_ended(self, key: str, outcome: Outcome = Outcome.OK) -> None:
        """Record the end of a program. An outcome other than OK means that none of its turns was the reason."""
        ...


class NullTurns:
    """The `Turns` of a runner whose turns and programs are not measured."""

    def begin(self, model: str, identity: ProgramIdentity, arrived_s: float) -> "NullTurns":
        """Return this object as the measured turn."""
        return self

    def rejected(self, reason: str, model: str) -> None:
        """Accept the report of a rejection, which nothing shows."""

    def program_ended(self, key: str, outcome: Outcome = Outcome.OK) -> None:
        """Accept the report that a program has ended, which nothing shows."""

    def received(self, tokens: int) -> None:
        """Accept the number of tokens that a turn has got, which nothing shows."""

    def takes_alone(self, alone_s: float | None) -> None:
        """Accept the seconds that the turn takes alone. No bound is computed from them."""

    def over(self, outcome: Outcome | None) -> None:
        """Accept the outcome of a turn, without comparing its times with the SLO."""


class RunWatch:
    """The turns of one run. A later turn arrives when its tools have answered.

    Args:
        turns: counts the turns.
        spec: the run.
        arrived_s: time in seconds at which the run was requested. None: it was taken over from another runner.
        clock: the clock of the arrivals.
        is_repeated: whether the run is requested again if it is refused, so that a refusal is not its end.
    """

    def __init__(
        self, turns: Turns, spec: RunSpec, arrived_s: float | None, clock: Clock, *, is_repeated: bool = False
    ) -> None:
        hints = ProgramIdentity.decode(spec.identity).hints
        identity = ProgramIdentity(spec.program, tenant=spec.tenant, hints=hints)
        self._turns, self._identity, self._model = turns, identity, spec.model
        self._arrived_s = arrived_s
        self._clock = clock
        self._is_repeated = is_repeated
        self._turn: TurnWatch | None = None
        self._left = False

    def turn(self) -> None:
        """Record that a turn is requested. It is the same turn if the previous attempt failed."""
        if self._turn is None:
            arrived_s = self._clock.now_s() if self._arrived_s is None else self._arrived_s
            self._turn = self._turns.begin(self._model, self._identity, arrived_s)
            self._arrived_s = None

    def received(self, tokens: int) -> None:
        """Record the number of tokens of the turn so far."""
        if self._turn is not None:
            self._turn.received(tokens)

    def answered(self, alone_s: float | None) -> None:
        """Record that the turn has completed, and the seconds that its first token would take alone. None: unknown."""
        if self._turn is not None:
            self._turn.takes_alone(alone_s)
        self._over(Outcome.OK)

    def refused(self, reason: str) -> None:
        """Record that the run was not accepted, for a reason, an error's code."""
        self._turns.rejected(reason, self._model)
        if self._is_repeated:
            return
        self.turn()
        self._over(Outcome.REJECTED)
        self._turns.program_ended(str(self._identity.key))

    def ended(self, end: Ended | None) -> None:
        """Record the end of the run. None: another runner continues it, and further calls here do nothing."""
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
    """Return the outcome of the turn or tool in progress when a run ended. None: the request was not valid."""
    if end.status == "cancelled":
        return Outcome.UNFINISHED
    if end.status == "failed":
        return None if end.fault is not None and end.fault.status < 500 else Outcome.FAILED
    return Outcome.TIMED_OUT if end.reason == MAX_WALL_TIME else Outcome.OK
