"""The words for tool calls: what a program asks for, and the one outcome that each call has."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

MAX_CLASS_LENGTH = 48
"""Characters of an argument class; a longer word is no class."""


ENDED_WITH_CALLS = "tool_calls"
"""The finish reason of a turn that the model itself ended after its last tool call."""

Anything = TypeVar("Anything")


def split_complete(calls: Sequence[Anything], finish_reason: str) -> tuple[tuple[Anything, ...], tuple[Anything, ...]]:
    """The complete calls of a turn, and the unfinished one if there is one.

    This is the one place that decides which calls count. A turn that was cut, by its token budget, the context window
    or a stop string, may have been cut within its last call. Its arguments prove nothing: a parser may have closed
    them, and a tool whose arguments are all optional takes none. So that call never counts.
    """
    if finish_reason == ENDED_WITH_CALLS:
        return tuple(calls), ()
    return tuple(calls[:-1]), tuple(calls[-1:])


def is_object(arguments: str) -> bool:
    """Whether the text is one JSON object."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


class Outcome(StrEnum):
    """What became of a tool call. Each call has exactly one."""

    OK = "ok"
    """The tool answered."""
    ERROR = "error"
    """The tool failed."""
    TIMEOUT = "timeout"
    """The deadline passed, in the queue or while the tool ran; it was stopped."""
    CANCELLED = "cancelled"
    """The caller no longer wanted the answer; the tool was stopped."""
    UNKNOWN = "unknown"
    """Whatever ran the tool died; the tool may have taken effect."""
    REFUSED = "refused"
    """Nothing was run: an unknown tool, bad arguments, or something that the operator does not allow."""
    STARTED = "started"
    """An asynchronous tool was started; its answer comes later, under the same id."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a program asks for."""

    id: str
    """Unique among the calls of its program that are under way."""
    name: str
    arguments: str | Mapping[str, Any] = "{}"
    """JSON text, as models write it, or its value."""
    program: str = ""
    """`ProgramIdentity.key` of the program that asks; empty: unknown."""
    idempotency_key: str | None = None
    """A repeated call of the same program and tool with the same key gets the first one's result."""
    deadline_s: float | None = None
    """Seconds from now within which an answer is wanted, if that is sooner than the tool's own deadline."""
    traceparent: str | None = None
    """What it is part of, as W3C's header says it; None: it is not traced, or is its program's."""
    owner: str | None = None
    """The entry of the configuration or of the request that has the tool: its MCP server. None: the tool itself is one.
    A tool is found by its owner and its name, and never by a part of its name."""
    consent: str | None = None
    """The consent under which it runs, unique: one consent runs its tool once, whoever makes the call how often."""

    @property
    def key(self) -> tuple[str, str]:
        """Unique among all calls under way."""
        return self.program, self.id


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What became of one call."""

    call_id: str
    name: str
    outcome: Outcome
    text: str
    """The answer, or the error: readable by the model and the caller, control characters and chat tokens escaped."""
    truncated: bool = False
    """The answer was longer than its cap."""
    queue_s: float = 0.0
    """Seconds before the tool was started."""
    run_s: float = 0.0
    """Seconds that the tool ran, retries and the waits between them included."""
    attempts: int = 0
    """Times that the tool was started."""
    statistics_name: str = ""
    """The name under which the duration is learnt: the tool, and the class of its arguments if it has one."""


class ToolOffer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that a model may call; the same in the tool runtime, in a request and in a run's log."""

    name: str
    """As the model calls it."""
    function: dict[str, Any]
    """OpenAI's function object: name, description, parameters."""
    here: bool
    """The cluster runs it; else the caller does."""
    approval: bool = False
    """Each call needs the caller's consent."""
    server: str | None = None
    """Label of the MCP server that a request brought and whose tool it is."""
    server_tool: str | None = None
    """Its name at its MCP server, the operator's or a request's."""
    owner: str | None = None
    """The entry of the configuration or of the request that it belongs to: itself, or its MCP server."""
    read_only: bool = False
    """Its MCP server says that it changes nothing (`readOnlyHint`)."""

    @property
    def description(self) -> str:
        """For the model."""
        return self.function.get("description") or ""

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON Schema of the arguments."""
        return self.function.get("parameters") or {}


def function_object(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, *, strict: bool | None = None
) -> dict[str, Any]:
    """OpenAI's function object."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = dict(parameters) if parameters is not None else {"type": "object", "properties": {}}
    if strict:
        function["strict"] = True
    return function


def statistics_name(tool: str, argument: object) -> str:
    """The tool's name, and the first word of ``argument``, as a shell reads it, if there is one.

    A shell tool's durations differ by program (``bash:pytest``, ``bash:ls``), an HTTP tool's by operation.
    """
    if not isinstance(argument, str):
        return tool
    try:
        words = shlex.split(argument, comments=True)
    except ValueError:  # a quotation that does not end
        words = argument.split()
    # An assignment before the command (A=1 cmd) is not what takes the time.
    commands = (word for word in words if not _is_assignment(word))
    word = next(commands, "").rpartition("/")[2]
    plain = word.isascii() and all(sign.isalnum() or sign in "._-" for sign in word)
    return f"{tool}:{word}" if word and plain and len(word) <= MAX_CLASS_LENGTH else tool


def _is_assignment(word: str) -> bool:
    name, separator, _ = word.partition("=")
    return bool(separator) and name.isidentifier()
