"""What one ingress process needs for programs that run on the server, put together: log, tools, durations, runner."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from cluster.auth.tenants import Tenants
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.supervision import SupervisedTasks
from cluster.core.tools import Outcome, ToolCall, ToolOffer, ToolResult
from cluster.dispatch.replica_clients import ReplicaClients
from cluster.observing.meter import Meter
from cluster.observing.recorders import ProgramMetrics
from cluster.observing.slo_tracker import SloTracker
from cluster.observing.trace_context import Traces
from cluster.runs.runner import ProgramRunner
from cluster.store.durations import SharedToolDurations
from cluster.store.runs.store import RunStore
from tools_runtime.actor import ToolActors

METRICS_PERIOD_S = 1.0
"""Gauges go stale in Ray unless they are set about so often."""


class ProgramService:
    """The parts, and their beginning and end.

    Args:
        replicas: run the turns.
        config: the whole configuration.
        clock: for all durations.
        owner: the name of this ingress process, unique and never used again.
        turns: counts what becomes of turns and programs.
        traces: record tool calls.
    """

    def __init__(
        self,
        replicas: ReplicaClients,
        config: CaesuraConfig,
        clock: Clock,
        owner: str,
        turns: SloTracker,
        traces: Traces,
    ) -> None:
        store, programs = config.redis, config.programs
        self._config = config
        self._store = RunStore(
            store.url,
            owner=owner,
            timeout_s=store.timeout_s,
            lease_s=programs.lease_s,
            retention_s=programs.retention_s,
        )
        self.durations = SharedToolDurations(store, model=config.model.id, writer=owner, clock=clock)
        self.tools = ToolActors(config.tools) if config.tools.defined or config.tools.request_kinds else None
        self.runner = ProgramRunner(
            name=owner,
            store=self._store,
            replicas=replicas,
            tools=traces.tools(self.tools or NullTools()),
            config=config,
            clock=clock,
            observe=self.durations.observe,
            turns=turns,
        )
        self._metrics = ProgramMetrics(Meter({"model": config.model.id}, enabled=config.metrics.enabled))
        self._tenants = Tenants(config)
        self._loops = SupervisedTasks("programs", clock)

    async def open(self) -> None:
        """Make the tools ready, and begin to work: on what others left, too.

        Raises:
            RayError: a tool cannot work as configured.
        """
        if self.tools is not None:
            await self.tools.ready()
        self._loops.start("tool durations", self.durations.exchange_for_ever)
        self._loops.start("metrics", self._count_for_ever)
        self.runner.attend()

    async def offers(self, tenant: str, definitions: Mapping[str, Any] | None = None) -> Sequence[ToolOffer]:
        """The tools that a tenant may use now, those that its request brings included.

        Raises:
            ToolRefused: what the request brings cannot be used.
        """
        return () if self.tools is None else self._tenants.tools(tenant, await self.tools.offers(definitions))

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        return (*self._loops.failed, *self.runner.failed)

    async def aclose(self) -> None:
        """Hand the runs over."""
        async with AsyncExitStack() as stack:
            if self.tools is not None:
                stack.push_async_callback(self.tools.aclose)
            stack.push_async_callback(self.runner.aclose)
            stack.push_async_callback(self._loops.aclose)

    async def _count_for_ever(self) -> None:
        while True:
            self._metrics.record(self.runner.open_runs, self.runner.counters)
            await asyncio.sleep(METRICS_PERIOD_S)


class NullTools:
    """Stands where no tools are configured: every call is refused."""

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """The refusal."""
        return ToolResult(call.id, call.name, Outcome.REFUSED, f"{Outcome.REFUSED}: no tools are configured here")

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """The refusal."""
        return ToolResult(call_id, "", Outcome.UNKNOWN, "unknown: there is no such call")

    async def cancel(self, program: str, call_id: str) -> bool:
        """Nothing is under way."""
        return False
