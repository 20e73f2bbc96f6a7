"""The snapshot of a replica for the router: its scheduler's state now, and what is expected of its programs.

It is made once a second between two steps, so its cost is bounded: only a limited number of waiting turns and paused
programs is examined one by one. A paused program is weighted by the probability that it comes back. The weight of a
program that ended without a report decreases to 0 with time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import frexp, inf

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from cluster.core.lifecycle.machine import ProgramState
from cluster.core.program import Hints, tool_key
from cluster.core.replica_snapshot import TAKES_ALL_S, ReplicaSnapshot, StepCosts, pack_names
from cluster.durations.statistics import Durations
from cluster.durations.table import OVERALL, DurationTable
from replicas.cached_prefix import cached_tokens, is_cached, leading_blocks
from replicas.cost_model import CostModel
from replicas.forecasts import NOTHING_KNOWN, Forecaster
from replicas.kv_groups import KvGroups
from replicas.load_shedding import shedding_of
from replicas.policies.caesura import HINT_SLACK, Tool
from replicas.policy import Forecast
from replicas.returns import Returns
from replicas.scheduler import AgentScheduler
from replicas.vllm_versions import waiting_queues

MIN_OBSERVATIONS = 5
"""Number of observed durations from which on a tool's own statistics are used. With fewer, those of all tools are used.
"""
PRIOR_PAUSES = 10
"""Number of pauses that the prior counts for: before any observation, one pause of this many is taken for an end."""
DONE_S = 1.0
"""Expected seconds until a program comes back after its tool has finished, as its executor reported."""


AGES_PER_OCTAVE = 8
"""Resolution of pause lengths, in steps per factor of two. Pauses of about equal length share one computation."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The forecast of one paused program's return."""

    returns: float
    """Probability that it comes back at all."""
    within: tuple[float, ...]
    """Probabilities that it is back by each of the given times."""


class ResumeEstimator:
    """Estimates the return of paused programs at one moment.

    A silent program may be waiting for a slow tool, or it may have ended. Let e be the share of pauses that were an
    end, and S(t) the share of pauses longer than t. By Bayes:
    P(comes back | silent for t) = (1 - e) S(t) / ((1 - e) S(t) + e). The share e is that of all pauses here, or that of
    the pause's tool (`Returns`) if this is larger.

    Args:
        durations: known durations of pauses.
        ends: number of programs seen here that ended without a report.
        returns: the share of programs that come back, by tool.
        now_s: the moment, in seconds on the scheduler's clock.
        horizons_s: seconds from that moment for which probabilities are wanted.
    """

    def __init__(
        self, durations: DurationTable, ends: int, returns: Returns, now_s: float, horizons_s: Sequence[float]
    ) -> None:
        self._durations = durations
        self._returns = returns
        self._end_share = (ends + 1) / (ends + durations.own()[OVERALL].count + PRIOR_PAUSES)
        self._now_s = now_s
        self._horizons_s = horizons_s
        self._known: dict[str, Durations | None] = {}
        self._answers: dict[tuple[str, int], Resume] = {}

    def of(self, program: ProgramState, forecast: Forecast | None) -> Resume:
        """Estimate the return of a program that has no turn in flight.

        Args:
            program: the program's state.
            forecast: the forecast of the turn that its pause followed, or None if it is not known.
        """
        if program.paused_s is not None and program.observed:
            away_s = max(0.0, self._now_s - program.last_event_s)
            return self._answer(Tool(None, None, DONE_S), away_s, self._end_share)
        began_s = program.last_event_s if program.paused_s is None else program.paused_s
        away_s = max(0.0, self._now_s - (began_s if program.tool_started_s is None else program.tool_started_s))
        name = program.tools[0] if len(program.tools) == 1 else tool_key(program.tools)
        if forecast is not None and forecast.pause_hinted:
            hinted_s = max(0.0, forecast.pause_s)
            return self._answer(Tool(self._statistics(name), hinted_s, max(1e-3, hinted_s)), away_s, self._end_share)
        mantissa, octave = frexp(away_s)
        age = int(((octave + 2 * mantissa) if away_s else -64) * AGES_PER_OCTAVE)
        answer = self._answers.get((name, age))
        if answer is None:
            statistics = self._statistics(name)
            tool = Tool(statistics, None, statistics.mean_s if statistics else 1.0)
            ends = 1.0 - self._returns.share(name, self._durations, self._now_s)
            answer = self._answers[name, age] = self._answer(tool, away_s, max(self._end_share, ends))
        return answer

    def _statistics(self, name: str) -> Durations | None:
        if name not in self._known:
            levels = list(self._durations.levels(name))
            enough = (level for level in levels if level.count >= MIN_OBSERVATIONS)
            self._known[name] = next(enough, levels[-1] if levels else None)
        return self._known[name]

    def _answer(self, tool: Tool, away_s: float, end_share: float) -> Resume:
        lasts = (1 - end_share) * _share_longer(tool, away_s)
        returns = lasts / (lasts + end_share)
        survival = tool.survival(away_s)
        return Resume(returns, tuple(returns * (1.0 - survival(more_s)) for more_s in self._horizons_s))


def _share_longer(tool: Tool, away_s: float) -> float:
    """Return S(away), the share of such pauses that last longer. Beyond all observations it decreases as 1 / away."""
    if tool.hinted_s is not None and away_s <= tool.hinted_s * HINT_SLACK:
        return 1.0
    statistics = tool.statistics
    if statistics is None:
        return tool.expected_s / (tool.expected_s + away_s)
    longer = statistics.survival(away_s)
    return longer if longer > 0 else statistics.max_s / max(away_s, statistics.max_s, 1e-3) / (statistics.count + 1)


HORIZONS_S = (1.0, 5.0, 30.0)
"""Horizons in seconds of `ReplicaSnapshot.resume_tokens`."""
ACTIVE_WITHIN_S = HORIZONS_S[1]
"""Seconds within which a program has to come back to count as active. Later ones take part in few of the next
iterations."""
MAX_PAUSED = 2048
"""Largest number of paused programs that are examined, the most recently paused first."""
MAX_WAITING = 256
"""Largest number of waiting turns whose prompts are looked up in the cache. The same share is assumed for the others.
"""
MOSTLY = 0.5
"""Least share of a program's KV in a place for the program to count as being there."""


def routing_snapshot(
    scheduler: AgentScheduler, replica: str, model: str, number: int, draining: bool
) -> ReplicaSnapshot:
    """Return the snapshot of an AgentScheduler's replica now, between two steps.

    `replicas.router_side` adds ``prefixes``.
    """
    load, shed = scheduler.load_now(), shedding_of(scheduler)
    in_flight = _InFlight(scheduler, scheduler.swapping.tokens_of)
    for request in _requests(scheduler):
        turn = scheduler.turns[request.request_id]
        put_off = any(queue.puts_off(request.request_id) for queue in scheduler.waiting_queues)
        in_flight.add(request, turn.key, turn.forecast.output_tokens, put_off=put_off)
    used_tokens = load.facts.capacity_tokens - load.free_tokens
    held_tokens = scheduler.holds.num_tokens + scheduler.swapping.fetching_tokens
    distinct = _distinct_share(used_tokens, in_flight.running_tokens + held_tokens)
    paused = _Paused(scheduler, distinct)
    for program in islice((state for state in scheduler.programs.recent() if not state.active), MAX_PAUSED):
        paused.add(program)
    expected = scheduler.forecaster.of(NOTHING_KNOWN, Hints(), scheduler.durations, last=False)
    average_turns = scheduler.programs.average_turns
    return ReplicaSnapshot(
        replica=replica,
        model=model,
        number=number,
        draining=draining,
        # The given costs: with measured ones, small differences would send every program to one replica.
        costs=step_costs(scheduler.settings.cost),
        kv_tokens=load.facts.capacity_tokens,
        free_tokens=load.free_tokens,
        held_tokens=load.held_tokens,
        host_tokens=load.facts.host_tokens,
        host_used_tokens=scheduler.swapping.used_tokens,
        volume=scheduler.swapping.volume,
        disk_token_s=0.0 if load.disk_read_s == inf else load.disk_read_s,
        running=load.running,
        waiting=load.waiting - load.waiting_late,
        put_off=load.waiting_late,
        shed_from_s=min(TAKES_ALL_S, shed.from_s),
        shed_sheddable_from_s=min(TAKES_ALL_S, shed.sheddable_from_s),
        shed_retry_after_s=shed.retry_after_s,
        guards_memory=scheduler.policies.guards_memory,
        max_sequences=scheduler.scheduler_config.max_num_seqs,
        step_time_ratio=scheduler.pace.scale,
        running_tokens=in_flight.running_tokens,
        waiting_tokens=in_flight.missing_tokens(),
        output_tokens=in_flight.output_tokens,
        programs=in_flight.count + round(paused.returning),
        working_set_tokens=in_flight.final_tokens(distinct) + paused.back_tokens,
        working_set_programs=in_flight.pressing + paused.back,
        active_tokens=in_flight.final_tokens(distinct) + paused.active_tokens,
        active_programs=in_flight.pressing + paused.active,
        resume_tokens=tuple(zip(HORIZONS_S, paused.missing_tokens, strict=True)),
        turn_output_tokens=expected.output_tokens,
        turn_new_tokens=expected.returned_tokens,
        program_turns=1.0 + expected.later_turns if average_turns is None else average_turns,
        pause_s=expected.pause_s,
        residents=pack_names(chain(in_flight.programs, paused.keys)),
        on_device=pack_names(chain(in_flight.where(device=True), paused.on_device)),
        on_host=pack_names(chain(in_flight.where(device=False), paused.on_host)),
        on_disk=pack_names(
            key
            for key in chain(in_flight.programs, paused.keys)
            if scheduler.swapping.disk_tokens_of(key) >= MOSTLY * max(1, scheduler.programs[key].context_tokens)
        ),
    )


def plain_snapshot(
    scheduler: Scheduler, cost: CostModel, replica: str, model: str, number: int, draining: bool
) -> ReplicaSnapshot:
    """Return the snapshot of vLLM's own scheduler.

    It knows no programs, so each turn counts as one, and nothing is learnt.
    """
    pool = scheduler.kv_cache_manager.block_pool
    groups = _groups_of(scheduler)
    capacity_tokens = groups.tokens_in(pool.num_gpu_blocks - 1)
    free_tokens = groups.tokens_in(int(pool.get_num_free_blocks()))
    in_flight = _InFlight(scheduler, lambda key: 0)
    expected = Forecaster().of(NOTHING_KNOWN, Hints(), DurationTable(), last=False)
    for request in _requests(scheduler):
        in_flight.add(request, None, expected.output_tokens)
    distinct = _distinct_share(capacity_tokens - free_tokens, in_flight.running_tokens)
    return ReplicaSnapshot(
        replica=replica,
        model=model,
        number=number,
        draining=draining,
        costs=step_costs(cost),
        max_sequences=scheduler.scheduler_config.max_num_seqs,
        kv_tokens=capacity_tokens,
        free_tokens=free_tokens,
        held_tokens=0,
        host_tokens=0,
        host_used_tokens=0,
        running=len(scheduler.running),
        waiting=sum(len(queue) for queue in waiting_queues(scheduler)),
        running_tokens=in_flight.running_tokens,
        waiting_tokens=in_flight.missing_tokens(),
        output_tokens=in_flight.output_tokens,
        programs=in_flight.count,
        working_set_tokens=in_flight.final_tokens(distinct),
        working_set_programs=in_flight.count,
        active_tokens=in_flight.final_tokens(distinct),
        active_programs=in_flight.count,
        resume_tokens=tuple((horizon_s, 0.0) for horizon_s in HORIZONS_S),
        turn_output_tokens=expected.output_tokens,
        turn_new_tokens=expected.returned_tokens,
        program_turns=1.0 + expected.later_turns,
        pause_s=expected.pause_s,
    )


def step_costs(cost: CostModel) -> StepCosts:
    """Return the part of a cost model that the router gets."""
    return StepCosts(
        overhead_s=cost.overhead_s,
        sequence_s=cost.sequence_s,
        weights_s=cost.weights_s,
        token_s=cost.token_s,
        context_s=cost.context_s + cost.pair_s,
        swap_token_s=cost.swap_token_s,
    )


def _groups_of(scheduler: Scheduler) -> KvGroups:
    caching = scheduler.kv_cache_manager.enable_caching
    return KvGroups.of(scheduler.kv_cache_config, scheduler.hash_block_size, caching=caching)


def _requests(scheduler: Scheduler) -> Iterable[Request]:
    return chain(scheduler.running, *waiting_queues(scheduler))


def _distinct_share(used_tokens: int, counted_tokens: int) -> float:
    """Return the ratio of used memory to the sum of the contexts in it. It is below 1 where contexts share prefixes."""
    return min(1.0, used_tokens / counted_tokens) if counted_tokens and used_tokens > 0 else 1.0


@dataclass(slots=True)
class _Place:
    """Shares of a program's KV on the device and on the host, for the turn in flight that has the most there."""

    device: float = 0.0
    host: float = 0.0


class _InFlight:
    """Sums over all turns that run or wait.

    Args:
        scheduler: the turns' scheduler.
        host_tokens: returns how many tokens of a program's context the host has.
    """

    def __init__(self, scheduler: Scheduler, host_tokens: Callable[[str], int]) -> None:
        self._groups = _groups_of(scheduler)
        self._cached = is_cached(scheduler.kv_cache_manager.block_pool, self._groups.main)
        self._running = {request.request_id for request in scheduler.running}
        self._host_tokens = host_tokens
        self._looked_at = self._known_tokens = self._missing_tokens = self._unknown_tokens = 0
        self._prefill_tokens = 0
        self._tokens = 0
        self._single_turns = self._single_put_off = 0
        self._pressing: set[str] = set()
        self.running_tokens = 0
        """Tokens of KV of running turns."""
        self.output_tokens = 0.0
        self.programs: dict[str, _Place] = {}
        """Places of the programs that have a key, by key."""

    def add(self, request: Request, key: str | None, output_tokens: float, *, put_off: bool = False) -> None:
        """Add one turn.

        Args:
            request: the turn's request.
            key: its program's key, or None if it belongs to no program.
            output_tokens: tokens that it is expected to generate in all.
            put_off: whether it is deferred, and so uses only what the others leave.
        """
        if put_off:
            if key is None:
                self._single_put_off += 1
            else:
                self.programs.setdefault(key, _Place())
            return
        tokens, there, host = request.num_tokens, request.num_computed_tokens, 0
        if request.request_id in self._running:
            self.running_tokens += there
            # A turn that decodes has one token to compute, which is no prompt's.
            self._prefill_tokens += tokens - there if tokens - there > 1 else 0
        elif self._looked_at < MAX_WAITING:
            self._looked_at += 1
            host = self._host_tokens(key) if key is not None else 0
            hashes = self._groups.main_hashes(request.block_hashes)
            there = max(there, leading_blocks(hashes, self._cached) * self._groups.block_tokens)
            self._known_tokens += tokens
            self._missing_tokens += max(1, tokens - max(there, host))
        else:
            self._unknown_tokens += tokens
        self._tokens += tokens
        self.output_tokens += max(1.0, min(output_tokens, request.max_tokens) - request.num_output_tokens)
        if key is None:
            self._single_turns += 1
            return
        self._pressing.add(key)
        place = self.programs.setdefault(key, _Place())
        place.device, place.host = max(place.device, there / tokens), max(place.host, host / tokens)

    @property
    def count(self) -> int:
        """Number of programs. A turn that belongs to none counts as one."""
        return len(self.programs) + self._single_turns + self._single_put_off

    @property
    def pressing(self) -> int:
        """Number of programs that have a turn that is not deferred."""
        return len(self._pressing) + self._single_turns

    def missing_tokens(self) -> int:
        """Return how many prompt tokens are to be computed."""
        share = self._missing_tokens / self._known_tokens if self._known_tokens else 1.0
        return self._prefill_tokens + self._missing_tokens + round(share * self._unknown_tokens)

    def final_tokens(self, distinct: float) -> float:
        """Return the tokens of KV of all turns at their ends. ``distinct`` is the result of `_distinct_share`."""
        return self._tokens + self.output_tokens - (1.0 - distinct) * self.running_tokens

    def where(self, *, device: bool) -> Iterator[str]:
        """Yield the keys of programs that are mostly on the device, or else on the host."""
        for key, place in self.programs.items():
            on_device = place.device >= MOSTLY
            if on_device if device else not on_device and place.host >= MOSTLY:
                yield key


class _Paused:
    """Sums over programs without a turn in flight, each weighted by the probability that it comes back."""

    def __init__(self, scheduler: AgentScheduler, distinct: float) -> None:
        self._scheduler = scheduler
        self._distinct = distinct
        self._cached = is_cached(scheduler.kv_cache_manager.block_pool, scheduler.groups.main)
        now_s, horizons_s = scheduler.clock.now_s(), (scheduler.facts.cost.refill_s, *HORIZONS_S)
        programs = scheduler.programs
        self._estimator = ResumeEstimator(scheduler.durations, programs.abandoned, programs.returns, now_s, horizons_s)
        self._returned = scheduler.forecaster.of(
            NOTHING_KNOWN, Hints(), scheduler.durations, last=False
        ).returned_tokens
        self.keys: list[str] = []
        self.on_device: list[str] = []
        self.on_host: list[str] = []
        self.returning = 0.0
        """Expected number of programs that come back at all."""
        self.back = self.back_tokens = 0.0
        """Expected number of programs that are back within the refill time, and tokens of their KV."""
        self.active = self.active_tokens = 0.0
        """Expected number of programs that are back within ACTIVE_WITHIN_S, and tokens of their KV."""
        self.missing_tokens = [0.0] * len(HORIZONS_S)
        """Expected tokens to compute for programs that are back within each of HORIZONS_S."""

    def add(self, program: ProgramState) -> None:
        """Count a program: its KV memory, when it is expected back, and the tokens that it will need then."""
        scheduler, key, context_tokens = self._scheduler, program.key, max(1, program.context_tokens)
        prefix = scheduler.cached_prefixes.get(key)
        held = scheduler.holds.get(key)
        forecast = prefix.forecast if prefix is not None else None
        device = held.tokens if held is not None else cached_tokens(prefix, self._cached)
        host, disk = scheduler.swapping.tokens_of(key), scheduler.swapping.disk_tokens_of(key)
        back = self._estimator.of(program, forecast)
        self.keys.append(key)
        if device >= MOSTLY * context_tokens:
            self.on_device.append(key)
        elif host >= MOSTLY * context_tokens:
            self.on_host.append(key)
        self.returning += back.returns
        taken_tokens = context_tokens - (1.0 - self._distinct) * min(device, context_tokens)
        refilled, active = back.within[0], back.within[1 + HORIZONS_S.index(ACTIVE_WITHIN_S)]
        self.back += refilled
        self.back_tokens += taken_tokens * refilled
        self.active += active
        self.active_tokens += taken_tokens * active
        returned = forecast.returned_tokens if forecast is not None else self._returned
        missing = max(0, context_tokens - max(device, host, disk)) + returned
        for number, probability in enumerate(back.within[1:]):
            self.missing_tokens[number] += missing * probability
