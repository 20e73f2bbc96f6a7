"""The host tier: vLLM's offloading connector with a spec of our own, on CUDA and on CPU.

Written for vLLM 0.29.0. `HostTierSpec` is vLLM's CPUOffloadingSpec with another manager (`replicas.host_cache`), and
with a worker for CPU engines, where vLLM has none. On CUDA vLLM's own worker copies: pinned memory under /dev/shm,
asynchronous, in streams of its own.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingManager,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from cluster.clock import MonotonicClock
from cluster.errors import ConfigError
from replicas.host_cache import HostCache

CONNECTOR = "OffloadingConnector"
PROGRAM_SHARE = 0.25
"""No program gets more than this part of the tier."""

MEMORY_SHARE = 0.5
"""Part of the machine's available memory that its replicas' tiers take together."""

CPU_CACHES = 2
"""On a CPU machine a tier takes no more than so many times the KV cache: host and device memory are the same there,
and the tier is there to be tried."""

SHARED_MEMORY = Path("/dev/shm")
"""Where vLLM's CUDA worker keeps the tier."""


def kv_transfer_config(
    num_bytes: int | None, program_share: float = PROGRAM_SHARE, replicas_here: int = 1
) -> dict[str, Any]:
    """vLLM's engine argument of that name.

    Args:
        num_bytes: of the tier, all ranks of the replica together; None: :func:`choose_size` is to be called where the
            replica starts.
        program_share: no program gets more than this part.
        replicas_here: that share the machine.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": HostTierSpec.__name__,
            "spec_module_path": __name__,
            "cpu_bytes_to_use": num_bytes,
            # What a turn generated is in the next turn's prompt.
            "offload_prompt_only": False,
            "program_share": program_share,
            "replicas_here": replicas_here,
        },
    }


def choose_size(config: Any) -> None:
    """Give a host tier that has no size one that fits this machine. To be called before any process is forked.

    Args:
        config: vLLM's VllmConfig, changed in place.
    """
    transfers = config.kv_transfer_config
    extra = transfers.kv_connector_extra_config if transfers is not None else {}
    if extra.get("spec_name") == HostTierSpec.__name__ and extra["cpu_bytes_to_use"] is None:
        on_cpu = config.device_config.device_type == "cpu"
        cache_bytes = config.cache_config.kv_cache_memory_bytes if on_cpu else None
        extra["cpu_bytes_to_use"] = fitting_bytes(extra["replicas_here"], cache_bytes)


def fitting_bytes(replicas: int, kv_cache_bytes: int | None) -> int:
    """The size of a replica's tier where the configuration says none.

    Args:
        replicas: that share this machine.
        kv_cache_bytes: of a CPU replica; None on CUDA, where the tier lives in shared memory.
    """
    share = int(psutil.virtual_memory().available * MEMORY_SHARE) // max(1, replicas)
    if kv_cache_bytes is not None:
        return min(share, CPU_CACHES * kv_cache_bytes)
    if SHARED_MEMORY.is_dir():
        share = min(share, int(shutil.disk_usage(SHARED_MEMORY).free * MEMORY_SHARE) // max(1, replicas))
    return share


class HostTierSpec(CPUOffloadingSpec):
    """What vLLM's connector asks: who manages the host's blocks, and who copies.

    Raises:
        ConfigError: chunks of several blocks are wanted (``blocks_per_chunk``); a chunk is a block here.
    """

    _manager: OffloadingManager | None
    _worker: OffloadingWorker | None

    def __init__(self, config: OffloadingConfig) -> None:
        if not self._uses_shared_region():
            self.BLOCK_SIZE_ALIGNMENT = 1  # pages matter to memory that is mapped and pinned only
        super().__init__(config)
        if self.blocks_per_chunk != 1:
            raise ConfigError(f"kv_transfer_config: a chunk is one block in the host tier, not {self.blocks_per_chunk}")

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side."""
        if self._manager is None:
            self._manager = HostCache(
                num_chunks=self.num_blocks,
                tokens_per_chunk=self.tokens_per_block[0],
                program_share=float(self.extra_config.get("program_share", PROGRAM_SHARE)),
                enable_events=self.kv_events_config.enable_kv_cache_events,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker's side: vLLM's own on CUDA."""
        if self._uses_shared_region():
            return super().get_worker(kv_caches)
        if self._worker is None:
            self._worker = CopyingWorker(kv_caches, self.num_blocks)
        return self._worker


class CopyingWorker(OffloadingWorker):
    """Copies blocks between two places in memory, at once: a transfer is done when it was submitted.

    Args:
        kv_caches: the engine's KV cache.
        num_blocks: of the host tier. Memory that no block was copied to yet is not taken from the machine.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, num_blocks: int) -> None:
        self._device = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self._host = [torch.empty((num_blocks, rows.shape[1]), dtype=torch.int8) for rows in self._device]
        self._tensors = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        """Engine to host."""
        return self._copy(job_id, src_spec.group_sizes, (self._device, src_spec), (self._host, dst_spec))

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Host to engine."""
        return self._copy(job_id, dst_spec.group_sizes, (self._host, src_spec), (self._device, dst_spec))

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """They are done."""

    def _copy(
        self,
        job_id: int,
        group_sizes: Sequence[int],
        source: tuple[list[torch.Tensor], Any],
        target: tuple[list[torch.Tensor], Any],
    ) -> bool:
        started_s = MonotonicClock().now_s()
        (sources, read), (targets, written) = source, target
        read_ids, written_ids = torch.from_numpy(read.block_ids), torch.from_numpy(written.block_ids)
        begin, copied = 0, 0
        for size, tensors in zip(group_sizes, self._tensors, strict=True):
            rows, into = read_ids[begin : begin + size], written_ids[begin : begin + size]
            begin += size
            for i in tensors if size else ():
                targets[i].index_copy_(0, into, sources[i].index_select(0, rows))
                copied += size * targets[i].shape[1]
        self._done.append(TransferResult(job_id, True, copied, MonotonicClock().now_s() - started_s))
        return True
