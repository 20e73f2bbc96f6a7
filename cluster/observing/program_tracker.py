"""Trackers of programs until each has its SLO verdict.

`ProgramTracker` has the turns of one ingress. `SharedSloTracker` sums the turns of several ingresses through the store.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from cluster.core.clock import Clock
from cluster.core.slo import Outcome, Slo, Tally, TurnRecord, Verdict
from cluster.store.slo_sums import Part, Question, SloSumStore, Unknown, Whole

GRACE_S = 1.5
"""Seconds after a program's end in which other ingresses report its turns. It is longer than two exchanges."""


class Served(NamedTuple):
    """The model and the tenant of a turn, which are labels of metrics."""

    model: str
    tenant: str


@dataclass(frozen=True, slots=True)
class EndedProgram:
    """A program that is due for its only verdict."""

    key: str | None
    """The program's key; None: it is a program of one turn, of which no other ingress knows."""
    served: Served
    """The model and tenant of its first turn."""
    slo: Slo
    tally: Tally
    wall_s: float
    """Seconds from the program's arrival to the end of its last turn."""
    idle: bool = False
    """Whether the program was only idle for too long at this ingress. Another ingress may have later turns."""

    @property
    def verdict(self) -> Verdict:
        """The verdict by the turns of this ingress."""
        return self.slo.verdict(self.tally)


class TurnEnd(NamedTuple):
    """The effect of the end of a turn on its program."""

    part: Tally
    """The tally of this turn."""
    first: bool
    """Whether the turn is the first of its program that counts."""
    ended: EndedProgram | None
    """The program, if it is now due for its verdict; otherwise None."""


@dataclass(slots=True)
class _Program:
    served: Served
    slo: Slo
    arrived_s: float
    seen_s: float
    """Time of the last event."""
    tally: Tally = field(default_factory=Tally)
    ended_s: float = 0.0
    in_flight: int = 0
    ending: bool = False
    judged: bool = False

    def end(self, key: str, *, idle: bool = False) -> EndedProgram | None:
        """Return the program for its verdict; None: it already had one, or it has no turns."""
        if self.judged or not self.tally.turns:
            return None
        self.judged = True
        return EndedProgram(key, self.served, self.slo, self.tally, self.ended_s - self.arrived_s, idle)


class ProgramTracker:
    """The programs of one ingress. It does no I/O and reads no clock.

    Memory is bounded. A program that is evicted from memory gets its verdict from the turns that it had.

    Args:
        idle_s: seconds without a turn after which a program has ended.
        max_programs: maximum number of programs in memory.
    """

    def __init__(self, idle_s: float, max_programs: int) -> None:
        self._idle_s = idle_s
        self._max_programs = max_programs
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        """The programs, in the order of their last event."""
        self._evicted: list[EndedProgram] = []

    def __len__(self) -> int:
        return len(self._programs)

    def turn_began(self, served: Served, slo: Slo, key: str, arrived_s: float, now_s: float) -> None:
        """Record the arrival of a turn of this program."""
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(served, slo, arrived_s, now_s)
            self._evict()
        program.in_flight += 1
        self._touch(key, program, now_s)

    def turn_withdrawn(self, key: str, now_s: float) -> EndedProgram | None:
        """Record that a turn does not count. Return its program if it is now due for its verdict."""
        return self._settle(key, now_s)

    def turn_ended(self, key: str, turn: TurnRecord, now_s: float, *, last: bool) -> TurnEnd | None:
        """Record the end of a turn. Return None if its program was evicted.

        After a failed turn the program is due for its verdict at once, since it can no longer be good.
        """
        program = self._programs.get(key)
        if program is None:
            return None
        first, part = not program.tally.turns, program.slo.tally(turn)
        program.tally += part
        program.ended_s = max(program.ended_s, now_s)
        program.ending = program.ending or last
        failed = program.end(key) if program.tally.failed else None
        return TurnEnd(part, first, self._settle(key, now_s) or failed)

    def program_ended(self, key: str, outcome: Outcome = Outcome.OK) -> EndedProgram | None:
        """Record the end of a program. An outcome other than OK has a cause outside of its turns."""
        program = self._programs.get(key)
        if program is None:
            return None
        program.tally += outside_turns(outcome)
        program.ending = True
        return self._close(key, program)

    def sweep(self, now_s: float) -> list[EndedProgram]:
        """Return the programs that have been idle for too long or were evicted, for their verdicts."""
        found, self._evicted = self._evicted, []
        while self._programs:
            key, program = next(iter(self._programs.items()))
            if now_s - program.seen_s < self._idle_s:
                break
            if program.in_flight:
                self._touch(key, program, now_s)
                continue
            del self._programs[key]
            found += filter(None, [program.end(key, idle=True)])
        return found

    def _settle(self, key: str, now_s: float) -> EndedProgram | None:
        program = self._programs.get(key)
        if program is None:
            return None
        program.in_flight = max(0, program.in_flight - 1)
        self._touch(key, program, now_s)
        return self._close(key, program)

    def _close(self, key: str, program: _Program) -> EndedProgram | None:
        if not program.ending or program.in_flight:
            return None
        del self._programs[key]
        return program.end(key)

    def _touch(self, key: str, program: _Program, now_s: float) -> None:
        program.seen_s = now_s
        self._programs.move_to_end(key)

    def _evict(self) -> None:
        while len(self._programs) > self._max_programs:
            key, program = self._programs.popitem(last=False)
            self._evicted += filter(None, [program.end(key)])


def outside_turns(outcome: Outcome) -> Tally:
    """Return the tally of a program that ended with this outcome for a cause outside of its turns."""
    unfinished = outcome is Outcome.UNFINISHED
    return Tally(failed=int(outcome is not Outcome.OK and not unfinished), unfinished=int(unfinished))


def single_turn_program(served: Served, slo: Slo, turn: TurnRecord) -> EndedProgram:
    """Make the program of a turn that names no program."""
    seconds = turn.last_token_s - turn.intended_start_s if turn.last_token_s is not None else 0.0
    return EndedProgram(None, served, slo, slo.tally(turn), seconds)


class DegradedVerdict(StrEnum):
    """The reason why a verdict counts only the turns of one ingress."""

    STORE_GONE = "store_gone"
    """The store did not answer."""
    STORE_LOST = "store_lost"
    """The store knows fewer of the program's turns than this ingress."""


@dataclass(slots=True)
class Exchanged:
    """The results of one exchange with the store."""

    new: list[Served] = field(default_factory=list)
    """Model and tenant of each program that had its first turn."""
    judged: list[EndedProgram] = field(default_factory=list)
    degraded: Counter[tuple[str, DegradedVerdict]] = field(default_factory=Counter)
    """Number of degraded verdicts, by model and reason."""


@dataclass(slots=True)
class _Unreported:
    """The turns of one program since the last exchange."""

    tally: Tally
    arrived_s: float
    """Arrival of the earliest of these turns."""
    served: Served
    first: bool

    def part(self, key: str, now_s: float) -> Part:
        """Return what the store adds for the program."""
        return Part(key, self.tally, max(0.0, now_s - self.arrived_s))


class SharedSloTracker:
    """Sums the turns of programs over all ingresses, so that each program gets one verdict. No request waits for it.

    If the store does not answer, the verdict depends on the turns of this ingress.

    Args:
        store: the store of the sums.
        clock: measures the age of programs.
        idle_s: seconds without a turn after which a program has ended.
    """

    def __init__(self, store: SloSumStore, clock: Clock, idle_s: float) -> None:
        self.store = store
        self._clock = clock
        self._idle_s = idle_s
        self._unreported: dict[str, _Unreported] = {}
        self._ends: list[tuple[float, EndedProgram]] = []

    def turn_ended(self, key: str, served: Served, end: TurnEnd, arrived_s: float) -> None:
        """Record the end of a turn, which the next exchange reports."""
        before = self._unreported.get(key)
        if before is None:
            self._unreported[key] = _Unreported(end.part, arrived_s, served, end.first)
            return
        tally, earliest_s = before.tally + end.part, min(before.arrived_s, arrived_s)
        self._unreported[key] = _Unreported(tally, earliest_s, before.served, before.first or end.first)

    def program_ended(self, program: EndedProgram) -> None:
        """Record that a program is due for its verdict, by this ingress or another one."""
        self._ends.append((self._clock.now_s() + GRACE_S, program))

    async def exchange(self) -> Exchanged:
        """Report the turns, and judge the programs that are due."""
        reported, self._unreported = self._unreported, {}
        unreported, now_s = list(reported.values()), self._clock.now_s()
        exchanged = Exchanged()
        if unreported:
            firsts = await self.store.add([one.part(key, now_s) for key, one in reported.items()])
            if firsts is None:
                for model in {one.served.model for one in unreported}:
                    exchanged.degraded[model, DegradedVerdict.STORE_GONE] += 1
                firsts = [one.first for one in unreported]
            exchanged.new.extend(one.served for one, first in zip(unreported, firsts, strict=True) if first)
        now_s = self._clock.now_s()
        due = [program for at_s, program in self._ends if at_s <= now_s]
        self._ends = [(at_s, program) for at_s, program in self._ends if at_s > now_s]
        if due:
            await self._judge(due, exchanged)
        return exchanged

    async def _judge(self, due: Sequence[EndedProgram], exchanged: Exchanged) -> None:
        answers = await self.store.judge([self._question(program) for program in due])
        for program, answer in zip(due, answers or [Unknown()] * len(due), strict=True):
            match answer:
                case None:
                    continue
                case Unknown() if answers is not None and program.idle:
                    continue  # another ingress has judged the program at its end
                case Whole() if answer.tally.turns >= program.tally.turns:
                    exchanged.judged.append(replace(program, tally=answer.tally, wall_s=answer.wall_s))
                case _:
                    reason = DegradedVerdict.STORE_GONE if answers is None else DegradedVerdict.STORE_LOST
                    exchanged.degraded[program.served.model, reason] += 1
                    exchanged.judged.append(program)

    def _question(self, program: EndedProgram) -> Question:
        assert program.key is not None
        goes_on = program.tally.failed > 0 and not program.idle
        return Question(program.key, self._idle_s if program.idle else 0.0, self._idle_s if goes_on else 0.0)
