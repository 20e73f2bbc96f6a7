"""AgentScheduler: vLLM's scheduler, taught that turns belong to programs. It adapts; policies decide.

Written for vLLM 0.29.0. Of ``AsyncScheduler`` it overrides, and tests pin:
    __init__, shutdown                      own state
    add_request, _free_blocks               a turn arrives; a turn has ended: hold or free its blocks
    schedule, update_from_output            holds, ranks and budget before; how long the step takes
    _update_request_with_output             when a turn's first token came
    _select_waiting_queue_for_scheduling    one order over both of vLLM's waiting queues
    reset_prefix_cache                      held blocks would make it fail
(what it uses beside these: `replicas.swapping`, for the host tier; `replicas.tally`, to count; `replicas.prefills`)
and of ``KVCacheManager`` it wraps
    allocate_slots                          admissions are seen here; short of memory, holds are broken until it fits
and sets its watermark_blocks, as the policy says. (Grammars of resumed turns: `replicas.resumed_grammar`.)
Subclassing AsyncScheduler also serves synchronous engines; subclassing Scheduler would turn async scheduling off.

Invariants (``check_integrity``): every block is free, owned by a request, or owned by a hold; a program has a hold
exactly in the phases HELD and RESUMING, and a fetch exactly in FETCHING; every request has one Turn or is a fetch.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

import replicas.control
from cluster.clock import Clock, MonotonicClock
from cluster.config import PolicyConfig
from cluster.errors import IntegrityError
from cluster.lifecycle import Phase, ProgramState
from cluster.lifecycle_events import (
    Action,
    Admitted,
    CancelFetch,
    Conclude,
    Decide,
    Event,
    Fetch,
    FreeHold,
    Held,
    HoldEnded,
    Observe,
    Released,
    Swapped,
    TurnAborted,
    TurnArrived,
)
from cluster.statistics import DurationTable
from replicas import turns, views
from replicas.forecasts import Forecaster
from replicas.hold_table import HoldOrigin, HoldTable
from replicas.policy import Forecast, Hold, PauseView, RankKey, Swap
from replicas.prefills import Prefills
from replicas.program_table import ProgramTable
from replicas.remains import MAX_REMAINS, Remains
from replicas.resumed_grammar import advance_grammars
from replicas.room import claimant_of, leaves_room, yielding
from replicas.settings import SchedulerSettings, build_policy
from replicas.step_pace import StepPace
from replicas.suspect import Unproven
from replicas.swapping import Swapping
from replicas.tally import Decision, Tally
from replicas.traced import Traced
from replicas.turns import Turn
from replicas.waiting_queue import EQUAL, LOADED, RankedQueue

SWEEP_PERIOD_S = 10.0
"""How often programs are looked over for those that will not come back."""


class AgentScheduler(AsyncScheduler):
    """One replica's scheduler. Its clock and policy may be replaced between steps."""

    clock: Clock = MonotonicClock()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = SchedulerSettings.of(self.vllm_config.additional_config)
        self.holds: HoldTable[KVCacheBlock] = HoldTable(self._give_back)
        self.programs = ProgramTable(self.settings.control.max_programs, self.settings.control.idle_program_s)
        self.durations = DurationTable()
        self.waiting = RankedQueue(self._rank)
        self.skipped_waiting = RankedQueue(self._rank)
        self._stale_ranks: list[str] = []
        self.counters: Counter[str] = Counter()
        self.turns: dict[str, Turn] = {}
        self.tool_names = turns.tool_name_reader(self.vllm_config.model_config, self.settings.tool_parser)
        self._next_sweep_s = 0.0
        self.lost_queue, self.on_time = turns.RecentMean(), turns.RecentMean()
        self.forecaster = Forecaster()
        self.pause_forecasts: dict[str, Forecast] = {}
        self.remains = Remains(self.hash_block_size, MAX_REMAINS)
        self.swapping = Swapping(self)
        self.facts = views.replica_facts(self)
        self.prefills = Prefills(self)
        self.pace = StepPace(self)
        self.load = views.load_view(self)
        self.tally, self.traced = Tally(self), Traced()
        self.unproven = Unproven(self.requests)
        self.kv_cache_manager.allocate_slots = self._breaking_holds(self.kv_cache_manager.allocate_slots)
        advance_grammars(self.structured_output_manager)
        self.use_policy(self.settings.policy)

    def use_policy(self, policy: PolicyConfig) -> None:
        """Decide by another policy from now on. Holds end: they are promises of the policy that made them."""
        self.policy_config, self.policies = policy, build_policy(policy)
        self.guards_memory = self.policies.guards_memory
        reserve_share = max(self.policies.reserve_share, self.scheduler_config.watermark)
        self.kv_cache_manager.watermark_blocks = int(reserve_share * self.kv_cache_config.num_blocks)
        for key in [held.key for held in self.holds]:
            self.apply(key, HoldEnded(self.clock.now_s(), "policy switch"))
        for queue in (self.waiting, self.skipped_waiting):
            queue.late_from = self.policies.late_rank
            queue.rerank_all()

    # --- a turn's way -------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Accept a turn: its program runs again, and the length of its pause is known."""
        if request.request_id not in self.requests:
            turn = self.turns[request.request_id] = turns.turn_of(self, request)
            if turn.key is not None:
                self._arrive(request, turn, turn.key)
        super().add_request(request)

    def _arrive(self, request: Request, turn: Turn, key: str) -> None:
        before = self.programs.get(key)
        self.apply(key, TurnArrived(turn.arrived_s, last=turn.identity.last_turn))
        self.holds.returned(key)
        if before is not None and before.active == 0:
            self.forecaster.tools_returned(key, max(0, request.num_tokens - before.context_tokens))
        turn.features = views.features_of(turn, self.programs[key], request.num_tokens)
        turn.forecast = views.forecast_of(self, turn)
        self.swapping.arrives(request, key, turn.forecast)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step: end and review holds, order prompts and what waits anew, set the budget, let vLLM schedule."""
        self.expire(self.clock.now_s())
        self.swapping.step()
        self.load = views.load_view(self)
        self.prefills.line_up()
        self._review_holds()
        if (refresh_steps := self.policies.order.refresh_steps) is not None:
            self.waiting.refresh(refresh_steps)
            self.skipped_waiting.refresh(refresh_steps)
        budget = self.policies.budget.tokens(self.load)
        self.max_num_scheduled_tokens = min(max(1, budget), self.facts.max_tokens)
        output: SchedulerOutput = super().schedule(throttle_prefills)
        self.pace.began(output)
        self.tally.step_began(output)
        self.unproven.began(output)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """A step has ended: policies reckon with the pace that the replica really has."""
        self.tally.step_ended(scheduler_output, self.pace.ended(scheduler_output))
        return super().update_from_output(scheduler_output, model_runner_output)

    def _review_holds(self) -> None:
        """Ask again what becomes of the programs that are held and whose pause lasts: a share of them in each step."""
        if (review_steps := self.policies.pause.review_steps) is None:
            return
        for held in self.holds.due(review_steps):
            if held.origin is not HoldOrigin.POLICY:  # what somebody asked for lasts as long as they asked
                continue
            decision = self.policies.pause.review(views.hold_view(self, held))
            if isinstance(decision, Swap) and self._swaps_out(held.key):
                self.apply(held.key, Swapped(self.load.now_s, decision.reason))
            elif not isinstance(decision, Hold):
                self.apply(held.key, HoldEnded(self.load.now_s, decision.reason))
            elif decision.until_s != held.until_s:
                self.holds.extend(held.key, min(decision.until_s, held.since_s + self.settings.control.hold_limit_s))

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """The tokens of a step have come: note when a turn's first one did."""
        if new_token_ids and not request.num_output_tokens:
            self.turns[request.request_id].first_token_s = self.clock.now_s()
        updated: tuple[list[int], bool] = super()._update_request_with_output(request, new_token_ids, is_stale)
        return updated

    def _free_blocks(self, request: Request) -> None:
        """A turn has ended: its program pauses, and the policy says whether its blocks stay; or it is over."""
        turn = self.turns.pop(request.request_id, None)
        if turn is None:
            self.swapping.freed(request)
        else:
            self.swapping.ends(request)
            self.tally.ended(request, turn)
            if turn.key is not None:
                self._end_turn(request, turn, turn.key)
        if request.request_id in self.requests:  # no hold has taken its blocks
            super()._free_blocks(request)

    def _end_turn(self, request: Request, turn: Turn, key: str) -> None:
        now_s = self.clock.now_s()
        decision = "released"
        tools: tuple[str, ...] = ()
        # A turn that never ran its course (aborted, refused, failed) leaves nothing that the program could go on from.
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            tools = turns.tools_of(self, request, turn)
            for action in self.apply(key, turns.ended(self, self.programs[key], request, turn, tools)):
                if isinstance(action, Decide):
                    decision = self._decide(request, turn, key)
        else:
            self.apply(key, TurnAborted(now_s))
        story = turns.story_of(request, turn, now_s, tools, decision)
        self.programs.tell(key, story)
        self.traced.turn_ended(turn, story, now_s)

    def _decide(self, request: Request, turn: Turn, key: str) -> str:
        """Ask the pause policy and do as it says; what was decided, in words."""
        now_s = self.clock.now_s()
        # The last token was sampled but not computed; an asynchronous engine counts it early.
        context_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        pause = views.pause_view(self, self.programs[key], turn, context_tokens)
        self.swapping.pauses(request, key, context_tokens, pause.forecast)
        self.remains.keep(key, request.block_hashes, context_tokens, pause.forecast)
        decision = self.policies.pause.decide(pause)
        if isinstance(decision, Hold):
            self.traced.hold_began(key, turn)
            return self._hold(request, key, pause, decision)
        if isinstance(decision, Swap) and self._swaps_out(key, request):
            self.apply(key, Swapped(now_s, decision.reason))
            self.tally.paused(Decision.SWAP, decision.reason)
            return f"swapped ({decision.reason})"
        self.apply(key, Released(now_s, decision.reason))
        self.tally.paused(Decision.RELEASE, decision.reason)
        return f"released ({decision.reason})"

    def _hold(self, request: Request, key: str, pause: PauseView, decision: Hold) -> str:
        now_s = pause.now_s
        until_s = max(now_s, min(decision.until_s, now_s + self.settings.control.hold_limit_s))
        origin = HoldOrigin.POLICY if pause.hints.retention_s is None else HoldOrigin.ASKED
        blocks = self.kv_cache_manager.pop_blocks_for_free(request)
        del self.requests[request.request_id]
        self.pause_forecasts[key] = pause.forecast
        self.tally.holds_change()
        self.holds.hold(key, blocks, pause.context_tokens, now_s, until_s, origin)
        self.apply(key, Held(now_s, until_s, decision.reason))
        self.tally.paused(Decision.HOLD, decision.reason)
        return f"held {until_s - now_s:.3f}s ({decision.reason})"

    def _swaps_out(self, key: str, request: Request | None = None) -> bool:
        """Does the host have what the policy wants swapped? Else it is released."""
        swaps = self.swapping.swaps_out(key, request)
        self.counters["swapped" if swaps else "swap_refused"] += 1
        return swaps

    # --- memory -------------------------------------------------------------------------------------------------------

    def _breaking_holds(
        self, allocate_slots: Callable[..., KVCacheBlocks | None]
    ) -> Callable[..., KVCacheBlocks | None]:
        """vLLM's allocate_slots; where it finds no memory, one hold after the other yields until it does.

        Called for every running turn at every step: a closure over the two names it needs, nothing else on that path.
        """
        running = RequestStatus.RUNNING

        def allocate(request: Request, num_new_tokens: int, **kwargs: Any) -> KVCacheBlocks | None:
            if request.status is not running and not leaves_room(self, self.policies.admission, request):
                return None
            blocks = allocate_slots(request, num_new_tokens, **kwargs)
            if blocks is not None and request.status is running:
                return blocks
            while blocks is None and self._break_a_hold(request):
                blocks = allocate_slots(request, num_new_tokens, **kwargs)
            if blocks is not None and request.status is not running:
                local, remote = kwargs.get("num_new_computed_tokens", 0), kwargs.get("num_external_computed_tokens", 0)
                self._admit(request, local, remote)
            return blocks

        return allocate

    def _admit(self, request: Request, local_tokens: int, remote_tokens: int) -> None:
        turn = self.turns[request.request_id]
        if turn.admitted_s is None:
            turn.admitted_s, turn.cached_tokens = self.clock.now_s(), local_tokens + remote_tokens
            self.tally.admitted(request, turn, local_tokens, remote_tokens)
            if turn.key is not None:
                program = self.programs[turn.key]
                if program.turns > 1 and program.phase is not Phase.RESUMING:
                    self.lost_queue.observe(turn.admitted_s - turn.arrived_s)
                self.apply(turn.key, Admitted(turn.admitted_s))

    def _break_a_hold(self, request: Request) -> bool:
        """Give the blocks of one hold back, if one yields to ``request``; its own program's goes last."""
        if not len(self.holds):
            return False
        claimant = claimant_of(self, request)
        key = yielding(self, self.policies.pause, claimant, self.turns[request.request_id].key)
        if key is None:
            return False
        self.apply(key, HoldEnded(self.clock.now_s(), f"broken for a {claimant.value} turn"))
        return True

    def expire(self, now_s: float) -> None:
        """End the holds whose time has come, unless their program's next turn waits already (Continuum 5.3)."""
        for key in self.holds.expired(now_s):
            program = self.programs.get(key)
            if program is not None and program.phase is Phase.HELD:
                self.apply(key, HoldEnded(now_s, "expired"))
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_PERIOD_S
            for key, actions in self.programs.sweep(now_s):
                self._act(key, actions)

    def _give_back(self, blocks: Any) -> None:
        self.kv_cache_manager.block_pool.free_blocks(blocks)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """End all holds, then as vLLM; ``reset_connector``: the host tier is emptied, too."""
        for key in [held.key for held in self.holds]:
            self.apply(key, HoldEnded(self.clock.now_s(), "cache reset"))
        if reset_connector:
            self.swapping.reset()
        return bool(super().reset_prefix_cache(reset_running_requests, reset_connector and self.swapping.may_reset))

    def shutdown(self) -> None:
        """End all holds, then as vLLM."""
        for key in [held.key for held in self.holds]:
            self.holds.release(key)
        super().shutdown()

    # --- the lifecycle's actions --------------------------------------------------------------------------------------

    def apply(self, key: str, event: Event) -> tuple[Action, ...]:
        """Take a program through an event and do what follows; the actions, done already but for Decide."""
        actions = tuple(self.programs.apply(key, event))
        self._act(key, actions)
        self.swapping.follow(key, self.programs.get(key))
        return actions

    def _act(self, key: str, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case FreeHold(reason):
                    self.tally.hold_ends(key, reason)
                    self.holds.release(key)
                    self.pause_forecasts.pop(key, None)
                    self._rerank_turns(key, reason)
                case Fetch():
                    self.swapping.fetch(key)
                case CancelFetch():
                    self.swapping.cancel(key)
                case Observe(tool, seconds):
                    self.durations.observe(tool, seconds)
                case Conclude(_, served_tokens):
                    self.forecaster.program_ended(key, served_tokens)
                    self.swapping.forget(key)
                    self.remains.forget(key)

    def _rerank_turns(self, key: str, reason: str) -> None:
        """The program is no longer pinned: its turns that wait rank anew, before the next one is chosen.

        Not at once: between looking at the head of a queue and taking it, vLLM allocates, which may break a hold.
        """
        program = self.programs.get(key)
        if program is None or program.active <= (1 if reason == "used" else 0):
            return
        self._stale_ranks.extend(request_id for request_id, turn in self.turns.items() if turn.key == key)

    # --- views --------------------------------------------------------------------------------------------------------

    def _rank(self, request: Request) -> RankKey:
        if request.num_computed_tokens:
            return LOADED
        return self.policies.order.key(views.turn_view(self, request)) or EQUAL

    def _select_waiting_queue_for_scheduling(self) -> RequestQueue | None:
        """The queue whose head ranks first; skipped turns before equals, as vLLM's FCFS has it."""
        if self._stale_ranks:
            self.waiting.rerank(self._stale_ranks)
            self.skipped_waiting.rerank(self._stale_ranks)
            self._stale_ranks.clear()
        if self.waiting and self.skipped_waiting:
            ahead = self.waiting.peek_rank() < self.skipped_waiting.peek_rank()
            return self.waiting if ahead else self.skipped_waiting
        return self.skipped_waiting or self.waiting or None

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the invariants above hold."""
        self.holds.check_integrity()
        if self.turns.keys() | self.swapping.request_ids != self.requests.keys():
            raise IntegrityError(f"turns {sorted(self.turns)} but requests {sorted(self.requests)}")
        self.swapping.check_integrity()
        for held in self.holds:
            program: ProgramState | None = self.programs.get(held.key)
            if program is None or program.phase not in (Phase.HELD, Phase.RESUMING):
                raise IntegrityError(f"{held.key} is held but {program and program.phase}")


replicas.control.install()
