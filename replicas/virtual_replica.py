"""A replica under virtual time: a real scheduler, whose steps take as long as a cost model expects.

A step is scheduled when the one before has ended, as a synchronous engine does; the time that ``schedule()`` itself
takes is measured but costs no virtual time (on a GPU it overlaps with the device). Turns that arrive during a step are
known to the scheduler at once and can be admitted by the next one.

With a host tier a step goes on beside the transfers of the steps before it (see `replicas.virtual_engine`); one that
only waits for them ends with the next one, or when a turn arrives.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from cluster.config.schema import PolicyConfig, SloConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import IntegrityError
from cluster.core.program import ProgramIdentity
from replicas.cost_model import CostModel
from replicas.host_tier import kv_transfer_config
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.stats import Waste, computed_again
from replicas.step_pace import work_of
from replicas.virtual_engine import Shape, VirtualEngine, VirtualLink

MIN_STEP_S = 1e-3
"""A step in which nothing could be scheduled takes at least so long: an engine that polls its queues."""


@dataclass(slots=True)
class VirtualTurn:
    """A turn on a virtual replica: what was asked, and what has come of it so far. Times are the clock's."""

    request: Request
    submitted_s: float
    known_tokens: int
    """Leading tokens whose KV was computed at some time: to compute one of them is to compute it again."""
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int | None = None
    """Prompt tokens that needed no computation at the first admission; None: no token yet."""
    fetched_tokens: int | None = None
    """Of these, those that came from the host tier."""

    def computes(self, tokens: int) -> int:
        """A step of so many tokens was scheduled; how many of them were computed at some time before."""
        length: int = self.request.num_computed_tokens  # vLLM counts the step's own already
        again = computed_again(length, tokens, self.known_tokens)
        self.known_tokens = max(self.known_tokens, length)
        return again

    @property
    def generated(self) -> list[int]:
        """The tokens generated so far."""
        return list(self.request.output_token_ids)


@dataclass(slots=True)
class VirtualReplica:
    """One scheduler, its engine without a model, and what its steps cost."""

    engine: VirtualEngine
    cost: CostModel
    clock: ManualClock
    link: VirtualLink | None = None
    """To the host tier, where there is one."""
    waste: Waste = field(default_factory=Waste)
    schedule_s: list[float] = field(default_factory=list)
    """Real seconds of each ``schedule()``."""
    preemptions: int = 0
    busy_s: float = 0.0
    """Seconds of steps that computed something."""
    _turns: dict[str, VirtualTurn] = field(default_factory=dict)
    _in_flight: SchedulerOutput | None = None
    _waits_for_link: bool = False
    """The step under way computes nothing: it ends with the next transfer, or when a turn arrives."""
    interrupted: bool = False
    """A turn has arrived while the step under way waits for the link: it is to end now."""

    @classmethod
    def build(
        cls, policy: PolicyConfig | None, cost: CostModel, slo: SloConfig, shape: Shape, model: Path, clock: ManualClock
    ) -> "VirtualReplica":
        """A replica that decides by ``policy``, with Caesura's host tier; None: vLLM's own class, untouched, and tier.

        ``model`` is a directory with a model's config.json.
        """
        link = VirtualLink(clock, cost.swap_s, shape.block_size) if shape.host_blocks else None
        if policy is None:
            return cls(VirtualEngine(AsyncScheduler, model, shape, link=link), cost, clock, link)
        settings = SchedulerSettings(policy=policy, cost=cost, slo=slo)
        engine = VirtualEngine(AgentScheduler, model, shape, settings, link=link, transfer_config=kv_transfer_config)
        engine.scheduler.clock = clock
        return cls(engine, cost, clock, link)

    @property
    def busy(self) -> bool:
        """A step is under way."""
        return self._in_flight is not None

    def is_prefilled(self, request_id: str) -> bool:
        """Whether the turn has its first token, or has ended."""
        turn = self._turns.get(request_id)
        return turn is None or turn.first_token_s is not None

    def submit(
        self, request_id: str, prompt: Sequence[int], output_tokens: int, identity: ProgramIdentity, known_tokens: int
    ) -> VirtualTurn:
        """A turn arrives that generates exactly ``output_tokens``."""
        now_s = self.clock.now_s()
        self._settle()
        request = self.engine.submit(request_id, prompt, output_tokens, identity, now_s)
        turn = self._turns[request_id] = VirtualTurn(request, now_s, known_tokens)
        self.interrupted = self._waits_for_link
        return turn

    def begin_step(self) -> float | None:
        """Schedule a step; the virtual seconds that it takes. None: there is nothing to do."""
        scheduler = self.engine.scheduler
        # A host tier goes on when the last turn has ended: its KV is still to be stored.
        if not (scheduler.has_unfinished_requests() if self.link is None else scheduler.has_requests()):
            return None
        self._settle()
        began = time.perf_counter()
        output = scheduler.schedule()
        self.schedule_s.append(time.perf_counter() - began)
        self._in_flight = output
        now_s = self.clock.now_s()
        for new in output.scheduled_new_reqs:
            self._turns[new.req_id].admitted_s = now_s
        self.preemptions += len(output.preempted_req_ids or ())
        self.engine.begin(output)
        if not output.total_num_scheduled_tokens:
            return self._flush_s() + self._idle_s()
        cost_s = self._cost_of(output)
        self.busy_s += cost_s
        return self._flush_s() + cost_s

    def _flush_s(self) -> float:
        return self.link.take_wait_s() if self.link is not None else 0.0

    def _idle_s(self) -> float:
        """Seconds of a step that computes nothing. Where all that is left to do is to wait for the link, it waits."""
        polled_s = max(self.cost.overhead_s, MIN_STEP_S)
        next_end_s = self.link.next_end_s if self.link is not None else None
        if next_end_s is None:
            return polled_s
        requests = self.engine.scheduler.requests.values()
        if any(request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests):
            return polled_s
        self._waits_for_link = True
        return max(next_end_s - self.clock.now_s(), MIN_STEP_S)

    def end_step(self) -> list[VirtualTurn]:
        """The step's tokens have come; the turns that it ended."""
        output, self._in_flight = self._in_flight, None
        self._waits_for_link = self.interrupted = False
        assert output is not None, "no step is under way"
        self._settle()
        now_s = self.clock.now_s()
        ended: list[VirtualTurn] = []
        for answer in self.engine.complete(output):
            if answer.prefill_stats is not None:
                turn = self._turns[answer.request_id]
                turn.first_token_s = now_s
                turn.cached_tokens = answer.prefill_stats.num_cached_tokens
                turn.fetched_tokens = answer.prefill_stats.num_external_cached_tokens
            if answer.finish_reason is not None:
                turn = self._turns.pop(answer.request_id)
                turn.last_token_s = now_s
                ended.append(turn)
        return ended

    def check_integrity(self) -> None:
        """Raise IntegrityError unless, with no turn left, every block is free once holds and the cache are given up."""
        scheduler = self.engine.scheduler
        if isinstance(scheduler, AgentScheduler):
            scheduler.check_integrity()
        if self._turns.keys() != scheduler.requests.keys():
            raise IntegrityError(f"turns {sorted(self._turns)} but requests {sorted(scheduler.requests)}")
        if not self._turns:
            scheduler.reset_prefix_cache()
            if self.engine.free_blocks() != self.engine.shape.num_blocks - 1:
                raise IntegrityError(
                    f"{self.engine.free_blocks()} of {self.engine.shape.num_blocks - 1} blocks are free"
                )

    def settled_waste(self) -> Waste:
        """The waste up to now."""
        self._settle()
        return Waste(self.waste.held, self.waste.recomputed)

    def _settle(self) -> None:
        """What is held changes only within a call of the scheduler: integrate up to now before each."""
        scheduler = self.engine.scheduler
        if isinstance(scheduler, AgentScheduler):
            self.waste.settle(self.clock.now_s(), scheduler.holds.num_tokens)

    def _cost_of(self, output: SchedulerOutput) -> float:
        """Seconds of the step, by its tokens, sequences and pairs of tokens; notes what it computes again."""
        total, context, sequences, pairs = work_of(output, self.engine.scheduler.requests)
        seconds = self.cost.step_s(total, context, sequences, pairs)
        recomputed = sum(self._turns[key].computes(tokens) for key, tokens in output.num_scheduled_tokens.items())
        if recomputed:
            self.waste.recompute(recomputed, total, context, seconds)
        return seconds
