"""Caesura's autoscaling policy: as many replicas as the programs need for their KV and their work.

It measures the time that a replica takes to start. It adds replicas for the load that is expected when they have
started, and removes one only after fewer have sufficed for twice that time.

Loads that come in bursts are over when the replicas for them have started. So the policy learns from removals that were
too early: where turns miss their SLO while replicas start again, replicas are kept from then on for as long as these
would have had to be.

A replica's capacity for work is learnt. The cost model gives the work of a turn, but neither the overhead around the
engine nor the batch that keeps the SLO. So where turns exceed their SLO at a load below the known capacity, this load
becomes the capacity.
"""

from dataclasses import dataclass, replace
from math import ceil

from cluster.core.scaling_report import Demand, total_demand
from router.autoscaling.policy import Reason, ScalingDecision, ScalingView

PERIOD_S = 1.0
"""Seconds between two decisions."""
FIRST_START_S = 60.0
"""The start of a replica, before one has been measured."""
USED_SHARE = 0.8
"""Part of the replicas' capacity, in work and in memory, that the load should use. The rest is for its variation."""
FREED_SHARE = 0.8
"""A replica is removed if the others then use no more than this part of `USED_SHARE`, so that it is not added again."""
UNUSED_STARTS, MIN_UNUSED_S = 2.0, 30.0
"""A replica is removed after fewer have sufficed for so many start-up times, and for so long."""
IDLE_STARTS, MIN_IDLE_S = 10.0, 120.0
"""The last replica is removed after it was idle for so many start-up times, and for so long: the next turn has to wait
for a start. The time counts from the start of the newest replica at the earliest."""
MAX_DOWNSCALE_DELAY_S = 1800.0
"""Largest learnt delay of a removal, in seconds (the stabilization window of Kubernetes)."""
DELAY_MARGIN = 1.5
"""A replica is kept for this multiple of the time that would have sufficed, since the next burst may come later."""
DELAY_FORGOTTEN_S = 4 * 3600.0
"""Time constant with which the time is forgotten for which replicas are kept."""
MISSED_SHARE, MIN_TURNS = 0.05, 10.0
"""Turns exceed their SLO if this part of at least so many turns does."""
SETTLED_S = 20.0
"""After a replica has started, turns that ended before still count for so long (`router.demand.RECENT_S`)."""
DRAIN_S = 10.0
"""Waiting work should be done in this time, or in the time that a replica takes to start if that is longer."""
MAX_LEARNT_STEP = 0.5
"""A capacity that is learnt from misses is at least this part of the one before, since the load may just be rising."""
FORGOTTEN_S = 1800.0
"""Time constant with which a capacity that was learnt from misses is forgotten."""


@dataclass(frozen=True, slots=True)
class LoadState:
    """What the policy remembers."""

    since_s: float | None = None
    """When the first decision was made."""
    decided_s: float = 0.0
    ready: int = 0
    start_s: float | None = None
    """Measured start-up time: from a decision until the replica serves."""
    raises_s: tuple[float, ...] = ()
    """When each of the replicas that are starting was asked for, the first one first."""
    settled_s: float = 0.0
    """When the last replica has started."""
    work: float = 0.0
    """Smoothed `Demand.turn_work`."""
    capacity: float = 1.0
    """Work of one replica in each second at which it keeps its SLO."""
    downscale_delay_s: float = 0.0
    """How long replicas are kept without need, learnt from removals that were too early (Ray's name; there it is
    fixed)."""
    removed: tuple[tuple[float, int], ...] = ()
    """Numbers of replicas that were given up, with the time until which so many were needed, as far as none later is
    larger."""
    gap_s: float = 0.0
    """How long the replicas that start, or have just started, would have had to be kept without need; 0: so many were
    not needed in the last `MAX_DOWNSCALE_DELAY_S`."""
    needs: tuple[tuple[float, int], ...] = ()
    """Times and numbers of replicas that would have sufficed, as far as none later is larger: the first is the largest
    of all that are remembered."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Replicas that the load needs. Fractions are parts of a replica."""

    memory: float
    work: float
    idle: bool

    @property
    def most(self) -> float:
        """The larger need."""
        return max(self.memory, self.work)


class ProgramLoad:
    """The policy. It has no state of its own."""

    def first(self) -> LoadState:
        """Return the state before the first decision."""
        return LoadState()

    def decide(self, view: ScalingView, state: LoadState) -> ScalingDecision[LoadState]:
        """Return the number of replicas that is wanted."""
        if state.since_s is not None and view.now_s - state.decided_s < PERIOD_S:
            return ScalingDecision(view.target, Reason.KEEP, state)
        state = _observed(view, state)
        if not view.reports:
            return ScalingDecision(_within(view, view.target), Reason.KEEP, state)
        start_s = start_up_s(view, state)
        demand = total_demand(view.reports)
        state = _with_delay(view, _learnt(view, state, demand, start_s), demand)
        need = needs_of(view, state, demand, start_s)
        for_s = max(MAX_DOWNSCALE_DELAY_S, _idle_s(start_s))
        state = replace(state, needs=_remembered(view.now_s, state.needs, _sufficing(need), for_s))
        up, reason = _more(view, state, need, demand)
        if up > view.target:
            gap_s = max(state.gap_s, _unneeded_s(view, state))
            raises_s = (*state.raises_s, *(view.now_s,) * (up - view.target))
            return ScalingDecision(up, reason, replace(state, raises_s=raises_s, gap_s=gap_s))
        down, reason = _fewer(view, state, start_s)
        if down < view.target and up <= down:
            needed_s = max(
                (at_s for at_s, number in state.needs if number > down), default=view.now_s - MAX_DOWNSCALE_DELAY_S
            )
            removed = _remembered(needed_s, state.removed, view.target, MAX_DOWNSCALE_DELAY_S)
            return ScalingDecision(down, reason, replace(state, removed=removed))
        return ScalingDecision(_within(view, view.target), Reason.KEEP, state)


def start_up_s(view: ScalingView, state: LoadState) -> float:
    """Return the time that a replica takes to start: as measured, else as the replicas report it."""
    reported = max((report.load.start_s for report in view.reports), default=0.0)
    return state.start_s or reported or FIRST_START_S


def needs_of(view: ScalingView, state: LoadState, demand: Demand, start_s: float) -> Needs:
    """Return the replicas that the load needs when a replica that is asked for now has started.

    The work of a program's later turns comes over the life of the program. So the work that arrives approaches that of
    the programs that arrive (Little's law), by the part of a program's life that passes meanwhile.
    """
    loads = [report.load for report in view.reports]
    ahead = min(1.0, start_s / demand.program_s) if demand.program_s > 0 else 1.0
    work = state.work + max(0.0, demand.program_work - state.work) * ahead
    backlog_s = demand.queued_work_s + sum(load.waiting_work_s for load in loads)
    work += max(0.0, backlog_s - len(loads)) / max(DRAIN_S, start_s)  # a second of backlog each is no more than a batch
    memory = sum(load.kv_tokens for load in loads) / len(loads)
    tokens = demand.queued_tokens + sum(load.working_set_tokens for load in loads)
    turns = sum(load.turns for load in loads) + demand.turns
    return Needs(
        memory=tokens / (USED_SHARE * memory) if memory > 0 else 0.0,
        work=work / (USED_SHARE * state.capacity),
        idle=turns == 0 and tokens < 1 and backlog_s <= 0 and demand.program_work <= 0,
    )


def _observed(view: ScalingView, state: LoadState) -> LoadState:
    """Measure the start of the replicas that have started since the last decision: those that were asked for first."""
    start_s, raises_s, settled_s = state.start_s, state.raises_s, state.settled_s
    if view.ready > state.ready and state.since_s is not None:
        settled_s, started = view.now_s, view.ready - state.ready
        for raised_s in raises_s[:started]:
            took_s = view.now_s - raised_s
            start_s = took_s if start_s is None else (start_s + took_s) / 2
        raises_s = raises_s[started:]
    raises_s = raises_s[: max(0, view.target - view.ready)]  # the others are no longer wanted
    return replace(
        state,
        since_s=view.now_s if state.since_s is None else state.since_s,
        ready=view.ready,
        start_s=start_s,
        raises_s=raises_s,
        settled_s=settled_s,
    )


def _learnt(view: ScalingView, state: LoadState, demand: Demand, start_s: float) -> LoadState:
    """Smooth the work that arrives over half of a start-up time, and learn the capacity of a replica."""
    passed_s = view.now_s - state.decided_s if state.decided_s else 0.0
    weight = min(1.0, max(PERIOD_S, passed_s) / max(PERIOD_S, start_s / 2)) if state.decided_s else 1.0
    work = state.work + (demand.turn_work - state.work) * weight
    capacity = state.capacity + (1.0 - state.capacity) * min(1.0, passed_s / FORGOTTEN_S)
    used = max(work, demand.turn_work) / max(1, view.ready)
    if _misses(view, state, demand) and view.target < view.most:  # with the replica that it adds, it learns anew
        capacity = min(capacity, max(MAX_LEARNT_STEP * capacity, used))
    elif demand.turns >= MIN_TURNS and not demand.missed:
        capacity = max(capacity, min(1.0, used))
    return replace(state, decided_s=view.now_s, work=work, capacity=capacity)


def _with_delay(view: ScalingView, state: LoadState, demand: Demand) -> LoadState:
    """Learn how long replicas are kept without need: turns miss their SLO while those start that were given up."""
    downscale_delay_s = state.downscale_delay_s * (1.0 - min(1.0, PERIOD_S / DELAY_FORGOTTEN_S))
    if not _starting(view, state):
        return replace(state, downscale_delay_s=downscale_delay_s, gap_s=0.0)
    if _exceeds_slo(demand):
        downscale_delay_s = max(downscale_delay_s, min(MAX_DOWNSCALE_DELAY_S, DELAY_MARGIN * state.gap_s))
    return replace(state, downscale_delay_s=downscale_delay_s)


def _unneeded_s(view: ScalingView, state: LoadState) -> float:
    """Return the time since more replicas were needed than are wanted now. 0: not within `MAX_DOWNSCALE_DELAY_S`."""
    needed_s = max((at_s for at_s, number in state.removed if number > view.target), default=view.now_s)
    return view.now_s - needed_s if view.now_s - needed_s <= MAX_DOWNSCALE_DELAY_S else 0.0


def _misses(view: ScalingView, state: LoadState, demand: Demand) -> bool:
    """Whether turns exceed their SLO because there are too few replicas.

    It does not count while replicas start, or where the turns of a replica do not compete.
    """
    competing = sum(report.load.turns for report in view.reports) > view.ready
    return _exceeds_slo(demand) and competing and not _starting(view, state)


def _starting(view: ScalingView, state: LoadState) -> bool:
    """Whether replicas start, or have just started, so that turns that waited for them still count."""
    return view.ready < view.target or view.now_s - state.settled_s < SETTLED_S


def _exceeds_slo(demand: Demand) -> bool:
    return demand.turns >= MIN_TURNS and demand.missed > MISSED_SHARE * demand.turns


def _more(view: ScalingView, state: LoadState, need: Needs, demand: Demand) -> tuple[int, Reason]:
    wanted = ceil(need.most - 1e-9)
    reason = Reason.MEMORY if need.memory > need.work else Reason.WORK
    if _misses(view, state, demand):
        wanted, reason = max(wanted, view.target + 1), Reason.SLO
    return _within(view, max(wanted, 0 if need.idle else 1)), reason


def _fewer(view: ScalingView, state: LoadState, start_s: float) -> tuple[int, Reason]:
    """The number that has sufficed for long enough, and only once all replicas have started.

    One that has not started after `UNUSED_STARTS` start-up times may never start, so that nothing waits for it.
    """
    asked_s = max(state.raises_s, default=state.settled_s)
    if view.ready < view.target and view.now_s - asked_s < max(MIN_UNUSED_S, UNUSED_STARTS * start_s):
        return view.target, Reason.KEEP
    idle_s, unused_s = _idle_s(start_s), max(MIN_UNUSED_S, UNUSED_STARTS * start_s, state.downscale_delay_s)
    kept_s = max(idle_s, state.downscale_delay_s)
    idle = [number for at_s, number in state.needs if view.now_s - at_s <= kept_s]
    serves = view.now_s - state.settled_s >= kept_s  # a replica is not idle before it has started
    if serves and _covers(view, state, kept_s) and not any(idle):
        return _within(view, 0), Reason.IDLE
    if not _covers(view, state, unused_s):
        return view.target, Reason.KEEP
    recent = [number for at_s, number in state.needs if view.now_s - at_s <= unused_s]
    return _within(view, max(1, *recent)), Reason.UNUSED


def _covers(view: ScalingView, state: LoadState, seconds: float) -> bool:
    return state.since_s is not None and view.now_s - state.since_s >= seconds


def _idle_s(start_s: float) -> float:
    return max(MIN_IDLE_S, IDLE_STARTS * start_s)


def _sufficing(need: Needs) -> int:
    return 0 if need.idle else max(1, ceil(need.most / FREED_SHARE - 1e-9))


def _remembered(
    now_s: float, needs: tuple[tuple[float, int], ...], number: int, for_s: float
) -> tuple[tuple[float, int], ...]:
    """Add a number, and drop those that are too old, or no larger than it."""
    kept = [(at_s, before) for at_s, before in needs if before > number and now_s - at_s <= for_s]
    return (*kept, (now_s, number))


def _within(view: ScalingView, replicas: int) -> int:
    return min(view.most, max(view.least, replicas))
