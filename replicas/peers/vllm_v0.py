"""vLLM's first engine (V0), with which most of the papers compare: a step computes prompts or decodes, never both.

Source: vLLM 0.2 (2023), ``vllm/core/scheduler.py``, without chunked prefill, its default. Waiting prompts come first,
as long as the first of them fits into memory, with a watermark of 1% of the blocks. The running turns wait for them.
vLLM 0.29 adds prompts to the steps that decode (chunked prefill).

One thing differs: a prompt that is larger than what is left of a step's tokens begins in this step, and is continued in
the next one, which has prompts only, too. In vLLM 0.2 it waits for the next step.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

from replicas.cost_model import CostModel
from replicas.peers.peer import Peer
from replicas.peers.vllm_priority import VllmPriority

WATERMARK = 0.01
"""Share of the blocks that admissions leave free (vLLM 0.2: ``watermark``)."""


class VllmV0Parameters(BaseModel):
    """Parameters of the peer `vllm-v0`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    order: Literal["turn", "program"] = "turn"
    """By what waiting turns are ordered: by their own arrival, as in vLLM, or by that of their program, as in the
    baseline ImprovedDiscard of InferCept (section 5)."""

    def build(self, cost: CostModel) -> Peer:
        """Return the peer whose scheduler orders by ``order``. It ignores the costs."""
        return VllmV0() if self.order == "turn" else VllmV0ByProgram()


class V0Scheduler(AsyncScheduler):
    """vLLM's scheduler with steps of prompts only, and of decodes only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_cache_manager.watermark_blocks = int(WATERMARK * self.kv_cache_config.num_blocks)
        self._tried: str | None = None

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step. The turns that decode skip it while a prompt is computed or can begin."""
        decodes = [request for request in self.running if request.num_tokens - request.num_computed_tokens <= 1]
        if len(decodes) < len(self.running) or self._next_fits():
            for request in decodes:
                # vLLM's own mark for pipelined decodes; its scheduler counts the step before it looks.
                request.next_decode_eligible_step = self.current_step + 2
        output: SchedulerOutput = super().schedule(throttle_prefills)
        return output

    def _next_fits(self) -> bool:
        """Return whether the first waiting prompt can begin now. It is tried in every other step at most."""
        if not self.waiting or len(self.running) >= self.max_num_running_reqs:
            return False
        first = self.waiting.peek_request()
        if self._tried == first.request_id:
            self._tried = None
            return False
        self._tried = first.request_id
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() - self.kv_cache_manager.watermark_blocks
        return bool(first.num_tokens <= free * self.block_size)


class VllmV0(Peer):
    """vLLM's V0 engine. Its client gives no hints."""

    scheduler_cls = V0Scheduler


class VllmV0ByProgram(VllmPriority):
    """vLLM's V0 engine, which admits the turns of programs that arrived earlier first."""

    scheduler_cls = V0Scheduler
