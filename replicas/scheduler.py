"""AgentScheduler: vLLM's scheduler, taught that turns belong to programs. It adapts; policies decide.

Written for vLLM 0.29.0. Of ``AsyncScheduler`` it overrides, and tests pin:
    __init__, shutdown                      own state
    add_request, _free_blocks               a turn arrives; a turn has ended: hold or free its blocks
    schedule                                expiry and budget before, nothing after
    _select_waiting_queue_for_scheduling    one order over both of vLLM's waiting queues
    reset_prefix_cache                      held blocks would make it fail
and of ``KVCacheManager`` it wraps
    allocate_slots                          admissions are seen here; short of memory, holds are broken until it fits
Subclassing AsyncScheduler also serves synchronous engines; subclassing Scheduler would turn async scheduling off.

Invariants (``check_integrity``): every block is free, owned by a request, or owned by a hold; a program has a hold
exactly in the phases HELD and RESUMING; every request has one Turn.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

import replicas.control
from cluster.clock import Clock, MonotonicClock
from cluster.errors import IntegrityError
from cluster.lifecycle import (
    Action,
    Admitted,
    Decide,
    Event,
    FreeHold,
    Held,
    HoldEnded,
    Observe,
    Phase,
    ProgramState,
    Released,
    TurnAborted,
    TurnArrived,
    TurnEnded,
    begin,
)
from cluster.program import USER_REPLY, WIRE_KEY, ProgramIdentity
from cluster.registry import POLICIES
from cluster.statistics import DurationTable
from replicas.hold_table import HeldBlocks, HoldTable
from replicas.policy import Claimant, Hold, HoldView, PauseView, Policy, RankKey, StepView, TurnView
from replicas.program_table import ProgramTable, TurnStory
from replicas.settings import SchedulerSettings
from replicas.tool_calls import ToolNames
from replicas.waiting_queue import RankedQueue

SWEEP_PERIOD_S = 10.0
"""How often programs are looked over for those that will not come back."""


@dataclass(slots=True)
class Turn:
    """What the scheduler notes of a request. ``key`` None: a request without a program."""

    identity: ProgramIdentity
    key: str | None
    arrived_s: float
    admitted_s: float | None = None
    cached_tokens: int = 0


class AgentScheduler(AsyncScheduler):
    """One replica's scheduler. Its clock and policy may be replaced between steps."""

    clock: Clock = MonotonicClock()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = SchedulerSettings.of(self.vllm_config.additional_config)
        self.holds: HoldTable[KVCacheBlock] = HoldTable(self._give_back)
        self.programs = ProgramTable(self.settings.control.max_programs, self.settings.control.idle_program_s)
        self.durations = DurationTable()
        self.counters: Counter[str] = Counter()
        self.turns: dict[str, Turn] = {}
        self._tool_names = self._tool_name_reader()
        self._next_sweep_s = 0.0
        self._full_budget = int(self.max_num_scheduled_tokens)  # type: ignore[has-type]
        self.kv_cache_manager.allocate_slots = self._breaking_holds(self.kv_cache_manager.allocate_slots)
        self.waiting = RankedQueue(self._rank)
        self.skipped_waiting = RankedQueue(self._rank)
        self.use_policy(self.settings.policy.name, self.settings.policy.parameters)

    def use_policy(self, name: str, parameters: dict[str, Any]) -> None:
        """Decide by another policy from now on. Holds end: they are promises of the policy that made them.

        Raises:
            ConfigError, pydantic.ValidationError: no such policy or parameter; nothing was changed.
        """
        policy: Policy = POLICIES.load(name).model_validate(parameters).build()
        self.policy_name, self.policy_parameters = name, parameters
        self._policies = policy
        for key in [held.key for held in self.holds]:
            self.apply(key, HoldEnded(self.clock.now_s(), "policy switch"))
        self.waiting.rerank_all()
        self.skipped_waiting.rerank_all()

    # --- a turn's way -------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Accept a turn: its program runs again, and the length of its pause is known."""
        if request.request_id not in self.requests:
            turn = self._turn_of(request)
            self.turns[request.request_id] = turn
            if turn.key is not None:
                self.apply(turn.key, TurnArrived(turn.arrived_s, last=turn.identity.last_turn))
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step: end the holds whose time has come, set the token budget, let vLLM schedule."""
        now_s = self.clock.now_s()
        self.expire(now_s)
        step = StepView(
            running=len(self.running),
            waiting=len(self.waiting) + len(self.skipped_waiting),
            free_tokens=self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size,
            held_tokens=self.holds.num_tokens,
            max_tokens=self._full_budget,
        )
        self.max_num_scheduled_tokens = min(max(1, self._policies.budget.tokens(step)), self._full_budget)
        return super().schedule(throttle_prefills)

    def _free_blocks(self, request: Request) -> None:
        """A turn has ended: its program pauses, and the policy says whether its blocks stay; or it is over."""
        turn = self.turns.pop(request.request_id)
        if turn.key is None:
            super()._free_blocks(request)
            return
        now_s = self.clock.now_s()
        decision = "released"
        tools: tuple[str, ...] = ()
        # A turn that never ran its course (aborted, refused, failed) leaves nothing that the program could go on from.
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            tools = self._tools(request, turn)
            for action in self.apply(turn.key, TurnEnded(now_s, tools, request.num_tokens - turn.cached_tokens)):
                if isinstance(action, Decide):
                    decision = self._decide(request, turn, now_s)
        else:
            self.apply(turn.key, TurnAborted(now_s))
        self._tell(request, turn, tools, decision)
        if request.request_id in self.requests:
            super()._free_blocks(request)

    def _decide(self, request: Request, turn: Turn, now_s: float) -> str:
        """Ask the pause policy and do as it says; what was decided, in words."""
        assert turn.key is not None
        program = self.programs.get(turn.key)
        assert program is not None
        # The last token was sampled but not computed; an asynchronous engine counts it early.
        context_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        pause = PauseView(
            program=program,
            hints=turn.identity.hints,
            tools=program.tools,
            context_tokens=context_tokens,
            durations=self.durations,
            average_turns=self.programs.average_turns,
            now_s=now_s,
        )
        decision = self._policies.pause.decide(pause)
        if isinstance(decision, Hold):
            until_s = min(decision.until_s, now_s + self.settings.control.hold_limit_s)
            blocks = self.kv_cache_manager.pop_blocks_for_free(request)
            del self.requests[request.request_id]
            self.holds.hold(turn.key, blocks, context_tokens, now_s, max(until_s, now_s))
            self.apply(turn.key, Held(now_s, until_s, decision.reason))
            self.counters["holds"] += 1
            return f"held {until_s - now_s:.3f}s ({decision.reason})"
        self.apply(turn.key, Released(now_s, decision.reason))
        return f"released ({decision.reason})"

    # --- memory -------------------------------------------------------------------------------------------------------

    def _breaking_holds(
        self, allocate_slots: Callable[..., KVCacheBlocks | None]
    ) -> Callable[..., KVCacheBlocks | None]:
        """vLLM's allocate_slots; where it finds no memory, one hold after the other yields until it does.

        Called for every running turn at every step: a closure over the two names it needs, nothing else on that path.
        """
        running = RequestStatus.RUNNING

        def allocate(request: Request, num_new_tokens: int, **kwargs: Any) -> KVCacheBlocks | None:
            blocks = allocate_slots(request, num_new_tokens, **kwargs)
            if blocks is not None and request.status is running:
                return blocks
            while blocks is None and self._break_a_hold(request):
                blocks = allocate_slots(request, num_new_tokens, **kwargs)
            if blocks is not None and request.status is not running:
                self._admit(request, kwargs.get("num_new_computed_tokens", 0))
            return blocks

        return allocate

    def _admit(self, request: Request, cached_tokens: int) -> None:
        turn = self.turns[request.request_id]
        if turn.admitted_s is None:
            turn.admitted_s, turn.cached_tokens = self.clock.now_s(), cached_tokens
            if turn.key is not None:
                self.apply(turn.key, Admitted(turn.admitted_s))

    def _break_a_hold(self, request: Request) -> bool:
        """Give the blocks of one hold back, if one yields to ``request``; its own program's goes last."""
        if not len(self.holds):
            return False
        if request.status is RequestStatus.RUNNING:
            claimant = Claimant.RUNNING
        else:
            claimant = Claimant.WAITING if self.running else Claimant.STARVED
        own = self.turns[request.request_id].key
        pause = self._policies.pause
        views = ((self._hold_view(held), held.key) for held in self.holds)
        ranked = (
            (held_key == own, pause.victim_key(view), held_key)
            for view, held_key in views
            if pause.yields(view, claimant)
        )
        victim = min(ranked, default=None)
        if victim is None:
            return False
        self.counters[f"broken_{claimant.value}"] += 1
        self.apply(victim[2], HoldEnded(self.clock.now_s(), f"broken for a {claimant.value} turn"))
        return True

    def expire(self, now_s: float) -> None:
        """End the holds whose time has come, unless their program's next turn waits already (Continuum 5.3)."""
        for key in self.holds.expired(now_s):
            program = self.programs.get(key)
            if program is not None and program.phase is Phase.HELD:
                self.counters["expired"] += 1
                self.apply(key, HoldEnded(now_s, "expired"))
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_PERIOD_S
            for key, actions in self.programs.sweep(now_s):
                self._act(key, actions)

    def _give_back(self, blocks: Any) -> None:
        self.kv_cache_manager.block_pool.free_blocks(blocks)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """End all holds, then as vLLM."""
        for key in [held.key for held in self.holds]:
            self.apply(key, HoldEnded(self.clock.now_s(), "cache reset"))
        return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))

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
        return actions

    def _act(self, key: str, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case FreeHold(reason):
                    self.holds.release(key)
                    self.counters[f"hold_{'used' if reason == 'used' else 'lost'}"] += 1
                    self._rerank_turns(key, reason)
                case Observe(tool, seconds):
                    self.durations.observe(tool, seconds)

    def _rerank_turns(self, key: str, reason: str) -> None:
        """The program is no longer pinned: its turns that wait rank anew."""
        program = self.programs.get(key)
        admitted = 1 if reason == "used" else 0
        if program is None or program.active <= admitted:
            return
        ids = [request_id for request_id, turn in self.turns.items() if turn.key == key]
        self.waiting.rerank(ids)
        self.skipped_waiting.rerank(ids)

    # --- views --------------------------------------------------------------------------------------------------------

    def _rank(self, request: Request) -> RankKey:
        turn = self.turns[request.request_id]
        program = self.programs.get(turn.key) if turn.key is not None else None
        view = TurnView(
            program=program or begin(request.request_id, turn.arrived_s),
            hints=turn.identity.hints,
            arrived_s=turn.arrived_s,
            tokens=request.num_tokens,
            preempted=request.status == RequestStatus.PREEMPTED,
            pinned=turn.key is not None and turn.key in self.holds,
        )
        return self._policies.order.key(view)

    def _hold_view(self, held: HeldBlocks[KVCacheBlock]) -> HoldView:
        program = self.programs.get(held.key)
        assert program is not None, f"{held.key} is held but unknown"
        return HoldView(program, held.tokens, held.since_s, held.until_s, program.phase is Phase.RESUMING)

    def _select_waiting_queue_for_scheduling(self) -> RequestQueue | None:
        """The queue whose head ranks first; skipped turns before equals, as vLLM's FCFS has it."""
        if self.waiting and self.skipped_waiting:
            ahead = self.waiting.peek_rank() < self.skipped_waiting.peek_rank()
            return self.waiting if ahead else self.skipped_waiting
        return self.skipped_waiting or self.waiting or None

    # --- what is known of a turn --------------------------------------------------------------------------------------

    def _turn_of(self, request: Request) -> Turn:
        extra = (request.sampling_params.extra_args if request.sampling_params else None) or {}
        try:
            identity = ProgramIdentity.decode(extra[WIRE_KEY]) if WIRE_KEY in extra else ProgramIdentity()
        except ValueError:
            self.counters["unreadable_identity"] += 1
            identity = ProgramIdentity()
        # Without Caesura's ingress in front (vLLM's own server, offline use) the session is the program.
        return Turn(identity, identity.key or request.session_id, self.clock.now_s())

    def _tools(self, request: Request, turn: Turn) -> tuple[str, ...]:
        if turn.identity.hints.expected_tool is not None:
            return (turn.identity.hints.expected_tool,)
        named = self._tool_names(request.output_token_ids) if self._tool_names else ()
        return named or (USER_REPLY,)

    def _tool_name_reader(self) -> ToolNames | None:
        """Loaded at start: the first turn that needs it must not stop the engine. None where vLLM has no tokenizer."""
        model_config = self.vllm_config.model_config
        if model_config.skip_tokenizer_init:
            return None
        return ToolNames(cached_tokenizer_from_config(model_config), self.settings.tool_parser)

    def _tell(self, request: Request, turn: Turn, tools: tuple[str, ...], decision: str) -> None:
        assert turn.key is not None
        now_s = self.clock.now_s()
        admitted_s = now_s if turn.admitted_s is None else turn.admitted_s
        self.programs.tell(
            turn.key,
            TurnStory(
                request_id=request.request_id,
                arrived_s=turn.arrived_s,
                queue_s=admitted_s - turn.arrived_s,
                run_s=now_s - admitted_s,
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=turn.cached_tokens,
                output_tokens=request.num_output_tokens,
                preemptions=request.num_preemptions,
                priority=turn.identity.hints.priority,
                tools=tools,
                outcome=str(request.status).removeprefix("FINISHED_").lower(),
                decision=decision,
            ),
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the invariants above hold."""
        self.holds.check_integrity()
        if self.turns.keys() != self.requests.keys():
            raise IntegrityError(f"turns {sorted(self.turns)} but requests {sorted(self.requests)}")
        for held in self.holds:
            program: ProgramState | None = self.programs.get(held.key)
            if program is None or program.phase not in (Phase.HELD, Phase.RESUMING):
                raise IntegrityError(f"{held.key} is held but {program and program.phase}")


replicas.control.install()
