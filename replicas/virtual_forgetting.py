"""Makes a virtual engine forget KV that nobody holds, as the engines of the papers, which have no prefix cache.

vLLM's offloading connector copies every full block to the host and finds it there again, whatever the policy decided.
Here a turn finds on the host only what its program swapped out.
"""

from collections.abc import Sequence
from dataclasses import replace

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from cluster.core.lifecycle.events import Action, Event, Fetched, Held, Released, Swapped
from replicas.host_tier import HostCache
from replicas.scheduler import AgentScheduler


def forget_free_blocks(pool: BlockPool) -> None:
    """Make the pool evict the content of each block when its last user gives it back, before it is queued as free."""
    queue = pool.free_block_queue
    append = queue.append_n

    def forget_and_append(blocks: list[KVCacheBlock]) -> None:
        pool.evict_blocks({block.block_id for block in blocks})
        append(blocks)

    queue.append_n = forget_and_append


def forget_copies(scheduler: AgentScheduler) -> None:
    """Hide the host's copies of all programs but those that are swapped out. Policies know that there is no cache."""
    scheduler.facts = replace(scheduler.facts, prefix_cache=False)
    cache, swapping = scheduler.swapping.cache, scheduler.swapping
    if cache is None:
        return
    swapped: set[str] = set()
    programs = scheduler.programs
    apply, lookup, tokens_of, whole = programs.apply, cache.lookup, swapping.tokens_of, swapping.whole

    def follow(key: str, event: Event) -> Sequence[Action]:
        if isinstance(event, Swapped):
            swapped.add(key)
        elif isinstance(event, Held | Released | Fetched):
            swapped.discard(key)
        return apply(key, event)

    def find(key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return lookup(key, req_context) if _program(cache, req_context) in swapped else LookupResult.MISS

    programs.apply = follow  # type: ignore[method-assign]
    cache.lookup = find
    swapping.tokens_of = lambda key: tokens_of(key) if key in swapped else 0  # type: ignore[method-assign]
    # A held context can be swapped out, as its copy is there.
    swapping.is_on_host = lambda key: 0 < whole(key) <= tokens_of(key)  # type: ignore[method-assign]


def _program(cache: HostCache, req_context: ReqContext) -> str | None:
    """Return the key of the program that a request belongs to."""
    account = cache.account(req_context)
    return None if account is None else account.key
