"""The configuration of tools, under the key `tools`. `tools_runtime` makes the tools from it."""

import ipaddress
import re
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, model_validator

from cluster.config.sections import Section
from cluster.core.registry import TOOL_KINDS
from cluster.core.tools import SEPARATOR

ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _network(text: str) -> str:
    return str(ipaddress.ip_network(text))


Network = Annotated[str, AfterValidator(_network)]
"""A network in CIDR form."""

PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
"""The place of an argument in an element of `argv`."""

_INTERPRETERS = frozenset(
    {"ash", "bash", "busybox", "dash", "ksh", "node", "perl", "python", "python3", "ruby", "sh", "zsh"}
)
_CODE = re.compile(r"--eval=?|-[A-Za-z]*[ce]")
"""The options of interpreters whose value is code."""

RequestKind = Literal["http", "mcp"]
"""Kinds of tools that a request may bring itself. Other kinds run code on this machine."""


class ToolSection(Section):
    """The options that tools of all kinds have."""

    description: str = ""
    """Description of the tool for the model."""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    """JSON Schema of the arguments. MCP servers and OpenAPI documents have their own."""
    deadline_s: float = Field(60.0, gt=0, le=24 * 3600)
    """Maximum duration of a call in seconds, including its time in the queue and its retries."""
    concurrency: int = Field(16, ge=1, le=4096)
    """Maximum number of calls that run at the same time in each actor. Further calls wait in order of arrival."""
    max_queued: int = Field(1024, ge=0)
    """Maximum number of waiting calls. Further calls are refused."""
    idempotent: bool = False
    """Whether two runs of the same call have the effect of one run. Only idempotent tools are retried. A call of an
    idempotent or read-only tool starts before its turn has ended."""
    retries: int = Field(2, ge=0, le=10)
    """Maximum number of retries of an idempotent tool after a transient failure."""
    retry_backoff_s: float = Field(0.2, ge=0)
    """Mean wait before the first retry in seconds. It doubles with each further retry."""
    output_cap_bytes: int = Field(64 << 10, ge=256, le=64 << 20)
    """Maximum size of an answer in bytes (UTF-8). A longer answer is cut and marked."""
    asynchronous: bool = False
    """Whether the program continues at once with a handle, and receives the answer later."""
    argument_class: str | None = None
    """Name of an argument whose first word distinguishes calls in the statistics of durations, such as `command` of a
    shell tool. null: all calls of the tool count together."""
    sticky: bool = False
    """Whether all calls of a program go to the same actor. A tool that keeps state for a program needs it."""


class PythonTool(ToolSection):
    """A tool that is a Python function. The names of its parameters are the names of the arguments."""

    kind: Literal["python"]
    """The kind of the tool."""
    entry: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`, which must be importable where the tools run. A generator yields its answer in pieces."""
    isolation: Literal["auto", "process", "thread", "async"] = "auto"
    """Where the function runs. `process`: a worker process, which can always be stopped. `thread`: a thread of the
    actor; if it does not end, it keeps its place among `concurrency`. `async`: the actor's event loop, which the
    function must not block. `auto`: `async` for coroutine functions, `process` for others."""
    memory_bytes: int | None = Field(None, ge=64 << 20)
    """Maximum address space of a worker process in bytes. null: no limit."""


class OpenApiOperation(Section):
    """One operation of an OpenAPI 3 document."""

    document: str = Field(min_length=1)
    """Path or URL of the document, in JSON or YAML. The request for it has the tool's headers only if `server` is null
    or has the same scheme, host and port."""
    operation: str = Field(min_length=1)
    """The operationId of the operation."""
    server: str | None = None
    """Base URL of the requests. null: the document's first server; if the tool has headers and the document is behind
    a URL, the first server with the scheme, host and port of the document. Set it if there is no such server."""


class HttpTool(ToolSection):
    """A tool that sends an HTTP request."""

    kind: Literal["http"]
    """The kind of the tool."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    """Method of the request. An OpenAPI operation has its own."""
    url: str | None = Field(None, pattern=r"^https?://[^\s{}/?#@]+([/?#]\S*)?$")
    """Template of the URL, such as `https://host/items/{id}`. Arguments that are not in the template go into the query,
    or for POST, PUT and PATCH into a JSON body."""
    openapi: OpenApiOperation | None = None
    """An operation of an OpenAPI document, instead of `url`."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers that are sent with each request."""
    headers_from_environment: dict[str, VariableName] = Field(default_factory=dict)
    """Headers with secret values: the name of each header, and the environment variable that has its value."""
    private_addresses: bool = False
    """Whether the tool may connect to private, loopback and link-local addresses. It is always false for tools that a
    request brings."""
    private_networks: list[Network] = Field(default_factory=list)
    """Private networks, such as `10.0.0.0/8`, to which the tool may connect even if `private_addresses` is false."""
    max_redirects: int = Field(3, ge=0, le=10)
    """Maximum number of redirects that are followed. Each address is checked again, and the configured headers are not
    sent to another host."""

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.url is None) == (self.openapi is None):
            raise ValueError("needs either url or openapi")
        return self


class CommandTool(ToolSection):
    """A tool that runs a command in a sandbox (bubblewrap), with no network, a read-only root and an empty scratch
    directory for each call.
    """

    kind: Literal["command"]
    """The kind of the tool."""
    argv: list[str] = Field(default_factory=list)
    """The command and its arguments. `{name}` is replaced with the argument of the call. An element that is only
    `{name}` is left out if the call does not have that argument. An argument must not begin with `-` where it would
    become an option, unless the element `--` stands before it. It cannot be the command, nor code of an interpreter
    (`bash -c`): give it to the code, as in `[bash, -c, 'grep "$1" /data', _, "{name}"]`."""
    allow_options: bool = False
    """Whether an argument of the call may become an option of the command."""
    shell: bool = False
    """Whether to run the call's argument `command` with `bash -c`, instead of `argv`."""
    environment: dict[VariableName, str] = Field(default_factory=dict)
    """The command's environment variables beside PATH, HOME and LANG. It gets no others."""
    read_only_paths: list[str] = Field(default_factory=list)
    """Paths of this machine that the command may read, beside /usr."""
    cpu_s: int = Field(60, ge=1)
    """Maximum CPU time of each process in seconds."""
    memory_bytes: int = Field(1 << 30, ge=16 << 20)
    """Maximum address space of each process in bytes."""
    processes: int = Field(64, ge=1)
    """Maximum number of processes and threads of one call."""
    scratch_bytes: int = Field(64 << 20, ge=4096)
    """Maximum size of the scratch directory, and of any file in it, in bytes."""
    open_files: int = Field(256, ge=16)
    """Maximum number of open files of each process."""
    allow_unsandboxed: bool = False
    """Whether to run the command without the sandbox where bubblewrap is missing or reports that it cannot make one.
    The command then has the limits, but also the network and access to all files."""

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        if bool(self.argv) == self.shell:
            raise ValueError("needs either argv or shell")
        return self

    @model_validator(mode="after")
    def _no_argument_is_code(self) -> Self:
        if self.argv and PLACEHOLDER.search(self.argv[0]):
            raise ValueError("argv.0: an argument of the call cannot be the command")
        interprets = False  # whether what follows are options of an interpreter
        for place, element in enumerate(self.argv):
            is_code = _CODE.match(element) or (place and _CODE.fullmatch(self.argv[place - 1]))
            if interprets and is_code and PLACEHOLDER.search(element):
                raise ValueError(
                    f"argv.{place}: an argument of the call would be code; put it behind the code, as in "
                    """bash -c 'grep "$1" /data' _ {name}"""
                )
            interprets = PurePath(element).name in _INTERPRETERS or (interprets and element.startswith("-"))
        return self


class McpTool(ToolSection):
    """An MCP server. Models call its tools `NAME__TOOL`."""

    kind: Literal["mcp"]
    """The kind of the tool."""
    command: list[str] = Field(default_factory=list)
    """Command that starts a server with the stdio transport. Set this or `url`."""
    url: str | None = Field(None, pattern=r"^https?://\S+$")
    """URL of a server with the streamable HTTP transport. Set this or `command`."""
    protocol: Literal["auto", "handshake", "stateless"] = "auto"
    """Version of MCP. `handshake`: versions up to 2025-11-25, with initialize and sessions. `stateless`: versions from
    2026-07-28 on. `auto`: the server is asked."""
    environment: dict[VariableName, str] = Field(default_factory=dict)
    """Environment variables of the command."""
    environment_from: list[VariableName] = Field(default_factory=list)
    """Variables of the actor's own environment that the command gets too."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers that are sent with each request to the URL."""
    headers_from_environment: dict[str, VariableName] = Field(default_factory=dict)
    """Headers with secret values: the name of each header, and the environment variable that has its value."""
    allowed_tools: list[str] | None = None
    """Tools that may be used, by their names at the server. null: all."""
    connect_timeout_s: float = Field(10.0, gt=0, le=600)
    """Seconds within which the server must start, agree on a protocol and list its tools."""
    private_addresses: bool = False
    """Whether the URL may have a private, loopback or link-local address. It is always false for servers that a request
    brings."""
    private_networks: list[Network] = Field(default_factory=list)
    """Private networks, such as `10.0.0.0/8`, to which the tool may connect even if `private_addresses` is false."""

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
    # A function, because pydantic accepts no field as a discriminator that the validators of Section see.
    Discriminator(
        _kind_of,
        custom_error_type="tool_kind",
        custom_error_message=f"must be a section with a kind, one of: {', '.join(TOOL_KINDS)}",
    ),
]


class ToolsConfig(Section):
    """The tools that run in the cluster, for programs whose loop runs there."""

    actors: int = Field(1, ge=1, le=256)
    """Number of processes that run tools. A process that dies is started again."""
    unattended_s: float = Field(60.0, gt=0)
    """Seconds for which these processes continue after the last ingress is gone and the last call has ended. Until then
    they keep results for calls that are resumed."""
    defined: dict[ToolName, ToolConfig] = Field(default_factory=dict)
    """The tools, by name."""
    request_kinds: list[RequestKind] = Field(default_factory=list)
    """Kinds of tools that a request may bring itself. Such tools can connect to public addresses only."""
    request_networks: list[Network] = Field(default_factory=list)
    """Private networks to which tools of requests may connect, for example those of your own MCP servers."""
    max_request_tools: int = Field(16, ge=1, le=256)
    """Maximum number of tools that one request may bring."""
    max_request_deadline_s: float = Field(120.0, gt=0)
    """Maximum `deadline_s` of a tool that a request brings."""
    max_request_output_bytes: int = Field(1 << 20, ge=256)
    """Maximum `output_cap_bytes` of a tool that a request brings."""
    max_argument_bytes: int = Field(256 << 10, ge=1024)
    """Maximum size of a call's arguments in bytes. Calls with larger arguments are refused."""
    special_tokens: list[str] = Field(default_factory=list)
    """Chat-template tokens of the model that are escaped in the output of tools, beside well-known ones."""

    @model_validator(mode="after")
    def _names_of_servers_apart(self) -> Self:
        servers = [name for name, tool in self.defined.items() if tool.kind == "mcp"]
        for name in servers:
            if name.endswith("_"):
                raise ValueError(f"defined.{name}: the name of an MCP server must not end with '_'")
        for name in self.defined:
            server = next((server for server in servers if name.startswith(server + SEPARATOR)), None)
            if server is not None:
                raise ValueError(f"defined.{name}: the name could be that of a tool of the MCP server {server!r}")
        return self
