"""The MCP servers of a Messages request: `mcp_servers`, and the toolsets that select their tools."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from cluster.api.anthropic.blocks import Part
from cluster.api.anthropic.tools import TOOLSET, Tool, ToolConfig
from cluster.core.errors import BadRequest
from cluster.core.tools import SEPARATOR, is_taken

MAX_SERVERS = 20


class McpConfiguration(Part):
    """Which tools of an MCP server are offered."""

    enabled: bool | None = None
    allowed_tools: list[str] | None = Field(None, max_length=512)


class McpServer(Part):
    """An MCP server that the request brings. Its token is secret: it is neither stored in a log nor repeated."""

    type: Literal["url"]
    url: str = Field(pattern=r"^https?://\S+$", max_length=4096)
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")
    authorization_token: str | None = Field(None, max_length=8192, pattern=r"^[\x20-\x7e]*$", repr=False)
    tool_configuration: McpConfiguration | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A server whose tools are offered, and the selection of its tools."""

    path: str
    """The path of the server in the request."""
    name: str
    definition: dict[str, Any]
    """As in the configuration's `tools.defined`, without secrets."""
    secret: dict[str, Any]
    """Secret fields of the definition; empty if there are none."""
    allowed: frozenset[str] | None
    """The tools that `tool_configuration` allows. None: all."""
    by_default: bool = True
    """Whether the toolset offers a tool that it does not name."""
    named: Mapping[str, ToolConfig] = field(default_factory=dict)
    """The tools that the toolset names, by their name at the server."""

    def offers(self, name: str) -> bool:
        """Return whether the model may call this tool of the server."""
        own = self.named.get(name)
        enabled = self.by_default if own is None or own.enabled is None else own.enabled
        return enabled and (self.allowed is None or name in self.allowed)

    def whole(self) -> dict[str, Any]:
        """Return the definition with its secrets, for calls of the server."""
        return {**self.definition, **self.secret}


def servers(listed: Sequence[McpServer], tools: Sequence[Tool]) -> tuple[Server, ...]:
    """Return the servers whose tools are offered.

    Args:
        listed: the request's servers.
        tools: the request's tools, of which the toolsets select the tools of a server.

    Raises:
        BadRequest: two servers have one name, or a toolset has no server, or the server of another toolset.
    """
    paths: dict[str, int] = {}
    for place, one in enumerate(listed):
        path = f"mcp_servers.{place}.name"
        if one.name in paths:
            raise _bad(path, f"another server has the name {one.name!r}")
        if SEPARATOR in one.name or one.name.endswith("_"):
            raise _bad(path, f"must not contain {SEPARATOR!r} nor end with '_': a tool's name begins with both")
        paths[one.name] = place
    toolsets = _toolsets(tools, paths)
    made = (_server(one, f"mcp_servers.{place}", toolsets.get(one.name)) for place, one in enumerate(listed))
    return tuple(one for one in made if one is not None)


def check_untaken(found: Sequence[Server], taken: Collection[str]) -> None:
    """Check that no server has the name of one of the operator's tools or servers.

    Raises:
        BadRequest: one has.
    """
    for one in found:
        if is_taken(one.name, taken):
            raise _bad(f"{one.path}.name", f"{one.name!r} cannot be a server's name here; choose another")


def _toolsets(tools: Sequence[Tool], names: Collection[str]) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for place, tool in enumerate(tools):
        if tool.type != TOOLSET:
            continue
        path, name = f"tools.{place}.mcp_server_name", tool.mcp_server_name
        if name is None:
            raise _bad(path, "Field required")
        if name not in names:
            raise _bad(path, f"no server {name[:200]!r} is in mcp_servers")
        if name in found:
            raise _bad(path, f"another toolset has the server {name!r}")
        found[name] = tool
    return found


def _server(one: McpServer, path: str, toolset: Tool | None) -> Server | None:
    """Return a server. None: none of its tools is offered."""
    configuration = one.tool_configuration or McpConfiguration()
    default = None if toolset is None or toolset.default_config is None else toolset.default_config.enabled
    by_default = default is not False
    named = {} if toolset is None else toolset.configs or {}
    if configuration.enabled is False or not (by_default or any(tool.enabled for tool in named.values())):
        return None
    allowed = None if configuration.allowed_tools is None else frozenset(configuration.allowed_tools)
    definition: dict[str, Any] = {"kind": "mcp", "url": one.url}
    if allowed is not None:
        definition["allowed_tools"] = sorted(allowed)
    elif not by_default:
        definition["allowed_tools"] = sorted(name for name, tool in named.items() if tool.enabled)
    token = one.authorization_token
    secret = {} if token is None else {"headers": {"Authorization": f"Bearer {token}"}}
    return Server(path, one.name, definition, secret, allowed, by_default, named)


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param)
