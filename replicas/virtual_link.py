"""The host tier of a virtual replica: vLLM's own offloading connector, and a link whose transfers take virtual time.

Both halves of the connector run as they are: the scheduler's plans loads, stores and flushes, the worker's decides when
each is handed to the link and reported. Only the copying is missing. As on a GPU, a store begins at the start of the
step after the one that planned it, a load when the compute of the step that planned it has ended (the copy stream waits
for the compute stream), each direction does one transfer after the other, and a step waits for the stores whose blocks
it is to overwrite.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput

from cluster.clock import Clock


@dataclass(slots=True)
class _Direction:
    """One way of the link: transfers end in the order in which they were submitted."""

    under_way: deque[tuple[int, float, int]]
    """Job, when it ends, its tokens."""
    free_at_s: float = 0.0
    tokens: int = 0
    """Moved up to now."""


class VirtualLink(OffloadingWorker):
    """Moves nothing, but takes its time.

    Args:
        clock: whose time it takes.
        transfer_s: seconds to move the KV of so many tokens one way.
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
        """When the next transfer ends; None: none is under way."""
        return min((way.under_way[0][1] for way in (self._out, self._in) if way.under_way), default=None)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Device to host."""
        return self._submit(self._out, job_id, src_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Host to device."""
        return self._submit(self._in, job_id, dst_spec)

    def _submit(self, way: _Direction, job_id: int, device: GPULoadStoreSpec) -> bool:
        tokens = len(device.block_ids) * self._block_size
        way.free_at_s = max(way.free_at_s, self._clock.now_s()) + self._transfer_s(tokens)
        way.under_way.append((job_id, way.free_at_s, tokens))
        return True

    def get_finished(self) -> list[TransferResult]:
        """The transfers that have ended, each told once. Neither bytes nor seconds: vLLM would only count them."""
        now_s = self._clock.now_s()
        results: list[TransferResult] = []
        for way in (self._out, self._in):
            while way.under_way and way.under_way[0][1] <= now_s:
                job_id, _, tokens = way.under_way.popleft()
                way.tokens += tokens
                results.append(TransferResult(job_id, success=True))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """The step that begins now goes on only when these have ended: see :meth:`take_wait_s`."""
        ends = (end_s for way in (self._out, self._in) for job_id, end_s, _ in way.under_way if job_id in job_ids)
        self._waited_until_s = max(ends, default=self._waited_until_s)

    def take_wait_s(self) -> float:
        """Seconds from now until what was waited for has ended."""
        wait_s = max(0.0, self._waited_until_s - self._clock.now_s())
        self._waited_until_s = 0.0
        return wait_s


class VirtualHostTier:
    """The worker's half of the connector of one virtual engine, on a link.

    Args:
        config: the engine's, with a ``kv_transfer_config``.
        kv_cache_config: the engine's.
        connector: the scheduler's half.
        link: what transfers take.
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
        """Submit the stores of the step before; wait for those whose blocks are to be overwritten."""
        transfers = _transfers_of(output)
        self._worker.handle_preemptions(transfers)
        if not output.total_num_scheduled_tokens:
            self._worker.start_kv_transfers(transfers)

    def step_ends(self, output: SchedulerOutput) -> KVConnectorOutput:
        """Submit the step's loads, keep its stores for the next one; what has arrived."""
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
    """vLLM's own host tier. What a turn generates is kept too, which is not vLLM's default: agents send it again."""
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
    """Where the scheduler's half walks a set of names or hashes, let it walk in an order that each process has.

    Host blocks are given out, and evicted, in that order. What vLLM leaves to chance is fixed here, nothing else.
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
