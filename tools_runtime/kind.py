"""The protocol of a kind of tool, the data between it and the executor, and the clock that both use."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.core.clock import Clock, MonotonicClock
from cluster.core.tools import ToolCall, ToolOffer, function_object
from tools_runtime.schemas import ArgumentCheck

# --- time -------------------------------------------------------------------------------------------------------------


class Timer(Protocol):
    """A scheduled wake-up."""

    def cancel(self) -> None:
        """Cancel the wake-up."""
        ...


class TimerClock(Clock, Protocol):
    """A clock that can also call a function at a given time."""

    def call_at(self, at_s: float, wake: Callable[[], None]) -> Timer:
        """Call ``wake`` at ``at_s`` of this clock, or soon if this time is past."""
        ...


class LoopClock(MonotonicClock):
    """The machine's monotonic clock, with the timers of the running event loop.

    It is not the loop's own time, because uvloop, on which Ray's actors run, has that in whole milliseconds.
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


def unreported(_: str) -> None:
    """Drop a piece of an answer that is reported where nobody reads it before the end."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """One start of a tool, with validated arguments."""

    tool: str
    """The tool's own name at its entry (`ToolId.tool`)."""
    arguments: Mapping[str, Any]
    output_cap_bytes: int
    """Bytes of an answer. A kind stops reading soon after this."""
    idempotency_key: str | None = None
    """The call's idempotency key, for tools that can pass it on. None: there is none."""
    traceparent: str | None = None
    """The value of W3C's traceparent header, for tools that can pass it on. None: there is none."""
    report: Callable[[str], object] = unreported
    """Receives the answer's text piece by piece while the tool runs, on the event loop. The answer that `ToolKind.run`
    returns replaces it. A kind whose tools answer at once need not call it."""
    images: bool = False
    """Whether the caller can use images of the answer."""

    @classmethod
    def of(
        cls, call: ToolCall, arguments: Mapping[str, Any], output_cap_bytes: int, report: Callable[[str], object]
    ) -> "Invocation":
        """Make the invocation of a call whose arguments were validated."""
        tool, key = call.target.tool, call.idempotency_key
        return cls(tool, arguments, output_cap_bytes, key, call.traceparent, report, call.images)


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The answer of a tool, unchanged."""

    text: str
    truncated: bool = False
    """Whether the answer was longer."""
    images: tuple[str, ...] = ()
    """Its images as `data:` URLs. Each has its place in the text, see `cluster.core.tools.IN_NEXT_MESSAGE`."""


class ToolKind(Protocol):
    """Runs tools of one kind. There is one object for each entry of the configuration.

    A kind has no deadlines, retries or queues, because the executor has them. It is cancelled by asyncio's
    cancellation, which it passes on to the tool. What it awaits then must end soon.
    """

    async def open(self) -> None:
        """Prepare what can be prepared before the first call. A tool that cannot be reached yet is no error.

        Calls do not wait for it. A call that comes before its end prepares what it needs itself.
        """
        ...

    def tools(self) -> Sequence[KnownTool]:
        """Return the tools that are known now."""
        ...

    def unusable(self) -> Sequence[ToolOffer]:
        """Return the tools that are known but cannot be called, with the reasons."""
        ...

    async def tool(self, name: str) -> KnownTool | None:
        """Return the tool that the kind itself calls ``name``, or None if there is none.

        Raises:
            ToolError: it is not possible to know.
        """
        ...

    async def run(self, invocation: Invocation) -> ToolOutput:
        """Run the tool once.

        Raises:
            ToolRefused: nothing was run.
            ToolFailed: the tool failed.
            ToolUnknown: the process or connection that ran it is gone.
        """
        ...

    async def aclose(self) -> None:
        """End everything that belongs to the kind, such as processes and connections."""
        ...


class SingleTool:
    """The part of a kind whose entry is one tool with a known schema.

    Raises:
        ValueError: the schema cannot be used.
    """

    def __init__(self, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        check = ArgumentCheck(parameters)
        self._tool = KnownTool(ToolOffer(name, function_object(name, description, check.schema), here=True), check)

    def tools(self) -> Sequence[KnownTool]:
        """Return the one tool."""
        return (self._tool,)

    def unusable(self) -> Sequence[ToolOffer]:
        """Return nothing: a tool that cannot be used is an error of the configuration."""
        return ()

    async def tool(self, name: str) -> KnownTool | None:
        """Return the one tool if it has this name, else None."""
        return self._tool if name == self._tool.offer.name else None
