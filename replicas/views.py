"""The frozen views that a scheduler gives its policies."""

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from cluster.lifecycle import Phase, ProgramState, begin
from cluster.program import tool_key
from replicas.forecasts import Features
from replicas.hold_table import HeldBlocks, HoldOrigin
from replicas.policy import Forecast, HoldView, KvPlace, LoadView, PauseView, ReplicaFacts, TurnView

if TYPE_CHECKING:
    from replicas.scheduler import AgentScheduler
    from replicas.turns import Turn


def replica_facts(scheduler: "AgentScheduler") -> ReplicaFacts:
    """Taken once, at the start."""
    pool = scheduler.kv_cache_manager.block_pool
    return ReplicaFacts(
        cost=scheduler.settings.cost,
        slo=scheduler.settings.slo,
        capacity_tokens=(pool.num_gpu_blocks - 1) * scheduler.block_size,
        max_tokens=int(scheduler.max_num_scheduled_tokens),
        host_tokens=scheduler.swapping.capacity_tokens,
    )


def load_view(scheduler: "AgentScheduler") -> LoadView:
    """The replica now."""
    free = int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks()) * scheduler.block_size
    # What is being fetched is going to be a hold.
    held = scheduler.holds.num_tokens + scheduler.swapping.fetching_tokens
    return LoadView(
        facts=scheduler.facts,
        now_s=scheduler.clock.now_s(),
        step=scheduler.current_step,
        running=len(scheduler.running),
        running_tokens=max(0, scheduler.facts.capacity_tokens - free - held),
        waiting=len(scheduler.waiting) + len(scheduler.skipped_waiting),
        held_tokens=held,
        free_tokens=free,
        on_time_share=scheduler.on_time.mean,
        waiting_late=scheduler.waiting.late + scheduler.skipped_waiting.late,
        lost_queue_s=scheduler.lost_queue.mean,
        prefill_tokens=scheduler.prefills.tokens,
    )


def features_of(turn: "Turn", program: ProgramState, prompt_tokens: int) -> Features:
    """What is known of a turn when it arrives; ``program`` as it is then."""
    last_tool = turn.identity.hints.last_tool or (tool_key(program.tools) if program.turns > 1 else "")
    return Features.of(last_tool, program.turns - 1, prompt_tokens)


def forecast_of(scheduler: "AgentScheduler", turn: "Turn") -> Forecast:
    """Hints first, then the predictor's, then what was learnt here."""
    identity = turn.identity
    last = turn.key is None or identity.last_turn
    return scheduler.forecaster.of(turn.features, identity.hints, scheduler.durations, last, identity.forecast)


def turn_view(scheduler: "AgentScheduler", request: Request) -> TurnView:
    """A turn that waits."""
    turn = scheduler.turns[request.request_id]
    program = scheduler.programs.get(turn.key) if turn.key is not None else None
    held = scheduler.holds.get(turn.key) if turn.key is not None else None
    place, there = (KvPlace.HELD, held.tokens) if held else (KvPlace.NONE, 0)
    if held is None and turn.key is not None and (there := scheduler.swapping.tokens_of(turn.key)):
        place = KvPlace.SWAPPED
    tokens = request.num_tokens
    return TurnView(  # by position: made for many turns in every step, and by name it takes half as long again
        program or begin(request.request_id, turn.arrived_s),
        turn.identity.hints,
        turn.forecast,
        scheduler.load,
        turn.arrived_s,
        turn.arrived_step,
        tokens,
        min(there, tokens),
        request.status is RequestStatus.PREEMPTED,
        place,
        request.num_output_tokens,
        turn.first_token_s,
    )


def prefill_view(scheduler: "AgentScheduler", request: Request) -> TurnView:
    """A turn that was admitted and whose prompt is not all computed."""
    return replace(turn_view(scheduler, request), cached_tokens=request.num_computed_tokens, kv=KvPlace.HELD)


def pause_view(scheduler: "AgentScheduler", program: ProgramState, turn: "Turn", context_tokens: int) -> PauseView:
    """A program whose turn has just ended: which tools it asked for is known now."""
    hints = turn.identity.hints
    asked = replace(hints, expected_tool=tool_key(program.tools))
    return PauseView(
        program=program,
        hints=hints,
        forecast=scheduler.forecaster.of(
            turn.features, asked, scheduler.durations, last=False, foreseen=turn.identity.forecast
        ),
        load=load_view(scheduler),
        tools=program.tools,
        context_tokens=context_tokens,
        durations=scheduler.durations,
        average_turns=scheduler.programs.average_turns,
    )


def hold_view(scheduler: "AgentScheduler", held: HeldBlocks[KVCacheBlock]) -> HoldView:
    """A hold."""
    program = scheduler.programs[held.key]
    return HoldView(
        program=program,
        forecast=scheduler.pause_forecasts[held.key],
        load=scheduler.load,
        durations=scheduler.durations,
        context_tokens=held.tokens,
        since_s=held.since_s,
        until_s=held.until_s,
        owner_waits=program.phase is Phase.RESUMING,
        asked=held.origin is HoldOrigin.ASKED,
    )
