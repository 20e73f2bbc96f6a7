"""What a server (`GET /v1/programs/{id}`) or a simulated scheduler reports of a program and of its memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

PAUSED = ("held", "swapped", "fetching", "released")
"""Phases of `cluster.core.lifecycle.machine` in which a program's KV waits for its next turn."""


PHASE_OF = {"hold": "held", "swap": "swapped", "release": "released"}
"""The phase after each decision of a turn (``kv``)."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A part of a pause in which nothing changed. Seconds on the reporter's clock."""

    from_s: float
    to_s: float
    phase: str
    """One of `PAUSED`."""
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a program's KV after a turn."""

    phase: str = ""
    """One of `PAUSED`; empty: unknown."""
    reason: str = ""
    """Empty: nothing was decided, because the program went on at once or ended."""


@dataclass(frozen=True, slots=True)
class ProgramHistory:
    """One program, as far as its replica remembers: of a long one, the first turns and events are dropped."""

    arrivals_s: tuple[float | None, ...] = ()
    """Of its turns, at the replica; seconds on the replica's clock."""
    waits_s: tuple[float | None, ...] = ()
    """Of its turns, in the replica's queue."""
    decisions: tuple[Decision, ...] = ()
    """After each turn."""
    pauses: tuple[Pause, ...] = ()

    @classmethod
    def of(cls, answer: object) -> "ProgramHistory":
        """Of a decoded answer; what cannot be read is left out."""
        if not isinstance(answer, Mapping):
            return cls()
        turns = [turn for turn in _list(answer.get("turns")) if isinstance(turn, Mapping)]
        return cls(
            arrivals_s=tuple(_seconds(turn.get("arrived_s")) for turn in turns),
            waits_s=tuple(_seconds(turn.get("queue_s")) for turn in turns),
            decisions=tuple(map(_decision, turns)),
            pauses=_pauses(_list(answer.get("events"))),
        )

    def ahead_s(self, sent_s: Sequence[float | None]) -> float:
        """How far the replica's clock is ahead of the client's, if the fastest turn took no time to get there.

        0 where nothing can be compared. ``sent_s``: of the turns, by the client's clock.
        """
        pairs = zip(self.arrivals_s, sent_s, strict=False)
        return min((arrived - sent for arrived, sent in pairs if arrived is not None and sent is not None), default=0.0)


def _decision(turn: Mapping[str, Any]) -> Decision:
    return Decision(PHASE_OF.get(str(turn.get("kv")), ""), str(turn.get("reason") or ""))


def _pauses(events: Sequence[Any]) -> tuple[Pause, ...]:
    known: list[tuple[float, str, str]] = []
    for event in events:
        at_s = _seconds(event.get("at_s")) if isinstance(event, Mapping) else None
        if at_s is not None:
            known.append((at_s, str(event.get("phase", "")), str(event.get("reason", ""))))
    pauses: list[Pause] = []
    for (at_s, phase, reason), (until_s, _, _) in pairwise(known):
        last = pauses[-1] if pauses else None
        if phase not in PAUSED:
            continue
        if last is not None and last.to_s == at_s and last.phase == phase:
            # A tool that started or finished changes nothing of the memory.
            pauses[-1] = Pause(last.from_s, until_s, phase, last.reason)
        elif until_s > at_s:
            pauses.append(Pause(at_s, until_s, phase, reason))
    return tuple(pauses)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What KV memory is used for, of a replica or of several. Tokens; a block counts as full."""

    running: int
    """Of turns."""
    held: int
    """Of paused programs."""
    cached: int
    """Free, but the prefix cache could still use it."""
    empty: int
    host: int = 0
    """Copies in the host tier."""
    host_capacity: int = 0

    @classmethod
    def of(cls, statistics: Mapping[str, Any]) -> "MemoryUse":
        """Of one replica's statistics. What a server does not report counts as nothing."""
        size, total, free = (integer(statistics.get(name)) for name in ("block_size", "total_blocks", "free_blocks"))
        held = min(integer(statistics.get("held_blocks")), total - free)
        cached = min(integer(statistics.get("cached_blocks")), free)
        return cls(
            running=(total - free - held) * size,
            held=held * size,
            cached=cached * size,
            empty=(free - cached) * size,
            host=integer(statistics.get("host_used_tokens")),
            host_capacity=integer(statistics.get("host_tokens")),
        )

    def __add__(self, other: "MemoryUse") -> "MemoryUse":
        """Of both."""
        return MemoryUse(
            self.running + other.running,
            self.held + other.held,
            self.cached + other.cached,
            self.empty + other.empty,
            self.host + other.host,
            self.host_capacity + other.host_capacity,
        )

    @property
    def capacity(self) -> int:
        """Of the device."""
        return self.running + self.held + self.cached + self.empty


MemorySample = tuple[float, MemoryUse]
"""Seconds on the clock of the run, and the memory of all replicas then."""


def integer(value: object) -> int:
    """A number of a decoded answer; 0 where it is none."""
    return int(value) if isinstance(value, int | float) else 0
