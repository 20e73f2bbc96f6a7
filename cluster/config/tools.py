"""The configuration of tools. `cluster.config.schema` holds it under `tools`; `tools_runtime` builds them from it."""

import ipaddress
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, model_validator

from cluster.config.sections import Section
from cluster.core.registry import TOOL_KINDS

SEPARATOR = "__"
"""Between an MCP server's name and its tool's: `files__read`."""

UNFIT = re.compile(r"[^A-Za-z0-9_-]")
"""Characters that a tool's name at its MCP server may have, and its name for a model may not."""


def server_tool_name(server: str, tool: str) -> str:
    """What a model calls a tool of an MCP server. The way back is a look-up among the offers, never a split."""
    return f"{server}{SEPARATOR}{UNFIT.sub('_', tool)}"


ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _network(text: str) -> str:
    return str(ipaddress.ip_network(text))


Network = Annotated[str, AfterValidator(_network)]
"""In CIDR form."""

RequestKind = Literal["http", "mcp"]
"""Kinds that a request may bring itself. The others run code on this machine."""


class ToolSection(Section):
    """What tools of every kind share."""

    description: str = ""
    """What the tool does, for the model."""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    """JSON Schema of the arguments. MCP servers and OpenAPI documents bring their own."""
    deadline_s: float = Field(60.0, gt=0, le=24 * 3600)
    """Seconds for a call, waiting in the queue and retries included."""
    concurrency: int = Field(16, ge=1, le=4096)
    """Calls that run at a time, in each actor; more wait in order of arrival."""
    max_queued: int = Field(1024, ge=0)
    """Calls that wait; more are refused."""
    idempotent: bool = False
    """Running it twice does what running it once does. Only such tools are retried."""
    retries: int = Field(2, ge=0, le=10)
    """How often an idempotent tool is tried again after a failure that may pass."""
    retry_backoff_s: float = Field(0.2, ge=0)
    """Mean wait before the first retry; it doubles with each."""
    output_cap_bytes: int = Field(64 << 10, ge=256, le=64 << 20)
    """Bytes (UTF-8) of an answer; a longer one is cut and marked."""
    asynchronous: bool = False
    """The program continues with a handle, and receives the answer later."""
    argument_class: str | None = None
    """The argument whose first word tells calls of different durations apart, such as a shell tool's `command`."""
    sticky: bool = False
    """All calls of one program go to the same actor: a tool that keeps state for it."""


class PythonTool(ToolSection):
    """A Python function; its parameters are the arguments' names."""

    kind: Literal["python"]
    """Which kind of tool this is."""
    entry: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`, importable where the tools run."""
    isolation: Literal["auto", "process", "thread", "async"] = "auto"
    """`process` can always be stopped; `async` shares the actor's event loop and must not block it; a `thread` that
    does not end keeps its place among `concurrency`. `auto`: async for coroutine functions, process for others."""
    memory_bytes: int | None = Field(None, ge=64 << 20)
    """Address space of a worker process."""


class OpenApiOperation(Section):
    """One operation of an OpenAPI 3 document."""

    document: str = Field(min_length=1)
    """A local path or a URL, JSON or YAML."""
    operation: str = Field(min_length=1)
    """The operationId."""
    server: str | None = None
    """Base URL; null takes the document's first server."""


class HttpTool(ToolSection):
    """An HTTP request."""

    kind: Literal["http"]
    """Which kind of tool this is."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    """Unless an OpenAPI operation says it."""
    url: str | None = Field(None, pattern=r"^https?://[^\s{}/?#@]+([/?#]\S*)?$")
    """Template: `https://host/items/{id}`. Arguments that it does not name go into the query, or for POST, PUT and
    PATCH into a JSON body."""
    openapi: OpenApiOperation | None = None
    """Instead of a URL."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with each request."""
    headers_from_environment: dict[str, VariableName] = Field(default_factory=dict)
    """Header to the environment variable that holds its value: secrets."""
    private_addresses: bool = False
    """May reach private, loopback and link-local addresses. Never for tools that a request brings."""
    private_networks: list[Network] = Field(default_factory=list)
    """Of those, the networks that it may reach even so, such as `10.0.0.0/8`."""
    max_redirects: int = Field(3, ge=0, le=10)
    """Redirects that are followed; each address is checked again, and no header of ours follows to another host."""

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.url is None) == (self.openapi is None):
            raise ValueError("needs either url or openapi")
        return self


class CommandTool(ToolSection):
    """A command in a sandbox (bubblewrap): no network, a read-only root, an empty scratch directory for each call."""

    kind: Literal["command"]
    """Which kind of tool this is."""
    argv: list[str] = Field(default_factory=list)
    """The command; `{name}` stands for an argument. An element that is only `{name}` is left out without it."""
    shell: bool = False
    """Run the argument `command` by `bash -c` instead."""
    environment: dict[VariableName, str] = Field(default_factory=dict)
    """All that it has beside PATH, HOME and LANG."""
    read_only_paths: list[str] = Field(default_factory=list)
    """Paths of this machine that it may read, beside /usr."""
    cpu_s: int = Field(60, ge=1)
    """CPU seconds of each process."""
    memory_bytes: int = Field(1 << 30, ge=16 << 20)
    """Address space of each process."""
    processes: int = Field(64, ge=1)
    """Processes and threads of one call."""
    scratch_bytes: int = Field(64 << 20, ge=4096)
    """Size of the scratch directory, and of any file in it."""
    open_files: int = Field(256, ge=16)
    """Open files of each process."""
    allow_unsandboxed: bool = False
    """Run it without the sandbox where bubblewrap is missing: with the limits, but with network and all files."""

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        if bool(self.argv) == self.shell:
            raise ValueError("needs either argv or shell")
        return self


class McpTool(ToolSection):
    """An MCP server; each of its tools is called `NAME__TOOL`."""

    kind: Literal["mcp"]
    """Which kind of tool this is."""
    command: list[str] = Field(default_factory=list)
    """Starts a server that talks over stdin and stdout."""
    url: str | None = Field(None, pattern=r"^https?://\S+$")
    """A server that talks streamable HTTP."""
    protocol: Literal["auto", "handshake", "stateless"] = "auto"
    """`handshake` is MCP up to 2025-11-25 (initialize, sessions), `stateless` from 2026-07-28 on; `auto` asks."""
    environment: dict[VariableName, str] = Field(default_factory=dict)
    """Of the command."""
    environment_from: list[VariableName] = Field(default_factory=list)
    """Variables of our environment that the command gets too."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with each request to the URL."""
    headers_from_environment: dict[str, VariableName] = Field(default_factory=dict)
    """Header to the environment variable that holds its value."""
    allowed_tools: list[str] | None = None
    """Names, as the server gives them; null allows all."""
    connect_timeout_s: float = Field(10.0, gt=0, le=600)
    """To start the server, agree on a protocol and list its tools."""
    private_addresses: bool = False
    """May reach private, loopback and link-local addresses. Never for tools that a request brings."""
    private_networks: list[Network] = Field(default_factory=list)
    """Of those, the networks that it may reach even so, such as `10.0.0.0/8`."""

    @model_validator(mode="after")
    def _one_transport(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("needs either command or url")
        return self


ToolModel = PythonTool | HttpTool | CommandTool | McpTool


def _kind_of(tool: Any) -> str | None:
    kind = tool.get("kind") if isinstance(tool, dict) else getattr(tool, "kind", None)
    return kind if isinstance(kind, str) else None


ToolConfig = Annotated[
    Annotated[PythonTool, Tag("python")]
    | Annotated[HttpTool, Tag("http")]
    | Annotated[CommandTool, Tag("command")]
    | Annotated[McpTool, Tag("mcp")],
    # A function, because pydantic takes no field for it that the validators of Section see.
    Discriminator(
        _kind_of,
        custom_error_type="tool_kind",
        custom_error_message=f"must be a section with a kind, one of: {', '.join(TOOL_KINDS)}",
    ),
]


class ToolsConfig(Section):
    """The tools that run here, for programs whose loop runs on the server."""

    actors: int = Field(1, ge=1, le=256)
    """Processes that run tools; one that dies is started again."""
    unattended_s: float = Field(60.0, gt=0)
    """Seconds for which these processes, and the results they keep for calls that are resumed, outlive the last ingress
    and the last call."""
    defined: dict[ToolName, ToolConfig] = Field(default_factory=dict)
    """The tools, by name."""
    request_kinds: list[RequestKind] = Field(default_factory=list)
    """Kinds of tools that a request may bring itself; these reach public addresses only."""
    request_networks: list[Network] = Field(default_factory=list)
    """Networks that are not public and that tools of requests may reach even so: where your own MCP servers are."""
    max_request_tools: int = Field(16, ge=1, le=256)
    """Tools that one request may bring."""
    max_request_deadline_s: float = Field(120.0, gt=0)
    """Longest deadline of a tool that a request brings."""
    max_request_output_bytes: int = Field(1 << 20, ge=256)
    """Largest cap of a tool that a request brings."""
    max_argument_bytes: int = Field(256 << 10, ge=1024)
    """Size of a call's arguments."""
    special_tokens: list[str] = Field(default_factory=list)
    """Chat-template tokens of the model, escaped in tool output beside the well-known ones."""

    @model_validator(mode="after")
    def _names_of_servers_apart(self) -> Self:
        servers = [name for name, tool in self.defined.items() if tool.kind == "mcp"]
        for name in self.defined:
            server = next((server for server in servers if name.startswith(server + SEPARATOR)), None)
            if server is not None:
                raise ValueError(f"defined.{name}: the name could be that of a tool of the MCP server {server!r}")
        return self
