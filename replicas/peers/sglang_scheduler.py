"""SglangScheduler: vLLM's scheduler, whose admissions, order and retractions follow SGLang 0.5.23's published rule.

A step is either a prefill step or a decode step. Prefills go first: while a waiting request is admitted, or a prompt is
incomplete, running requests generate nothing (SGLang mixes both only with ``--enable-mixed-chunk``).

Admission, in the order of the queue, until the step's tokens are used up. A request needs, in free or evictable memory,
its tokens that are not cached, the tokens that it may still generate (4096 at most), and a page. This must be less than
what is left after a reserve for each running request: ``new_token_ratio`` times the tokens that it may still generate.
If the first one in the queue does not fit, nobody is admitted until a running request has left. The ratio begins at
0.7, falls in 600 decode steps to 0.098, and begins again when the replica is idle.

Order: ``fcfs`` is the arrival. ``lpm`` sorts the queue by the cached prefix, the longest first, while 128 requests wait
at most; else the queue stays as it is. Of requests whose cached prefix is at most 32 tokens, but which begin with the
same 32 tokens, only the first is sorted in; the others come last, so that they find its KV. What is cached
of waiting requests is kept from eviction: at each sort of lpm, and else in each 32nd pass for the first 128.

Retraction: if the next token of all running requests does not fit, requests are retracted until it does, those with the
fewest generated tokens first, then those with the longest prompts. They go to the end of the queue. The ratio becomes
(generated tokens + 20 for each request) / (tokens that all may generate) of the remaining requests.

What is left out or differs. The engine is vLLM's, so the cache has blocks of 16 tokens where SGLang's radix tree has
single ones; this loses up to 15 tokens of a hit. The KV of a retracted request stays cached until its blocks are used,
and a request finds the KV of one that is admitted in the same step; both favour this version. The token limit of a step
is the engine's, which is SGLang's chunk of 8192 on an H100. A request that does not fit is admitted if nothing runs.
Simulated requests ignore the end of sequence so that they have the recorded lengths; agents do not, so the ratio
applies to them (SGLang reserves all that a request with ``ignore_eos`` may generate).
Left out, because the simulation has none of it: HiCache (so there is no host tier), priorities, LoRA, grammars,
speculative decoding, sliding windows, data parallelism, and the overlap of scheduling with the previous step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from replicas.prefill_scheduling import missing_tokens

KEY = "sglang"
"""The key of ``additional_config``."""
CLIP_TOKENS = 4096
"""Largest number of tokens that a request is expected to generate (``SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION``)."""
SORTED_REQUESTS = 128
"""Waiting requests up to which lpm sorts, and whose prefixes are kept else (``WAITING_QUEUE_PREFIX_MATCH_MAX``)."""
IN_BATCH_TOKENS = 32
"""Both thresholds of in-batch prefix caching (``IN_BATCH_PREFIX_CACHING_*_THRESHOLD``)."""
REFRESH_PASSES = 32
"""Passes without a sort after which waiting prefixes are kept again (``WAITING_PREFIX_REFRESH_INTERVAL``)."""
RETRACT_STEPS = 20
"""Tokens that each request is expected to generate after a retraction (``SGLANG_RETRACT_DECODE_STEPS``)."""
LAST = float("inf")


@dataclass(slots=True)
class NewTokenRatio:
    """``new_token_ratio``: the share of the tokens that a running request may still generate which is reserved."""

    initial: float = 0.7
    least: float = 0.7 * 0.14
    steps: int = 600
    current: float = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the initial ratio."""
        self.reset()

    def reset(self) -> None:
        """Begin again. The replica is idle."""
        self.current = self.initial

    def decay(self) -> None:
        """Lower the ratio after a decode step without a retraction."""
        self.current = max(self.current - (self.initial - self.least) / self.steps, self.least)

    def retracted(self, generated_tokens: int, limit_tokens: int, requests: int) -> None:
        """Estimate the ratio after a retraction.

        Args:
            generated_tokens: tokens that the remaining requests have generated.
            limit_tokens: tokens that they may generate in all.
            requests: number of remaining requests.
        """
        self.current = min(1.0, (generated_tokens + RETRACT_STEPS * requests) / (limit_tokens + 1))


@dataclass(slots=True)
class PrefillBudget:
    """The memory and the step's tokens that the requests of one prefill step may use."""

    free_tokens: float
    """Free and evictable tokens that are not reserved."""
    step_tokens: int
    page_tokens: int

    def admits(self, new_tokens: int, output_tokens: int) -> bool:
        """Return whether a request fits into memory with its new tokens and with the output that it may generate."""
        return new_tokens + output_tokens + self.page_tokens < self.free_tokens

    def take(self, new_tokens: int, output_tokens: int, pinned_tokens: int = 0) -> None:
        """Reserve for an admitted request or for a chunk of a prompt.

        A chunk that does not complete its prompt reserves no output.
        """
        scheduled = min(-(-new_tokens // self.page_tokens) * self.page_tokens, self.step_tokens)
        completes = new_tokens <= scheduled
        self.step_tokens -= scheduled
        self.free_tokens -= scheduled + self.page_tokens + pinned_tokens + (output_tokens if completes else 0)


class SglangScheduler(AsyncScheduler):
    """vLLM's scheduler with SGLang's rule. It is for synchronous engines without a host tier."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config[KEY]
        self.sorts: bool = settings["policy"] == "lpm" and self.kv_cache_manager.enable_caching
        self.known_lengths: bool = settings["known_lengths"]
        self.ratio = NewTokenRatio()
        self._capacity_tokens = (self.kv_cache_manager.block_pool.num_gpu_blocks - 1) * self.block_size
        self._full = False
        """Whether a request did not fit, and no running request has left since (``batch_is_full``)."""
        self._ran = 0
        """Number of running requests after the last step was scheduled."""
        self._rejected = False
        """Whether vLLM scheduled nothing of the last prefill step. The next one is a decode step."""
        self._passes = 0

    def add_request(self, request: Request) -> None:
        """Accept a request. The ratio begins again if the replica was idle."""
        if not self.requests:
            self.ratio.reset()
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a prefill step or a decode step."""
        decoding = [request for request in self.running if missing_tokens(request) <= 1]
        chunked = [request for request in self.running if missing_tokens(request) > 1]
        if len(self.running) < self._ran or not decoding:
            self._full = False
        admitted = [] if self._rejected else self._admit(decoding, chunked)
        prefills = bool(admitted or chunked) and not self._rejected
        if prefills:
            for request in decoding:
                # vLLM's own mark for pipelined decodes; its scheduler counts the step before it looks.
                request.next_decode_eligible_step = self.current_step + 2
        else:
            self._retract(decoding)
        names = {request.request_id for request in admitted}
        rest = [request for request in self.waiting if request.request_id not in names]
        self._queue(admitted)
        output: SchedulerOutput = super().schedule(throttle_prefills)
        self._queue([*self.waiting, *rest])
        self._rejected = prefills and bool(decoding) and not output.total_num_scheduled_tokens
        self._ran = len(self.running)
        return output

    def _queue(self, requests: Iterable[Request]) -> None:
        ordered = list(requests)
        self.waiting.clear()
        self.waiting.extend(ordered)

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admit(self, decoding: Sequence[Request], chunked: Sequence[Request]) -> list[Request]:
        """Return the waiting requests that are admitted in this step, in their order."""
        if not chunked and (self._full or not self.waiting):
            return []
        self._sort_waiting()
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size
        reserved = sum(self._output_tokens(request) * self.ratio.current for request in decoding)
        budget = PrefillBudget(free - reserved, self.max_num_scheduled_tokens, self.block_size)
        for request in chunked:
            budget.take(missing_tokens(request), self._output_tokens(request))
        admitted: list[Request] = []
        pinned: set[int] = set()
        for request in self.waiting:
            if budget.step_tokens <= 0 or self._full:
                break
            if len(self.running) + len(admitted) >= self.max_num_running_reqs:
                self._full = True
                break
            cached, blocks = self._cached(request)
            evictable = {block.block_id for block in blocks if block.ref_cnt == 0} - pinned
            pinned_tokens = len(evictable) * self.block_size
            new, output = request.num_tokens - cached, self._output_tokens(request)
            if not budget.admits(new + pinned_tokens, output) and (self.running or admitted):
                self._full = True
                break
            pinned |= evictable
            budget.take(new, output, pinned_tokens)
            admitted.append(request)
            if budget.free_tokens <= 0:
                self._full = True
                break
        return admitted

    def _limit_tokens(self, request: Request) -> int:
        """Return the largest number of tokens that the request may generate, of which the prompt leaves room."""
        if self.known_lengths:
            return int(request.max_tokens)
        context: int = min(int(self.max_model_len), self._capacity_tokens - int(self.block_size))
        return max(0, context - int(request.num_prompt_tokens) - 1)

    def _output_tokens(self, request: Request) -> int:
        """Return how many tokens the request is expected to generate at most."""
        generated = int(request.num_output_tokens)
        return min(max(0, self._limit_tokens(request) - generated), CLIP_TOKENS)

    # --- order --------------------------------------------------------------------------------------------------------

    def _sort_waiting(self) -> None:
        """Sort the queue by lpm, or leave it; and keep the cached prefixes of waiting requests from eviction."""
        if self.sorts and len(self.waiting) <= SORTED_REQUESTS:
            self._sort_by_prefix()
            return
        if self._passes % REFRESH_PASSES == 0:
            for request in reversed(list(self.waiting)[:SORTED_REQUESTS]):
                self._keep(self._cached(request)[1])
        self._passes += 1

    def _sort_by_prefix(self) -> None:
        ranks: dict[str, float] = {}
        heads: set[bytes] = set()
        for request in self.waiting:
            cached, blocks = self._cached(request)
            self._keep(blocks)
            ranks[request.request_id] = -cached
            if cached <= IN_BATCH_TOKENS and (head := self._head(request)) is not None:
                if head in heads:
                    ranks[request.request_id] = LAST
                heads.add(head)
        self._queue(sorted(self.waiting, key=lambda request: ranks[request.request_id]))

    def _head(self, request: Request) -> bytes | None:
        """Return what identifies the first 32 tokens of a request. None: it is shorter."""
        blocks = -(-IN_BATCH_TOKENS // self.block_size)
        head: bytes | None = request.block_hashes[blocks - 1] if len(request.block_hashes) >= blocks else None
        return head

    def _cached(self, request: Request) -> tuple[int, Sequence[KVCacheBlock]]:
        """Return how many leading tokens of a request are cached, and their blocks."""
        blocks, tokens, *_ = self.kv_cache_manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return int(tokens), [block for group in blocks for block in group]

    def _keep(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Evict these blocks after all others, the end of the prefix first."""
        pool = self.kv_cache_manager.block_pool
        pool.touch(blocks)
        pool.free_blocks(reversed(blocks))

    # --- retraction ---------------------------------------------------------------------------------------------------

    def _retract(self, decoding: Sequence[Request]) -> None:
        """Retract running requests if the next token of all does not fit. Else lower the ratio."""
        if not decoding:
            return
        if self._fits(decoding):
            self.ratio.decay()
            return
        kept = sorted(decoding, key=lambda request: (-request.num_output_tokens, request.num_prompt_tokens))
        first = True
        while len(kept) > 1 and (first or not self._fits(kept)):
            request, first = kept.pop(), False
            self.running.remove(request)
            self._preempt_request(request, 0.0)  # the time is for vLLM's log of events, which is off
            self.waiting.remove_request(request)
            self.waiting.add_request(request)
        self._full = False
        self.ratio.retracted(
            sum(request.num_output_tokens for request in kept), sum(map(self._limit_tokens, kept)), len(kept)
        )

    def _fits(self, decoding: Iterable[Request]) -> bool:
        needed = sum(request.num_computed_tokens % self.block_size == 0 for request in decoding)
        return bool(needed <= self.kv_cache_manager.block_pool.get_num_free_blocks())
