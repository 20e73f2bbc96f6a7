"""The protocol of a kind of tool, what passes between it and the executor, and the clock that both go by."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.core.clock import Clock, MonotonicClock
from cluster.core.tools import ToolCall, ToolOffer, function_object
from tools_runtime.schemas import ArgumentCheck

# --- time -------------------------------------------------------------------------------------------------------------


class Timer(Protocol):
    """A wake-up that was asked for."""

    def cancel(self) -> None:
        """Do not wake."""
        ...


class TimerClock(Clock, Protocol):
    """What time is it, and who wakes me?"""

    def call_at(self, at_s: float, wake: Callable[[], None]) -> Timer:
        """Call ``wake`` at ``at_s`` of this clock, or soon if that is past."""
        ...


class LoopClock(MonotonicClock):
    """The machine's monotonic clock, with the running event loop's timers.

    Not the loop's own time: uvloop, on which Ray's actors run, keeps that in whole milliseconds.
    """

    def call_at(self, at_s: float, wake: Callable[[], None]) -> Timer:
        """Call ``wake`` at ``at_s``."""
        return asyncio.get_running_loop().call_later(max(0.0, at_s - self.now_s()), wake)


async def sleep_until(clock: TimerClock, at_s: float) -> None:
    """Wait until ``at_s`` of ``clock``."""
    if at_s <= clock.now_s():
        return
    woken = asyncio.get_running_loop().create_future()
    timer = clock.call_at(at_s, lambda: None if woken.done() else woken.set_result(None))
    try:
        await woken
    finally:
        timer.cancel()


# --- tools ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownTool:
    """A tool that can be called now."""

    offer: ToolOffer
    check: ArgumentCheck


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

    def tools(self) -> Sequence[KnownTool]:
        """The tools that are known now."""
        ...

    async def tool(self, name: str) -> KnownTool | None:
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
        check = ArgumentCheck(parameters)
        self._tool = KnownTool(
            ToolOffer(name, function_object(name, description, check.schema), here=True, owner=name), check
        )

    def tools(self) -> Sequence[KnownTool]:
        """The one tool."""
        return (self._tool,)

    async def tool(self, name: str) -> KnownTool | None:
        """The one tool, by its name."""
        return self._tool if name == self._tool.offer.name else None
