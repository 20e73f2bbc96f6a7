"""The admission queue: programs for which no replica has room yet, in the order of their admission. Pure.

Tenants share admissions by start-time fair queueing (Goyal et al., 1996) over their admitted work and their weights.
Within a tenant, the lowest priority comes first, then programs that can still meet their bounds, then those with the
least work, then the oldest. A fixed part of the admissions goes to the oldest program, whatever its work. Sheddable
programs (`Hints.sheddable`) come after the others of all tenants, make room for these in a full queue, and reserve no
replica while one of these waits. No program waits longer than the limit.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import exp

from cluster.core.errors import IntegrityError
from router.decisions import Refuse, Refused, TurnRequest
from router.settings import EngineSettings

LOOKAHEAD = 8
"""Programs of one tenant, or children of one parent, that are tried for one that fits."""
TRIES = 4 * LOOKAHEAD
"""Programs that are tried at a time, about, where more than `TENANTS` tenants wait. Each try costs up to 0.1 ms."""
TENANTS = 4
"""As many tenants are all tried each time."""
RATE_MEMORY_S = 60.0
"""Time constant of the measured admission rate."""
PRIOR_S = 5.0
"""The expected rate weighs as much as so many seconds of measurement."""
MAX_OWED = 2.0
"""Bound of the admissions that a tenant owes to its oldest programs."""
SPARE = 1024
"""Stale heap entries that are not worth a compaction."""
MIN_RATE_PER_S = 1e-3
MIN_RETRY_S, MAX_RETRY_S = 1.0, 3600.0

Rank = tuple[float, ...]
"""Priority, 1 if the program is late, seconds of work, arrival."""
SHEDDABLE: Rank = (0.5,)
"""A rank after those of all programs that are not sheddable, and before those that are."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A program that waits, with its turns."""

    number: int
    """Position in the order of arrival."""
    request: TurnRequest
    """The first turn of the program."""
    arrived_s: float
    work_s: float
    """Seconds of a replica's time that the program is expected to take."""
    on_time_until_s: float
    """If it is admitted later, its first turn misses the SLO."""
    give_up_s: float
    """At this time it is rejected."""
    turns: dict[str, TurnRequest] = field(default_factory=dict)
    on_time: bool = True
    reserved: str | None = None
    """A replica that admits no other program before this one."""

    @property
    def rank(self) -> Rank:
        """Its key among the programs of its tenant."""
        return (self.request.hints.priority or 0, float(not self.on_time), self.work_s, self.number)


@dataclass(slots=True)
class _Tenant:
    weight: float
    served_s: float
    """Virtual time: admitted work over the weight."""
    owed: float = 0.0
    """Admissions that are due to the oldest programs."""
    turns: int = 0
    waiters: dict[int, Waiter] = field(default_factory=dict)
    """By number, which is the order of arrival."""
    unsheddable: dict[int, Waiter] = field(default_factory=dict)
    """Those that are not sheddable."""
    ranks: list[Rank] = field(default_factory=list)
    tried: list[int] = field(default_factory=lambda: [0, 0])
    """The rounds in which its programs were tried last: those that are not sheddable, and the sheddable ones."""

    def oldest(self) -> Waiter:
        return next(iter((self.unsheddable or self.waiters).values()))

    def first(self, sheddable: bool) -> Iterator[Waiter]:
        """Those to try of the sheddable programs, or of the others."""
        if self.owed >= 1 and bool(self.unsheddable) is not sheddable:
            yield self.oldest()
        middle = bisect_left(self.ranks, SHEDDABLE)
        begin, end = (middle, len(self.ranks)) if sheddable else (0, middle)
        for *_, number in self.ranks[begin : min(end, begin + LOOKAHEAD)]:
            yield self.waiters[int(number)]


class AdmissionQueue:
    """Orders the waiting programs, and rejects turns that may not wait. The caller gives every time, in seconds."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._tenants: dict[str, _Tenant] = {}
        self._waiters: dict[str, Waiter] = {}
        self._turns: dict[str, Waiter] = {}
        self._children: dict[str, dict[int, Waiter]] = {}
        self._late_at: list[tuple[float, int, str]] = []
        self._give_up_at: list[tuple[float, int, str]] = []
        self._number = 0
        self._virtual_s = 0.0
        self._tags: dict[str, float] = {}
        self._sheddable: dict[int, Waiter] = {}
        self._reserved: Waiter | None = None
        self._round = 1
        self._is_new_round_due = True
        self._admissions = self._measured_s = self._measured_at_s = 0.0

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def turns(self) -> int:
        """Turns that wait."""
        return len(self._turns)

    def requests(self) -> Iterator[TurnRequest]:
        """The first turn of each program that waits."""
        return (waiter.request for waiter in self._waiters.values())

    def waiter(self, key: str) -> Waiter | None:
        """The program, if it waits."""
        return self._waiters.get(key)

    def reserved_for(self, waiter: Waiter | None) -> str | None:
        """The replica that is reserved for another program than ``waiter``."""
        return None if self._reserved is None or self._reserved is waiter else self._reserved.reserved

    def wait_s(self, expected_per_s: float, now_s: float) -> float:
        """Time until all waiting programs are admitted. ``expected_per_s``: see `refusal`."""
        return len(self) / self._rate_per_s(expected_per_s, now_s) if self._waiters else 0.0

    def refusal(self, request: TurnRequest, work_s: float, expected_per_s: float, now_s: float) -> Refuse | None:
        """The rejection of a turn that may not wait; None: it may.

        ``expected_per_s``: the expected admission rate, used until enough admissions are measured.
        """
        tenant = self._tenants.get(request.tenant)
        wait_s = self._expected_wait_s(request, work_s, expected_per_s, now_s)
        mine = tenant.turns if tenant is not None else 0
        most = self._max_turns(request.tenant, request.tenant)
        if len(self._tenants) + (tenant is None) > 1 and mine + 1 > most:
            return _refuse(Refused.TENANT_SHARE, wait_s)
        if (
            self.turns >= self._settings.max_waiting
            and not self._yields_to(request)
            and self._tenant_most_over_share(request.tenant) in (None, request.tenant)
        ):
            return _refuse(Refused.QUEUE_FULL, wait_s)
        if request.key in self._waiters:
            return None
        deadline_s = request.hints.deadline_s
        if wait_s > self._settings.max_wait_s or (deadline_s is not None and wait_s > deadline_s):
            return _refuse(Refused.QUEUE_TIMEOUT, wait_s)
        return None

    def add(
        self,
        turn_id: str,
        request: TurnRequest,
        now_s: float,
        *,
        work_s: float,
        on_time_until_s: float,
    ) -> list[tuple[str, Refuse]]:
        """The turn waits. Returns the turns that are rejected to make room for it."""
        evicted = self._evict(request, now_s) if self.turns >= self._settings.max_waiting else []
        waiter = self._waiters.get(request.key)
        if waiter is None:
            waiter = self._join(request, now_s, work_s, on_time_until_s)
        waiter.turns[turn_id] = request
        self._turns[turn_id] = waiter
        self._tenants[waiter.request.tenant].turns += 1
        return evicted

    def remove(self, turn_id: str) -> None:
        """The turn no longer waits. Its program waits while another of its turns does."""
        waiter = self._turns.pop(turn_id, None)
        if waiter is None:
            return
        del waiter.turns[turn_id]
        self._tenants[waiter.request.tenant].turns -= 1
        if not waiter.turns:
            self._leave(waiter)

    def take(self, waiter: Waiter, now_s: float) -> dict[str, TurnRequest]:
        """The program is admitted. Returns its turns."""
        tenant = self._tenants[waiter.request.tenant]
        aged = tenant.owed >= 1 and waiter is tenant.oldest()
        tenant.owed = min(MAX_OWED, tenant.owed + self._settings.aged_share - (1.0 if aged else 0.0))
        # Programs are also admitted out of the order of the tenants. Those who come later must not wait for that.
        self._virtual_s = max(self._virtual_s, min(one.served_s for one in self._tenants.values()))
        tenant.served_s += waiter.work_s / tenant.weight
        self._measure(now_s)
        self._admissions += 1
        self._is_new_round_due = True
        return self.drop(waiter)

    def room_grew(self) -> None:
        """A program has left its replica: its room is due to the first tenants, whoever was tried while there was none.

        If nothing was admitted since the last time, the round goes on: what waits first does not fit, and what waits
        last would never be tried.
        """
        self._round += self._is_new_round_due
        self._is_new_round_due = False

    def drop(self, waiter: Waiter) -> dict[str, TurnRequest]:
        """The program no longer waits, without an admission by this queue. Returns its turns."""
        turns = dict(waiter.turns)
        for turn_id in turns:
            self.remove(turn_id)
        return turns

    def expired(self, now_s: float) -> list[tuple[str, Refuse]]:
        """Remove and reject the turns that have waited too long."""
        over: list[tuple[str, Refuse]] = []
        while self._give_up_at and self._give_up_at[0][0] <= now_s:
            _, number, key = heappop(self._give_up_at)
            waiter = self._waiters.get(key)
            if waiter is not None and waiter.number == number:
                refuse = _refuse(Refused.QUEUE_TIMEOUT, len(self) / self._rate_per_s(MIN_RATE_PER_S, now_s))
                over += [(turn_id, refuse) for turn_id in self.drop(waiter)]
        return over

    def in_order(self, now_s: float) -> Iterator[Waiter]:
        """The programs to try for admission: a few of each tenant, those of the least served tenant first.

        The sheddable ones of all tenants come last.

        Where many tenants wait, half of `TRIES` goes to the first tenants each time, since room is due to these. The
        other half goes round: it takes those in the order that were not tried in this round (`room_grew` begins a new
        one). A program for which a replica is reserved is always tried, because it may keep out all others.
        """
        self._age(now_s)
        tenants = sorted(self._tenants.values(), key=lambda one: (one.served_s, one.oldest().number))
        kept = None if self._reserved is None else self._tenants[self._reserved.request.tenant]
        tries = 0
        for sheddable in (False, True):
            for tenant in tenants:
                is_first = len(tenants) <= TENANTS or tries < TRIES // 2 or tenant is kept
                if is_first or (tries < TRIES and tenant.tried[sheddable] < self._round):
                    tenant.tried[sheddable] = self._round
                    for waiter in tenant.first(sheddable):
                        tries += 1
                        yield waiter
        if tries < TRIES:  # none is left of this round
            self._round += 1

    def children(self) -> list[tuple[str, list[Waiter]]]:
        """The parents' keys, each with its waiting children in the order of arrival."""
        return [(parent, list(children.values())) for parent, children in self._children.items()]

    def postpone(self, parents: Iterable[str]) -> None:
        """The waiting children of these parents come after those of all others."""
        for parent in parents:
            self._children[parent] = self._children.pop(parent)

    def is_overdue(self, waiter: Waiter) -> bool:
        """Whether it waits, is the oldest program of its tenant, and an admission is due to it."""
        tenant = self._tenants.get(waiter.request.tenant)
        return tenant is not None and tenant.owed >= 1 and waiter is tenant.oldest()

    def reserve(self, waiter: Waiter, replica: str | None) -> None:
        """Reserve the replica for ``waiter``, unless another program has a reservation, or ``waiter`` is sheddable and
        others wait. None ends the reservation.
        """
        if waiter.number in self._sheddable and len(self._sheddable) < len(self._waiters):
            replica = None
        if self._reserved is None or self._reserved is waiter:
            waiter.reserved = replica
            self._reserved = waiter if replica is not None else None

    def check_integrity(self) -> None:
        """Check the indexes against each other.

        Raises:
            IntegrityError: they do not.
        """
        by_tenant = [waiter for tenant in self._tenants.values() for waiter in tenant.waiters.values()]
        ranked = [number for one in self._tenants.values() for *_, number in one.ranks]
        split = [number for one in self._tenants.values() for number in one.unsheddable] + list(self._sheddable)
        turns = {turn_id: waiter for waiter in by_tenant for turn_id in waiter.turns}
        if (
            sorted(ranked) != sorted(waiter.number for waiter in by_tenant)
            or sorted(split) != sorted(ranked)
            or {waiter.request.key: waiter for waiter in by_tenant} != self._waiters
            or turns != self._turns
            or not all(
                one.waiters and one.turns == sum(len(w.turns) for w in one.waiters.values())
                for one in self._tenants.values()
            )
            or (self._reserved is not None and not self.is_overdue(self._reserved))
        ):
            raise IntegrityError(f"the admission queue does not add up: {self._tenants}, {self._turns}")

    def _join(self, request: TurnRequest, now_s: float, work_s: float, on_time_until_s: float) -> Waiter:
        if not self._waiters:
            self._measured_at_s = now_s
            self._is_new_round_due = True
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = _Tenant(
                self._weight(request.tenant), max(self._virtual_s, self._tags.pop(request.tenant, 0.0))
            )
        self._number += 1
        give_up_s = now_s + self._settings.max_wait_s
        if request.hints.deadline_s is not None:
            give_up_s = min(give_up_s, now_s + max(0.0, request.hints.deadline_s))
        waiter = Waiter(self._number, request, now_s, work_s, on_time_until_s, give_up_s)
        self._waiters[request.key] = waiter
        if request.parent_key is not None:
            self._children.setdefault(request.parent_key, {})[waiter.number] = waiter
        tenant.waiters[waiter.number] = waiter
        (self._sheddable if request.hints.sheddable else tenant.unsheddable)[waiter.number] = waiter
        if self._reserved is not None:  # it ends if that program is sheddable, and this one is not
            self.reserve(self._reserved, self._reserved.reserved)
        insort(tenant.ranks, waiter.rank)
        heappush(self._late_at, (on_time_until_s, waiter.number, request.key))
        heappush(self._give_up_at, (give_up_s, waiter.number, request.key))
        return waiter

    def _leave(self, waiter: Waiter) -> None:
        name = waiter.request.tenant
        tenant = self._tenants[name]
        del self._waiters[waiter.request.key]
        del tenant.waiters[waiter.number]
        if (parent := waiter.request.parent_key) is not None:
            del self._children[parent][waiter.number]
            if not self._children[parent]:
                del self._children[parent]
        tenant.unsheddable.pop(waiter.number, None)
        self._sheddable.pop(waiter.number, None)
        del tenant.ranks[bisect_left(tenant.ranks, waiter.rank)]
        if self._reserved is waiter:
            self._reserved = None
        if not tenant.waiters:
            del self._tenants[name]
            if tenant.served_s > self._virtual_s:
                self._tags[name] = tenant.served_s
        if not self._waiters:
            self._tags.clear()
        self._compact()

    def _compact(self) -> None:
        """Drop stale entries once they are the majority."""
        limit = SPARE + 2 * len(self._waiters)
        if len(self._tags) > limit:
            self._tags = {name: tag for name, tag in self._tags.items() if tag > self._virtual_s}
        for times in (self._late_at, self._give_up_at):
            if len(times) > limit:
                live = {waiter.number for waiter in self._waiters.values()}
                times[:] = [entry for entry in times if entry[1] in live]
                heapify(times)

    def _age(self, now_s: float) -> None:
        while self._late_at and self._late_at[0][0] < now_s:
            _, number, key = heappop(self._late_at)
            waiter = self._waiters.get(key)
            if waiter is not None and waiter.number == number and waiter.on_time:
                ranks = self._tenants[waiter.request.tenant].ranks
                del ranks[bisect_left(ranks, waiter.rank)]
                waiter.on_time = False
                insort(ranks, waiter.rank)

    def _share(self, name: str, newcomer: str) -> float:
        """The tenant's share of the queue while ``newcomer`` waits, too."""
        return self._weight(name) / sum(self._weight(one) for one in self._tenants.keys() | {newcomer})

    def _weight(self, name: str) -> float:
        return self._settings.tenant_weights.get(name, 1.0)

    def _max_turns(self, name: str, newcomer: str) -> float:
        """The turns with which the tenant may wait while ``newcomer`` waits, too: one at least."""
        return max(1.0, self._share(name, newcomer) * self._settings.max_waiting)

    def _tenant_most_over_share(self, newcomer: str) -> str | None:
        """Of the tenants beyond their share with ``newcomer``, the one with the most waiting turns for its weight."""
        over = [name for name in self._tenants if self._tenants[name].turns > self._max_turns(name, newcomer)]
        return max(over, key=lambda one: self._tenants[one].turns / self._tenants[one].weight, default=None)

    def _yields_to(self, request: TurnRequest) -> bool:
        """Whether a sheddable program makes room for the request in a full queue."""
        return bool(self._sheddable) and not request.hints.sheddable

    def _evict(self, newcomer: TurnRequest, now_s: float) -> list[tuple[str, Refuse]]:
        if self._yields_to(newcomer):
            waiter, reason = next(reversed(self._sheddable.values())), Refused.QUEUE_FULL
        elif (name := self._tenant_most_over_share(newcomer.tenant)) is not None:
            waiter, reason = next(reversed(self._tenants[name].waiters.values())), Refused.TENANT_SHARE
        else:
            return []
        refuse = _refuse(reason, len(self) / self._rate_per_s(MIN_RATE_PER_S, now_s))
        return [(turn_id, refuse) for turn_id in self.drop(waiter)]

    def _expected_wait_s(self, request: TurnRequest, work_s: float, expected_per_s: float, now_s: float) -> float:
        """The programs of its tenant before it, over its tenant's share of the admission rate. Before a sheddable one
        come those of the other tenants, too.
        """
        rate_per_s = self._rate_per_s(expected_per_s, now_s)
        rate = rate_per_s * self._share(request.tenant, request.tenant)
        tenant, others = self._tenants.get(request.tenant), 0
        if request.hints.sheddable:
            others = sum(len(one.unsheddable) for one in self._tenants.values() if one is not tenant)
        rank = (request.hints.priority or 0, 0.0, work_s, self._number + 1)
        before = bisect_left(tenant.ranks, rank) if tenant is not None else 0
        return (before + 1) / rate + others / rate_per_s

    def _rate_per_s(self, expected_per_s: float, now_s: float) -> float:
        self._measure(now_s)
        rate = (self._admissions + PRIOR_S * expected_per_s) / (self._measured_s + PRIOR_S)
        return max(MIN_RATE_PER_S, rate)

    def _measure(self, now_s: float) -> None:
        if self._waiters and now_s > self._measured_at_s:
            passed_s = now_s - self._measured_at_s
            fading = exp(-passed_s / RATE_MEMORY_S)
            self._admissions *= fading
            self._measured_s = self._measured_s * fading + passed_s
        self._measured_at_s = now_s


def _refuse(reason: Refused, wait_s: float) -> Refuse:
    return Refuse(reason, min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))
