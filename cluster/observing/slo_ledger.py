"""Programs as one door sees them, until each has its end: which turns they had, and what came of these.

Pure: no clock, no I/O. Memory is bounded; a program that is forgotten for that is judged by the turns that it had.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.goodput import Outcome, Slo, Tally, TurnRecord, Verdict


class Served(NamedTuple):
    """Whose turn, on what: the labels of metrics."""

    model: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that is to be judged; again it is not."""

    key: str | None
    """None: a program of one turn, of which nobody else knows."""
    served: Served
    """Of its first turn."""
    slo: Slo
    tally: Tally
    wall_s: float
    """From its arrival to its last turn's end."""
    silent: bool = False
    """It only has been idle: another door may know better."""

    @property
    def verdict(self) -> Verdict:
        """By the turns of this door."""
        return self.slo.verdict(self.tally)


class Over(NamedTuple):
    """What a turn's end means to its program."""

    part: Tally
    """Of this turn."""
    first: bool
    """It is the program's first that counts."""
    ended: Ended | None


@dataclass(slots=True)
class _Program:
    served: Served
    slo: Slo
    arrived_s: float
    seen_s: float
    """When it last did anything."""
    tally: Tally = field(default_factory=Tally)
    ended_s: float = 0.0
    under_way: int = 0
    ending: bool = False
    judged: bool = False

    def end(self, key: str, *, silent: bool = False) -> Ended | None:
        """What there is to judge, once."""
        if self.judged or not self.tally.turns:
            return None
        self.judged = True
        return Ended(key, self.served, self.slo, self.tally, self.ended_s - self.arrived_s, silent)


class SloLedger:
    """The programs of one door.

    Args:
        idle_s: a program without a turn for so long has ended.
        max_programs: that are remembered.
    """

    def __init__(self, idle_s: float, max_programs: int) -> None:
        self._idle_s = idle_s
        self._max_programs = max_programs
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        """Those that did something last are last."""
        self._forgotten: list[Ended] = []

    def __len__(self) -> int:
        return len(self._programs)

    def began(self, served: Served, slo: Slo, key: str, arrived_s: float, now_s: float) -> None:
        """A turn of this program has come."""
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(served, slo, arrived_s, now_s)
            self._bound()
        program.under_way += 1
        self._touch(key, program, now_s)

    def taken_back(self, key: str, now_s: float) -> Ended | None:
        """The turn was none; what is to be judged if the program waited for it."""
        return self._settle(key, now_s)

    def over(self, key: str, turn: TurnRecord, now_s: float, *, last: bool) -> Over | None:
        """A turn that began is over; None: its program had to be forgotten.

        A failed turn decides at once: whatever comes after it, the program is not good.
        """
        program = self._programs.get(key)
        if program is None:
            return None
        first, part = not program.tally.turns, program.slo.tally(turn)
        program.tally += part
        program.ended_s = max(program.ended_s, now_s)
        program.ending = program.ending or last
        failed = program.end(key) if program.tally.failed else None
        return Over(part, first, self._settle(key, now_s) or failed)

    def ended(self, key: str, outcome: Outcome = Outcome.OK) -> Ended | None:
        """Somebody says that the program has ended; not OK: for another reason than one of its turns."""
        program = self._programs.get(key)
        if program is None:
            return None
        program.tally += beside_turns(outcome)
        program.ending = True
        return self._close(key, program)

    def sweep(self, now_s: float) -> list[Ended]:
        """The programs that have been idle for too long, or had to be forgotten."""
        found, self._forgotten = self._forgotten, []
        while self._programs:
            key, program = next(iter(self._programs.items()))
            if now_s - program.seen_s < self._idle_s:
                break
            if program.under_way:
                self._touch(key, program, now_s)
                continue
            del self._programs[key]
            found += filter(None, [program.end(key, silent=True)])
        return found

    def _settle(self, key: str, now_s: float) -> Ended | None:
        program = self._programs.get(key)
        if program is None:
            return None
        program.under_way = max(0, program.under_way - 1)
        self._touch(key, program, now_s)
        return self._close(key, program)

    def _close(self, key: str, program: _Program) -> Ended | None:
        if not program.ending or program.under_way:
            return None
        del self._programs[key]
        return program.end(key)

    def _touch(self, key: str, program: _Program, now_s: float) -> None:
        program.seen_s = now_s
        self._programs.move_to_end(key)

    def _bound(self) -> None:
        while len(self._programs) > self._max_programs:
            key, program = self._programs.popitem(last=False)
            self._forgotten += filter(None, [program.end(key)])


def beside_turns(outcome: Outcome) -> Tally:
    """Of a program that ended so for another reason than one of its turns."""
    unfinished = outcome is Outcome.UNFINISHED
    return Tally(failed=int(outcome is not Outcome.OK and not unfinished), unfinished=int(unfinished))


def lone(served: Served, slo: Slo, turn: TurnRecord) -> Ended:
    """A turn that belongs to no program is one."""
    seconds = turn.last_token_s - turn.intended_start_s if turn.last_token_s is not None else 0.0
    return Ended(None, served, slo, slo.tally(turn), seconds)
