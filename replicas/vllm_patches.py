"""Changes of vLLM 0.29.0 and calls of its private names. Each has its reason, and when it can be deleted.

`install_utility`: EngineCore has no hook for calls to a scheduler plug-in. Delete it when vLLM has one.
    Contract: tests/contracts/test_vllm_engine.py, the calls that round trip.
`wrap_allocate_slots`: admissions and shortages of memory have no hook. Delete it when vLLM asks one before it preempts.
    Contract: tests/contracts/test_vllm_contracts.py, the keywords of ``allocate_slots``.
`StagedScheduler`: AsyncScheduler fails on a synchronous engine with pipeline stages. Delete it when it does not.
    Contract: tests/replica/test_pipeline_stages.py.
`LoadingScheduler`: vLLM loads for turns only, and a program is fetched before its turn comes. Delete it when a
    connector can be asked to prefetch. Contract: tests/contracts/test_host_tier.py. vLLM preempts for running turns
    only. Delete `preempt` when it asks who is preempted for a waiting turn. Contract: tests/replica/test_preemption.py.
`stop_storing_after`: vLLM stores a finished request's last block although its last token has no KV. Delete it when vLLM
    stores computed tokens only. Contract: tests/contracts/test_host_tier.py.
`look_up_unless`: vLLM looks up all chunks of a waiting turn in each step while some of them are being loaded. Delete it
    when vLLM looks up what has changed. Contract: tests/replica/test_tiers.py.
`LoadingScheduler.renew_kv`, `salt_block_hashes`: vLLM's hashes of KV do not depend on the weights, so that copies on
    the host and on disk would be found after an update. Delete them when they do.
    Contract: tests/contracts/test_weights.py.
`advance_grammars`: a resumed turn's tokens are a part of the prompt, at which grammars do not look. Delete it when vLLM
    resumes streams. Contract: tests/contracts/test_resumption.py.
`share_compilation`: vLLM compiles grammars in the order of arrival, also for requests that have ended. Delete it when
    vLLM's compilation is fair. Contract: tests/replica/test_grammar_queue.py, the manager's executor.
`share_rendering`: vLLM renders and tokenizes in one thread, in the order of arrival. Delete it when a large prompt does
    not delay small ones. Contract: tests/contracts/test_resumption.py, the thread of a small prompt.
`forked_engine_core`: vLLM spawns its engine inside a Ray actor, which costs all imports again on CPU. Delete it when
    the method can be configured there. Contract: tests/contracts/test_vllm_contracts.py, the start method.

Beside these, `replicas.amx` is a plugin of vLLM, `replicas.host_tier` has classes that vLLM's connector loads by their
names, and `replicas.scheduler` lists what it overrides.
"""

import ctypes
import gc
import hashlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin
from vllm.utils import system_utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from cluster.core.malloc_trim import trim
from replicas.grammar_queue import GrammarQueue
from replicas.kv_groups import KvGroups
from replicas.render_threads import RenderThreads
from replicas.stop_strings import sorted_ids
from replicas.vllm_versions import Loads, batch_places

# --- the engine -------------------------------------------------------------------------------------------------------


def install_utility(name: str, run: Callable[[Any, str, Mapping[str, Any]], dict[str, Any]]) -> None:
    """Add a utility method to EngineCore, in this process, that runs an operation on its scheduler."""

    def utility(core: Any, operation: str, payload: dict[str, Any]) -> dict[str, Any]:
        return run(core.scheduler, operation, payload)

    setattr(EngineCore, name, utility)


# --- memory -----------------------------------------------------------------------------------------------------------


def wrap_allocate_slots(
    manager: KVCacheManager,
    groups: KvGroups,
    *,
    evict: Callable[[Request, int], bool],
    on_admitted: Callable[[Request, int, int], None],
) -> None:
    """Wrap a scheduler's allocation of KV blocks with the callbacks below.

    It runs for every running turn at every step. Therefore it is a closure over the names that it needs.

    Args:
        manager: the scheduler's KV cache manager.
        groups: its groups.
        evict: evicts a hold, or its end, for this request and the number of blocks that it lacks. Returns False
            if none yields.
        on_admitted: called when a waiting turn has got its memory, with the number of tokens from the prefix cache and
            from the connector.
    """
    allocate_slots = manager.allocate_slots
    running = RequestStatus.RUNNING

    def allocate(request: Request, num_new_tokens: int, **kwargs: Any) -> KVCacheBlocks | None:
        blocks = allocate_slots(request, num_new_tokens, **kwargs)
        if blocks is not None and request.status is running:
            return blocks
        while blocks is None:
            if not evict(request, lacking_blocks(manager, groups, request, num_new_tokens, **kwargs)):
                return None
            blocks = allocate_slots(request, num_new_tokens, **kwargs)
        if request.status is not running:
            local, remote = kwargs.get("num_new_computed_tokens", 0), kwargs.get("num_external_computed_tokens", 0)
            on_admitted(request, local, remote)
        return blocks

    manager.allocate_slots = allocate


def lacking_blocks(
    manager: KVCacheManager,
    groups: KvGroups,
    request: Request,
    num_new_tokens: int,
    *,
    new_computed_blocks: KVCacheBlocks | None = None,
    reserved_blocks: int = 0,
    has_scheduled_reqs: bool = True,
    **others: Any,
) -> int:
    """Return how many blocks an allocation lacks that was refused. It is an estimate, and at least 1.

    Args:
        manager: the scheduler's KV cache manager.
        groups: its groups.
        request: the turn.
        num_new_tokens: tokens that the step computes of it.
        new_computed_blocks: cached blocks of a waiting turn.
        reserved_blocks: blocks that other turns need.
        has_scheduled_reqs: whether other turns run. Only then a waiting turn has to leave the watermark free.
        others: what else vLLM passes to ``allocate_slots``.
    """
    if request.status is RequestStatus.RUNNING:
        wanted = sum(-(-num_new_tokens // group.block_tokens) for group in groups.groups)
    else:
        # A turn that was loaded from the host owns its blocks already, and no cached ones are found for it.
        found = new_computed_blocks.blocks if new_computed_blocks is not None else ()
        tables = (*found, *manager.get_blocks(request.request_id).blocks)
        owned = sum(block.ref_cnt > 0 and not block.is_null for table in tables for block in table)
        wanted = groups.blocks_of(request.num_tokens) - owned + has_scheduled_reqs * int(manager.watermark_blocks)
    return max(1, wanted + reserved_blocks - int(manager.block_pool.get_num_free_blocks()))


# --- loads from the host tier -----------------------------------------------------------------------------------------


class FoundContext(NamedTuple):
    """The part of a context that the replica has, from its first token on."""

    blocks: KVCacheBlocks
    """Blocks that are in the prefix cache."""
    local: int
    """Number of tokens of ``blocks``."""
    remote: int
    """Number of tokens after these that the host has."""


class StagedScheduler(Loads):
    """AsyncScheduler, which also serves a synchronous engine with pipeline stages.

    Such an engine schedules a step before the tokens of the last one are known (vLLM has one step in flight for each
    stage). AsyncScheduler then schedules placeholders, which the first stage of a synchronous engine cannot resolve, so
    that its worker fails. vLLM's own choice for such an engine is Scheduler, whose methods are used here.
    """

    @property
    def _waits_for_tokens(self) -> bool:
        return bool(self.use_pp and not self.scheduler_config.async_scheduling)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self._waits_for_tokens:
            Scheduler._update_after_schedule(self, scheduler_output)
        else:
            super()._update_after_schedule(scheduler_output)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        updated: tuple[list[int], bool]
        if self._waits_for_tokens:
            updated = Scheduler._update_request_with_output(self, request, new_token_ids, is_stale)
        else:
            updated = super()._update_request_with_output(request, new_token_ids, is_stale)
        return updated


class StoppedScheduler(StagedScheduler):
    """Ends a running turn as stopped, and not as aborted, if a stop string was found in its text."""

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End requests. The ids may have the mark of `replicas.stop_strings`."""
        if request_ids is None or isinstance(request_ids, str):
            return list(super().finish_requests(request_ids, finished_status))
        stopped, others = sorted_ids(request_ids, self.requests)
        running = [
            one for one in stopped if one in self.requests and self.requests[one].status == RequestStatus.RUNNING
        ]
        ended = super().finish_requests(running, RequestStatus.FINISHED_STOPPED)
        return [*ended, *super().finish_requests([*stopped, *others], finished_status)]


WRITTEN_BLOCKS = 2
"""Largest number of blocks of a group that a step in flight writes after a turn's end: it computes the last token, and
drafts that may reach into the next block."""


class LoadingScheduler(StoppedScheduler):
    """vLLM's scheduler, extended by loads of a context from the host before a turn needs it, and by preemptions.

    A load is one of ``requests``, so that vLLM keeps stepping until it is done, but it is in no queue.

    It uses these names of vLLM: requests, connector, finished_recving_kv_req_ids, failed_recving_kv_req_ids,
    finished_req_ids, _get_local_prefix_cache_hit, _update_waiting_for_remote_kv, _inflight_prefills; and for
    preemptions running, num_waiting_for_streaming_input, deferred_frees, requires_kv_delivery,
    prev_step_scheduled_req_ids, reset_preempted_req_ids, _pause_state, _preempt_request; and for blocks that a step in
    flight may write defer_block_free, processed_step_seq, sched_step_seq, Request.last_sched_seq.
    """

    groups: KvGroups

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector is not None:
            self._find_remote = self.connector.get_num_new_matched_tokens
            self.connector.get_num_new_matched_tokens = self._find_unless_preempted

    def _find_unless_preempted(self, request: Request, local: int) -> tuple[int | None, bool]:
        """Ask the connector what it can load of a turn. A turn that this step preempts loads in a later step.

        vLLM's offloading connector fails if a turn is preempted and begins to load in the same step.
        """
        found: tuple[int | None, bool] = self._find_remote(request, local)
        return (None, False) if found[0] and request.request_id in self.reset_preempted_req_ids else found

    def register_load(self, request: Request) -> None:
        """Register the load with vLLM and its connector."""
        self.requests[request.request_id] = request
        self.connector.on_new_request(request)

    def find_context(self, request: Request) -> FoundContext | None:
        """Return what prefix cache and host have of a load's context. None: the host's part is being moved."""
        blocks, local, *_ = self._get_local_prefix_cache_hit(request)
        if local % self.block_size:
            blocks, local = self.kv_cache_manager.empty_kv_cache_blocks, 0
        remote, _ = self.connector.get_num_new_matched_tokens(request, local)
        return None if remote is None else FoundContext(blocks, local, remote)

    def fits_beside(self, found: FoundContext, others: Iterable[int]) -> bool:
        """Return whether free memory suffices for a context and for the tokens that other requests lack."""
        wanted = sum(self.groups.blocks_of(tokens + self.block_size) for tokens in others)
        shared = sum(block.ref_cnt > 0 for block in self.groups.in_order(found.blocks.blocks))
        free = int(self.kv_cache_manager.block_pool.get_num_free_blocks())
        return bool(self.groups.blocks_of(found.local + found.remote) - shared + wanted <= free)

    def begin_load(self, request: Request, found: FoundContext) -> bool:
        """Allocate the blocks of a load and let the connector begin it. Return False if there is not enough memory."""
        if not self.allocate_load(request, found.blocks, found.local, found.remote):
            return False
        blocks = self.kv_cache_manager.get_blocks(request.request_id)
        self.connector.update_state_after_alloc(request, blocks, found.remote)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = found.local + found.remote
        return True

    def complete_load(self, request: Request) -> bool:
        """Take over a load that has finished. Return False if it is still in progress."""
        if request.request_id not in self.finished_recving_kv_req_ids:
            return False
        tokens = request.num_computed_tokens
        self._update_waiting_for_remote_kv(request)
        request.num_computed_tokens, request.status = tokens, RequestStatus.FINISHED_ABORTED
        return True

    def is_loading(self, request: Request) -> bool:
        """Return whether anything is being copied into the memory of a waiting turn."""
        waits = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return waits and request.request_id not in self.finished_recving_kv_req_ids

    def abort_load(self, request_id: str) -> None:
        """Abort a load. Its memory is freed when its transfer, if there is one, has ended."""
        self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def has_device_work(self) -> bool:
        """Whether a step has to do anything on the device, or to free what ended. It is for an engine that is paused.

        It excludes what moves between the host and the disk, which may hang.
        """
        offloading = getattr(self.connector, "connector_scheduler", None)
        if not isinstance(offloading, OffloadingConnectorScheduler):
            return bool(super().has_requests())
        ended = self.finished_req_ids or any(one.is_finished() for one in self.requests.values())
        return bool(ended or offloading._jobs)

    @property
    def anything_runs(self) -> bool:
        """Whether a turn runs, or will run as soon as its context is loaded."""
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        return bool(self.running) or any(one.status is loading for one in self._inflight_prefills)

    @property
    def is_full(self) -> bool:
        """Whether the batch has as many turns as it may have."""
        return len(self.running) + int(self.num_waiting_for_streaming_input) >= batch_places(self)

    @property
    def may_preempt(self) -> bool:
        """Whether waiting turns are admitted, and no memory is still to be freed by a step in flight."""
        return self._pause_state is PauseState.UNPAUSED and not self.deferred_frees

    def preempt(self, request_ids: Collection[str]) -> None:
        """Preempt running turns between two steps, as vLLM does within a step. They wait again."""
        for request in [one for one in self.running if one.request_id in request_ids]:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=self.requires_kv_delivery)
            # It may be admitted again in the next step, as after vLLM's reset of the prefix cache.
            self.prev_step_scheduled_req_ids.discard(request.request_id)

    def renew_kv(self, waiting: Iterable[Request]) -> None:
        """Drop all KV between two steps, that of turns under way too. Nothing may be copied into it meanwhile. What is
        computed from now on has the hashes of `salt_block_hashes`.

        ``waiting``: the turns that wait. None of them `is_loading`.
        """
        for request in waiting:
            loads = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            if loads or request.num_computed_tokens:  # its context was loaded
                self.kv_cache_manager.free(request)
                request.num_computed_tokens = 0
                self._inflight_prefills.discard(request)
            if loads:  # vLLM has not looked at it since, as the batch was full
                self.finished_recving_kv_req_ids.discard(request.request_id)
                self.failed_recving_kv_req_ids.discard(request.request_id)
                request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        self.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        for request in self.requests.values():
            request.block_hashes.clear()
            request.update_block_hashes()
        offloading = getattr(self.connector, "connector_scheduler", None)
        if isinstance(offloading, OffloadingConnectorScheduler):
            for status in offloading._req_status.values():
                for group in status.group_states:
                    group.offload_keys.clear()

    def take_cached(self, found: FoundContext) -> list[KVCacheBlock]:
        """Take references to the blocks of a context that are in the prefix cache."""
        blocks = self.groups.in_order(found.blocks.blocks)
        self.kv_cache_manager.block_pool.touch(blocks)
        return blocks

    def take_first(self, request: Request, blocks: int) -> list[KVCacheBlock]:
        """Take references to a request's first blocks. vLLM frees its own when the request ends."""
        first = list(self.kv_cache_manager.get_blocks(request.request_id).blocks[0][:blocks])
        self.kv_cache_manager.block_pool.touch(first)
        return first

    def take_blocks(self, request: Request) -> Sequence[KVCacheBlock]:
        """Take over a request's blocks. vLLM does not free them any more, and forgets the request."""
        blocks = self.groups.in_order(self.kv_cache_manager.get_blocks(request.request_id).blocks)
        if self.defer_block_free and request.last_sched_seq > self.processed_step_seq:
            # A step in flight may still write the last ones: a reference of vLLM's own keeps them until it has ended.
            written = blocks[-WRITTEN_BLOCKS * len(self.groups.groups) :]
            self.kv_cache_manager.block_pool.touch(written)
            self.deferred_frees.append((self.sched_step_seq, written))
        self.kv_cache_manager.pop_blocks_for_free(request)
        del self.requests[request.request_id]
        return blocks


def stop_storing_after(offloading: OffloadingConnectorScheduler, request: Request) -> None:
    """Limit the connector's stores of a turn that has ended to its computed tokens.

    vLLM stores the last block when its tokens fill it, although the last token has no KV. Whoever loads that block
    later computes with invalid KV. (With ``offload_prompt_only`` this does not happen.)
    """
    status = offloading._req_status.get(request.request_id)
    if status is not None:
        computed = max(0, min(request.num_computed_tokens, request.num_tokens - 1))
        bound = status.max_offload_tokens
        status.max_offload_tokens = computed if bound is None else min(bound, computed)


def look_up_unless(still_loads: Callable[[str, int], bool], offloading: OffloadingConnectorScheduler) -> None:
    """Let the connector look up no chunks of a turn while a part of its context is still being loaded.

    Args:
        still_loads: returns this of a request's id and of its tokens that the device has.
        offloading: the connector.
    """
    find = offloading.get_num_new_matched_tokens

    def find_unless_loading(request: Request, local: int, **more: Any) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = (None, False)  # vLLM 0.32 also gives the most that can be loaded
        return found if still_loads(request.request_id, local) else find(request, local, **more)

    offloading.get_num_new_matched_tokens = find_unless_loading


def store_again(offloading: OffloadingConnectorScheduler, request_id: str) -> bool:
    """Let the connector offer a turn's chunks again. Return False if it does not know the turn.

    Of a group with a sliding window, only chunks within the window are offered. vLLM has freed the blocks before it and
    keeps their ids below ``next_stored_chunk_idx``. They would be stored with the content that they have by now, and a
    job that names one block twice ends the engine (`_remove_pending_job`).
    """
    status = offloading._req_status.get(request_id)
    if status is None:
        return False
    for config, group in zip(offloading.config.kv_group_configs, status.group_states, strict=True):
        window = config.sliding_window_size_in_chunks
        chunks = status.req.num_computed_tokens // config.tokens_per_chunk
        first = 0 if window is None else max(0, chunks - window + 1)
        group.next_stored_chunk_idx = min(first, group.next_stored_chunk_idx)
    return True


def transfers_under_way(offloading: OffloadingConnectorScheduler) -> bool:
    """Return whether the connector has transfers because of which it must not be reset twice between two steps."""
    return bool(offloading._current_batch_jobs_to_flush)


# --- hashes of KV blocks ----------------------------------------------------------------------------------------------


def salt_block_hashes(salt: str) -> None:
    """Let the hashes of all blocks depend on ``salt`` too, in this process. An empty one restores vLLM's own hashes.

    vLLM's `NONE_HASH` comes before the first block of each prompt. It is read at each use.
    """
    global _own_none_hash
    if _own_none_hash is None:
        _own_none_hash = kv_cache_utils.NONE_HASH
    salted = hashlib.sha256(bytes(_own_none_hash) + salt.encode()).digest() if salt else _own_none_hash
    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(salted)


_own_none_hash: Any = None


# --- grammars of resumed turns ----------------------------------------------------------------------------------------

RESUMED_KEY = "caesura_resumed"
"""The key of ``SamplingParams.extra_args`` whose value is the number of the prompt's last tokens that are this turn's
output."""


def resumed_tokens(request: Any) -> int:
    """Return how many of the last prompt tokens of vLLM's ``request`` were generated elsewhere."""
    extra = (request.sampling_params.extra_args if request.sampling_params else None) or {}
    known: int = extra.get(RESUMED_KEY, 0)
    return known


def turn_tokens(request: Any) -> tuple[int, int]:
    """Return how many tokens the prompt and the output of a turn have. What another replica generated is output."""
    known = resumed_tokens(request)
    return request.num_prompt_tokens - known, request.num_output_tokens + known


def advance_grammars(manager: Any) -> None:
    """Let every grammar that ``manager`` makes from now on begin after the tokens that its request already has."""
    create = manager._create_grammar

    def advanced(request: Any) -> Any:
        grammar = create(request)
        known = resumed_tokens(request)
        if known:
            ids = _without_reasoning(manager, request, list(request.prompt_token_ids), known)
            if ids and not grammar.accept_tokens(request.request_id, ids):
                raise ValueError("the tokens that were generated elsewhere do not fit the grammar")
        return grammar

    manager._create_grammar = advanced


def share_compilation(manager: Any) -> None:
    """Let ``manager`` compile grammars in the order of a `GrammarQueue`, in place of their order of arrival.

    Do nothing for a model without a tokenizer, which has no grammars.
    """
    if (executor := getattr(manager, "executor", None)) is not None:
        manager.executor = GrammarQueue(executor._max_workers)


def share_rendering(renderer: Any) -> None:
    """Let vLLM's renderer use `RenderThreads` in place of its thread, also where it has kept the executor.

    Only some of vLLM's renderers, such as HfRenderer, have a tokenizer that several threads may use.
    """
    is_pooled = isinstance(renderer.tokenizer, ThreadSafeHFTokenizerMixin)
    renderer._executor.submit = RenderThreads(is_pooled=is_pooled).submit


def _without_reasoning(manager: Any, request: Any, ids: list[int], known: int) -> Sequence[int]:
    """Return the known tokens to which the grammar applies.

    Set in ``request`` whether the reasoning has ended in them.
    """
    asked = request.structured_output_request
    reasoner = manager._get_reasoner(request)
    if manager.enable_in_reasoning or asked.reasoning_ended is True or reasoner is None:
        return ids[-known:]
    begin = len(ids) - known
    if asked.reasoning_ended is None and reasoner.is_reasoning_end(ids[:begin]):
        asked.reasoning_ended = True
        return ids[begin:]
    asked.reasoning_ended = False
    for position in range(begin, len(ids)):
        if reasoner.is_reasoning_end_streaming(ids[: position + 1], [ids[position]]):
            asked.reasoning_ended = True
            return ids[position + 1 :]
    return ()


# --- the engine's process on CPU --------------------------------------------------------------------------------------

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
PR_SET_PDEATHSIG = 1

TITLE = "VLLM::EngineCore"
"""vLLM's name for the process. After a fork from a Ray worker vLLM cannot set it itself."""

_libc = ctypes.CDLL(None)
_set_title: Callable[[str], None] | None = None
"""Sets the title of a process. None: the current fork does not belong to `forked_engine_core`."""


@contextmanager
def forked_engine_core(set_title: Callable[[str], None]) -> Iterator[None]:
    """Let vLLM fork its engine process in the block. It works on Linux only, before CUDA is initialised.

    The fork shares the imported modules of the replica, so that it starts without importing. vLLM spawns inside a Ray
    actor, because a fork inherits the locks and sockets of Ray's threads. EngineCore uses neither: only vLLM's engine
    loop runs in it, and a multiprocessing child ends without the parent's exit handlers. It must not outlive the
    replica, whose sockets it holds open. Therefore the kernel kills it when its parent ends.

    Args:
        set_title: sets the title of a process.
    """
    global _set_title
    before, asked = os.environ.get(METHOD), system_utils.is_in_ray_actor
    # Garbage, and objects that a collection would write to, would be copied into the child page by page.
    gc.collect()
    trim()
    gc.freeze()
    _set_title, os.environ[METHOD], system_utils.is_in_ray_actor = set_title, "fork", lambda: False
    try:
        yield
    finally:
        _set_title, system_utils.is_in_ray_actor = None, asked
        if before is None:
            del os.environ[METHOD]
        else:
            os.environ[METHOD] = before


def _prepare_engine_core() -> None:
    if _set_title is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _set_title(TITLE)


os.register_at_fork(after_in_child=_prepare_engine_core)
