"""What one ingress process needs for programs that run on the server, put together: log, tools, durations, runner."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.clock import Clock
from cluster.config import CaesuraConfig
from cluster.fleet import Fleet
from cluster.observing.meter import Meter
from cluster.observing.programs import ProgramMetrics
from cluster.observing.traced_tools import traced
from cluster.observing.tracing import NoTraces, Traces
from cluster.observing.turns import TurnBook
from cluster.program_runner import ProgramRunner
from cluster.run_store import RunStore
from cluster.tenants import Tenants
from cluster.tool_durations import SharedToolDurations
from cluster.tools import Outcome, ToolCall, ToolOffer, ToolResult
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
        turns: told what becomes of turns and programs.
        traces: are told of tool calls.
    """

    def __init__(
        self,
        replicas: Fleet,
        config: CaesuraConfig,
        clock: Clock,
        owner: str,
        turns: TurnBook,
        traces: Traces | NoTraces,
    ) -> None:
        store, programs = config.store, config.programs
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
            tools=traced(self.tools or NoTools(), traces),
            config=config,
            clock=clock,
            observe=self.durations.observe,
            turns=turns,
        )
        self._metrics = ProgramMetrics(Meter({"model": config.model.id}, enabled=config.metrics.enabled))
        self._tenants = Tenants(config)
        self._regular: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Make the tools ready, and begin to work: on what others left, too.

        Raises:
            RayError: a tool cannot work as configured.
        """
        if self.tools is not None:
            await self.tools.ready()
        self._regular = [
            asyncio.create_task(self.durations.exchange_for_ever()),
            asyncio.create_task(self._count_for_ever()),
        ]
        self.runner.attend()

    async def offers(self, tenant: str, definitions: Mapping[str, Any] | None = None) -> Sequence[ToolOffer]:
        """The tools that a tenant may use now, those that its request brings included.

        Raises:
            ToolRefused: what the request brings cannot be used.
        """
        return () if self.tools is None else self._tenants.tools(tenant, await self.tools.offers(definitions))

    async def aclose(self) -> None:
        """Hand the runs over."""
        for task in self._regular:
            task.cancel()
        await self.runner.aclose()
        if self.tools is not None:
            await self.tools.aclose()

    async def _count_for_ever(self) -> None:
        while True:
            self._metrics.record(self.runner.open_runs, self.runner.counters)
            await asyncio.sleep(METRICS_PERIOD_S)


class NoTools:
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
