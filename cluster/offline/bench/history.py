"""Histories of programs and memory use, as reported by a server (`GET /v1/programs/{id}`) or a simulated scheduler."""

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
    """A part of a pause without a change of phase. Times are seconds on the reporter's clock."""

    from_s: float
    to_s: float
    phase: str
    """One of `PAUSED`."""
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a program's KV after a turn."""

    phase: str = ""
    """One of `PAUSED`; empty if it is unknown."""
    reason: str = ""
    """Reason of the decision; empty if there was none, because the program continued at once or ended."""


@dataclass(frozen=True, slots=True)
class ProgramHistory:
    """The history of one program at its replica, which drops the first turns and events of a long program."""

    arrivals_s: tuple[float | None, ...] = ()
    """Arrival of each turn at the replica, in seconds on the replica's clock."""
    waits_s: tuple[float | None, ...] = ()
    """Seconds that each turn waited in the replica's queue."""
    decisions: tuple[Decision, ...] = ()
    """Decision after each turn."""
    pauses: tuple[Pause, ...] = ()

    @classmethod
    def of(cls, answer: object) -> "ProgramHistory":
        """Read a decoded answer. Invalid parts are omitted."""
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
        """Estimate by how many seconds the replica's clock is ahead of the client's; 0 if nothing can be compared.

        The estimate assumes that the fastest turn arrived without a delay. ``sent_s``: when each turn was sent, on the
        client's clock.
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
            # The start or the end of a tool does not change the memory.
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
    """The use of the KV memory of one or several replicas, in tokens. Each block counts as full."""

    running: int
    """Tokens in blocks that are allocated to turns, whether they run or wait."""
    held: int
    """Tokens of paused programs."""
    cached: int
    """Tokens of free blocks that the prefix cache can still use."""
    empty: int
    host: int = 0
    """Tokens that the host tier has a copy of."""
    host_capacity: int = 0

    @classmethod
    def of(cls, statistics: Mapping[str, Any]) -> "MemoryUse":
        """Read one replica's statistics. A missing value counts as 0."""
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
        """Add the memory uses of two groups of replicas."""
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
        """Tokens of the device memory."""
        return self.running + self.held + self.cached + self.empty


MemorySample = tuple[float, MemoryUse]
"""A time in seconds on the clock of the run, and the memory use of all replicas at that time."""


def integer(value: object) -> int:
    """Return a number of a decoded answer; 0 if it is no number."""
    return int(value) if isinstance(value, int | float) else 0
