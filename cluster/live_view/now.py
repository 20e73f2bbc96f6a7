"""What a server does now: rates between two looks at it, and its memory by what it is used for. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.live_view.look import Look
from cluster.metrics import GOOD_REQUESTS, PROGRAM_ENDS, PROGRAMS, REQUESTS

DECISIONS = ("hold", "swap", "release")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Tokens of KV."""

    running: int
    held: int
    cached: int
    empty: int
    host: int = 0
    host_capacity: int = 0

    @property
    def capacity(self) -> int:
        """Of the device."""
        return self.running + self.held + self.cached + self.empty


@dataclass(frozen=True, slots=True)
class ReplicaNow:
    """One replica."""

    name: str
    policy: str
    draining: bool
    running: int
    waiting: int
    programs: int
    memory: MemoryUse
    decisions_per_s: Mapping[str, float]
    """By `DECISIONS`; empty until there is a look before."""
    pace: float | None
    """How many times as long steps take as its cost model says."""


@dataclass(frozen=True, slots=True)
class GoodputNow:
    """Per second, over ``window_s``; None: the server does not tell its metrics."""

    window_s: float
    programs: float | None
    """Good ones that ended."""
    ended: float | None
    offered: float | None
    requests: float | None
    """Good ones."""
    all_requests: float | None

    @property
    def attainment(self) -> float | None:
        """Good programs over those that ended."""
        return self.programs / self.ended if self.programs is not None and self.ended else None


@dataclass(frozen=True, slots=True)
class Now:
    """All of it."""

    replicas: tuple[ReplicaNow, ...]
    goodput: GoodputNow
    waiting_at_front: int
    placements_per_s: float | None
    moves: int
    refusals: int


def now_of(looks: Sequence[Look], window_s: float = 2.0) -> Now:
    """Of looks in their order, the last one now: decisions over ``window_s`` or more, goodput since the first look."""
    last, first = looks[-1], looks[0]
    before = next((seen for seen in reversed(looks[:-1]) if last.at_s - seen.at_s >= window_s), first)
    earlier = {str(told.get("replica")): told for told in before.replicas()}
    seconds = last.at_s - before.at_s
    routers = list(last.routers().values())
    placed = [_placements(seen) for seen in (before, last)]
    return Now(
        replicas=tuple(_replica(told, earlier.get(str(told.get("replica"))), seconds) for told in last.replicas()),
        goodput=_goodput(first, last),
        waiting_at_front=sum(_int(view.get("waiting")) for view in routers),
        placements_per_s=(placed[1] - placed[0]) / seconds if seconds > 0 else None,
        moves=sum(_int(view.get("moves")) for view in routers),
        refusals=sum(sum(map(_int, _mapping(view.get("refusals")).values())) for view in routers),
    )


def memory_of(told: Mapping[str, Any]) -> MemoryUse:
    """Of one replica's statistics. A server that does not know what is cached calls it free."""
    size, total, free = (_int(told.get(name)) for name in ("block_size", "total_blocks", "free_blocks"))
    held = min(_int(told.get("held_blocks")), total - free)
    cached = min(_int(told.get("cached_blocks")), free)
    return MemoryUse(
        running=(total - free - held) * size,
        held=held * size,
        cached=cached * size,
        empty=(free - cached) * size,
        host=_int(told.get("host_used_tokens")),
        host_capacity=_int(told.get("host_tokens")),
    )


def _replica(told: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> ReplicaNow:
    rates: dict[str, float] = {}
    # A replica that was started again under its name counts from 0.
    if before is not None and seconds > 0:
        rates = {kind: max(0, _decided(told, kind) - _decided(before, kind)) / seconds for kind in DECISIONS}
    pace = told.get("step_pace")
    return ReplicaNow(
        name=str(told.get("replica", "?")),
        policy=str(told.get("policy", "?")),
        draining=bool(told.get("draining")),
        running=_int(told.get("running")),
        waiting=_int(told.get("waiting")),
        programs=_int(told.get("programs")),
        memory=memory_of(told),
        decisions_per_s=rates,
        pace=float(pace) if isinstance(pace, int | float) else None,
    )


def _decided(told: Mapping[str, Any], kind: str) -> int:
    return sum(map(_int, _mapping(_mapping(told.get("pauses")).get(kind)).values()))


def _placements(seen: Look) -> int:
    return sum(sum(map(_int, _mapping(view.get("placements")).values())) for view in seen.routers().values())


def _goodput(first: Look, last: Look) -> GoodputNow:
    seconds = last.at_s - first.at_s

    def rate(name: str, **labels: str) -> float | None:
        after = last.total(name, **labels)
        if after is None or seconds <= 0:
            return None
        return max(0.0, after - (first.total(name, **labels) or 0.0)) / seconds

    return GoodputNow(
        window_s=seconds,
        programs=rate(PROGRAM_ENDS.exported, verdict="good"),
        ended=rate(PROGRAM_ENDS.exported),
        offered=rate(PROGRAMS.exported),
        requests=rate(GOOD_REQUESTS.exported),
        all_requests=rate(REQUESTS.exported),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _int(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
