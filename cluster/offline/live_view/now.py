"""Computes the current state of a server from several `Look`s: rates, and the use of its memory. The module is pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.observing.catalogue import (
    GOOD_REQUESTS,
    HTTP_REFUSALS,
    PROGRAM_ENDS,
    PROGRAM_MIGRATIONS,
    PROGRAMS,
    REQUESTS,
    REQUESTS_REJECTED,
    ROUTING_DECISIONS,
    WAITING_TURNS,
)
from cluster.offline.bench.history import MemoryUse, integer
from cluster.offline.live_view.look import Look

DECISIONS = ("hold", "swap", "release")
EARLY_PREFILL = ("used", "wasted")
"""Outcomes of the tokens that replicas compute while tools run."""


@dataclass(frozen=True, slots=True)
class ReplicaNow:
    """The current state of one replica."""

    name: str
    policy: str
    draining: bool
    running: int
    waiting: int
    programs: int
    memory: MemoryUse
    decisions_per_s: Mapping[str, float]
    """Rate of each of `DECISIONS`; empty if there is no earlier look."""
    pace: float | None
    """Measured step time divided by that of the cost model."""
    early_prefill_per_s: Mapping[str, float]
    """Tokens a second by each of `EARLY_PREFILL`, counted when the outcome is known; empty if there is no earlier
    look."""
    early_prefill_pending: int
    """Tokens that are still to be computed in pauses."""
    disk_share: float | None = None
    """Used share of its part of the disk tier; None if there is none."""
    disk_troubles: tuple[str, ...] = ()
    """What is wrong with the disk tier's volume, by name."""


@dataclass(frozen=True, slots=True)
class GoodputNow:
    """Rates per second over ``window_s`` seconds. None: the server does not export its metrics."""

    window_s: float
    programs: float | None
    """Good programs that ended."""
    ended: float | None
    offered: float | None
    requests: float | None
    """Requests that met the bounds of a turn."""
    all_requests: float | None

    @property
    def attainment(self) -> float | None:
        """Good programs divided by ended programs; None if it is unknown."""
        return self.programs / self.ended if self.programs is not None and self.ended else None


@dataclass(frozen=True, slots=True)
class RefusedNow:
    """Requests of one route that were answered with one error."""

    route: str
    status: str
    code: str
    recent: int
    """Number since the first look."""
    total: int
    """Number since the start of the ingresses that run now."""


@dataclass(frozen=True, slots=True)
class Now:
    """The current state of a server."""

    replicas: tuple[ReplicaNow, ...]
    goodput: GoodputNow
    waiting_at_front: int | None
    """Turns in the admission queues of all ingresses; None, here and below: there are no such metrics."""
    placements_per_s: float | None
    moves: int | None
    refusals: int | None
    refused: tuple[RefusedNow, ...]
    """Refused requests by route and error, those with the most recent ones first."""


def now_of(looks: Sequence[Look], window_s: float = 2.0) -> Now:
    """Compute the state at the last look. Decisions cover at least ``window_s``, goodput the time since the first."""
    last = looks[-1]
    first = next((seen for seen in looks if seen.has_metrics), last)
    earlier_looks = [seen for seen in reversed(looks[:-1]) if last.at_s - seen.at_s >= window_s]
    before = next(iter(earlier_looks), looks[0])
    counted = next((seen for seen in earlier_looks if seen.has_metrics), first)
    earlier = {str(statistics.get("replica")): statistics for statistics in before.replicas()}
    seconds = last.at_s - before.at_s
    return Now(
        replicas=tuple(
            _replica(statistics, earlier.get(str(statistics.get("replica"))), seconds) for statistics in last.replicas()
        ),
        goodput=_goodput(first, last),
        waiting_at_front=_whole(last.total(WAITING_TURNS.exported)),
        placements_per_s=_rate(counted, last, ROUTING_DECISIONS.exported),
        moves=_whole(last.total(PROGRAM_MIGRATIONS.exported)),
        refusals=_whole(last.total(REQUESTS_REJECTED.exported)),
        refused=_refused(first, last),
    )


def _refused(first: Look, last: Look) -> tuple[RefusedNow, ...]:
    totals: Counter[tuple[str, str, str]] = Counter()
    recent: Counter[tuple[str, str, str]] = Counter()
    for (name, labels), value in last.samples.items():
        if name == HTTP_REFUSALS.exported:
            its = dict(labels)
            key = its.get("route", ""), its.get("status", ""), its.get("code", "")
            totals[key] += round(value)
            # A process that has ended since is in neither number.
            recent[key] += max(0, round(value - first.samples.get((name, labels), 0.0)))
    found = [RefusedNow(*key, recent[key], total) for key, total in totals.items() if total]
    return tuple(sorted(found, key=lambda one: (-one.recent, -one.total, one.route, one.status, one.code)))


def _replica(statistics: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> ReplicaNow:
    rates: dict[str, float] = {}
    early: dict[str, float] = {}
    # A replica that has restarted under the same name counts from 0.
    if before is not None and seconds > 0:
        rates = {kind: max(0, _decided(statistics, kind) - _decided(before, kind)) / seconds for kind in DECISIONS}
        early = {kind: max(0, _early(statistics, kind) - _early(before, kind)) / seconds for kind in EARLY_PREFILL}
    pace = statistics.get("step_time_ratio")
    disk_tokens = integer(statistics.get("disk_tokens"))
    return ReplicaNow(
        name=str(statistics.get("replica", "?")),
        policy=str(statistics.get("policy", "?")),
        draining=bool(statistics.get("draining")),
        running=integer(statistics.get("running")),
        waiting=integer(statistics.get("waiting")),
        programs=integer(statistics.get("programs")),
        memory=MemoryUse.of(statistics),
        decisions_per_s=rates,
        early_prefill_per_s=early,
        early_prefill_pending=integer(statistics.get("early_prefill_pending")),
        pace=float(pace) if isinstance(pace, int | float) else None,
        disk_share=integer(statistics.get("disk_used_tokens")) / disk_tokens if disk_tokens else None,
        disk_troubles=tuple(name for name, wrong in _mapping(statistics.get("disk_degraded")).items() if wrong),
    )


def _decided(statistics: Mapping[str, Any], kind: str) -> int:
    return sum(map(integer, _mapping(_mapping(statistics.get("kv_retention_decisions")).get(kind)).values()))


def _early(statistics: Mapping[str, Any], outcome: str) -> int:
    return integer(_mapping(statistics.get("early_prefill_tokens")).get(outcome))


def _whole(total: float | None) -> int | None:
    return None if total is None else round(total)


def _rate(first: Look, last: Look, name: str, **labels: str) -> float | None:
    """Return how much a counter of all processes grew in a second; None: unknown. ``first`` has metrics."""
    seconds, after = last.at_s - first.at_s, last.total(name, **labels)
    if after is None or seconds <= 0:
        return None
    return max(0.0, after - (first.total(name, **labels) or 0.0)) / seconds


def _goodput(first: Look, last: Look) -> GoodputNow:
    return GoodputNow(
        window_s=last.at_s - first.at_s,
        programs=_rate(first, last, PROGRAM_ENDS.exported, verdict="good"),
        ended=_rate(first, last, PROGRAM_ENDS.exported),
        offered=_rate(first, last, PROGRAMS.exported),
        requests=_rate(first, last, GOOD_REQUESTS.exported),
        all_requests=_rate(first, last, REQUESTS.exported),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
