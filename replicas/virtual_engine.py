"""A replica without a model: a real vLLM scheduler class, driven step by step with made-up tokens.

What runs is vLLM's scheduler, KV cache manager and block pool as they are; only the forward pass is missing. Each
request generates exactly its ``max_tokens`` (``ignore_eos``). Used by tests and benchmarks as a readable timeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from cluster.program import WIRE_KEY, ProgramIdentity
from replicas.settings import SchedulerSettings

FIRST_TOKEN = 100
"""Generated tokens are this one and those after it: never an end-of-sequence token of the tiny model."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The memory and the bounds of a virtual replica."""

    num_blocks: int = 64
    """KV blocks, vLLM's null block included."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192


class VirtualEngine:
    """One scheduler and the loop around it.

    Args:
        scheduler_cls: a class with vLLM's scheduler constructor; the stock one for a baseline.
        model: directory with a model's config.json; weights and tokenizer are not read.
        shape: memory and bounds.
        settings: policy and bounds for an AgentScheduler.
        asynchronous: schedule the next step before the last one's tokens are known, as on a GPU.
    """

    def __init__(
        self,
        scheduler_cls: type[AsyncScheduler],
        model: Path,
        shape: Shape = Shape(),
        settings: SchedulerSettings | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.shape = shape
        config = _vllm_config(model, shape, settings or SchedulerSettings(), asynchronous)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(shape.block_size, sha256)
        spec = FullAttentionSpec(block_size=shape.block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.scheduler = scheduler_cls(
            config,
            KVCacheConfig(shape.num_blocks, [], [KVCacheGroupSpec(["layer.0"], spec)]),
            StructuredOutputManager(config),
            block_size=shape.block_size,
        )
        self._in_flight: list[tuple[SchedulerOutput, list[bool]]] = []
        self._asynchronous = asynchronous
        self._next_token = FIRST_TOKEN

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        identity: ProgramIdentity | None = None,
    ) -> Request:
        """Add a request that generates exactly ``max_tokens``."""
        extra: Mapping[str, Any] | None = {WIRE_KEY: identity.encode()} if identity else None
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=dict(extra) if extra else None)
        request = Request(
            request_id,
            list(prompt),
            params,
            None,
            block_hasher=self._hasher,
            session_id=identity.key if identity else None,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        """Schedule once and, unless a step is to stay in flight, take its tokens; what was scheduled."""
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._samples(output)))
        if not self._asynchronous or len(self._in_flight) > 1:
            self._finish(*self._in_flight.pop(0))
        return output

    def complete(self, output: SchedulerOutput) -> None:
        """The tokens of a step that the caller scheduled by itself, to time it; not for asynchronous engines."""
        self._finish(output, self._samples(output))

    def _samples(self, output: SchedulerOutput) -> list[bool]:
        """Which requests get a token from this step: not those whose prompt goes on. The next step may change it."""
        return [not self.scheduler.requests[i].is_prefill_chunk for i in output.num_scheduled_tokens]

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left; the number of steps.

        Raises:
            RuntimeError: something is left after ``max_steps``.
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
        """Blocks that nobody owns; ``shape.num_blocks - 1`` when all are free."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _finish(self, output: SchedulerOutput, samples: Sequence[bool]) -> None:
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[self._token()] if sample else [] for sample in samples],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(output, result)

    def _token(self) -> int:
        self._next_token = FIRST_TOKEN + (self._next_token - FIRST_TOKEN + 1) % 100
        return self._next_token


def _vllm_config(model: Path, shape: Shape, settings: SchedulerSettings, asynchronous: bool) -> VllmConfig:
    model_config = ModelConfig(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=shape.max_model_len,
        dtype="float32",
    )
    cache_config = CacheConfig(block_size=shape.block_size, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = shape.num_blocks
    scheduler_config = SchedulerConfig(
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        max_model_len=shape.max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        scheduler_config=scheduler_config,
        device_config=DeviceConfig("cpu"),
        additional_config=settings.additional_config(),
    )
    config.scheduler_config.async_scheduling = asynchronous
    return config
