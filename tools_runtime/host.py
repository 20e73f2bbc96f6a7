"""The parts that one process needs to run tools: the configured tools, those of requests, and the executor."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pydantic

from cluster.config.tools import HttpTool, McpTool, ToolConfig, ToolModel, ToolName, ToolsConfig
from cluster.core.clock import Clock
from cluster.core.errors import ConfigError, ToolError, ToolRefused
from cluster.core.program import tenant_of
from cluster.core.registry import TOOL_KINDS
from cluster.core.supervision import SupervisedTasks, run_all
from cluster.core.tools import SEPARATOR, Outcome, ToolCall, ToolOffer, ToolResult, ToolSource, is_taken
from tools_runtime.executor import Entry, ToolExecutor, ToolTable
from tools_runtime.kind import LoopClock, TimerClock

# --- tools of the configuration and of requests -----------------------------------------------------------------------

MAX_REQUEST_BYTES = 256 << 10
"""Largest size of all tools of one request, in characters of JSON."""

MAX_REQUEST_DOCUMENT_BYTES = 1 << 20
"""Largest size of an OpenAPI document to which a tool of a request refers."""

MAX_REQUEST_CONCURRENCY = 64
"""Largest concurrency of a tool that a request brings."""

MAX_TABLES = 64
"""Number of different sets of request tools above which sets that are not in use are closed."""
MAX_TABLES_OF_TENANT = 16
"""Largest number of different sets of request tools of one tenant. Servers that hang can use up only their own
tenant's."""

CLOSE_S = 10.0
"""Seconds within which a set of request tools must be closed. It can be a hostile server that is disconnected."""

_NOT_FOR_REQUESTS = (
    "headers_from_environment",
    "private_addresses",
    "private_networks",
    "environment",
    "environment_from",
    "command",
)
_REQUEST_TOOLS = pydantic.TypeAdapter(dict[ToolName, ToolConfig])


def entry(name: str, config: ToolModel, source: ToolSource) -> Entry:
    """Make one entry of the configuration or of a request.

    Raises:
        ConfigError: it cannot work.
    """
    bounds = {}
    if source is ToolSource.REQUEST and isinstance(config, HttpTool) and config.openapi is not None:
        bounds["max_document_bytes"] = MAX_REQUEST_DOCUMENT_BYTES
    return Entry.of(name, config, TOOL_KINDS.load(config.kind)(name, config, **bounds), source)


def configured(config: ToolsConfig) -> ToolTable:
    """Make the table of the operator's tools, without opening them.

    Raises:
        ConfigError: one cannot work.
    """
    return ToolTable(entry(name, tool, ToolSource.OPERATOR) for name, tool in config.defined.items())


class RequestTables:
    """Tables of the tools that requests bring. The same tools of one tenant get the same table.

    No update waits for anything, so that concurrent requests see whole updates. Tables are closed in the background.

    Args:
        config: what the operator allows.
        below: the operator's tools.
        clock: measures how long closing takes.
    """

    def __init__(self, config: ToolsConfig, below: ToolTable, clock: Clock) -> None:
        self._config = config
        self._below = below
        self._tables: OrderedDict[tuple[str, str], ToolTable] = OrderedDict()
        """Tables by tenant and definitions, the least recently used first."""
        self._closing = SupervisedTasks("request tools", clock)

    def table(self, definitions: Mapping[str, Any], tenant: str) -> ToolTable:
        """Return the table of the operator's tools and these.

        Args:
            definitions: tools by name, as in the configuration's `tools.defined`.
            tenant: whose request brings them.

        Raises:
            ToolRefused: a tool is not allowed, or not valid, or too many sets of this tenant are in use.
        """
        key = tenant, _text(definitions)
        known = self._tables.get(key)
        if known is None:
            evicted = self._evicted(tenant)
            known = ToolTable(self._entries(definitions), self._below)
            if evicted is not None:
                self._closing.run("close", _closed(self._tables.pop(evicted)))
            self._tables[key] = known
        self._tables.move_to_end(key)
        return known

    async def aclose(self) -> None:
        """Close all tables."""
        tables = list(self._tables.values())
        self._tables.clear()
        await asyncio.gather(*map(_closed, tables), return_exceptions=True)
        await self._closing.aclose()

    def _evicted(self, tenant: str) -> tuple[str, str] | None:
        """Return a table that is not in use and has to make room for another one, if there are too many.

        Raises:
            ToolRefused: all tables that this tenant can have are in use.
        """
        own = [key for key in self._tables if key[0] == tenant]
        is_full = len(own) >= MAX_TABLES_OF_TENANT
        if not is_full and len(self._tables) < MAX_TABLES:
            return None
        idle = next((key for key in (own if is_full else self._tables) if not self._tables[key].busy), None)
        if idle is None and is_full:
            raise ToolRefused(f"the tools of {len(own)} requests of this tenant are in use; try again later")
        return idle

    def _entries(self, definitions: Mapping[str, Any]) -> Sequence[Entry]:
        if len(definitions) > self._config.max_request_tools:
            raise ToolRefused(f"a request may bring {self._config.max_request_tools} tools, not {len(definitions)}")
        for name, definition in definitions.items():
            self._require_allowed(name, definition)
        try:
            tools = _REQUEST_TOOLS.validate_python(dict(definitions))
        except pydantic.ValidationError as error:
            fault = error.errors(include_url=False)[0]
            path = ".".join(str(step) for step in fault["loc"])
            raise ToolRefused(f"the request's tool {path}: {fault['msg']}") from None
        entries = []
        for name, tool in tools.items():
            self._require_modest(name, tool)
            if isinstance(tool, HttpTool) and tool.openapi is not None and "://" not in tool.openapi.document:
                raise ToolRefused(f"the request's tool {name!r}: an OpenAPI document must be a URL")
            if isinstance(tool, HttpTool | McpTool):
                reaches = {"private_networks": self._config.request_networks}
                entries.append(self._entry(name, tool.model_copy(update=reaches)))
        return entries

    def _entry(self, name: str, tool: ToolModel) -> Entry:
        try:
            return entry(name, tool, ToolSource.REQUEST)
        except ConfigError as error:
            raise ToolRefused(f"the request's tool {name!r}: {error}") from None

    def _require_allowed(self, name: str, definition: Any) -> None:
        kind = definition.get("kind") if isinstance(definition, dict) else None
        if kind not in self._config.request_kinds:
            allowed = ", ".join(self._config.request_kinds) or "none"
            raise ToolRefused(f"a request may bring tools of the kinds: {allowed}; {name!r} is of the kind {kind!r}")
        if SEPARATOR in name or name.endswith("_"):
            raise ToolRefused(f"the request's tool {name!r} must not contain {SEPARATOR!r} nor end with '_'")
        if is_taken(name, self._config.defined):
            raise ToolRefused(f"the request's tool {name!r} cannot have this name; choose another")
        said = next((key for key in _NOT_FOR_REQUESTS if key in definition), None)
        if said is not None:
            raise ToolRefused(f"the request's tool {name!r} must not set {said}")

    def _require_modest(self, name: str, tool: ToolModel) -> None:
        limits = {
            "deadline_s": self._config.max_request_deadline_s,
            "output_cap_bytes": self._config.max_request_output_bytes,
            "concurrency": MAX_REQUEST_CONCURRENCY,
        }
        for key, limit in limits.items():
            if getattr(tool, key) > limit:
                raise ToolRefused(f"the request's tool {name!r}: {key} is at most {limit:g}")


async def _closed(table: ToolTable) -> None:
    async with asyncio.timeout(CLOSE_S):
        await table.aclose()


def _text(definitions: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(definitions, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolRefused(f"the request's tools are not JSON: {error}") from None
    if len(text) > MAX_REQUEST_BYTES:
        raise ToolRefused(f"the request's tools have {len(text)} characters; at most {MAX_REQUEST_BYTES} are taken")
    return text


# --- the host ---------------------------------------------------------------------------------------------------------

REQUEST = "request"
"""The name under which tools that requests bring are counted."""

OPENING_S = 10.0
"""Longest wait in seconds, from when the configured tools begin to be opened, before the known tools are listed."""

REFRESH_S = 1.0
"""Longest wait in seconds, from when a configured server is called again, before the known tools are listed."""

REACH_S = 120.0
"""Seconds after which it is given up to reach such a server, until the tools are listed again."""


class ToolHost:
    """The tools of one process.

    Args:
        config: the tools.
        clock: the clock of deadlines and durations. None is the event loop's.
        observe: called with each run that ended: the entry's name, or REQUEST, and the result.

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
        clock = clock or LoopClock()
        self._clock = clock
        self._request_tools = RequestTables(config, self._tools, clock)
        self._observe = observe
        self._longest_listing_s = config.max_request_deadline_s
        self._refreshing: dict[str, asyncio.Task[None]] = {}
        self._refreshing_from_s: dict[str, float] = {}
        """When these began, on the clock."""
        self._opening: asyncio.Task[None] | None = None
        self._listed_from_s = 0.0
        """When listings stop waiting for ``_opening``, on the clock."""
        self.executor = ToolExecutor(
            self._tools,
            clock,
            special_tokens=config.special_tokens,
            max_argument_bytes=config.max_argument_bytes,
            observe=self._observed,
        )

    def begin(self) -> "asyncio.Task[None]":
        """Begin to open the configured tools, all at once, and return the task. Further calls return the same task.

        No call of a tool waits for it. If it failed, it begins again.
        """
        opening = self._opening
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._opening = asyncio.create_task(self._tools.open(), name="open tools")
            self._listed_from_s = self._clock.now_s() + OPENING_S
        return opening

    async def open(self) -> None:
        """Open the configured tools. Further calls do nothing."""
        await asyncio.shield(self.begin())

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """Run a call and return its one outcome.

        Args:
            call: the call to run.
            definitions: the tools that the request brought, as in the configuration.
            resumed: see `ToolExecutor.run`.
        """
        if not definitions:
            return await self.executor.run(call, resumed=resumed)
        try:
            tools = self._request_tools.table(definitions, tenant_of(call.program))
        except ToolRefused as refusal:
            # REFUSED would mean that nothing was run.
            outcome = Outcome.UNKNOWN if resumed else Outcome.REFUSED
            return ToolResult(call.id, call.name, outcome, f"{outcome}: {refusal}")
        return await self.executor.run(call, tools, resumed=resumed)

    async def offers(self, definitions: Mapping[str, Any] | None = None, tenant: str = "") -> list[ToolOffer]:
        """Return the tools that are known now: the configuration's first, then those that a request brings.

        Before them are the tools that MCP servers list but that cannot be called (`ToolOffer.unusable`).

        Raises:
            ToolRefused: the request's tools are not allowed, not valid, or cannot be listed.
        """
        tools = self._request_tools.table(definitions, tenant) if definitions else self._tools
        with tools.in_use():
            await self._refresh()
            if definitions:
                await run_all(self._listed(entry) for entry in tools.own)
        entries = (*self._tools.own, *(tools.own if definitions else ()))
        unusable = [offer for entry in entries for offer in entry.unusable()]
        return unusable + [offer for entry in entries for offer in entry.offers()]

    async def _refresh(self) -> None:
        """Connect to configured servers that were not reachable or whose tools have changed.

        It waits for REFRESH_S from when each server was called, so that one that hangs delays only the first listings.
        Before that, it waits for OPENING_S at most where the tools are opened for the first time.
        """
        if self._opening is not None and not self._opening.done():
            await asyncio.wait({self._opening}, timeout=max(0.0, self._listed_from_s - self._clock.now_s()))
        for entry in self._tools.own:
            if entry.name not in self._refreshing:
                self._refreshing[entry.name] = asyncio.create_task(self._reach(entry))
                self._refreshing_from_s[entry.name] = self._clock.now_s()
        await asyncio.gather(*map(self._refreshed, list(self._refreshing)))

    async def _refreshed(self, name: str) -> None:
        if (task := self._refreshing.get(name)) is not None:
            rest_s = self._refreshing_from_s[name] + REFRESH_S - self._clock.now_s()
            await asyncio.wait({task}, timeout=max(0.0, rest_s))

    async def _reach(self, entry: Entry) -> None:
        try:
            with suppress(ToolError, TimeoutError):
                async with asyncio.timeout(REACH_S):
                    await entry.kind.tool(entry.name)
        finally:
            del self._refreshing[entry.name], self._refreshing_from_s[entry.name]

    async def _listed(self, entry: Entry) -> None:
        try:
            async with asyncio.timeout(self._longest_listing_s):
                await entry.kind.tool(entry.name)
        except ToolError as error:
            raise ToolRefused(f"the request's tool {entry.name!r}: {error}") from None
        except TimeoutError:
            text = f"it was not listed within {self._longest_listing_s:g} s"
            raise ToolRefused(f"the request's tool {entry.name!r}: {text}") from None

    async def aclose(self) -> None:
        """End all calls, then close all tools."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        for task in list(self._refreshing.values()):
            task.cancel()
        await self.executor.aclose()
        await self._request_tools.aclose()
        await self._tools.aclose()

    def _observed(self, entry: Entry, result: ToolResult) -> None:
        if self._observe is not None:
            self._observe(entry.name if entry.source is ToolSource.OPERATOR else REQUEST, result)
