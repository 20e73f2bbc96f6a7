"""The protocol of a kind of tool, and what passes between it and the executor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.tools import ToolCall
from tools_runtime.schemas import ArgumentCheck


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool that can be called now."""

    name: str
    """As programs call it."""
    description: str
    check: ArgumentCheck
    read_only: bool = False
    """Its server says that it changes nothing."""
    own_name: str | None = None
    """As its server calls it, if it has one."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """One start of a tool, its arguments checked."""

    name: str
    """As programs call it."""
    arguments: Mapping[str, Any]
    output_cap_bytes: int
    """A kind stops reading an answer soon after this."""
    idempotency_key: str | None = None
    """For tools that can pass it on."""
    traceparent: str | None = None
    """As W3C's header says it; for tools that can pass it on."""

    @classmethod
    def of(cls, call: ToolCall, arguments: Mapping[str, Any], output_cap_bytes: int) -> "Invocation":
        """The start of a call whose arguments were checked."""
        return cls(call.name, arguments, output_cap_bytes, call.idempotency_key, call.traceparent)


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a tool answered, as it came."""

    text: str
    truncated: bool = False
    """There was more."""


class ToolKind(Protocol):
    """How is a tool of this kind run? One object for each entry of the configuration.

    A kind has no deadlines, retries or queues: those are the executor's. It is cancelled by asyncio's cancellation,
    which it passes on to the tool; whatever is awaited then must end soon.
    """

    async def open(self) -> None:
        """Make ready what can be made ready beforehand. A tool that cannot be reached yet is no error.

        Raises:
            ConfigError: the configuration cannot work.
        """
        ...

    def offers(self) -> Sequence[Offer]:
        """The tools that are known now."""
        ...

    async def offer(self, name: str) -> Offer | None:
        """The tool that programs call ``name``; None if there is none.

        Raises:
            ToolError: it cannot be said.
        """
        ...

    async def run(self, invocation: Invocation) -> ToolOutput:
        """Run the tool once.

        Raises:
            ToolRefused: nothing was run.
            ToolFailed: the tool failed.
            ToolUnknown: whatever ran it is gone.
        """
        ...

    async def aclose(self) -> None:
        """End everything that belongs to it: processes, connections."""
        ...


class SingleTool:
    """The part of a kind whose entry is one tool of a known schema.

    Raises:
        ValueError: the schema cannot be used.
    """

    def __init__(self, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self._offer = Offer(name, description, ArgumentCheck(parameters))

    def offers(self) -> Sequence[Offer]:
        """The one tool."""
        return (self._offer,)

    async def offer(self, name: str) -> Offer | None:
        """The one tool, by its name."""
        return self._offer if name == self._offer.name else None
