"""The components with which one ingress runs programs: the store of logs, tools, durations and the runner."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from cluster.api.openai import RETRY_AFTER_S
from cluster.auth.tenants import Tenants
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.errors import Overloaded, ToolFailed
from cluster.core.supervision import SupervisedTasks
from cluster.core.tools import Outcome, ToolCall, ToolOffer, ToolResult
from cluster.dispatch.replica_clients import ReplicaClients
from cluster.observing.meter import Meter
from cluster.observing.recorders import ProgramMetrics
from cluster.observing.slo_tracker import SloTracker
from cluster.observing.trace_context import Traces
from cluster.runs.runner import ProgramRunner
from cluster.store.conversations import ConversationStore
from cluster.store.durations import SharedToolDurations
from cluster.store.runs.store import RunStore
from cluster.store.usage import UsageStore
from tools_runtime.actor import ToolActors

METRICS_PERIOD_S = 1.0
"""Seconds between two records of the gauges. In Ray, a gauge goes stale unless it is set about once a second."""


class ProgramService:
    """The components of an ingress that run programs, with their start and their end.

    Args:
        replicas: run the turns.
        config: the whole configuration.
        clock: measures all durations.
        owner: the name of this ingress process, which must be unique and never be used again.
        turns: measures turns and judges programs.
        traces: trace tool calls.
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
        self._recordings = replicas.recordings
        self._store = RunStore(
            store.url,
            owner=owner,
            timeout_s=store.timeout_s,
            lease_s=programs.lease_s,
            retention_s=programs.retention_s,
        )
        self.conversations = ConversationStore(
            store.url,
            timeout_s=store.timeout_s,
            retention_s=programs.retention_s,
            tenant_bytes=config.batches.max_stored_bytes,
            clock=clock,
        )
        self.usage = UsageStore(store.url, timeout_s=store.timeout_s, clock=clock)
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
        """Start the tools and the runner, which also claims runs that other ingresses have left.

        Raises:
            RayError: a tool cannot work as it is configured.
        """
        if self.tools is not None:
            await self.tools.ready()
        self._loops.start("tool durations", self.durations.exchange_for_ever)
        self._loops.start("metrics", self._count_for_ever)
        self.runner.attend()

    async def offers(self, tenant: str, definitions: Mapping[str, Any] | None = None) -> Sequence[ToolOffer]:
        """Return the tools that a tenant may use now, including those that its request brings.

        Raises:
            ToolRefused: the tools of the request are invalid.
            Overloaded: the tool runtime does not answer.
        """
        if self.tools is None:
            return ()
        try:
            return self._tenants.tools(tenant, await self.tools.offers(definitions, tenant))
        except ToolFailed as error:
            raise Overloaded(str(error), retry_after_s=RETRY_AFTER_S) from error

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        return (*self._loops.failed, *self.runner.failed)

    async def aclose(self) -> None:
        """Stop the loops, the runner and the tools. Other ingresses can then claim the runs."""
        async with AsyncExitStack() as stack:
            if self.tools is not None:
                stack.push_async_callback(self.tools.aclose)
            stack.push_async_callback(self.conversations.close)
            stack.push_async_callback(self.usage.close)
            stack.push_async_callback(self.runner.aclose)
            stack.push_async_callback(self._loops.aclose)

    async def _count_for_ever(self) -> None:
        while True:
            memory = self.runner.memory
            self._metrics.record_memory(memory.memory.used_bytes, memory.memory.max_bytes, memory.evicted)
            self._metrics.record_tokens(self._recordings.counters)
            self._metrics.record(self.runner.open_runs, self.runner.counters, self.runner.answers_cut)
            await asyncio.sleep(METRICS_PERIOD_S)


class NullTools:
    """The tools of a cluster in which none are configured. They refuse every call."""

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """Return the result of a refused call."""
        return ToolResult(call.id, call.name, Outcome.REFUSED, f"{Outcome.REFUSED}: no tools are configured here")

    async def output(self, program: str, call_id: str, known: int) -> str | None:
        """Return None, since no call is in progress."""
        return None

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """Return the result of an unknown call."""
        return ToolResult(call_id, "", Outcome.UNKNOWN, "unknown: there is no such call")

    async def cancel(self, program: str, call_id: str) -> bool:
        """Return False, since there is no call to cancel."""
        return False
