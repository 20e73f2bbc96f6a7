"""The differences between the versions of vLLM that Caesura runs on, and the only place that knows them.

The pinned version is 0.29.0, which Ray's LLM extra requires. `make test-next` runs the contracts on newer ones
(`requirements/vllm`). All other files use the names of this one, and are written once. When Ray requires a newer vLLM,
delete here what only older versions need. Each difference is found by the names that vLLM has, not by its number,
because builds between two releases have numbers of their own.

| here | 0.29 | 0.32 |
| --- | --- | --- |
| `ChunkStatus` | BlockStatus | ChunkStatus |
| `HostChunks`, `tier_chunks`, `job_rows`, `offload_region` | the host tier counts blocks | it counts chunks |
| `touch_contexts` | the connector reports each context to the manager | it does not: this module reports it |
| `TwoQueues` | skipped turns wait in a second queue, and a method chooses a queue | turns with KV memory wait in a \
second queue, which always comes first |
| `batch_places` | max_num_running_reqs bounds the running turns | max_num_active_reqs does |
| `Loads` | blocks of a load are excluded from zeroing after their allocation | at their allocation |
| `cover_loads` | a lookup may promise fewer chunks of a sliding window than the load needs (vllm#54914): more are \
looked up | the lookup covers the load |
| `lark_grammar` | vLLM converts a Lark grammar to EBNF | xgrammar compiles it |
| `GeneratedTokens` | GenerateResponse, whose log probabilities name a token as `token_id:ID` | GenerateResponseBase; \
they have `token_id` |
| `grammar_tokenizer` | the backend gets a wrapped tokenizer of Mistral's | it gets the tokenizer |
"""

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
)
from vllm.entrypoints.scale_out.token_in_token_out import protocol as token_protocol
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec
from vllm.v1.kv_offload.cpu import manager as cpu_manager
from vllm.v1.kv_offload.cpu.policies import base as cpu_policies
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering import async_lookup
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.request import Request
from vllm.v1.structured_output import utils as structured_output

# --- the host tier ----------------------------------------------------------------------------------------------------

COUNTS_CHUNKS = hasattr(cpu_policies, "ChunkStatus")
"""Whether the host tier counts chunks. Before, it called them blocks."""

ChunkStatus: Any = cpu_policies.ChunkStatus if COUNTS_CHUNKS else cpu_policies.BlockStatus
"""vLLM's record of a chunk on the host. Its ``ref_cnt`` is -1 until the chunk is stored."""

TOUCHES_CONTEXTS = hasattr(OffloadingConnectorScheduler, "_touch")
"""Whether vLLM's connector reports a turn's context to the manager when it looks it up and when it stores."""


COVERS_LOADS = hasattr(GroupOffloadConfig, "load_window_size_in_chunks")
"""Whether a lookup asks for all chunks of a sliding window that the load after it needs."""


class HostChunks(cpu_manager.CPUOffloadingManager):
    """vLLM's manager of the host tier, without a threshold for stores.

    Args:
        num_chunks: capacity of the tier, in chunks.
        cache_policy: name of the class that chooses which chunks are evicted.
        cache_policy_module_path: module of that class.
        enable_events: whether vLLM's KV events are on.
    """

    def __init__(self, num_chunks: int, cache_policy: str, cache_policy_module_path: str, enable_events: bool) -> None:
        super().__init__(
            **{"num_chunks" if COUNTS_CHUNKS else "num_blocks": num_chunks},
            cache_policy=cache_policy,
            cache_policy_module_path=cache_policy_module_path,
            enable_events=enable_events,
            store_threshold=0,
        )
        self.num_chunks = num_chunks

    @property
    def free_chunks(self) -> int:
        """Number of chunks of the tier that store nothing."""
        return int(self._get_num_free_chunks() if COUNTS_CHUNKS else self._get_num_free_blocks())


def tier_chunks(spec: Any) -> int:
    """Return the number of chunks that a CPUOffloadingSpec gives its tier."""
    return int(spec.num_chunks if COUNTS_CHUNKS else spec.num_blocks)


def job_rows(job: TransferJob) -> Iterable[int]:
    """Return the rows of the host tier's memory that a transfer to or from a tier below it reads or writes."""
    rows: Iterable[int] = job.chunk_ids if COUNTS_CHUNKS else job.block_ids
    return rows


def offload_region(spec: Any, rank: int | None) -> SharedOffloadRegion:
    """Open the host tier's memory, which the engine's process and its workers share.

    Args:
        spec: vLLM's CPUOffloadingSpec.
        rank: rank of the worker. None: the engine's process.
    """
    unit = "chunk" if COUNTS_CHUNKS else "block"
    return SharedOffloadRegion(
        engine_id=spec.config.engine_id,
        rank=rank,
        cpu_page_size=spec.cpu_page_size_per_worker,
        **{f"num_{unit}s": tier_chunks(spec), f"kv_bytes_per_{unit}": spec.kv_bytes_per_chunk},
    )


def touch_contexts(offloading: OffloadingConnectorScheduler) -> None:
    """Report the context of a turn to the connector's manager at each lookup and each store, where vLLM does not."""
    if TOUCHES_CONTEXTS:
        return
    find, store = offloading.get_num_new_matched_tokens, offloading._build_store_jobs

    def touch(request_id: str) -> None:
        status = offloading._req_status[request_id]
        for config, group in zip(offloading.config.kv_group_configs, status.group_states, strict=True):
            window = config.sliding_window_size_in_chunks
            unused = 0 if window is None else max(0, group.num_hit_chunks - window)
            offloading.manager.touch(group.offload_keys[unused:], status.req_context)

    def find_and_touch(request: Request, *args: Any, **kwargs: Any) -> Any:
        found = find(request, *args, **kwargs)
        touch(request.request_id)
        return found

    def store_and_touch(output: Any) -> Any:
        jobs = store(output)
        for job in jobs.values():
            touch(job.req_id)
        return jobs

    offloading.get_num_new_matched_tokens, offloading._build_store_jobs = find_and_touch, store_and_touch


def cover_loads(offloading: OffloadingConnectorScheduler, kv_cache_config: KVCacheConfig) -> None:
    """Let lookups ask for all chunks of a sliding window that a load needs, where vLLM's do not.

    A load needs the window before the end of the hit. vLLM 0.29 looks up the chunks of one window, counted back from
    the last chunk that the hit touches. It looks up too few where the hit ends within a chunk, because groups of blocks
    have several sizes, and with speculative decoding, for which some tokens before the window are kept as well. If the
    full tier has evicted such a chunk, an assertion in ``prepare_load`` ends the engine (vllm#54914).
    """
    if COVERS_LOADS:
        return
    groups = offloading.config.kv_group_configs
    smallest = min(group.tokens_per_chunk for group in groups)

    def covering(group: GroupOffloadConfig) -> GroupOffloadConfig:
        spec = kv_cache_config.kv_cache_groups[group.group_idx].kv_cache_spec
        if not isinstance(spec, SlidingWindowSpec):
            return group
        # A hit ends at the end of one of the smallest chunks, or one token before it.
        outside = group.tokens_per_chunk - smallest + 1
        needed = spec.sliding_window - 1 + spec.extra_retained_tokens + outside
        return group._replace(sliding_window_size_in_chunks=cdiv(needed, group.tokens_per_chunk))

    offloading.config = offloading.config._replace(kv_group_configs=tuple(covering(group) for group in groups))


# --- waiting turns ----------------------------------------------------------------------------------------------------

CHOOSES_QUEUE = hasattr(AsyncScheduler, "_select_waiting_queue_for_scheduling")
"""Whether vLLM asks a method which of its two queues comes first. Otherwise, turns with memory always come first."""

SECOND_QUEUE = "skipped_waiting" if CHOOSES_QUEUE else "kv_holding_waiting"
"""vLLM's name for the queue beside ``waiting``."""


class TwoQueues(AsyncScheduler):
    """vLLM's scheduler, with both of its waiting queues under one name.

    It uses these names of vLLM: waiting, and skipped_waiting with _select_waiting_queue_for_scheduling or
    kv_holding_waiting with _handle_blocked_waiting_request.
    """

    @property
    def waiting_queues(self) -> tuple[Any, Any]:
        """Both queues of waiting turns. Each waiting turn is in one of them."""
        return waiting_queues(self)

    @waiting_queues.setter
    def waiting_queues(self, queues: Iterable[Any]) -> None:
        self.waiting, second = queues
        setattr(self, SECOND_QUEUE, second)

    def _select_waiting_queue_for_scheduling(self) -> Any:
        """Return the queue whose head ranks first. At equal ranks, skipped turns come first, as in vLLM's FCFS.

        Newer versions do not call it. They take turns with memory first, which have the rank before all others.
        """
        first, second = self.waiting_queues
        queue = second or first or None
        if first and second and first.peek_rank() < second.peek_rank():
            queue = first
        if queue:
            self.consider(queue.peek_request())
        return queue

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Return whether a turn that is admitted next may be. Versions that choose a queue do not call it."""
        may_be: bool = super()._handle_blocked_waiting_request(request)
        if may_be:
            self.consider(request)
        return may_be

    def consider(self, request: Request) -> None:
        """Process that vLLM looks at this turn next. It may be marked so that vLLM skips it in this step."""


def batch_places(scheduler: Any) -> int:
    """Return how many turns may run at a time."""
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def waiting_queues(scheduler: Any) -> tuple[Any, Any]:
    """Return both queues of waiting turns of any scheduler of vLLM."""
    return scheduler.waiting, getattr(scheduler, SECOND_QUEUE)


# --- loads of the scheduler's own -------------------------------------------------------------------------------------

ZEROES_AT_ALLOCATION = not hasattr(KVCacheManager, "get_zeroing_block_ids_in_range")
"""Whether ``allocate_slots`` is given the groups of which the new blocks are not set to zero."""


class Loads(TwoQueues):
    """vLLM's scheduler, with the allocation of the blocks of a load.

    It uses these names of vLLM: kv_cache_manager, running, _inflight_prefill_reserved_blocks, and
    needs_kv_cache_zeroing, _skip_zero_block_ids or connector.get_loaded_kv_cache_group_ids,
    _spec_decode_step_blocks, _set_kv_fetch_stage.
    """

    def allocate_load(self, request: Request, blocks: KVCacheBlocks, local: int, remote: int) -> bool:
        """Allocate blocks as vLLM does for a waiting turn whose context the connector loads. They are not zeroed.

        The class's own method allocates, as a wrapper of the manager's method would break holds.

        Args:
            request: the load.
            blocks: its blocks in the prefix cache.
            local: tokens of these.
            remote: tokens after these, which are loaded.

        Returns:
            False if there is not enough memory.
        """
        manager, reserved = self.kv_cache_manager, self._inflight_prefill_reserved_blocks()
        newer: dict[str, Any] = {}
        if ZEROES_AT_ALLOCATION:
            reserved += self._spec_decode_step_blocks
            newer["skip_zeroing_group_ids"] = self.connector.get_loaded_kv_cache_group_ids(request)
        allocated = KVCacheManager.allocate_slots(
            manager,
            request,
            0,
            num_new_computed_tokens=local,
            new_computed_blocks=blocks,
            num_external_computed_tokens=remote,
            delay_cache_blocks=True,
            reserved_blocks=reserved,
            has_scheduled_reqs=bool(self.running),
            **newer,
        )
        if allocated is not None and not ZEROES_AT_ALLOCATION and self.needs_kv_cache_zeroing:
            written = manager.get_zeroing_block_ids_in_range(request.request_id, local, local + remote)
            self._skip_zero_block_ids.update(written)
        return allocated is not None


DRAINS_LATE_LOOKUPS = hasattr(async_lookup, "LookupPhase")
"""Whether vLLM's lookups in a tier ignore the answer to an earlier lookup of the same chunk."""

# --- grammars ---------------------------------------------------------------------------------------------------------

CONVERTS_LARK = hasattr(structured_output, "convert_lark_to_ebnf")
"""Whether vLLM itself converts Lark grammars."""


def lark_grammar(spec: str) -> tuple[str, str]:
    """Return the kind of grammar that vLLM's backend compiles for a Lark grammar, and its text.

    Raises:
        ValueError: vLLM rejects the grammar.
    """
    return ("grammar", structured_output.convert_lark_to_ebnf(spec)) if CONVERTS_LARK else ("lark", spec)


def grammar_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer that vLLM gives its grammar backend."""
    wrap = getattr(structured_output, "maybe_wrap_mistral_common_tokenizer", None)
    return tokenizer if wrap is None else wrap(tokenizer)


# --- requests of token ids --------------------------------------------------------------------------------------------

GeneratedTokens: Any = getattr(token_protocol, "GenerateResponseBase", token_protocol.GenerateResponse)
"""vLLM's class of the whole answer to a request of token ids."""
