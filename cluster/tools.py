"""The words for tool calls: what a program asks for, and the one outcome that each call has."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_CLASS_LENGTH = 48
"""Characters of an argument class; a longer word says nothing of a duration and is left out."""


class Outcome(StrEnum):
    """What became of a tool call. Each call has exactly one."""

    OK = "ok"
    """The tool answered."""
    ERROR = "error"
    """The tool failed, or said that it did."""
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
    """`ProgramIdentity.key` of the program that asks; empty: nobody said."""
    idempotency_key: str | None = None
    """A repeated call of the same program and tool with the same key gets the first one's result."""
    deadline_s: float | None = None
    """Seconds from now within which an answer is wanted, if that is sooner than the tool's own deadline."""
    traceparent: str | None = None
    """What it is part of, as W3C's header says it; None: it is not traced, or is its program's."""

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
    """The tool had more to say than its cap."""
    queue_s: float = 0.0
    """Seconds before the tool was started."""
    run_s: float = 0.0
    """Seconds that the tool ran, retries and the waits between them included."""
    attempts: int = 0
    """Times that the tool was started."""
    statistics_name: str = ""
    """The name under which the duration is learnt: the tool, and the class of its arguments if it has one."""


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """A tool that can be called now."""

    name: str
    """As programs call it."""
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments."""
    owner: str
    """The entry of the configuration or of the request that it belongs to: itself, or its MCP server."""
    read_only: bool = False
    """Its MCP server says that it changes nothing (`readOnlyHint`)."""
    own_name: str | None = None
    """As its MCP server calls it; None: it has none."""


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
