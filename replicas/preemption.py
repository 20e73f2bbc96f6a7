"""Preemptions of sheddable turns: whom a policy is asked about, and in which order vLLM preempts.

The policy is asked before a step about the waiting turn that is admitted next, if the step before could not give it
memory although all holds that yield were evicted, or if the batch is full. Where a running turn lacks memory, vLLM
preempts the last turn of its list. Therefore the sheddable turns come last there, and those of them that the policy
protects come first. A policy that ranks running turns has the one that ranks last there.
"""

from collections.abc import Callable, Mapping
from itertools import chain, islice

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from replicas.policy import PreemptionPolicy, RankKey, RunningView, ShortageView
from replicas.turns import Turn
from replicas.views import Views

ASKED_A_STEP = 16
"""Largest number of running turns of which a step asks whether they are protected. Each takes about 20 µs."""


class Preemption:
    """The preemptions of one scheduler.

    Args:
        views: makes the views of turns.
        blocks: returns the blocks of a request, given its id.
        block_tokens: tokens of a block.
    """

    def __init__(self, views: Views, blocks: Callable[[str], KVCacheBlocks], block_tokens: int) -> None:
        self._views = views
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._refused: tuple[str, int] | None = None
        self._yield: dict[str, bool] = {}
        """Of the sheddable turns that run, whether they are not protected. Who was asked about longest ago is first."""
        self.sheddable: set[str] = set()
        """Ids of the sheddable turns that wait or run."""

    def arrives(self, request_id: str, turn: Turn) -> None:
        """Note a turn that arrives."""
        if turn.identity.hints.sheddable:
            self.sheddable.add(request_id)

    def ended(self, request_id: str) -> None:
        """Forget a turn that has ended."""
        self.sheddable.discard(request_id)

    def yielding(self, running: list[Request], policy: PreemptionPolicy | None) -> Mapping[str, bool]:
        """Return which running turns give their memory to others (True), and which never do (False).

        It is called once in each step. The others are not sheddable, or the policy was not asked about them yet.
        """
        if not self.sheddable:
            return {}
        ours = {one.request_id: one for one in running if one.request_id in self.sheddable}
        known = {request_id: yields for request_id, yields in self._yield.items() if request_id in ours}
        for request_id in list(islice(chain((one for one in ours if one not in known), known), ASKED_A_STEP)):
            known.pop(request_id, None)
            known[request_id] = policy is None or not policy.is_protected(
                self._view(ours[request_id]), self._views.load
            )
        self._yield = known
        return known

    def lacks(self, request: Request, lacking: int, running: list[Request], policy: PreemptionPolicy) -> None:
        """Note that a turn lacks memory in this step, although no hold yields.

        Args:
            request: the turn.
            lacking: blocks that it lacks.
            running: vLLM's list. A sheddable turn that the step has not scheduled yet may be moved to its end.
            policy: the policy.
        """
        if not self.sheddable:
            return
        if request.status is not RequestStatus.RUNNING:
            self._refused = (request.request_id, lacking)
            return
        later = running[running.index(request) :]
        for one in reversed(later):
            if one.request_id in self.sheddable and not policy.is_protected(self._view(one), self._views.load):
                running.remove(one)
                running.append(one)
                return

    def preempt_last(self, request: Request, running: list[Request], rank: Callable[[Request], RankKey]) -> None:
        """Move the turn that ranks last to the end of vLLM's list, from where vLLM preempts.

        Args:
            request: the running turn that lacks memory. Only turns that the step has not scheduled yet are moved.
            running: vLLM's list.
            rank: returns the rank of a running turn.
        """
        if request.status is RequestStatus.RUNNING:
            later = range(running.index(request), len(running))
            running.append(running.pop(max(later, key=lambda place: (rank(running[place]), place))))

    def victims(
        self, head: Request, running: list[Request], policy: PreemptionPolicy, *, full: bool
    ) -> tuple[str, ...]:
        """Return the ids of the running turns that are preempted before the next step.

        Args:
            head: the waiting turn that is admitted next, which waits for nothing but memory and a place in the batch.
            running: vLLM's list.
            policy: the policy.
            full: whether the batch is full.
        """
        refused, self._refused = self._refused, None
        if head.request_id in self.sheddable:
            return ()
        if refused is not None and refused[0] == head.request_id:
            lacking = refused[1] * self._block_tokens
        elif full:
            lacking = 0
        else:
            return ()
        if not any(one.request_id in self.sheddable for one in running):
            return ()
        return policy.victims(ShortageView(self._views.waiting(head), lacking, tuple(map(self._view, running))))

    def _view(self, request: Request) -> RunningView:
        return self._views.running(request, chain(*self._blocks(request.request_id).blocks))
