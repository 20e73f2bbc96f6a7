"""The components with which one ingress works on batches, with their start and their end."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack

from cluster.api.ray_errors import as_http_error
from cluster.batches.records import Endpoint
from cluster.batches.runner import BatchRunner
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.supervision import SupervisedTasks
from cluster.http.batch_lines import Handler, LineRequests
from cluster.http.batches import BatchRoutes
from cluster.http.files import FileRoutes
from cluster.observing.meter import Meter
from cluster.observing.recorders import BatchMetrics
from cluster.runs.runner import ProgramRunner
from cluster.store.files import FileStore
from cluster.store.runs.records import LogKind
from cluster.store.runs.store import RunStore

METRICS_PERIOD_S = 1.0
"""Seconds between two records of the gauges. In Ray, a gauge goes stale unless it is set about once a second."""


class BatchService:
    """The batches and files of an ingress.

    Args:
        config: the whole configuration.
        clock: measures all durations.
        owner: the name of this ingress process, which must be unique and never be used again.
        runner: has the runs of lines that are programs, and the memory of the store.
        handlers: the handlers of the routes that a line may name.
    """

    def __init__(
        self,
        config: CaesuraConfig,
        clock: Clock,
        owner: str,
        runner: ProgramRunner,
        handlers: Mapping[Endpoint, Handler],
    ) -> None:
        url, timeout_s, lease_s = config.redis.url, config.redis.timeout_s, config.programs.lease_s
        kept_s = config.batches.retention_s
        self._store = RunStore(
            url, owner=owner, timeout_s=timeout_s, lease_s=lease_s, retention_s=kept_s, kind=LogKind.BATCHES
        )
        self._files = FileStore(url, owner=owner, timeout_s=timeout_s, clock=clock)
        self._runner = runner
        self._batches = BatchRunner(
            name=owner,
            store=self._store,
            files=self._files,
            requests=LineRequests(handlers, as_http_error, self._forget_line, self._cancel_line),
            config=config.batches,
            lease_s=lease_s,
            clock=clock,
            is_full=self._is_full,
        )
        self.file_routes = FileRoutes(self._files, config, self._is_full, self._batches.uses)
        self.batch_routes = BatchRoutes(self._batches, self.file_routes)
        self._metrics = BatchMetrics(Meter(enabled=config.metrics.enabled), config.tenants)
        self._loops = SupervisedTasks("batches", clock)

    def open(self) -> None:
        """Begin to work on batches, also on those that other ingresses have left."""
        self._loops.start("metrics of batches", self._count_for_ever)
        self._batches.attend()

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        return (*self._loops.failed, *self._batches.failed)

    async def aclose(self) -> None:
        """Stop. Other ingresses can then claim the batches."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._store.close)
            stack.push_async_callback(self._files.close)
            stack.push_async_callback(self._batches.aclose)
            stack.push_async_callback(self._loops.aclose)

    def _is_full(self) -> bool:
        return self._runner.memory.is_full_for_storing

    async def _forget_line(self, tenant: str, key: str) -> None:
        if (run_id := await self._runner.keyed(tenant, key)) is not None:
            await self._runner.delete(run_id)

    async def _cancel_line(self, tenant: str, key: str) -> None:
        if (run_id := await self._runner.keyed(tenant, key)) is not None:
            await self._runner.cancel(run_id)

    async def _count_for_ever(self) -> None:
        while True:
            batches = self._batches
            self._metrics.record(batches.open_by_tenant(), batches.left_by_tenant(), batches.lines)
            await asyncio.sleep(METRICS_PERIOD_S)
