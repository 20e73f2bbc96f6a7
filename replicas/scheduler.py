"""AgentScheduler: vLLM's scheduler for turns that belong to programs. It carries out what the policies decide.

It is written for vLLM 0.29.0, and `replicas.vllm_versions` has what differs in newer versions. It overrides these
methods of ``AsyncScheduler``, which tests pin:
    __init__, shutdown                      the state of this class
    add_request, _free_blocks               a turn arrives; a turn has ended and its blocks are held or freed
    schedule, update_from_output            holds, ranks and budget before a step; the duration of the step
    _update_request_with_output             the time of a turn's first token
    _preempt_request                        a preemption resets the progress that is recorded here
    reset_prefix_cache                      held blocks would make it fail
    has_requests                            steps that compute a held program's next prompt early

It also sets the KV cache manager's watermark_blocks to the policy's value. All other code that changes vLLM is in
`replicas.vllm_patches`. A subclass of AsyncScheduler also serves synchronous engines; a subclass of Scheduler would
turn async scheduling off.

The parts (programs, holds, views, swapping, statistics, ...) own their state, and get what they need as named
arguments. The engine's process has to import `replicas.control`, which adds the side channel.

Invariants (``check_integrity``): every block is free, owned by a request, or owned by a hold. A program has a hold
exactly in the phases HELD and RESUMING, and a fetch exactly in FETCHING. Every request has one Turn, is a fetch, or is
of early prefill.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from cluster.config.schema import PolicyConfig
from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import IntegrityError
from cluster.core.lifecycle.events import (
    Action,
    Admitted,
    Decide,
    Event,
    Held,
    HoldEnded,
    PauseReason,
    Released,
    ReleaseReason,
    Swapped,
    TurnAborted,
    TurnArrived,
)
from cluster.core.lifecycle.machine import Phase
from cluster.core.program import USER_REPLY, ProgramIdentity
from cluster.core.turn_tokens import INITIAL_WEIGHTS
from cluster.durations.table import DurationTable
from replicas.adapter_slots import AdapterSlots
from replicas.bills import Bills
from replicas.cached_prefix import CachedPrefixes, is_cached
from replicas.crash_attribution import CrashAttribution
from replicas.duration_sync import DurationChanges
from replicas.early_prefill import EarlyPrefill, SchedulerCalls
from replicas.engine_costs import settings_of
from replicas.eviction import Eviction
from replicas.forecasts import Forecaster
from replicas.gpu_time import GpuTimes
from replicas.hold_reviews import HoldReviews, decide
from replicas.hold_table import HoldOrigin, HoldTable
from replicas.kv_groups import KvGroups
from replicas.lifecycle_actions import LifecycleActions
from replicas.policy import Forecast, Hold, LoadView, PauseView, RankKey, Release, ReplicaFacts, Swap
from replicas.preemption import Preemption
from replicas.prefill_scheduling import Head, PrefillScheduling, drafted_tokens, head_of
from replicas.program_table import KvDecision, ProgramTable, TurnRecord
from replicas.program_trees import Ahead, ProgramTrees
from replicas.rewritten_context import ReturningOutputs, computed_tokens
from replicas.settings import build_policy
from replicas.single_flight import SingleFlight
from replicas.stats import Stats
from replicas.step_pace import StepPace
from replicas.swapping import LoadCalls, Swapping
from replicas.turn_reports import TurnReports
from replicas.turns import RecentMean, Turn, ended_event, read_identity, record_of, tool_name_reader, tools_of
from replicas.views import Views, features_of
from replicas.vllm_patches import (
    FoundContext,
    LoadingScheduler,
    advance_grammars,
    share_compilation,
    wrap_allocate_slots,
)
from replicas.waiting_queue import EQUAL, LAST, LOADED, Ranked, RankedQueue, first_admissible


class AgentScheduler(LoadingScheduler):
    """One replica's scheduler. Its clock and its policy may be replaced between steps."""

    clock: Clock = MonotonicClock()
    facts: ReplicaFacts
    weights_version = INITIAL_WEIGHTS
    max_num_scheduled_tokens: int
    """vLLM's attribute: the token budget of a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cache, layout = self.kv_cache_manager, self.kv_cache_config
        self.groups = KvGroups.of(layout, self.hash_block_size, caching=cache.enable_caching)
        self.settings = settings_of(self.vllm_config, layout, self.groups)
        pool, control = cache.block_pool, self.settings.limits
        self.holds: HoldTable[KVCacheBlock] = HoldTable(pool.free_blocks)
        self.programs, self.trees = ProgramTable(control.max_programs, control.program_ttl_s), ProgramTrees()
        self.durations, self.duration_changes = DurationTable(), DurationChanges()
        self.waiting_queues = tuple(
            RankedQueue(self._rank, lambda one: self.views.missing_tokens(one)) for _ in range(2)
        )
        self.counters: Counter[str] = Counter()
        self.turns: dict[str, Turn] = {}
        self.tool_names = tool_name_reader(self.vllm_config.model_config, self.settings.tool_parser)
        self.lost_queue, self.forecaster, self.prefill_scheduling = RecentMean(), Forecaster(), PrefillScheduling()
        self.cached_prefixes = CachedPrefixes(self.groups.block_tokens)
        self.returning_outputs = ReturningOutputs(self.hash_block_size)
        self.single_flight = SingleFlight(pool, self.prefill_scheduling.is_late, self.counters)
        self._prompt_tokens = self.scheduler_config.long_prefill_token_threshold
        self.pace = StepPace(self.settings.cost, self._now_s, self.requests)
        self._pace_scale = self.pace.scale
        self.swapping = Swapping(
            connector=self.connector,
            groups=self.groups,
            now_s=self._now_s,
            cost=lambda: self.facts.cost,
            block_tokens=self.hash_block_size,
            programs=self.programs,
            apply=self.apply,
            counters=self.counters,
            calls=LoadCalls(
                register=self.register_load,
                find=self.find_context,
                fits=self._leaves_waiting_room,
                begin=self.begin_load,
                complete=self.complete_load,
                free=self._free_request,
                abort=self.abort_load,
                take_cached=self.take_cached,
                take_blocks=self.take_blocks,
                hold=self._hold_fetched,
            ),
        )
        self.facts = ReplicaFacts(
            cost=self.settings.cost,
            slo=self.settings.slo,
            capacity_tokens=self.groups.tokens_in(pool.num_gpu_blocks - 1),
            max_tokens=int(self.max_num_scheduled_tokens),
            host_tokens=self.swapping.capacity_tokens,
            prefix_cache=self.groups.caching,
        )
        self.views = Views(
            load=self.load_now(),
            turns=self.turns,
            programs=self.programs,
            trees=self.trees,
            holds=self.holds,
            swapping=self.swapping,
            forecaster=self.forecaster,
            durations=self.durations,
            block_tokens=self.block_size,
            bounds_of=lambda key: self.settings.bounds_of_program(key),
        )
        self.preemption = Preemption(self.views, self.kv_cache_manager.get_blocks, self.block_size)
        self.adapters = AdapterSlots(
            most=lambda: self.lora_config.max_loras if self.lora_config else 0,
            running=lambda: self.running,
            turns=self.turns,
            view=self.views.waiting,
        )
        self.reports, self.bills = TurnReports(), Bills()
        self.gpu_times = GpuTimes(
            facts=lambda: self.facts,
            requests=self.requests,
            turns=self.turns,
            owner_of=lambda request_id: self.early_prefill.owner_of(request_id),
            bill_of=self.bills.of,
        )
        self.stats = Stats(
            now_s=self._now_s,
            programs=self.programs,
            holds=self.holds,
            cached_prefixes=self.cached_prefixes,
            requests=self.requests,
            block_tokens=self.hash_block_size,
            starvation_s=control.starvation_s,
            gpu_times=self.gpu_times,
        )
        self.early_prefill = EarlyPrefill(
            enabled=self.groups.prefixes_stay and self.parallel_config.data_parallel_size == 1 and not cache.use_eagle,
            holds=self.holds,
            block_tokens=self.block_size,
            max_tokens=self.max_model_len,
            swapping=self.swapping,
            calls=SchedulerCalls(super().add_request, self.take_first, self.abort_load, self.stats.hold_changes),
        )
        self.lifecycle = LifecycleActions(
            now_s=self._now_s,
            programs=self.programs,
            trees=self.trees,
            holds=self.holds,
            turns=self.turns,
            swapping=self.swapping,
            early_prefill=self.early_prefill,
            cached_prefixes=self.cached_prefixes,
            returning_outputs=self.returning_outputs,
            durations=self.durations,
            duration_changes=self.duration_changes,
            forecaster=self.forecaster,
            stats=self.stats,
            counters=self.counters,
            block_tokens=self.block_size,
            prefixes_stay=self.groups.prefixes_stay,
            rerank=self._rerank_later,
        )
        self.crash_attribution = CrashAttribution(self.requests)
        self.eviction = Eviction(
            holds=self.holds,
            view=self.views.hold,
            program_of=lambda request: self.turns[request.request_id].key,
            anything_runs=lambda: self.anything_runs,
            end=lambda key, reason: self.apply(key, HoldEnded(self._now_s(), reason)),
            trim=self.lifecycle.trim if self.groups.prefixes_stay else None,
            note=self.gpu_times.evicted,
        )
        self.reviews = HoldReviews(self.holds, self.views.hold, self.swapping.swaps_out, self.apply, control.max_pin_s)
        wrap_allocate_slots(self.kv_cache_manager, self.groups, evict=self._evict, on_admitted=self._admit)
        advance_grammars(self.structured_output_manager)
        share_compilation(self.structured_output_manager)
        self.use_policy(self.settings.policy)

    def _now_s(self) -> float:
        return self.clock.now_s()

    def use_policy(self, policy: PolicyConfig) -> None:
        """Use another policy from now on. All holds end, because the previous policy decided them."""
        self.policy_config, self.policies = policy, build_policy(policy)
        reserve_share = max(self.policies.reserve_share, self.scheduler_config.watermark)
        self.kv_cache_manager.watermark_blocks = int(reserve_share * self.kv_cache_config.num_blocks)
        self._end_all_holds(ReleaseReason.POLICY_SWITCH)
        for queue in self.waiting_queues:
            queue.is_late = self.policies.is_late
            queue.rerank_all()

    # --- a step -------------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Choose what the next step computes: end expired holds, order the waiting turns, and let vLLM schedule."""
        self.expire_holds(self._now_s())
        self.swapping.step()
        self.views.load = self.load_now()
        if self.lora_config:
            self.adapters.step_begins(self.waiting_queues, self.policies.max_wait_s)
        if self.preemption.sheddable and self.may_preempt:
            self._preempt_sheddable()
        self._order_prefills()
        self.reviews.step(self.policies.pause, self.views.load.now_s)
        changed = self.trees.take_changed_turns()
        for queue in self.waiting_queues:  # ranks change with time, and with what is ahead of other programs
            queue.refresh(self.policies.order.refresh_steps, changed)
        budget, room = self.facts.max_tokens, 0
        if self.scheduler_config.enable_chunked_prefill:  # else vLLM never admits a prompt that is above the budget
            drafts = drafted_tokens(self.running) if self.num_spec_tokens else 0
            budget = min(max(1, self.policies.budget.tokens(self.views.load)) + drafts, budget)
            room = self.prefill_scheduling.make_room(self.running, self._head, budget=budget, step=self.current_step)
        self.max_num_scheduled_tokens = budget
        self.scheduler_config.long_prefill_token_threshold = min(filter(None, (room, self._prompt_tokens)), default=0)
        early = self._pause_state is PauseState.UNPAUSED and self.early_prefill.begin(self.views.load, self.running)
        self.max_num_scheduled_tokens = min(self.facts.max_tokens, early or self.max_num_scheduled_tokens)
        output: SchedulerOutput = super().schedule(throttle_prefills)
        self.single_flight.step_ends()
        self.pace.began(output)
        self.stats.step_began(output)
        self.crash_attribution.began(output)
        self.early_prefill.scheduled(output)
        return output

    def has_requests(self) -> bool:
        """Return whether the engine has to step: for a request, or for a prompt that can be computed early."""
        if self._pause_state is PauseState.PAUSED_ALL and not self.swapping.leaves:
            return self.has_device_work
        return super().has_requests() or (self.early_prefill.ready and self._pause_state is PauseState.UNPAUSED)

    def expire_holds(self, now_s: float) -> None:
        """End expired holds, unless the program's next turn is already waiting (Continuum, section 5.3)."""
        for key in self.holds.expired(now_s):
            if (program := self.programs.get(key)) is not None and program.phase is Phase.HELD:
                self.apply(key, HoldEnded(now_s, ReleaseReason.EXPIRED))
        self.lifecycle.sweep(now_s)

    def load_now(self) -> LoadView:
        """Return the replica's load now."""
        free = self.groups.tokens_in(int(self.kv_cache_manager.block_pool.get_num_free_blocks()))
        held_tokens = min(self.holds.num_tokens, self.groups.tokens_in(self.holds.num_blocks))
        held = held_tokens + self.swapping.fetching_tokens  # tokens that are being loaded will be held
        return LoadView(
            facts=self.facts,
            now_s=self._now_s(),
            step=self.current_step,
            running=len(self.running),
            running_tokens=sum(one.num_computed_tokens for one in self.running if not one.is_finished()),
            waiting=sum(len(queue) for queue in self.waiting_queues),
            held_tokens=held,
            free_tokens=free,
            waiting_late=sum(queue.late for queue in self.waiting_queues),
            waiting_tokens=sum(queue.tokens_in_time for queue in self.waiting_queues),
            lost_queue_s=self.lost_queue.mean,
            prefill_tokens=self.prefill_scheduling.tokens(self.running),
            disk_read_s=self.swapping.disk_read_s,
        )

    def _preempt_sheddable(self) -> None:
        policy, first = self.policies.preemption, self._first()
        if policy is not None and first is not None:
            self.preempt(self.preemption.victims(first.request, self.running, policy, full=self.is_full))
            self.views.load = self.load_now()

    def _order_prefills(self) -> None:
        changed = self.prefill_scheduling.order(
            self.running,
            rank=self._rank_running,
            ranked=self.policies.ranks_running or self.policies.is_late is not None,
            is_late=self.policies.is_late,
            tokens=self.views.load.prefill_tokens,
            yielding=self.preemption.yielding(self.running, self.policies.preemption),
        )
        if changed:
            self.views.load = replace(self.views.load, prefill_tokens=self.prefill_scheduling.tokens(self.running))

    def _rank_running(self, request: Request) -> RankKey:
        return self.policies.order.key(self.views.prefilling(request))

    def _first(self) -> Ranked | None:
        """Return the waiting turn that is admitted next of those that can be."""
        return first_admissible(self.waiting_queues, self.adapters.blocks if self.lora_config else None)

    def _head(self) -> Head | None:
        """Return the waiting turn that is admitted next, if it fits into free memory."""
        if (first := self._first()) is None:
            return None
        self.consider(first.request)
        cached = is_cached(self.kv_cache_manager.block_pool) if self.groups.prefixes_stay else None
        head = head_of(first, self.views.missing_tokens, cached, self.block_size)
        return head if head is not None and head.tokens <= self.views.load.free_tokens else None

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Process the end of a step. Policies use the replica's measured step times from now on."""
        self.stats.step_ended(scheduler_output, self.pace.ended(scheduler_output))
        if self.pace.scale != self._pace_scale:
            self._pace_scale = self.pace.scale
            self.facts = replace(self.facts, cost=self.pace.cost)
        return self.reports.attached(super().update_from_output(scheduler_output, model_runner_output))

    def _rank(self, request: Request) -> RankKey:
        if request.request_id not in self.turns:  # it is of early prefill
            return LAST
        if request.num_computed_tokens:
            return LOADED
        return self.policies.order.key(self.views.waiting(request)) or EQUAL

    def consider(self, request: Request) -> None:
        """Let vLLM skip the turn that it would admit next, if it should wait.

        It waits for memory, for another one's blocks, or for a slot of its adapter.
        """
        if self.lora_config and self.adapters.blocks(request):
            self.single_flight.skip(request)
            return
        passes = self.policies.skips_swapped and self.running and self.views.is_swapped(request)
        if passes and self.views.missing_tokens(request) > self.load_now().free_tokens:
            self.single_flight.skip(request)
        if self.policies.single_flight and self.groups.prefixes_stay:
            is_late = any(queue.puts_off(request.request_id) for queue in self.waiting_queues)
            self.single_flight.consider(request, self.running, is_late=is_late)

    # --- a turn's way -------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Accept a turn: its program runs again, and the length of its pause is known."""
        if request.request_id not in self.requests:
            try:
                identity = read_identity(request)
            except ValueError:
                self.counters["unreadable_identity"] += 1
                identity = ProgramIdentity()
            key = identity.key
            if key is None and request.session_id is not None:
                # Without Caesura's ingress in front (vLLM's own server, offline use) the session is the program.
                key = f"{identity.tenant}/{request.session_id}"
            turn = self.turns[request.request_id] = Turn(identity, key, self._now_s(), self.current_step)
            turn.bind(self.settings.bounds_of(identity), self.facts.alone_s(request.num_tokens, 0))
            turn.weights = (self.weights_version,)
            self.preemption.arrives(request.request_id, turn)
            if key is not None:
                self._arrive(request, turn, key)
        super().add_request(request)

    def _arrive(self, request: Request, turn: Turn, key: str) -> None:
        before = self.programs.get(key)
        turn.resumes = before is not None and before.last_served_s is not None
        self.apply(key, TurnArrived(turn.arrived_s, last=turn.identity.last_turn))
        if compacted := before is not None and before.active == 0:
            compacted = not self.lifecycle.keeps_prompt(request, key) and request.num_tokens < before.context_tokens
            if not compacted:
                new = max(0, request.num_tokens - before.context_tokens)
                turn.bind(self.settings.bounds_of(turn.identity), self.facts.alone_s(new, before.context_tokens))
                self.forecaster.tools_returned(key, new)
        self.holds.returned(key, turn.bounds)
        turn.features = features_of(turn, self.programs[key], request.num_tokens, compacted=compacted)
        turn.forecast = self.views.forecast(turn)
        self.swapping.arrives(request, key, turn.forecast)
        ahead = Ahead.of_turn(turn.arrived_s, request.num_tokens, self.views.missing_tokens(request), turn.forecast)
        self.trees.turn_arrived(key, request.request_id, ahead, turn.identity.parent_key, starts=before is None)

    def _admit(self, request: Request, local_tokens: int, remote_tokens: int) -> None:
        turn = self.turns.get(request.request_id)
        if turn is None:
            return
        now_s, preempted = self._now_s(), turn.waits_since_s is not None
        if first := turn.admitted(now_s):
            turn.cached_tokens = local_tokens + remote_tokens
            if turn.key is not None:
                turn.disk_tokens = min(turn.cached_tokens, self.swapping.loaded_tokens(turn.key))
                # The KV of a first turn was written by another replica.
                self.counters["arrived_with_kv"] += bool(turn.disk_tokens) and not turn.resumes
            self.stats.admitted(request, turn, local_tokens, remote_tokens)
            if turn.key is not None:
                if turn.resumes and self.programs[turn.key].phase is not Phase.RESUMING:
                    self.lost_queue.observe(turn.waited_s)
                self.apply(turn.key, Admitted(now_s))
        else:
            self.swapping.resumes(turn.key)
        if turn.key is not None and (preempted or (first and turn.resumes)):
            self.programs.waited(turn.key, self.current_step - turn.queued_step)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.stats.preempted(request)
        turn = self.turns[request.request_id]
        turn.preempted(self._now_s(), self.current_step)
        self.swapping.preempted(turn.key, int(request.num_computed_tokens))
        super()._preempt_request(request, *args, **kwargs)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Process the tokens of a step, and note the time of a turn's first token."""
        if new_token_ids and not request.num_output_tokens:
            turn = self.turns[request.request_id]
            turn.first_token_s = self._now_s()
            self.reports.note(request.request_id, turn)
        updated: tuple[list[int], bool] = super()._update_request_with_output(request, new_token_ids, is_stale)
        return updated

    def _free_blocks(self, request: Request) -> None:
        """Process the end of a turn. Its program ends, or it pauses and the policy decides about its blocks."""
        turn = self.turns.pop(request.request_id, None)
        self.preemption.ended(request.request_id)
        if turn is None:
            self.swapping.freed(request)
            self.early_prefill.freed(request)
        else:
            self.swapping.ends(request)
            self.reports.note(request.request_id, turn)
            self.stats.ended(request, turn)
            if turn.key is not None:
                self._end_turn(request, turn, turn.key)
        if request.request_id in self.requests:  # no hold has taken its blocks
            super()._free_blocks(request)

    def _end_turn(self, request: Request, turn: Turn, key: str) -> None:
        now_s = self._now_s()
        record = record_of(request, turn, now_s)
        self.trees.turn_ended(key, request.request_id)
        # A turn that did not complete (aborted, rejected, failed) leaves no context to continue from.
        if record.is_complete:
            record = replace(record, tools=tools_of(request, turn, self.tool_names))
            ended = ended_event(request, turn, record.tools, now_s)
            served_tokens = self.programs[key].served_tokens + ended.served_tokens
            self.forecaster.turn_ended(key, turn.features, ended.generated_tokens, served_tokens)
            for action in self.apply(key, ended):
                if isinstance(action, Decide):
                    record = self._decide(request, turn, key, record)
        else:
            self.trees.aborted(key, now_s)  # before the program may end, which would answer its parent
            self.apply(key, TurnAborted(now_s))
        self.programs.record(key, record)
        self.stats.traces.turn_ended(turn, record, now_s)

    # --- holds --------------------------------------------------------------------------------------------------------

    def _decide(self, request: Request, turn: Turn, key: str, record: TurnRecord) -> TurnRecord:
        """Ask the pause policy, and apply its decision. Return the record with the decision."""
        now_s = self._now_s()
        context_tokens = computed_tokens(request)
        if self.groups.prefixes_stay:
            known, by_user = (request.block_hashes, request.num_prompt_tokens), record.tools == (USER_REPLY,)
            context_tokens = self.returning_outputs.pauses(key, *known, context_tokens, user_answers=by_user)
        pause = self.views.pause(self.programs[key], turn, context_tokens, self.load_now())
        self.trees.paused(key, Ahead.of_pause(now_s, context_tokens, pause.forecast))
        if record.tools == (USER_REPLY,):
            self.lifecycle.child_ended(self.trees.answered(key, now_s))
        self.swapping.pauses(request, key, context_tokens, pause.forecast)
        pause = replace(pause, host_room=self.swapping.host_room(key), on_disk=self.swapping.will_be_on_disk(key))
        self.cached_prefixes.keep(key, self.groups.main_hashes(request.block_hashes), context_tokens, pause.forecast)
        decision = decide(self.policies, pause) if self.groups.caching else Release(PauseReason.NO_PREFIX_CACHE)
        hold_s = None
        if isinstance(decision, Hold):
            kv = KvDecision.HOLD
            self.stats.traces.hold_began(key, turn)
            hold_s = self._hold(request, key, pause, decision)
        elif isinstance(decision, Swap) and self.swapping.swaps_out(key, request, decision.place):
            kv = KvDecision.SWAP
            self.apply(key, Swapped(now_s, decision.reason))
        else:
            kv = KvDecision.RELEASE
            self.apply(key, Released(now_s, decision.reason))
        self.stats.paused(kv, decision.reason)
        return replace(record, decision=kv, reason=decision.reason, hold_s=hold_s)

    def _hold(self, request: Request, key: str, pause: PauseView, decision: Hold) -> float:
        """Hold the blocks of a turn that has ended. Return the length of the hold in seconds."""
        now_s = pause.now_s
        until_s = max(now_s, min(decision.until_s, now_s + self.settings.limits.max_pin_s))
        origin = HoldOrigin.ASKED if decision.reason is PauseReason.RETENTION else HoldOrigin.POLICY
        blocks = self.take_blocks(request)
        self.stats.holds_change()
        if pause.context_tokens < computed_tokens(request):  # the output will not return in a prompt
            kept = pause.context_tokens // self.block_size
            self.kv_cache_manager.block_pool.free_blocks(blocks[kept:][::-1])
            blocks = blocks[:kept]
        self.holds.hold(key, blocks, pause.context_tokens, now_s, until_s, origin, pause.forecast)
        self.early_prefill.pauses(key, request)
        self.apply(key, Held(now_s, until_s, decision.reason))
        return until_s - now_s

    def _hold_fetched(
        self, key: str, blocks: Sequence[KVCacheBlock], tokens: int, seconds: float, forecast: Forecast
    ) -> float:
        """Hold a context that was loaded from the host. Return the time at which the hold ends, in seconds."""
        now_s = self._now_s()
        until_s = now_s + min(seconds, self.settings.limits.max_pin_s)
        self.stats.holds_change()
        self.holds.hold(key, blocks, tokens, now_s, until_s, HoldOrigin.FETCHED, forecast)
        return until_s

    def _end_all_holds(self, reason: ReleaseReason) -> None:
        for key in [held.key for held in self.holds]:
            self.apply(key, HoldEnded(self._now_s(), reason))

    # --- memory -------------------------------------------------------------------------------------------------------

    def _evict(self, request: Request, lacking: int) -> bool:
        if request.request_id not in self.turns:
            return False
        evicted = self.eviction.evict(request, lacking, self.policies, self.current_step)
        if not evicted and self.policies.preemption is not None:
            self.preemption.lacks(request, lacking, self.running, self.policies.preemption)
        elif not evicted and self.policies.ranks_running:
            self.preemption.preempt_last(request, self.running, self._rank_running)
        return evicted

    def _leaves_waiting_room(self, key: str, found: FoundContext) -> bool:
        """Return whether free memory suffices for a context, after the other programs' waiting turns."""
        waiting = [one for queue in self.waiting_queues for one in queue if self.turns[one.request_id].key != key]
        return self.fits_beside(found, map(self.views.missing_tokens, waiting))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """End all holds, then reset as vLLM does. ``reset_connector`` empties the host tier too."""
        self._end_all_holds(ReleaseReason.CACHE_RESET)
        if reset_connector:
            self.swapping.reset()
        return bool(super().reset_prefix_cache(reset_running_requests, reset_connector and self.swapping.may_reset))

    def shutdown(self) -> None:
        """End all holds, then shut down as vLLM does."""
        for key in [held.key for held in self.holds]:
            self.holds.release(key)
        super().shutdown()

    # --- programs -----------------------------------------------------------------------------------------------------

    def apply(self, key: str, event: Event) -> tuple[Action, ...]:
        """Apply an event to a program, and perform the actions that follow, except for Decide. Return the actions."""
        return self.lifecycle.apply(key, event)

    def _rerank_later(self, request_ids: Sequence[str]) -> None:
        for queue in self.waiting_queues if request_ids else ():
            queue.rerank_later(request_ids)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the invariants of the module's docstring hold."""
        self.holds.check_integrity()
        self.trees.check_integrity()
        if self.turns.keys() | self.swapping.request_ids | self.early_prefill.request_ids != self.requests.keys():
            raise IntegrityError(f"turns {sorted(self.turns)} but requests {sorted(self.requests)}")
        self.swapping.check_integrity()
        self.programs.check_held(held.key for held in self.holds)
