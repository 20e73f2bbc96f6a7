"""What a replica says of itself to the router: its scheduler's state now, and what is expected of its programs.

Made once a second between two steps, so its cost is bounded: waiting turns and paused programs beyond a number are not
looked at one by one. A paused program counts for as much as it is likely to come back (`replicas.comebacks`): one that
ended without saying so fades away by itself.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from cluster.lifecycle import ProgramState
from cluster.program import Hints
from cluster.routing import ReplicaSnapshot, StepCosts, pack_names
from cluster.statistics import DurationTable
from replicas import views
from replicas.comebacks import Comebacks
from replicas.cost_model import CostModel
from replicas.forecasts import NOTHING_KNOWN, Forecaster
from replicas.remains import is_cached, leading_blocks, tokens_left

if TYPE_CHECKING:
    from replicas.scheduler import AgentScheduler

HORIZONS_S = (1.0, 5.0, 30.0)
"""Of `ReplicaSnapshot.resume_tokens`."""
ACTIVE_WITHIN_S = HORIZONS_S[1]
"""Who comes back later than that takes part in few of the next iterations."""
MAX_PAUSED = 2048
"""Paused programs that are looked at, those that paused last first."""
MAX_WAITING = 256
"""Waiting turns of which is looked up what is cached of their prompts; of the others, the same share is."""
MOSTLY = 0.5
"""A program's KV is where at least so much of it is."""


def routing_snapshot(
    scheduler: "AgentScheduler", replica: str, model: str, number: int, draining: bool
) -> ReplicaSnapshot:
    """An AgentScheduler's replica, now; between two steps. ``prefixes`` are for `replicas.prefix_memory` to add."""
    load = views.load_view(scheduler)
    in_flight = _InFlight(scheduler, scheduler.swapping.tokens_of)
    for request in _requests(scheduler):
        turn = scheduler.turns[request.request_id]
        put_off = any(queue.puts_off(request.request_id) for queue in (scheduler.waiting, scheduler.skipped_waiting))
        in_flight.add(request, turn.key, turn.forecast.output_tokens, put_off=put_off)
    used_tokens = load.facts.capacity_tokens - load.free_tokens
    distinct = _distinct_share(used_tokens, in_flight.running_tokens + load.held_tokens)
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
        # As given: by the pace that each has learnt, small differences would send every program to one replica.
        costs=step_costs(scheduler.settings.cost),
        kv_tokens=load.facts.capacity_tokens,
        free_tokens=load.free_tokens,
        held_tokens=load.held_tokens,
        host_tokens=load.facts.host_tokens,
        host_used_tokens=scheduler.swapping.used_tokens,
        running=load.running,
        waiting=load.waiting - load.waiting_late,
        put_off=load.waiting_late,
        guards_memory=scheduler.guards_memory,
        running_tokens=in_flight.running_tokens,
        waiting_tokens=in_flight.missing_tokens(),
        output_tokens=in_flight.output_tokens,
        programs=in_flight.count + round(paused.alive),
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
    )


def plain_snapshot(
    scheduler: Scheduler, cost: CostModel, replica: str, model: str, number: int, draining: bool
) -> ReplicaSnapshot:
    """The same of vLLM's own scheduler: it knows no programs, and every turn counts as one; nothing is learnt."""
    pool = scheduler.kv_cache_manager.block_pool
    capacity_tokens = (pool.num_gpu_blocks - 1) * scheduler.block_size
    free_tokens = int(pool.get_num_free_blocks()) * scheduler.block_size
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
        kv_tokens=capacity_tokens,
        free_tokens=free_tokens,
        held_tokens=0,
        host_tokens=0,
        host_used_tokens=0,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting) + len(scheduler.skipped_waiting),
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
    """What the router is told of a cost model."""
    return StepCosts(
        overhead_s=cost.overhead_s,
        sequence_s=cost.sequence_s,
        weights_s=cost.weights_s,
        token_s=cost.token_s,
        context_s=cost.context_s,
        swap_token_s=cost.swap_token_s,
    )


def _requests(scheduler: Scheduler) -> Iterable[Request]:
    return chain(scheduler.running, scheduler.waiting, scheduler.skipped_waiting)


def _distinct_share(used_tokens: int, counted_tokens: int) -> float:
    """Of the contexts that are in memory, added up, what they take there: shared prefixes are there once."""
    return min(1.0, used_tokens / counted_tokens) if counted_tokens and used_tokens > 0 else 1.0


@dataclass(slots=True)
class _Place:
    """Where the KV of a program with turns in flight is: shares of its turn that has most of it there."""

    device: float = 0.0
    host: float = 0.0


class _InFlight:
    """All turns that run or wait, added up.

    Args:
        scheduler: whose turns they are.
        host_tokens: how much of a program's context the host has.
    """

    def __init__(self, scheduler: Scheduler, host_tokens: Callable[[str], int]) -> None:
        self._cached = is_cached(scheduler)
        self._block_tokens = scheduler.hash_block_size
        self._running = {request.request_id for request in scheduler.running}
        self._host_tokens = host_tokens
        self._looked_at = self._known_tokens = self._missing_tokens = self._unknown_tokens = 0
        self._prefill_tokens = 0
        self._tokens = 0
        self._lone = self._lone_put_off = 0
        self._pressing: set[str] = set()
        self.running_tokens = 0
        """KV of running turns."""
        self.output_tokens = 0.0
        self.programs: dict[str, _Place] = {}
        """By key, those that have one."""

    def add(self, request: Request, key: str | None, output_tokens: float, *, put_off: bool = False) -> None:
        """One turn, expected to generate so many tokens in all; ``put_off``: it takes only what the others leave."""
        if put_off:
            if key is None:
                self._lone_put_off += 1
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
            there = max(there, leading_blocks(request.block_hashes, self._cached) * self._block_tokens)
            self._known_tokens += tokens
            self._missing_tokens += max(1, tokens - max(there, host))
        else:
            self._unknown_tokens += tokens
        self._tokens += tokens
        self.output_tokens += max(1.0, min(output_tokens, request.max_tokens) - request.num_output_tokens)
        if key is None:
            self._lone += 1
            return
        self._pressing.add(key)
        place = self.programs.setdefault(key, _Place())
        place.device, place.host = max(place.device, there / tokens), max(place.host, host / tokens)

    @property
    def count(self) -> int:
        """Programs; a turn of none is one."""
        return len(self.programs) + self._lone + self._lone_put_off

    @property
    def pressing(self) -> int:
        """Of these, those of which not all turns are put off."""
        return len(self._pressing) + self._lone

    def missing_tokens(self) -> int:
        """Prompt tokens that are to be computed."""
        share = self._missing_tokens / self._known_tokens if self._known_tokens else 1.0
        return self._prefill_tokens + self._missing_tokens + round(share * self._unknown_tokens)

    def final_tokens(self, distinct: float) -> float:
        """KV of all of them at their ends; ``distinct``: see `_distinct_share`."""
        return self._tokens + self.output_tokens - (1.0 - distinct) * self.running_tokens

    def where(self, *, device: bool) -> Iterator[str]:
        """Keys of programs that are mostly on the device, or else on the host."""
        for key, place in self.programs.items():
            on_device = place.device >= MOSTLY
            if on_device if device else not on_device and place.host >= MOSTLY:
                yield key


class _Paused:
    """Programs without a turn in flight, each weighted by the chance that it comes back."""

    def __init__(self, scheduler: "AgentScheduler", distinct: float) -> None:
        self._scheduler = scheduler
        self._distinct = distinct
        self._cached = is_cached(scheduler)
        now_s, horizons_s = scheduler.clock.now_s(), (scheduler.facts.cost.refill_s, *HORIZONS_S)
        self._comebacks = Comebacks(scheduler.durations, scheduler.programs.abandoned, now_s, horizons_s)
        self._returned = scheduler.forecaster.of(
            NOTHING_KNOWN, Hints(), scheduler.durations, last=False
        ).returned_tokens
        self.keys: list[str] = []
        self.on_device: list[str] = []
        self.on_host: list[str] = []
        self.alive = 0.0
        """How many are expected to come back at all."""
        self.back = self.back_tokens = 0.0
        """How many are expected back within the refill time, and their KV."""
        self.active = self.active_tokens = 0.0
        """The same within ACTIVE_WITHIN_S."""
        self.missing_tokens = [0.0] * len(HORIZONS_S)
        """What those expected back within each of HORIZONS_S will need computed."""

    def add(self, program: ProgramState) -> None:
        """One more."""
        scheduler, key, context_tokens = self._scheduler, program.key, max(1, program.context_tokens)
        left = scheduler.remains.get(key)
        held = scheduler.holds.get(key)
        forecast = left.forecast if left is not None else None
        device = held.tokens if held is not None else tokens_left(left, self._cached)
        host = scheduler.swapping.tokens_of(key)
        back = self._comebacks.of(program, forecast)
        self.keys.append(key)
        if device >= MOSTLY * context_tokens:
            self.on_device.append(key)
        elif host >= MOSTLY * context_tokens:
            self.on_host.append(key)
        self.alive += back.alive
        taken_tokens = context_tokens - (1.0 - self._distinct) * min(device, context_tokens)
        refilled, active = back.within[0], back.within[1 + HORIZONS_S.index(ACTIVE_WITHIN_S)]
        self.back += refilled
        self.back_tokens += taken_tokens * refilled
        self.active += active
        self.active_tokens += taken_tokens * active
        returned = forecast.returned_tokens if forecast is not None else self._returned
        missing = max(0, context_tokens - max(device, host)) + returned
        for number, probability in enumerate(back.within[1:]):
            self.missing_tokens[number] += missing * probability
