"""Programs whose turns come through several doors: judged once, by the turns of all. Never on a request's way.

What the store does not answer is judged by the turns of this door, and counted as a fallback.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from cluster.clock import Clock
from cluster.ledger_store import LedgerStore, Part, Question, Unknown, Whole
from cluster.observing.slo_ledger import Ended, Over, Served

GRACE_S = 1.5
"""After a program's end, for other doors to tell of its turns; more than two exchanges."""


class LedgerFallback(StrEnum):
    """What a verdict had to do without."""

    STORE_GONE = "store_gone"
    """The store did not answer: this door's turns count."""
    STORE_LOST = "store_lost"
    """It knows fewer of the program's turns than this door."""


class Outcomes(NamedTuple):
    """What an exchange brought."""

    new: list[Served]
    """Of programs whose first turn it was."""
    judged: list[Ended]
    fallbacks: list[LedgerFallback]


@dataclass(slots=True)
class _Told:
    """Of one program, since the last exchange."""

    part: Part
    served: Served
    first: bool


class SharedLedger:
    """One door's part.

    Args:
        store: where the parts meet.
        clock: how long something is ago.
        idle_s: a program without a turn for so long has ended.
    """

    def __init__(self, store: LedgerStore, clock: Clock, idle_s: float) -> None:
        self.store = store
        self._clock = clock
        self._idle_s = idle_s
        self._parts: dict[str, _Told] = {}
        self._ends: list[tuple[float, Ended]] = []

    def told(self, key: str, served: Served, over: Over, arrived_s: float) -> None:
        """A turn is over."""
        before = self._parts.get(key)
        tally = over.part if before is None else before.part.tally + over.part
        first = over.first or (before is not None and before.first)
        part = Part(key, tally, max(0.0, self._clock.now_s() - arrived_s))
        self._parts[key] = _Told(part, served if before is None else before.served, first)

    def ended(self, program: Ended) -> None:
        """The program is to be judged, by this door or another."""
        self._ends.append((self._clock.now_s() + GRACE_S, program))

    async def exchange(self) -> Outcomes:
        """Tell the parts, and judge what is due."""
        told, self._parts = list(self._parts.values()), {}
        outcomes = Outcomes([], [], [])
        if told:
            firsts = await self.store.add([one.part for one in told])
            if firsts is None:
                outcomes.fallbacks.append(LedgerFallback.STORE_GONE)
            is_new = [one.first for one in told] if firsts is None else firsts
            outcomes.new.extend(one.served for one, new in zip(told, is_new, strict=True) if new)
        now_s = self._clock.now_s()
        due = [program for at_s, program in self._ends if at_s <= now_s]
        self._ends = [(at_s, program) for at_s, program in self._ends if at_s > now_s]
        if due:
            await self._judge(due, outcomes)
        return outcomes

    async def _judge(self, due: Sequence[Ended], outcomes: Outcomes) -> None:
        answers = await self.store.judge([self._question(program) for program in due])
        for program, answer in zip(due, answers or [Unknown()] * len(due), strict=True):
            match answer:
                case None:
                    continue
                case Unknown() if answers is not None and program.silent:
                    continue  # another door has judged it at its end
                case Whole() if answer.tally.turns >= program.tally.turns:
                    outcomes.judged.append(replace(program, tally=answer.tally, wall_s=answer.wall_s))
                case _:
                    kind = LedgerFallback.STORE_GONE if answers is None else LedgerFallback.STORE_LOST
                    outcomes.fallbacks.append(kind)
                    outcomes.judged.append(program)

    def _question(self, program: Ended) -> Question:
        assert program.key is not None
        goes_on = program.tally.failed > 0 and not program.silent
        return Question(program.key, self._idle_s if program.silent else 0.0, self._idle_s if goes_on else 0.0)
