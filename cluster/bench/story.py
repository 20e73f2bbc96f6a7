"""What a server (`GET /v1/programs/{id}`) or a simulated scheduler tells of a program, as a report needs it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

PAUSED = ("held", "swapped", "fetching", "released")
"""Phases of `cluster.lifecycle` in which a program's KV waits for its next turn."""

_EVENT = re.compile(r"\w+(?:\((?P<why>.*)\))? -> (?P<phase>\w+)")
"""A line of a program's story: `Held(why) -> held`."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A part of a pause in which nothing changed. Seconds on the teller's clock."""

    from_s: float
    to_s: float
    phase: str
    """One of `PAUSED`."""
    why: str


@dataclass(frozen=True, slots=True)
class Story:
    """One program, as far as the teller remembers: the first turns and the last events of a long one are dropped."""

    arrivals_s: tuple[float | None, ...] = ()
    """Of its turns, at the replica; seconds on the teller's clock."""
    waits_s: tuple[float | None, ...] = ()
    """Of its turns, in the replica's queue."""
    decisions: tuple[str, ...] = ()
    """After each turn: what became of its KV, and why in brackets."""
    pauses: tuple[Pause, ...] = ()

    @classmethod
    def of(cls, told: object) -> "Story":
        """Of a decoded answer; what cannot be read is left out."""
        if not isinstance(told, Mapping):
            return cls()
        turns = [turn for turn in _list(told.get("turns")) if isinstance(turn, Mapping)]
        return cls(
            arrivals_s=tuple(_seconds(turn.get("arrived_s")) for turn in turns),
            waits_s=tuple(_seconds(turn.get("queue_s")) for turn in turns),
            decisions=tuple(str(turn.get("decision", "")) for turn in turns),
            pauses=_pauses(_list(told.get("events"))),
        )

    def ahead_s(self, sent_s: Sequence[float | None]) -> float:
        """How far the teller's clock is ahead of the client's, if the fastest turn took no time to get there.

        0 where nothing can be compared. ``sent_s``: of the turns, by the client's clock.
        """
        pairs = zip(self.arrivals_s, sent_s, strict=False)
        return min((arrived - sent for arrived, sent in pairs if arrived is not None and sent is not None), default=0.0)


def _pauses(events: Sequence[Any]) -> tuple[Pause, ...]:
    read: list[tuple[float, str, str]] = []
    for event in events:
        at_s = _seconds(event.get("at_s")) if isinstance(event, Mapping) else None
        found = _EVENT.fullmatch(str(event.get("event"))) if at_s is not None else None
        if at_s is not None and found is not None:
            read.append((at_s, found["phase"], found["why"] or ""))
    pauses: list[Pause] = []
    for (at_s, phase, why), (until_s, _, _) in pairwise(read):
        last = pauses[-1] if pauses else None
        if phase not in PAUSED:
            continue
        if last is not None and last.to_s == at_s and last.phase == phase:
            # A tool that started or finished changes nothing of the memory.
            pauses[-1] = Pause(last.from_s, until_s, phase, last.why)
        elif until_s > at_s:
            pauses.append(Pause(at_s, until_s, phase, why))
    return tuple(pauses)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
