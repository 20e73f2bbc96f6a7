"""Of several turns with the same beginning that is not in memory, one computes it, and the others wait for its blocks.

vLLM caches a prompt's blocks as soon as a step computes them, so that turns which are admitted later reuse them. But a
turn that is admitted while another one is in the middle of the same beginning would compute the rest of it once more.
That happens where a step has tokens left beside a prompt that has begun: they are left to a turn that ranks before it
(`replicas.prefill_scheduling`), or vLLM's ``long_prefill_token_threshold`` bounds what the prompt gets.

To wait is sooner, as the other turn is ahead in the same prompt and both would share the steps. It is not sooner if the
other turn is late and this one is not, as a late prompt skips steps.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request


def shared_blocks(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """Return how many leading blocks two prompts have in common. Hashes are chained, so that a bisection finds it."""
    if not one or not other or one[0] != other[0]:
        return 0
    return bisect_left(range(min(len(one), len(other))), True, key=lambda block: one[block] != other[block])


def waits_for(
    request: Request, running: Iterable[Request], is_cached: Callable[[BlockHash], bool], skips: Callable[[str], bool]
) -> bool:
    """Return whether a running prompt is about to compute blocks that a waiting turn needs, too.

    Args:
        request: the waiting turn, of which nothing is computed.
        running: the running turns.
        is_cached: whether a block is in the prefix cache, or is computed by this step.
        skips: whether a running prompt skips steps that this turn would not.
    """
    for other in running:
        if other.num_tokens - other.num_computed_tokens <= 1 or skips(other.request_id):
            continue
        shared = shared_blocks(request.block_hashes, other.block_hashes)
        if shared and not is_cached(request.block_hashes[shared - 1]):
            return True
    return False


class SingleFlight:
    """The turns of one step that wait for blocks of others, with vLLM's mark by which its scheduler skips them.

    Args:
        pool: the scheduler's blocks, of one KV cache group.
        skips: returns whether a running prompt is late, and so waits for turns in time.
        counters: the scheduler's counters. ``single_flight_waits`` counts the steps that turns have waited.
    """

    def __init__(self, pool: BlockPool, skips: Callable[[str], bool], counters: Counter[str]) -> None:
        self._pool = pool
        self._skips = skips
        self._counters = counters
        self._marked: list[Request] = []

    def consider(self, request: Request, running: Sequence[Request], *, is_late: bool) -> None:
        """Let vLLM skip the turn that it would admit next, if it should wait for another one's blocks.

        The mark is that of a preempted turn whose last output has not arrived. vLLM skips such a turn for one step.
        """
        if request.num_computed_tokens or request.num_stale_output_tokens:
            return
        if waits_for(request, running, self._is_cached, lambda other: not is_late and self._skips(other)):
            request.num_stale_output_tokens = 1
            self._marked.append(request)
            self._counters["single_flight_waits"] += 1

    def skip(self, request: Request) -> None:
        """Let vLLM skip a turn that it would admit next for one step."""
        if not request.num_stale_output_tokens:
            request.num_stale_output_tokens = 1
            self._marked.append(request)

    def step_ends(self) -> None:
        """Remove the marks, once a step has been scheduled."""
        for request in self._marked:
            request.num_stale_output_tokens = 0
        self._marked.clear()

    def _is_cached(self, block: BlockHash) -> bool:
        return self._pool.get_cached_block(block, [0]) is not None
