"""Tools from the configuration, and from requests where the operator allows it."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from cluster.errors import ConfigError, ToolRefused
from cluster.registry import TOOL_KINDS
from cluster.tool_config import HttpTool, McpTool, ToolConfig, ToolModel, ToolName, ToolsConfig
from tools_runtime.tool_table import Entry, ToolTable

MAX_REQUEST_BYTES = 256 << 10
"""Size of all the tools of one request."""

MAX_REQUEST_CONCURRENCY = 64
"""Calls at a time of a tool that a request brings."""

MAX_TABLES = 64
"""Different sets of request tools that are kept ready."""

_NOT_FOR_REQUESTS = (
    "headers_from_environment",
    "private_addresses",
    "private_networks",
    "environment",
    "environment_from",
    "command",
)
_REQUEST_TOOLS = pydantic.TypeAdapter(dict[ToolName, ToolConfig])


def entry(name: str, config: ToolModel) -> Entry:
    """One entry of the configuration.

    Raises:
        ConfigError: it cannot work.
    """
    return Entry.of(name, config, TOOL_KINDS.load(config.kind)(name, config))


def configured(config: ToolsConfig) -> ToolTable:
    """The operator's tools, not opened yet.

    Raises:
        ConfigError: one cannot work.
    """
    return ToolTable(entry(name, tool) for name, tool in config.defined.items())


class RequestTools:
    """Tables for the tools that requests bring; the same tools get the same table.

    Args:
        config: what the operator allows.
        below: the operator's tools.
    """

    def __init__(self, config: ToolsConfig, below: ToolTable) -> None:
        self._config = config
        self._below = below
        self._tables: OrderedDict[str, ToolTable] = OrderedDict()

    async def table(self, definitions: Mapping[str, Any]) -> ToolTable:
        """The operator's tools and these.

        Args:
            definitions: by name, as in the configuration's `tools.defined`.

        Raises:
            ToolRefused: one is not allowed, or wrong.
        """
        text = _text(definitions)
        known = self._tables.get(text)
        if known is None:
            if len(self._tables) >= MAX_TABLES:
                await self._close_idle()
            known = self._tables[text] = ToolTable(self._entries(definitions), self._below)
        self._tables.move_to_end(text)
        return known

    async def aclose(self) -> None:
        """Close all of them."""
        while self._tables:
            _, table = self._tables.popitem()
            await table.aclose()

    async def _close_idle(self) -> None:
        idle = next((text for text, table in self._tables.items() if not table.busy), None)
        if idle is None:
            raise ToolRefused(f"the tools of {MAX_TABLES} requests are in use; try again later")
        await self._tables.pop(idle).aclose()

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
            return entry(name, tool)
        except ConfigError as error:
            raise ToolRefused(f"the request's tool {name!r}: {error}") from None

    def _require_allowed(self, name: str, definition: Any) -> None:
        kind = definition.get("kind") if isinstance(definition, dict) else None
        if kind not in self._config.request_kinds:
            allowed = ", ".join(self._config.request_kinds) or "none"
            raise ToolRefused(f"a request may bring tools of the kinds: {allowed}; {name!r} is of the kind {kind!r}")
        if name in self._below.entries:
            raise ToolRefused(f"there is a tool {name!r} already; a request cannot replace it")
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


def _text(definitions: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(definitions, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolRefused(f"the request's tools are not JSON: {error}") from None
    if len(text) > MAX_REQUEST_BYTES:
        raise ToolRefused(f"the request's tools have {len(text)} characters; at most {MAX_REQUEST_BYTES} are taken")
    return text
