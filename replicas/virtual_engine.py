"""A replica without a model: a real vLLM scheduler class, driven step by step with made-up tokens.

vLLM's scheduler, KV cache manager and block pool run unchanged; only the forward pass is missing. Each request
generates exactly its ``max_tokens`` (``ignore_eos``). Tests and benchmarks drive it as a readable timeline, and
`replicas.virtual_replica` gives its steps a duration.

The host tier of a virtual replica consists of vLLM's own offloading connector and a link whose transfers take virtual
time. Both halves of the connector run unchanged: the scheduler's half plans loads, stores and flushes, and the worker's
half decides when each is submitted to the link and reported. Only the copying is missing. Times are as on a GPU. A
store begins at the start of the step after the one that planned it. A load begins when the compute of the step that
planned it has ended, because the copy stream waits for the compute stream. Each direction does one transfer after the
other. A step waits for the stores whose blocks it will overwrite.
"""

import json
import mmap
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from cluster.core.clock import Clock
from cluster.core.program import WIRE_KEY, ProgramIdentity
from replicas.peers.peer import NO_FIELDS, RequestFields
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.virtual_forgetting import forget_copies, forget_free_blocks
from replicas.virtual_tools import VirtualTools


@dataclass(slots=True)
class _Direction:
    """One direction of the link. Transfers end in the order in which they were submitted."""

    under_way: deque[tuple[int, float, int]]
    """Triples (job id, end in seconds, tokens) of the transfers in progress."""
    free_at_s: float = 0.0
    tokens: int = 0
    """Tokens moved so far."""


class VirtualLink(OffloadingWorker):
    """A link that moves nothing, but takes virtual time.

    Args:
        clock: the virtual clock.
        transfer_s: returns the seconds to move the KV of this many tokens one way.
        block_size: tokens of a block.
    """

    def __init__(self, clock: Clock, transfer_s: Callable[[int], float], block_size: int) -> None:
        self._clock = clock
        self._transfer_s = transfer_s
        self._block_size = block_size
        self._out = _Direction(deque())
        self._in = _Direction(deque())
        self._waited_until_s = 0.0

    @property
    def stored_tokens(self) -> int:
        """Tokens whose KV has arrived on the host."""
        return self._out.tokens

    @property
    def loaded_tokens(self) -> int:
        """Tokens whose KV has come back to the device."""
        return self._in.tokens

    @property
    def next_end_s(self) -> float | None:
        """Time at which the next transfer ends, or None if none is in progress."""
        return min((way.under_way[0][1] for way in (self._out, self._in) if way.under_way), default=None)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Submit a transfer from the device to the host."""
        return self._submit(self._out, job_id, src_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Submit a transfer from the host to the device."""
        return self._submit(self._in, job_id, dst_spec)

    def _submit(self, way: _Direction, job_id: int, device: GPULoadStoreSpec) -> bool:
        tokens = len(device.block_ids) * self._block_size
        way.free_at_s = max(way.free_at_s, self._clock.now_s()) + self._transfer_s(tokens)
        way.under_way.append((job_id, way.free_at_s, tokens))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that have ended, each once.

        Bytes and seconds are left out, as vLLM would only count them.
        """
        now_s = self._clock.now_s()
        results: list[TransferResult] = []
        for way in (self._out, self._in):
            while way.under_way and way.under_way[0][1] <= now_s:
                job_id, _, tokens = way.under_way.popleft()
                way.tokens += tokens
                results.append(TransferResult(job_id, success=True))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Make the step that begins now wait until these transfers have ended: see :meth:`take_wait_s`."""
        ends = (end_s for way in (self._out, self._in) for job_id, end_s, _ in way.under_way if job_id in job_ids)
        self._waited_until_s = max(ends, default=self._waited_until_s)

    def take_wait_s(self) -> float:
        """Return the seconds from now until the awaited transfers have ended."""
        wait_s = max(0.0, self._waited_until_s - self._clock.now_s())
        self._waited_until_s = 0.0
        return wait_s


class VirtualHostTier:
    """The worker's half of the connector of one virtual engine, on a link.

    Args:
        config: the engine's configuration, with a ``kv_transfer_config``.
        kv_cache_config: the engine's KV cache configuration.
        connector: the scheduler's half.
        link: the link that takes the transfers.
    """

    def __init__(
        self, config: VllmConfig, kv_cache_config: KVCacheConfig, connector: OffloadingConnector, link: OffloadingWorker
    ) -> None:
        worker = OffloadingConnector(config, KVConnectorRole.WORKER, kv_cache_config).connector_worker
        assert worker is not None, "the role of a worker was asked for"
        worker.worker = link
        self._worker = worker
        _make_repeatable(connector)

    def step_begins(self, output: SchedulerOutput) -> None:
        """Submit the stores of the previous step, and wait for those whose blocks will be overwritten."""
        transfers = _transfers_of(output)
        self._worker.handle_preemptions(transfers)
        if not output.total_num_scheduled_tokens:
            self._worker.start_kv_transfers(transfers)

    def step_ends(self, output: SchedulerOutput) -> KVConnectorOutput:
        """Submit the step's loads, and keep its stores for the next step. Return what has arrived."""
        transfers = _transfers_of(output)
        if output.total_num_scheduled_tokens:
            self._worker.start_kv_transfers(transfers)
        self._worker.prepare_store_kv(transfers)
        sent, received = self._worker.get_finished(output.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            kv_connector_worker_meta=self._worker.build_connector_worker_meta(),
        )


def stock_transfer_config(num_bytes: int) -> dict[str, Any]:
    """Return the configuration of vLLM's own host tier.

    Generated tokens are kept too, which is not vLLM's default, because agents send them again.
    """
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": num_bytes, "offload_prompt_only": False},
    }


def _transfers_of(output: SchedulerOutput) -> OffloadingConnectorMetadata:
    transfers = output.kv_connector_metadata
    assert isinstance(transfers, OffloadingConnectorMetadata), f"the connector planned {transfers!r}"
    return transfers


def _make_repeatable(connector: OffloadingConnector) -> None:
    """Make the connector iterate over sets of names and hashes in the same order in each process.

    Host blocks are allocated and evicted in that order. Nothing else of vLLM is changed.
    """
    scheduler = connector.connector_scheduler
    assert scheduler is not None, "this is a worker's half"
    plan = connector.build_connector_meta

    def build_connector_meta(output: SchedulerOutput) -> Any:
        if len(output.finished_req_ids) > 1:
            ordered: Any = tuple(sorted(output.finished_req_ids))
            output = replace(output, finished_req_ids=ordered)
        transfers = plan(output)
        for jobs in (transfers.load_jobs, transfers.store_jobs):
            for job_id in jobs:
                keys: Any = tuple(sorted(scheduler._jobs[job_id].keys))
                scheduler._jobs[job_id].keys = keys
        return transfers

    connector.build_connector_meta = build_connector_meta


FIRST_TOKEN = 100
"""The first id of generated tokens. They never include the end-of-sequence token of the tiny model."""
NUM_TOKENS = 100
"""Number of ids of generated tokens that call no tool."""


HASH_BYTES = 8
"""Bytes of a block's hash. vLLM's own has 32. Two blocks have the same hash once in 2^64 pairs."""

HEAD_SIZE = mmap.PAGESIZE
"""Head size of the made-up KV cache. With it a block has full pages of memory, to which vLLM's host tier rounds up."""

CONFIG_ONLY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
    "torch_dtype": "float32",
}
"""A model configuration. A scheduler reads only that it is a decoder, and how long its context may be."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The memory and the limits of a virtual replica."""

    num_blocks: int = 64
    """Number of KV blocks, vLLM's null block included."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    prefix_caching: bool = True
    forgetful: bool = False
    """Whether the content of a block is forgotten once nothing uses or holds it, and host copies once their program is
    not swapped out, as in an engine that keeps the KV of paused programs, but has no prefix cache."""
    host_blocks: int = 0
    """Number of blocks of the host tier. 0 means that there is none."""


class VirtualEngine:
    """One scheduler and the loop around it.

    Args:
        scheduler_cls: a class with vLLM's scheduler constructor. vLLM's own class serves as a baseline.
        model: a directory with a model's config.json. Weights and tokenizer are not read.
        shape: memory and limits.
        settings: policy and limits for an AgentScheduler.
        asynchronous: whether the next step is scheduled before the last one's tokens are known, as on a GPU.
        link: the link to the host tier. It is needed if ``shape`` has a host tier.
        transfer_config: returns the configuration of a tier of so many bytes: vLLM's own or
            `replicas.host_tier.kv_transfer_config`.
        additional_config: vLLM's engine argument for another scheduler, in place of ``settings``.
        scheduling_policy: vLLM's engine argument.
    """

    def __init__(
        self,
        scheduler_cls: type[Scheduler],
        model: Path,
        shape: Shape = Shape(),
        settings: SchedulerSettings | None = None,
        asynchronous: bool = False,
        link: OffloadingWorker | None = None,
        transfer_config: Callable[[int], dict[str, Any]] = stock_transfer_config,
        additional_config: Mapping[str, Any] | None = None,
        scheduling_policy: str = "fcfs",
    ) -> None:
        self.shape = shape
        self._hasher = block_hasher(shape.block_size) if shape.prefix_caching else None
        spec = FullAttentionSpec(shape.block_size, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float32)
        page_bytes = spec.page_size_bytes
        transfers = KVTransferConfig(**transfer_config(shape.host_blocks * page_bytes)) if shape.host_blocks else None
        if additional_config is None:
            additional_config = (settings or SchedulerSettings()).additional_config()
        config = _vllm_config(model, shape, additional_config, asynchronous, transfers, scheduling_policy)
        tensor = KVCacheTensor(shape.num_blocks * page_bytes, ["layer.0"], shape.num_blocks * page_bytes, page_bytes)
        kv_cache_config = KVCacheConfig(shape.num_blocks, [tensor], [KVCacheGroupSpec(["layer.0"], spec)])
        self.scheduler = scheduler_cls(
            config, kv_cache_config, StructuredOutputManager(config), block_size=shape.block_size
        )
        if shape.forgetful:
            forget_free_blocks(self.scheduler.kv_cache_manager.block_pool)
            if isinstance(self.scheduler, AgentScheduler):
                forget_copies(self.scheduler)
            else:
                assert not shape.host_blocks, "vLLM's own connector finds every copy again"
        self._host_tier: VirtualHostTier | None = None
        if shape.host_blocks:
            connector = self.scheduler.connector
            assert isinstance(connector, OffloadingConnector) and link is not None, "a host tier needs a link"
            self._host_tier = VirtualHostTier(config, kv_cache_config, connector, link)
        self._in_flight: list[tuple[SchedulerOutput, list[bool], KVConnectorOutput | None]] = []
        self._asynchronous = asynchronous
        self._next_token = FIRST_TOKEN
        self._tools = VirtualTools(FIRST_TOKEN + NUM_TOKENS)
        if isinstance(self.scheduler, AgentScheduler):
            self.scheduler.tool_names = self._tools

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        identity: ProgramIdentity | None = None,
        arrival_s: float | None = None,
        fields: RequestFields = NO_FIELDS,
        tool: str | None = None,
    ) -> Request:
        """Add a request that generates exactly ``max_tokens``, the last of which calls ``tool``.

        vLLM records ``arrival_s``. None is the time of day. ``fields`` are those of a peer's client.
        """
        if tool is not None:
            self._tools.plan(request_id, tool)
        extra = {**({WIRE_KEY: identity.encode()} if identity else {}), **fields.extra_args}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None)
        request = Request(
            request_id,
            list(prompt),
            params,
            None,
            arrival_time=arrival_s,
            priority=fields.priority,
            block_hasher=self._hasher,
            session_id=identity.key if identity else None,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        """Schedule once, and process the step's tokens unless it stays in flight. Return what was scheduled."""
        output = self.scheduler.schedule()
        self.begin(output)
        self._in_flight.append((output, self._samples(output), self._transferred(output)))
        if not self._asynchronous or len(self._in_flight) > 1:
            self._finish(*self._in_flight.pop(0))
        return output

    def begin(self, output: SchedulerOutput) -> None:
        """Submit the transfers at the beginning of a step that the caller has scheduled."""
        if self._host_tier is not None:
            self._host_tier.step_begins(output)

    def complete(self, output: SchedulerOutput) -> list[EngineCoreOutput]:
        """Process the tokens of a step that the caller has scheduled. It is not for asynchronous engines."""
        return self._finish(output, self._samples(output), self._transferred(output))

    def _transferred(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        return self._host_tier.step_ends(output) if self._host_tier is not None else None

    def _samples(self, output: SchedulerOutput) -> list[bool]:
        """Return which requests get a token from this step, without those whose prompt goes on.

        It has to be called before the next step, which may change the result.
        """
        requests = self.scheduler.requests  # one that ended when it was scheduled is not among them
        return [i in requests and not requests[i].is_prefill_chunk for i in output.num_scheduled_tokens]

    def run(self, max_steps: int = 10_000) -> int:
        """Step until no request is left. Return the number of steps.

        Raises:
            RuntimeError: a request is left after ``max_steps``.
        """
        for steps in range(max_steps):
            if not self.scheduler.has_unfinished_requests() and not self._in_flight:
                return steps
            if self.scheduler.has_unfinished_requests():
                self.step()
            else:
                self._finish(*self._in_flight.pop(0))
        raise RuntimeError(f"{self.scheduler.get_num_unfinished_requests()} requests are left after {max_steps} steps")

    def free_blocks(self) -> int:
        """Return the number of blocks that nobody owns. It is ``shape.num_blocks - 1`` when all are free."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of the leading blocks are in the prefix cache. The host tier does not count.

        The search is a bisection, because the end of a chain is evicted first.
        """
        find = self.scheduler.kv_cache_manager.block_pool.get_cached_block
        return bisect_left(hashes, True, key=lambda block: find(block, [0]) is None)

    def fill_cache(self, prompt: Sequence[int], tokens: int) -> None:
        """Put the KV of the prompt's first ``tokens`` into the prefix cache, as far as memory suffices.

        Raises:
            ValueError: there is no prefix cache.
        """
        if self._hasher is None:
            raise ValueError("an engine without a prefix cache has none to be filled")
        request = Request("filling", list(prompt), SamplingParams(max_tokens=1), None, block_hasher=self._hasher)
        pool, known = self.scheduler.kv_cache_manager.block_pool, self.cached_blocks(request.block_hashes)
        full = min(tokens // self.shape.block_size, len(request.block_hashes), known + self.free_blocks())
        if full <= known:
            return
        new = pool.get_new_blocks(full - known)
        pool.cache_full_blocks(request, [pool.null_block] * known + new, known, full, self.shape.block_size, 0)
        pool.free_blocks(reversed(new))  # the end of a prompt is evicted first

    def _finish(
        self, output: SchedulerOutput, samples: Sequence[bool], transferred: KVConnectorOutput | None
    ) -> list[EngineCoreOutput]:
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[self._token(i)] if sample else [] for i, sample in zip(ids, samples, strict=True)],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=transferred,
        )
        by_client = self.scheduler.update_from_output(output, result)
        return [answer for outputs in by_client.values() for answer in outputs.outputs]

    def _token(self, request_id: str) -> int:
        request = self.scheduler.requests.get(request_id)
        is_last = request is not None and request.num_output_tokens + 1 == request.max_tokens
        if is_last and (call := self._tools.take(request_id)) is not None:
            return call
        self._next_token = FIRST_TOKEN + (self._next_token - FIRST_TOKEN + 1) % NUM_TOKENS
        return self._next_token


def block_hasher(block_size: int) -> Callable[[Request], list[BlockHash]]:
    """Return a function that hashes a request's new full blocks, each chained to the one before it.

    It works as vLLM's hasher, but without sha256. Integers have the same hash in every process, so that a run can be
    repeated. There is no cache salt, no LoRA and no image.
    """

    def hashes(request: Request) -> list[BlockHash]:
        known = request.block_hashes
        if (len(known) + 1) * block_size > request.num_tokens:  # this is the case after most tokens
            return []
        return chained_hashes(request._all_token_ids, block_size, len(known), known[-1] if known else None)

    return hashes


def chained_hashes(
    tokens: Sequence[int], block_size: int, known: int = 0, last: BlockHash | None = None
) -> list[BlockHash]:
    """Return the hashes of the full blocks of ``tokens`` after the first ``known``, whose last hash is ``last``."""
    parent = int.from_bytes(last, "big", signed=True) if last is not None else 0
    new: list[BlockHash] = []
    for begin in range(known * block_size, len(tokens) - block_size + 1, block_size):
        parent = hash((parent, *tokens[begin : begin + block_size]))
        new.append(BlockHash(parent.to_bytes(HASH_BYTES, "big", signed=True)))
    return new


def write_config_only_model(directory: Path, max_model_len: int) -> Path:
    """Write a model directory that has only a configuration. Return ``directory``."""
    config = CONFIG_ONLY_MODEL | {"max_position_embeddings": max_model_len}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _vllm_config(
    model: Path,
    shape: Shape,
    additional_config: Mapping[str, Any],
    asynchronous: bool,
    transfers: KVTransferConfig | None,
    scheduling_policy: str,
) -> VllmConfig:
    model_config = ModelConfig(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=shape.max_model_len,
        dtype="float32",
    )
    cache_config = CacheConfig(block_size=shape.block_size, enable_prefix_caching=shape.prefix_caching)
    cache_config.num_gpu_blocks = shape.num_blocks
    scheduler_config = SchedulerConfig(
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        max_model_len=shape.max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        policy=scheduling_policy,
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        scheduler_config=scheduler_config,
        device_config=DeviceConfig("cpu"),
        additional_config=dict(additional_config),
        kv_transfer_config=transfers,
    )
    config.scheduler_config.async_scheduling = asynchronous
    return config
