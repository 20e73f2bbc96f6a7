"""The host tier's worker of a CPU engine, for which vLLM has none."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from cluster.core.clock import MonotonicClock


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between two places in memory. A transfer is complete when its submission returns.

    Args:
        kv_caches: the engine's KV cache.
        num_blocks: capacity of the host tier, in blocks. The operating system provides the memory of a block when the
            first copy to it is made.
        region: memory that the engine's process sees too. None: the worker has its own.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, num_blocks: int, region: SharedOffloadRegion | None = None
    ) -> None:
        self._device = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        sizes = [rows.shape[1] for rows in self._device]
        if region is None:
            self._host = [torch.empty((num_blocks, size), dtype=torch.int8) for size in sizes]
        else:
            self._host = [region.create_next_worker_view(size) for size in sizes]
        self._tensors = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        """Copy blocks from the engine to the host."""
        return self._copy(job_id, src_spec.group_sizes, (self._device, src_spec), (self._host, dst_spec))

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy blocks from the host to the engine."""
        return self._copy(job_id, dst_spec.group_sizes, (self._host, src_spec), (self._device, dst_spec))

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that were completed since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: the transfers are already complete."""

    def _copy(
        self,
        job_id: int,
        group_sizes: Sequence[int],
        source: tuple[list[torch.Tensor], Any],
        target: tuple[list[torch.Tensor], Any],
    ) -> bool:
        started_s = MonotonicClock().now_s()
        (sources, read), (targets, written) = source, target
        # The type of block ids depends on vLLM's version.
        read_ids, written_ids = (torch.from_numpy(spec.block_ids).long() for spec in (read, written))
        begin, copied = 0, 0
        for size, tensors in zip(group_sizes, self._tensors, strict=True):
            rows, into = read_ids[begin : begin + size], written_ids[begin : begin + size]
            begin += size
            for i in tensors if size else ():
                targets[i].index_copy_(0, into, sources[i].index_select(0, rows))
                copied += size * targets[i].shape[1]
        self._done.append(TransferResult(job_id, True, copied, MonotonicClock().now_s() - started_s))
        return True
