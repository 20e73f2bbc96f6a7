"""Prefills under way: which prompts a step computes first.

vLLM gives a step's tokens to the running turns in the order in which they were admitted, and what is left to those that
wait: a long prompt, once begun, keeps every other one waiting until it is computed (head-of-line blocking). Here turns
that generate come first, which is a token for each, then prompts by their rank. And while a turn waits that can be in
time, those that cannot any more sit out every other step, so that it is admitted: not every step, as it may be waiting
for memory.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from replicas import views

if TYPE_CHECKING:
    from replicas.scheduler import AgentScheduler


class Prefills:
    """Of one scheduler, whose policy says who is late; where it puts nobody off, vLLM's own order stays."""

    def __init__(self, scheduler: "AgentScheduler") -> None:
        self._scheduler = scheduler
        self._late: frozenset[str] = frozenset()
        self._sat_out = False

    @property
    def tokens(self) -> int:
        """That the prompts under way still need computed, but for those that are late."""
        return sum(missing_tokens(request) for request in self._under_way() if request.request_id not in self._late)

    def line_up(self) -> None:
        """Before a step: put the running turns in order, and let the late prompts sit it out where others need it.

        The load, by which all are ranked, then knows which of them are late.
        """
        scheduler, late_from = self._scheduler, self._scheduler.policies.late_rank
        prompts = self._under_way() if late_from is not None else []
        key = scheduler.policies.order.key
        ranks = {request.request_id: key(views.prefill_view(scheduler, request)) for request in prompts}
        late = frozenset(name for name, rank in ranks.items() if late_from is not None and rank >= late_from)
        if late != self._late:
            self._late = late
            scheduler.load = replace(scheduler.load, prefill_tokens=self.tokens)
        if prompts:  # stable: equals stay in the order of their admission, which those that generate are
            scheduler.running.sort(key=lambda request: ranks.get(request.request_id, ()))
        self._sat_out = bool(self._late) and not self._sat_out and self._others_wait()
        if self._sat_out:
            for request in prompts:
                if request.request_id in self._late:
                    # vLLM's own mark for pipelined decodes; its scheduler counts the step before it looks.
                    request.next_decode_eligible_step = scheduler.current_step + 2

    def _under_way(self) -> list[Request]:
        return [request for request in self._scheduler.running if missing_tokens(request) > 1]

    def _others_wait(self) -> bool:
        queues = (self._scheduler.waiting, self._scheduler.skipped_waiting)
        return any(len(queue) > queue.late for queue in queues)


def missing_tokens(request: Request) -> int:
    """Tokens to compute before the next one is generated; 1 of a turn that generates, 0 where that is under way."""
    return int(request.num_tokens - request.num_computed_tokens)
