"""A replica under virtual time: a real scheduler, whose steps take as long as a cost model expects.

A step is scheduled when the one before has ended, as in a synchronous engine. The time of ``schedule()`` itself is
measured, but it costs no virtual time, because it overlaps with the device on a GPU. Turns that arrive during a step
are known to the scheduler at once, and the next step can admit them.

With a host tier, a step overlaps with the transfers of earlier steps (see `replicas.virtual_engine`). A step that only
waits for transfers ends with the next one, or when a turn arrives.
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
from replicas.control import dispatch
from replicas.cost_model import CostModel
from replicas.host_tier import kv_transfer_config
from replicas.peers.peer import NO_FIELDS, Peer
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.stats import Waste, computed_again
from replicas.step_pace import work_of
from replicas.virtual_disk import VirtualDisk, VirtualDiskTier
from replicas.virtual_engine import Shape, VirtualEngine, VirtualLink

MIN_STEP_S = 1e-3
"""Least seconds of a step in which nothing could be scheduled. They stand for an engine that polls its queues."""
DISK_POLL_S = 10e-3
"""Longest step in which nothing could be scheduled while the disk reads or writes."""


@dataclass(slots=True)
class VirtualTurn:
    """A turn on a virtual replica: its request and its progress. Times are in seconds of the clock."""

    request: Request
    submitted_s: float
    known_tokens: int
    """Leading tokens whose KV was computed before. To compute one of them is a recomputation."""
    identity: ProgramIdentity
    tool: str | None = None
    """The tool that its output calls."""
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int | None = None
    """Prompt tokens that needed no computation at the first admission. None: there is no token yet."""
    fetched_tokens: int | None = None
    """Those of ``cached_tokens`` that came from the host tier."""

    def computes(self, tokens: int) -> int:
        """Process a scheduled step of so many tokens. Return how many of them were computed before."""
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
    """One scheduler, its engine without a model, and the cost of its steps."""

    engine: VirtualEngine
    cost: CostModel
    clock: ManualClock
    link: VirtualLink | None = None
    """The link to the host tier, or None if there is none."""
    disk: VirtualDisk | None = None
    """The drive of its disk tier, or None if there is none."""
    peer: Peer | None = None
    """The peer whose scheduler this is, or None."""
    waste: Waste = field(default_factory=Waste)
    schedule_s: list[float] = field(default_factory=list)
    """Real seconds of each ``schedule()``."""
    preemptions: int = 0
    busy_s: float = 0.0
    """Virtual seconds of steps that computed something."""
    _turns: dict[str, VirtualTurn] = field(default_factory=dict)
    _in_flight: SchedulerOutput | None = None
    _waits_for_link: bool = False
    """Whether the current step computes nothing. It ends with the next transfer, or when a turn arrives."""
    interrupted: bool = False
    """Whether a turn has arrived while the current step waits for the link. The step has to end now."""

    @classmethod
    def build(
        cls,
        policy: PolicyConfig | Peer | None,
        cost: CostModel,
        slo: SloConfig,
        shape: Shape,
        model: Path,
        clock: ManualClock,
        disk: VirtualDisk | None = None,
    ) -> "VirtualReplica":
        """Build a replica.

        Args:
            policy: the policy of an AgentScheduler with Caesura's host tier, or a peer, whose scheduler has vLLM's host
                tier. None: vLLM's own scheduler class and host tier.
            cost: the cost model of its steps.
            slo: the SLO that the policy uses.
            shape: memory and limits.
            model: a directory with a model's config.json.
            clock: the virtual clock.
            disk: the drive of a disk tier below the host tier of an AgentScheduler.
        """
        link = VirtualLink(clock, cost.swap_s, shape.block_size) if shape.host_blocks else None
        if policy is None:
            return cls(VirtualEngine(AsyncScheduler, model, shape, link=link), cost, clock, link)
        if isinstance(policy, Peer):
            policy.prepare(clock)
            engine = VirtualEngine(
                policy.scheduler_cls,
                model,
                shape,
                link=link,
                additional_config=policy.additional_config(shape.max_model_len),
                scheduling_policy=policy.scheduling_policy,
            )
            policy.attach(engine.scheduler)
            return cls(engine, cost, clock, link, peer=policy)
        settings = SchedulerSettings(policy=policy, cost=cost, slo=slo)
        tiers = kv_transfer_config if disk is None else disk.transfer_config
        engine = VirtualEngine(AgentScheduler, model, shape, settings, link=link, transfer_config=tiers)
        engine.scheduler.clock = clock
        return cls(engine, cost, clock, link, disk)

    @property
    def busy(self) -> bool:
        """Whether a step is in progress."""
        return self._in_flight is not None

    def is_prefilled(self, request_id: str) -> bool:
        """Return whether the turn has its first token, or has ended."""
        turn = self._turns.get(request_id)
        return turn is None or turn.first_token_s is not None

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        output_tokens: int,
        identity: ProgramIdentity,
        known_tokens: int,
        tool: str | None = None,
    ) -> VirtualTurn:
        """Add a turn that generates exactly ``output_tokens``, the last of which calls ``tool``."""
        now_s = self.clock.now_s()
        self._settle()
        fields = NO_FIELDS if self.peer is None else self.peer.fields(identity, now_s)
        request = self.engine.submit(request_id, prompt, output_tokens, identity, now_s, fields, tool)
        turn = self._turns[request_id] = VirtualTurn(request, now_s, known_tokens, identity, tool)
        self.interrupted = self._waits_for_link
        return turn

    def begin_step(self) -> float | None:
        """Schedule a step. Return its virtual seconds, or None if there is nothing to do."""
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
        cost_s = self.cost_of(output)
        self.busy_s += cost_s
        return self._flush_s() + cost_s

    def _flush_s(self) -> float:
        return self.link.take_wait_s() if self.link is not None else 0.0

    def _idle_s(self) -> float:
        """Return the seconds of a step that computes nothing.

        It waits for the link where nothing else is left to do.
        """
        polled_s = max(self.cost.overhead_s, MIN_STEP_S)
        next_end_s = self.link.next_end_s if self.link is not None else None
        if (disk_end_s := self._disk_end_s()) is not None:
            if next_end_s is None:  # a turn that waits for the disk is asked again, but not every millisecond
                return min(max(disk_end_s - self.clock.now_s(), MIN_STEP_S), DISK_POLL_S)
            next_end_s = min(next_end_s, disk_end_s)
        if next_end_s is None:
            return polled_s
        requests = self.engine.scheduler.requests.values()
        if any(request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests):
            return polled_s
        self._waits_for_link = True
        return max(next_end_s - self.clock.now_s(), MIN_STEP_S)

    def _disk_end_s(self) -> float | None:
        """Return the time at which the next transfer from or to the disk ends; None: none is in progress."""
        scheduler = self.engine.scheduler
        if self.disk is None or not isinstance(scheduler, AgentScheduler) or scheduler.swapping.disk is None:
            return None
        tier = scheduler.swapping.disk.disk
        return tier.next_end_s if isinstance(tier, VirtualDiskTier) else None

    @property
    def moves_kv(self) -> bool:
        """Whether KV is being moved between the device, the host and the disk."""
        return (self.link is not None and self.link.next_end_s is not None) or self._disk_end_s() is not None

    def program_ended(self, key: str) -> None:
        """Report to the policy that a program has ended, as its client does. Other schedulers get no such report."""
        if isinstance(scheduler := self.engine.scheduler, AgentScheduler):
            self._settle()
            dispatch(scheduler, "end", {"key": key})

    def leave(self) -> None:
        """Write the contexts of programs to disk, because this replica ends."""
        if isinstance(scheduler := self.engine.scheduler, AgentScheduler):
            dispatch(scheduler, "leave", {})

    @property
    def may_end(self) -> bool:
        """Whether no step is in progress, no KV is moved, and no context is still to be written."""
        scheduler = self.engine.scheduler
        leaves = isinstance(scheduler, AgentScheduler) and scheduler.swapping.leaves
        return not (self.busy or self.moves_kv or leaves)

    def abandon_writes(self) -> None:
        """Write nothing more to disk, because this replica has waited for as long as it may."""
        scheduler = self.engine.scheduler
        if isinstance(scheduler, AgentScheduler) and (cache := scheduler.swapping.disk) is not None:
            cache.abandon_writes()
            if isinstance(cache.disk, VirtualDiskTier):
                cache.disk.abandon()

    def restart(self) -> None:
        """Lose what a process loses that ends, while no turn is open and no KV is moved. The disk keeps its chunks."""
        scheduler = self.engine.scheduler
        if not isinstance(scheduler, AgentScheduler):
            scheduler.reset_prefix_cache()
            return
        for program in list(scheduler.programs.recent()):
            dispatch(scheduler, "moved", {"key": program.key})
        scheduler.reset_prefix_cache()
        if scheduler.swapping.cache is not None:
            scheduler.swapping.cache.reset_cache()
        scheduler.swapping.leave(False)

    def end_step(self) -> list[VirtualTurn]:
        """Process the tokens of the step. Return the turns that it ended."""
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
        if self.peer is not None:
            for turn in ended:
                self.peer.turn_ended(self.engine.scheduler, turn.identity, turn.tool)
        return ended

    def check_integrity(self) -> None:
        """Raise IntegrityError if blocks are lost.

        With no turn left, every block has to be free after holds and the cache are dropped.
        """
        scheduler = self.engine.scheduler
        if isinstance(scheduler, AgentScheduler):
            scheduler.check_integrity()
        retained = self.peer.retained_ids(scheduler) if self.peer is not None else ()
        if self._turns.keys() != {*scheduler.requests, *retained}:
            raise IntegrityError(f"turns {sorted(self._turns)} but requests {sorted(scheduler.requests)}")
        if not self._turns:
            scheduler.reset_prefix_cache()
            if self.engine.free_blocks() != self.engine.shape.num_blocks - 1:
                raise IntegrityError(
                    f"{self.engine.free_blocks()} of {self.engine.shape.num_blocks - 1} blocks are free"
                )

    def settled_waste(self) -> Waste:
        """Return the waste up to now."""
        self._settle()
        return Waste(self.waste.held, self.waste.recomputed, self.waste.recomputing_s)

    def _settle(self) -> None:
        """Integrate the held memory up to now.

        It changes only within calls of the scheduler, so this comes before each.
        """
        scheduler = self.engine.scheduler
        if isinstance(scheduler, AgentScheduler):
            self.waste.settle(self.clock.now_s(), scheduler.holds.num_tokens)

    def cost_of(self, output: SchedulerOutput) -> float:
        """Return the seconds of a step that was scheduled, and add what it recomputes to the waste.

        The cost model computes them from the step's tokens, sequences and pairs. A subclass may time steps otherwise.
        """
        total, context, sequences, pairs = work_of(output, self.engine.scheduler.requests)
        seconds = self.cost.step_s(total, context, sequences, pairs)
        recomputed = sum(self._turns[key].computes(tokens) for key, tokens in output.num_scheduled_tokens.items())
        if recomputed:
            running = sum(request.num_computed_tokens for request in self.engine.scheduler.requests.values())
            self.waste.recompute(recomputed, total, running, seconds)
        return seconds
