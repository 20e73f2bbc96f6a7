"""What an AgentScheduler does with the host tier: swap out at a pause, fetch when the tool has finished.

vLLM's connector stores a block on the host as soon as it is full, and loads by itself what a waiting turn finds there.
Swapping a program out therefore only means to give its blocks back; they are not evicted from the prefix cache:
InferCept's swap needs the memory to be free, not empty, and what nobody has taken by the resume need not be loaded.
What is added here: the tier is told which programs are worth its room, a swap is refused where the host has no copy,
and a program is fetched before its next turn comes. A fetch is a request of our own that no queue, policy or client
ever sees; it takes free memory only, and none that waiting turns could have.

Names of vLLM 0.29.0's Scheduler that are used here, and tests pin: requests, connector, finished_recving_kv_req_ids,
needs_kv_cache_zeroing, hash_block_size, _get_local_prefix_cache_hit, _inflight_prefill_reserved_blocks,
_skip_zero_block_ids, _update_waiting_for_remote_kv, _free_request, finish_requests; of OffloadingConnectorScheduler:
manager, _req_status, _current_batch_jobs_to_flush; of its RequestOffloadState: max_offload_tokens, group_states.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request, RequestStatus

from cluster.errors import IntegrityError
from cluster.lifecycle import Phase, ProgramState
from cluster.lifecycle_events import CopyLost, Fetched, FetchFailed
from replicas.hold_table import HoldOrigin
from replicas.host_cache import HostCache, Standing
from replicas.policy import Forecast

if TYPE_CHECKING:
    from replicas.scheduler import AgentScheduler

FETCHED_HOLD_S = 10.0
"""For so long a fetched context is held for the turn that its tool's end has announced."""

RESIDENT = frozenset({Phase.RUNNING, Phase.DECIDING, Phase.HELD, Phase.RESUMING, Phase.FETCHING})
"""Phases in which a program's KV is, or will be, on the device."""

PREFIX = "caesura-fetch-"
"""Of the request ids of fetches."""


@dataclass(frozen=True, slots=True)
class Context:
    """What it takes to find a paused program's KV again: whole blocks of it."""

    tokens: Sequence[int]
    hashes: Sequence[BlockHash]
    length: int
    """Tokens in whole blocks."""
    forecast: Forecast
    """Of the turn that the pause followed."""


@dataclass(slots=True)
class Fetch:
    """A load from the host, from the wish to the hold."""

    key: str
    request: Request
    loaded: bool = False


class Swapping:
    """The host tier of one scheduler; without one it does nothing.

    Args:
        scheduler: whose connector it looks at, and whose lifecycle events it raises.
    """

    def __init__(self, scheduler: "AgentScheduler") -> None:
        self._scheduler = scheduler
        connector = getattr(scheduler.connector, "connector_scheduler", None)
        self._offloading: OffloadingConnectorScheduler | None = connector
        manager = getattr(connector, "manager", None)
        self.cache: HostCache | None = manager if isinstance(manager, HostCache) else None
        self._contexts: dict[str, Context] = {}
        self._forecasts: dict[str, tuple[float, float]] = {}
        self._fetches: dict[str, Fetch] = {}
        self._cancelled: set[str] = set()
        self._numbers = itertools.count()

    # --- what is asked ------------------------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the host tier takes; 0: there is none."""
        return self.cache.capacity_tokens if self.cache else 0

    @property
    def used_tokens(self) -> int:
        """Tokens that the tier has a copy of."""
        return self.cache.used_tokens if self.cache else 0

    @property
    def fetching_tokens(self) -> int:
        """Tokens that memory was allocated for and that are being loaded."""
        return sum(fetch.request.num_computed_tokens for fetch in self._fetches.values())

    @property
    def request_ids(self) -> set[str]:
        """Requests that are fetches, those included that nobody waits for any more."""
        return self._fetches.keys() | self._cancelled

    def __len__(self) -> int:
        """Fetches under way."""
        return len(self._fetches)

    def tokens_of(self, key: str) -> int:
        """Tokens of a program's context that the host has, from its first one on."""
        return self.cache.tokens_of(key) if self.cache else 0

    # --- a turn's way -------------------------------------------------------------------------------------------------

    def arrives(self, request: Request, key: str, forecast: Forecast) -> None:
        """A turn has come; vLLM does not know it yet."""
        if self.cache is None:
            return
        self._expect(key, request.num_tokens, forecast)
        self.cache.tell(key, self._standing(key, None), self._scheduler.clock.now_s(), request.request_id)

    def ends(self, request: Request) -> None:
        """A turn has ended, whatever its outcome: what was sampled but not computed must not be stored.

        vLLM 0.29.0 stores a finished request's last block when its tokens fill it, although the last one has no KV:
        whoever loads that block later computes with garbage. (With ``offload_prompt_only`` it does not come to that.)
        """
        status = self._offloading._req_status.get(request.request_id) if self._offloading else None
        if status is not None:
            computed = max(0, min(request.num_computed_tokens, request.num_tokens - 1))
            told = status.max_offload_tokens
            status.max_offload_tokens = computed if told is None else min(told, computed)

    def pauses(self, request: Request, key: str, context_tokens: int, forecast: Forecast) -> None:
        """The program pauses with this context; before the policy's decision is carried out."""
        if self.cache is None:
            return
        self._expect(key, context_tokens, forecast)
        whole = context_tokens // self.cache.tokens_per_chunk * self.cache.tokens_per_chunk
        hashes = request.block_hashes[: whole // self._scheduler.hash_block_size]
        self._contexts[key] = Context(request.all_token_ids[: whole + 1], hashes, whole, forecast)

    def swaps_out(self, key: str, request: Request | None = None) -> bool:
        """May the program's blocks be given back because the host has a copy, or will have one?

        Args:
            key: of the program, which has paused.
            request: its turn, if that ends just now: what the host refused of it is offered once more.
        """
        context = self._contexts.get(key)
        if self.cache is None or context is None:
            return False
        if request is None:
            return 0 < context.length <= self.cache.tokens_of(key)
        now_s = self._scheduler.clock.now_s()
        self.cache.tell(key, self._standing(key, now_s), now_s)
        if not self.cache.could_hold(key, context.length):
            return False
        status = self._offloading._req_status.get(request.request_id) if self._offloading else None
        if status is not None and self.cache.tokens_of(key) < context.length:
            self.cache.reopen(request.request_id)
            for group in status.group_states:
                group.next_stored_chunk_idx = 0
        return True

    def follow(self, key: str, state: ProgramState | None) -> None:
        """The program's state has changed: whether its copy is the only one, and since when."""
        if self.cache is None or state is None or key not in self._forecasts:
            return
        since_s = state.last_event_s if state.paused_s is None else state.paused_s
        standing = self._standing(key, None if state.phase in RESIDENT else since_s)
        self.cache.tell(key, standing, self._scheduler.clock.now_s())
        if state.phase in (Phase.RUNNING, Phase.RELEASED):
            self._contexts.pop(key, None)

    def forget(self, key: str) -> None:
        """The program has ended."""
        self._contexts.pop(key, None)
        self._forecasts.pop(key, None)
        if self.cache is not None:
            self.cache.forget(key)

    def _expect(self, key: str, context_tokens: int, forecast: Forecast) -> None:
        """Worth nothing is a program of which no later turn is expected."""
        cost, tokens = self._scheduler.facts.cost, max(1, context_tokens)
        saved_s = max(0.0, cost.prefill_s(tokens) - cost.swap_s(tokens)) / tokens if forecast.later_turns > 0 else 0.0
        self._forecasts[key] = (saved_s, max(0.0, forecast.pause_s))

    def _standing(self, key: str, away_since_s: float | None) -> Standing:
        saved_s, pause_s = self._forecasts[key]
        return Standing(away_since_s is None, saved_s, pause_s, away_since_s or 0.0)

    # --- fetches ------------------------------------------------------------------------------------------------------

    def fetch(self, key: str) -> None:
        """Begin to load a swapped program's context; the next steps do it."""
        scheduler, context = self._scheduler, self._contexts.get(key)
        if self.cache is None or context is None or not context.length:
            self._lose(key, "nothing to fetch")
            return
        request_id = f"{PREFIX}{next(self._numbers)}"
        request = Request(request_id, list(context.tokens), SamplingParams(max_tokens=1), None)
        request.block_hashes = list(context.hashes)
        self._fetches[request_id] = Fetch(key, request)
        # Among the scheduler's requests but in none of its queues: so vLLM keeps stepping until the load is done.
        scheduler.requests[request_id] = request
        scheduler.connector.on_new_request(request)
        # vLLM's queue is not passed: the tier learns here whose context this is.
        self.cache.tell(key, self._standing(key, None), scheduler.clock.now_s(), request_id)

    def cancel(self, key: str) -> None:
        """Nobody waits for it any more: what is being loaded is given back as soon as it has come."""
        for request_id in [i for i, fetch in self._fetches.items() if fetch.key == key]:
            del self._fetches[request_id]
            self._cancelled.add(request_id)
            self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """Before each step: begin loads that can begin, and hold what has come."""
        for request_id, fetch in list(self._fetches.items()):
            if fetch.request.is_finished():  # somebody aborts all requests; it is freed when its load has come
                continue
            if fetch.request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._start(fetch)
            elif request_id in self._scheduler.finished_recving_kv_req_ids:
                tokens = fetch.request.num_computed_tokens
                self._scheduler._update_waiting_for_remote_kv(fetch.request)
                self._land(fetch, tokens)

    def _start(self, fetch: Fetch) -> None:
        scheduler, request = self._scheduler, fetch.request
        manager = scheduler.kv_cache_manager
        blocks, local, *_ = scheduler._get_local_prefix_cache_hit(request)
        if local % scheduler.block_size:
            blocks, local = manager.empty_kv_cache_blocks, 0
        remote, _ = scheduler.connector.get_num_new_matched_tokens(request, local)
        if remote is None:  # it is still being stored, or somebody is loading it
            return
        if local + remote == 0:
            self._lose(fetch.key, "not on the host any more")
        elif not self._fits(fetch, local + remote, blocks):
            self._fail(fetch, "no room")
        elif remote == 0:
            self._adopt(fetch, blocks, local)
        elif not self._allocate(request, blocks, local, remote):
            self._fail(fetch, "no room")

    def _fits(self, fetch: Fetch, tokens: int, blocks: KVCacheBlocks) -> bool:
        """Free memory is enough for this and for other programs' turns that wait: it is theirs first."""
        scheduler = self._scheduler
        waiting = itertools.chain(scheduler.waiting, scheduler.skipped_waiting)
        others = (request for request in waiting if scheduler.turns[request.request_id].key != fetch.key)
        wanted = sum(request.num_tokens + scheduler.block_size for request in others)
        shared = sum(block.ref_cnt > 0 for group in blocks.blocks for block in group) * scheduler.block_size
        free = int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks()) * scheduler.block_size
        return bool(tokens - shared + wanted <= free)

    def _allocate(self, request: Request, blocks: KVCacheBlocks, local: int, remote: int) -> bool:
        """As vLLM does it for a waiting turn whose context the connector loads. False: there is no room."""
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        # The class's own method: the scheduler's wrapper would break holds.
        allocated = KVCacheManager.allocate_slots(
            manager,
            request,
            0,
            num_new_computed_tokens=local,
            new_computed_blocks=blocks,
            num_external_computed_tokens=remote,
            delay_cache_blocks=True,
            reserved_blocks=scheduler._inflight_prefill_reserved_blocks(),
            has_scheduled_reqs=bool(scheduler.running),
        )
        if allocated is None:
            return False
        request_id = request.request_id
        scheduler.connector.update_state_after_alloc(request, manager.get_blocks(request_id), remote)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = local + remote
        if scheduler.needs_kv_cache_zeroing:
            written = manager.get_zeroing_block_ids_in_range(request_id, local, local + remote)
            scheduler._skip_zero_block_ids.update(written)
        return True

    def _adopt(self, fetch: Fetch, blocks: KVCacheBlocks, tokens: int) -> None:
        """All that the host has is in the prefix cache still: hold that."""
        flat = [block for group in blocks.blocks for block in group]
        self._scheduler.kv_cache_manager.block_pool.touch(flat)
        del self._fetches[fetch.request.request_id]
        self._cancelled.add(fetch.request.request_id)
        self._scheduler.finish_requests(fetch.request.request_id, RequestStatus.FINISHED_ABORTED)
        self._hold(fetch, flat, tokens)

    def _land(self, fetch: Fetch, tokens: int) -> None:
        """The load is done: its blocks become a hold (through :meth:`freed`)."""
        fetch.loaded, fetch.request.num_computed_tokens = True, tokens
        fetch.request.status = RequestStatus.FINISHED_ABORTED
        self._scheduler._free_request(fetch.request)

    def freed(self, request: Request) -> None:
        """vLLM gives a fetch's blocks back: it has landed, it was cancelled, or all requests are being aborted."""
        request_id = request.request_id
        fetch = self._fetches.pop(request_id, None)
        self._cancelled.discard(request_id)
        if fetch is None:
            return
        if not fetch.loaded:
            self._scheduler.counters["fetch_failed"] += 1
            self._scheduler.apply(fetch.key, FetchFailed(self._scheduler.clock.now_s(), "aborted"))
            return
        blocks = self._scheduler.kv_cache_manager.pop_blocks_for_free(request)
        del self._scheduler.requests[request_id]
        self._hold(fetch, blocks, request.num_computed_tokens)

    def _hold(self, fetch: Fetch, blocks: Sequence[object], tokens: int) -> None:
        scheduler = self._scheduler
        now_s = scheduler.clock.now_s()
        until_s = now_s + min(FETCHED_HOLD_S, scheduler.settings.control.hold_limit_s)
        scheduler.pause_forecasts[fetch.key] = self._contexts[fetch.key].forecast
        scheduler.tally.holds_change()
        scheduler.holds.hold(fetch.key, blocks, tokens, now_s, until_s, HoldOrigin.FETCHED)
        scheduler.counters["fetched"] += 1
        scheduler.apply(fetch.key, Fetched(now_s, until_s))

    def _fail(self, fetch: Fetch, reason: str) -> None:
        self.cancel(fetch.key)
        self._scheduler.counters["fetch_failed"] += 1
        self._scheduler.apply(fetch.key, FetchFailed(self._scheduler.clock.now_s(), reason))

    def _lose(self, key: str, reason: str) -> None:
        self._scheduler.counters["fetch_lost"] += 1
        self._scheduler.apply(key, CopyLost(self._scheduler.clock.now_s(), reason))

    # --- the whole tier -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The copies are no longer to be used: programs that had one have none now."""
        now_s = self._scheduler.clock.now_s()
        for key in list(self._contexts):
            program = self._scheduler.programs.get(key)
            if program is not None and program.phase in (Phase.SWAPPED, Phase.FETCHING):
                self._scheduler.apply(key, CopyLost(now_s, "cache reset"))

    @property
    def may_reset(self) -> bool:
        """vLLM's connector cannot be reset twice between two steps if transfers were under way the first time."""
        return self._offloading is None or not self._offloading._current_batch_jobs_to_flush

    def check_integrity(self) -> None:
        """Raise IntegrityError unless exactly the programs in FETCHING have a fetch, and the tier's counts add up."""
        for fetch in self._fetches.values():
            program = self._scheduler.programs.get(fetch.key)
            if program is None or program.phase is not Phase.FETCHING:
                raise IntegrityError(f"{fetch.key} is being fetched but {program and program.phase}")
        if self.cache is not None:
            self.cache.chunks.check_integrity()
