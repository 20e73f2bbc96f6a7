"""Makes a virtual engine forget KV that nobody holds, as the engines of the papers, which have no prefix cache.

vLLM's offloading connector copies every full block to the host and finds it there again, whatever the policy decided.
Here a turn finds on the host only what its program swapped out, and other copies are never kept in place of that.
"""

from collections.abc import Sequence
from dataclasses import replace

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext

from cluster.core.lifecycle.events import Action, Admitted, Event, Fetched, Held, Released, Swapped
from cluster.core.lifecycle.machine import Phase
from replicas.host_tier import HostCache, Standing
from replicas.scheduler import AgentScheduler

HELD_WORTH = 1e-9
"""Share of its worth that the copy of a held context has. It is lost before any swapped context is, and after copies of
running turns, because a review may swap the held context out."""


def forget_free_blocks(pool: BlockPool) -> None:
    """Make the pool evict the content of each block when its last user gives it back, before it is queued as free."""
    queue = pool.free_block_queue
    append = queue.append_n

    def forget_and_append(blocks: list[KVCacheBlock]) -> None:
        pool.evict_blocks({block.block_id for block in blocks})
        append(blocks)

    queue.append_n = forget_and_append


def forget_copies(scheduler: AgentScheduler) -> None:
    """Hide the host's copies of all programs but those that are swapped out. Policies know that there is no cache.

    Hidden copies take only memory that no swapped context needs.
    """
    scheduler.facts = replace(scheduler.facts, prefix_cache=False)
    cache, swapping = scheduler.swapping.cache, scheduler.swapping
    if cache is None:
        return
    swapped: set[str] = set()
    programs = scheduler.programs
    apply, lookup, tokens_of, whole = programs.apply, cache.lookup, swapping.tokens_of, swapping.whole
    update = cache.update

    def follow(key: str, event: Event) -> Sequence[Action]:
        if isinstance(event, Swapped):
            swapped.add(key)
        elif isinstance(event, Held | Released | Fetched | Admitted):
            swapped.discard(key)
        return apply(key, event)

    def find(key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return lookup(key, req_context) if _program(cache, req_context) in swapped else LookupResult.MISS

    def value(key: str, standing: Standing, now_s: float, request_id: str | None = None) -> None:
        program = programs.get(key)
        phase = Phase.RUNNING if program is None else program.phase
        if key not in swapped and phase is not Phase.DECIDING:
            share = HELD_WORTH if phase is Phase.HELD else 0.0
            standing = replace(standing, saved_s=share * standing.saved_s)
        update(key, standing, now_s, request_id)

    programs.apply = follow  # type: ignore[method-assign]
    cache.lookup = find
    cache.update = value  # type: ignore[method-assign]
    swapping.tokens_of = lambda key: tokens_of(key) if key in swapped else 0  # type: ignore[method-assign]
    # A held context can be swapped out, as its copy is there.
    swapping.is_on_host = lambda key: 0 < whole(key) <= tokens_of(key)  # type: ignore[method-assign]


def _program(cache: HostCache, req_context: ReqContext) -> str | None:
    """Return the key of the program that a request belongs to."""
    account = cache.account(req_context)
    return None if account is None else account.key
