"""Everything that one process needs to run tools: the configured tools, those of requests, and the executor."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from cluster.errors import ToolError, ToolRefused
from cluster.tool_config import ToolsConfig
from cluster.tools import Outcome, ToolCall, ToolOffer, ToolResult
from tools_runtime.executor import ToolExecutor
from tools_runtime.registry import RequestTools, configured
from tools_runtime.timers import LoopClock, TimerClock
from tools_runtime.tool_table import Entry

REQUEST = "request"
"""The name under which tools that requests bring are counted."""

REFRESH_S = 1.0
"""Longest wait for a configured server that is to be reached again, before the tools that are known are told."""


class ToolHost:
    """The tools of one process.

    Args:
        config: which tools there are.
        clock: of deadlines and durations.
        observe: told of each run that ended: the entry's name, or REQUEST, and the result.

    Raises:
        ConfigError: a tool cannot work as configured.
    """

    def __init__(
        self,
        config: ToolsConfig,
        clock: TimerClock | None = None,
        observe: Callable[[str, ToolResult], None] | None = None,
    ) -> None:
        self._tools = configured(config)
        self._request_tools = RequestTools(config, self._tools)
        self._observe = observe
        self._longest_listing_s = config.max_request_deadline_s
        self._refreshing: dict[str, asyncio.Task[None]] = {}
        self._opening = asyncio.Lock()
        self._open = False
        self.executor = ToolExecutor(
            self._tools,
            clock or LoopClock(),
            special_tokens=config.special_tokens,
            max_argument_bytes=config.max_argument_bytes,
            observe=self._observed,
        )

    async def open(self) -> None:
        """Make the configured tools ready; again is nothing.

        Raises:
            ConfigError: one cannot work as configured.
        """
        async with self._opening:
            if not self._open:
                await self._tools.open()
                self._open = True

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """The call's one outcome.

        Args:
            call: what to run.
            definitions: the tools that the request brought, as in the configuration.
            resumed: see `ToolExecutor.run`.
        """
        if not definitions:
            return await self.executor.run(call, resumed=resumed)
        try:
            tools = await self._request_tools.table(definitions)
        except ToolRefused as refusal:
            # REFUSED would say that nothing was run.
            outcome = Outcome.UNKNOWN if resumed else Outcome.REFUSED
            return ToolResult(call.id, call.name, outcome, f"{outcome}: {refusal}")
        return await self.executor.run(call, tools, resumed=resumed)

    async def offers(self, definitions: Mapping[str, Any] | None = None) -> list[ToolOffer]:
        """The tools that are known now, the configuration's first, then those that a request brings.

        Raises:
            ToolRefused: the request's tools are not allowed, or wrong, or cannot be listed.
        """
        tools = await self._request_tools.table(definitions) if definitions else self._tools
        await self._refresh()
        if definitions:
            await asyncio.gather(*(self._listed(entry) for entry in tools.own.values()))
        theirs = tools.own.values() if definitions else ()
        return [
            ToolOffer(offer.name, offer.description, offer.check.schema, entry.name, offer.read_only, offer.own_name)
            for entry in (*self._tools.own.values(), *theirs)
            for offer in entry.kind.offers()
        ]

    async def _refresh(self) -> None:
        """Reach configured servers that were not there, or whose tools have changed; without waiting for long."""
        for name, entry in self._tools.own.items():
            if name not in self._refreshing:
                self._refreshing[name] = asyncio.create_task(self._reach(entry))
        if self._refreshing:
            await asyncio.wait(self._refreshing.values(), timeout=REFRESH_S)

    async def _reach(self, entry: Entry) -> None:
        try:
            with suppress(ToolError):
                await entry.kind.offer(entry.name)
        finally:
            del self._refreshing[entry.name]

    async def _listed(self, entry: Entry) -> None:
        try:
            async with asyncio.timeout(self._longest_listing_s):
                await entry.kind.offer(entry.name)
        except ToolError as error:
            raise ToolRefused(f"the request's tool {entry.name!r}: {error}") from None
        except TimeoutError:
            text = f"it was not listed within {self._longest_listing_s:g} s"
            raise ToolRefused(f"the request's tool {entry.name!r}: {text}") from None

    async def aclose(self) -> None:
        """End all calls, then all tools."""
        for task in list(self._refreshing.values()):
            task.cancel()
        await self.executor.aclose()
        await self._request_tools.aclose()
        await self._tools.aclose()

    def _observed(self, entry: Entry, result: ToolResult) -> None:
        if self._observe is not None:
            known = self._tools.own.get(entry.name) is entry
            self._observe(entry.name if known else REQUEST, result)
