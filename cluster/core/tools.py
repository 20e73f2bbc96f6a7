"""The types of tool calls: the tools that are offered, the calls, and the one outcome that each call has."""

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

MAX_CLASS_LENGTH = 48
"""Maximum length of an argument class (characters). A longer word is not used as a class."""


ENDED_WITH_CALLS = "tool_calls"
"""The finish reason of a turn that the model itself ended after its last tool call."""

SEPARATOR = "__"
"""The separator between the names of an MCP server and of its tool, as in `files__read`."""

IN_NEXT_MESSAGE = "[image: see the next message]"
"""The place of an image in a tool's answer. Chat templates take no image there, so that it is in the next message."""

NOT_SENT_BACK = "[image: it was not sent back]"
"""The same place in an answer that a client has sent back, since the forms of the cluster's own calls have texts only.
"""

UNFIT = re.compile(r"[^A-Za-z0-9_-]")
"""Characters that are not allowed in the name of a tool for a model, although an MCP server may use them."""

MAX_CALLED_NAME_LENGTH = 4096
"""Largest length of the name of a call in a client's history. A model may call a tool that does not exist, by any name.
"""

Anything = TypeVar("Anything")


def split_complete(calls: Sequence[Anything], finish_reason: str) -> tuple[tuple[Anything, ...], tuple[Anything, ...]]:
    """Return the complete calls of a turn, and the incomplete call if there is one.

    This is the only function that decides which calls are complete. If the token budget, the context window or a stop
    string ended a turn, its last call may be incomplete, even if its arguments are valid: a parser may have closed the
    JSON text, and all arguments of the tool may be optional. Such a last call therefore never counts as complete.

    Args:
        calls: the calls of the turn, in order.
        finish_reason: the turn's finish reason, see `ENDED_WITH_CALLS`.
    """
    if finish_reason == ENDED_WITH_CALLS:
        return tuple(calls), ()
    return tuple(calls[:-1]), tuple(calls[-1:])


def is_object(arguments: str) -> bool:
    """Return whether the text is one JSON object."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


class Outcome(StrEnum):
    """The outcome of a tool call. Each call has exactly one."""

    OK = "ok"
    """The tool answered within its deadline. Its answer is the text of the result."""
    ERROR = "error"
    """The tool failed, or could not be reached. The text of the result is the error."""
    TIMEOUT = "timeout"
    """The deadline passed while the call was queued or the tool ran. The tool was stopped."""
    CANCELLED = "cancelled"
    """The caller cancelled the call. The tool was stopped."""
    UNKNOWN = "unknown"
    """The process that ran the tool died. The tool may have taken effect."""
    REFUSED = "refused"
    """Nothing was run, because the tool is unknown, the arguments are invalid, or the operator does not allow the
    call."""
    STARTED = "started"
    """An asynchronous tool was started. Its answer comes later, under the same id."""


class ToolSource(StrEnum):
    """Whose entry a tool belongs to. It decides what the entry may do, and which tenants may use it."""

    OPERATOR = "operator"
    """An entry of the configuration (`tools.defined`)."""
    REQUEST = "request"
    """An entry that the run's own request has brought, such as an MCP server."""


class ToolId(msgspec.Struct, frozen=True):
    """Which tool it is: whose, which entry, and which tool of the entry.

    The name by which a model calls a tool is resolved to this value once, when the tools of a request are listed. From
    there on, the log, the check of the tenant, the consent and the tool runtime use this value and never a name.
    """

    source: ToolSource
    entry: str
    """The key in `tools.defined`, or the label of the request's server."""
    tool: str
    """The tool's own name at its MCP server; for other kinds, the entry's name."""

    @classmethod
    def of_operator(cls, entry: str, tool: str | None = None) -> "ToolId":
        """Return the id of a tool of the configuration. ``tool`` None: the entry is the tool."""
        return cls(ToolSource.OPERATOR, entry, tool or entry)

    @classmethod
    def of_request(cls, entry: str, tool: str | None = None) -> "ToolId":
        """Return the id of a tool that a request has brought. ``tool`` None: the entry is the tool."""
        return cls(ToolSource.REQUEST, entry, tool or entry)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a program."""

    id: str
    """The id of the call, which is unique among the calls of its program in flight."""
    name: str
    arguments: str | Mapping[str, Any] = "{}"
    """The arguments, as JSON text or as the value of such a text."""
    program: str = ""
    """`ProgramIdentity.key` of the calling program; empty: unknown."""
    idempotency_key: str | None = None
    """A repeated call of the same program and tool with the same key gets the first call's result. None: the call has
    no
    such key."""
    deadline_s: float | None = None
    """Seconds from now until the call times out, if that is sooner than the tool's own deadline; None: only the tool's
    deadline applies."""
    traceparent: str | None = None
    """Parent of the call's span, as a W3C `traceparent` header; None: the call is not traced, or its span belongs to
    its
    program's trace."""
    tool: ToolId | None = None
    """The tool. None: the operator's entry ``name``, which is one tool."""
    consent: str | None = None
    """The unique id of the caller's consent to this call. A consent runs its tool once, however often the call is
    repeated. None: the call runs without a consent."""
    images: bool = False
    """Whether the caller can use images of the answer."""

    @property
    def key(self) -> tuple[str, str]:
        """The program and the id, which together are unique among all calls in flight."""
        return self.program, self.id

    @property
    def target(self) -> ToolId:
        """The tool that is called."""
        return ToolId.of_operator(self.name) if self.tool is None else self.tool


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one call."""

    call_id: str
    name: str
    outcome: Outcome
    text: str
    """The answer or the error message, for the model and the caller. Control characters and chat-template tokens are
    escaped."""
    truncated: bool = False
    """Whether the answer was longer than its cap and was cut."""
    queue_s: float = 0.0
    """Seconds that the call waited before the tool was started."""
    run_s: float = 0.0
    """Seconds that the tool ran, including retries and the waits between them."""
    attempts: int = 0
    """Number of times that the tool was started."""
    statistics_name: str = ""
    """The name under which the duration is learnt: the tool's name, with the class of its arguments if it has one."""
    images: tuple[str, ...] = ()
    """Images of the answer as `data:` URLs. Each has its place in the text, see `IN_NEXT_MESSAGE`."""

    @property
    def chars(self) -> int:
        """Number of characters of the answer."""
        return len(self.text) + sum(map(len, self.images))


class ToolOffer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that a model may call. The tool runtime, requests and the logs of runs all use this type."""

    name: str
    """The name by which the model calls the tool."""
    function: dict[str, Any]
    """OpenAI's function object, with name, description and parameters."""
    here: bool
    """Whether the cluster runs the tool. Otherwise the caller does."""
    approval: bool = False
    """Whether each call needs the caller's consent."""
    server: str | None = None
    """Label of the tool's MCP server, if a request brought that server; otherwise None."""
    server_tool: str | None = None
    """The tool's name at its MCP server, which the operator or a request configured; None: it is not an MCP tool."""
    tool: ToolId | None = None
    """The tool that the cluster runs. None: the caller runs it, or the tool runtime has not named it yet."""
    read_only: bool = False
    """Whether the tool's MCP server declares that the tool changes nothing (`readOnlyHint`)."""
    starts_early: bool = False
    """Whether a call may start before its turn has ended: the tool is idempotent or read-only, and answers its call."""
    custom: bool = False
    """Whether the caller gave the tool one text as its argument. The function has it as its only string, `input`."""
    namespace: str | None = None
    """The group of tools that the caller put it in."""
    unusable: str | None = None
    """The reason why nobody can call the tool, although its MCP server lists it. None: it can be called."""

    @property
    def label(self) -> str:
        """The name of the tool's server that clients read: the MCP server, or the tool itself if it has none."""
        return self.server or (self.name if self.tool is None else self.tool.entry)

    @property
    def own_name(self) -> str:
        """The tool's name at its server."""
        return self.server_tool or self.name

    @property
    def description(self) -> str:
        """The description for the model; empty if there is none."""
        return self.function.get("description") or ""

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON Schema of the arguments; empty if there is none."""
        return self.function.get("parameters") or {}


def server_tool_name(server: str, tool: str) -> str:
    """Return the name for a model of a tool of an MCP server.

    The name cannot be split again, since characters may have been replaced. The tool is looked up among the offers.
    """
    return f"{server}{SEPARATOR}{UNFIT.sub('_', tool)}"


def is_taken(name: str, operators: Collection[str]) -> bool:
    """Return whether a request's tool or server cannot have this name, because of the operator's tools and servers.

    It is one of their names, or one of them begins with it and `SEPARATOR`: a tool of the request's server could then
    have the name of that tool, or of a tool of that server. A call would still reach the right one (`ToolId`), but
    nobody who reads the name could know which one that is.
    """
    return name in operators or any(other.startswith(name + SEPARATOR) for other in operators)


def function_object(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, *, strict: bool | None = None
) -> dict[str, Any]:
    """Make OpenAI's function object. Without ``parameters`` it has a schema for no arguments."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = dict(parameters) if parameters is not None else {"type": "object", "properties": {}}
    if strict:
        function["strict"] = True
    return function


def images_message(images: Sequence[str]) -> list[dict[str, Any]]:
    """Return the message with the images of tools' answers before it, as a list. It is empty without images."""
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [{"role": "user", "content": parts}] if parts else []


def sent_back(text: str) -> str:
    """Return a tool's answer that a client has sent back, without its images."""
    return text.replace(IN_NEXT_MESSAGE, NOT_SENT_BACK)


_LATE_HEAD, _LATE_TAIL = "[The call of ", " that was started earlier has ended]"


def late_message(name: str, text: str) -> dict[str, Any]:
    """Return the message with the second answer of a call, whose first answer was that its tool had started."""
    return {"role": "user", "content": f"{_LATE_HEAD}{name}{_LATE_TAIL}\n{text}"}


def is_late_message(message: Mapping[str, Any]) -> bool:
    """Return whether a chat message is a result of `late_message`."""
    content = message.get("content")
    if message.get("role") != "user" or not isinstance(content, str):
        return False
    return content.startswith(_LATE_HEAD) and content.partition("\n")[0].endswith(_LATE_TAIL)


def statistics_name(tool: str, argument: object) -> str:
    """Return the tool's name, with the first word of ``argument`` as a shell reads it, if there is one.

    The durations of a shell tool differ by program (``bash:pytest``, ``bash:ls``), those of an HTTP tool by operation.
    """
    if not isinstance(argument, str):
        return tool
    try:
        words = shlex.split(argument, comments=True)
    except ValueError:  # a quotation mark that is not closed
        words = argument.split()
    # An assignment before the command (A=1 cmd) is not what takes the time.
    commands = (word for word in words if not _is_assignment(word))
    word = next(commands, "").rpartition("/")[2]
    plain = word.isascii() and all(sign.isalnum() or sign in "._-" for sign in word)
    return f"{tool}:{word}" if word and plain and len(word) <= MAX_CLASS_LENGTH else tool


def _is_assignment(word: str) -> bool:
    name, separator, _ = word.partition("=")
    return bool(separator) and name.isidentifier()
