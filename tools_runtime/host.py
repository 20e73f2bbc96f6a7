"""Everything that one process needs to run tools: the configured tools, those of requests, and the executor."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from cluster.errors import ToolRefused
from cluster.tool_config import ToolsConfig
from cluster.tools import Outcome, ToolCall, ToolResult
from tools_runtime.executor import ToolExecutor
from tools_runtime.registry import RequestTools, configured
from tools_runtime.timers import LoopClock, TimerClock
from tools_runtime.tool_table import Entry

REQUEST = "request"
"""The name under which tools that requests bring are counted."""


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

    async def run(self, call: ToolCall, definitions: Mapping[str, Any] | None = None) -> ToolResult:
        """The call's one outcome.

        Args:
            call: what to run.
            definitions: the tools that the request brought, as in the configuration.
        """
        if not definitions:
            return await self.executor.run(call)
        try:
            tools = await self._request_tools.table(definitions)
        except ToolRefused as refusal:
            return ToolResult(call.id, call.name, Outcome.REFUSED, f"{Outcome.REFUSED}: {refusal}")
        return await self.executor.run(call, tools)

    def offers(self) -> list[dict[str, Any]]:
        """The configured tools that are known now: name, description, parameters."""
        return [
            {"name": offer.name, "description": offer.description, "parameters": offer.check.schema}
            for offer in self._tools.offers()
        ]

    async def aclose(self) -> None:
        """End all calls, then all tools."""
        await self.executor.aclose()
        await self._request_tools.aclose()
        await self._tools.aclose()

    def _observed(self, entry: Entry, result: ToolResult) -> None:
        if self._observe is not None:
            known = self._tools.own.get(entry.name) is entry
            self._observe(entry.name if known else REQUEST, result)
