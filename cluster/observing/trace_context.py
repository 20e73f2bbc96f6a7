"""Traces of programs: the W3C trace context, what a turn reports to its trace, and traces that do nothing.

A program's trace id follows from its key, so that every process knows it. OpenTelemetry is used only by
`cluster.observing.spans`, which is imported only where an OTLP endpoint is configured.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol

from cluster.config.sections import TracingConfig
from cluster.core.clock import Clock
from cluster.core.program import ProgramIdentity
from cluster.core.tools import ToolCall, ToolResult

TRACEPARENT = "traceparent"
"""The header of the W3C trace context."""

_FORM = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 0x01
_RATIO_BITS = 64
"""Low bits of the trace id that decide on sampling, as in OpenTelemetry's TraceIdRatioBased."""


# --- trace context ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span that others can be children of."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        """The value of the header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.sampled else 0:02x}"

    @classmethod
    def read(cls, header: str | None) -> "TraceContext | None":
        """Parse a header; None if it is missing or invalid, so that a new trace begins."""
        found = _FORM.fullmatch(header.strip()) if header else None
        if found is None or header is None or header.startswith("ff") or (found[4] and header.startswith("00")):
            return None
        context = cls(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & _SAMPLED))
        return context if context.trace_id and context.span_id else None

    @classmethod
    def of_program(cls, key: str, sample_ratio: float) -> "TraceContext":
        """The root span of a program's own trace.

        Args:
            key: `ProgramIdentity.key`.
            sample_ratio: share of the programs that are traced; all processes choose the same programs.
        """
        digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=24, person=b"caesura-trace").digest()
        trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
        return cls(trace_id, span_id, is_sampled(trace_id, sample_ratio))


def is_sampled(trace_id: int, sample_ratio: float) -> bool:
    """Whether a trace that begins here is recorded."""
    return trace_id & ((1 << _RATIO_BITS) - 1) < round(sample_ratio * (1 << _RATIO_BITS))


def parent_of(traceparent: str | None, key: str | None, sample_ratio: float) -> TraceContext | None:
    """The parent of a turn or a tool call: the client's span, else the program's root; None if there is neither."""
    given = TraceContext.read(traceparent)
    if given is not None or key is None:
        return given
    return TraceContext.of_program(key, sample_ratio)


def child_of_program(identity: ProgramIdentity, tracing: TracingConfig) -> ProgramIdentity:
    """The identity of a turn for which the ingress has no span, so that the replica's are children of the program's."""
    parent = parent_of(identity.traceparent, identity.key, tracing.sample_ratio)
    if tracing.otlp_endpoint is None or parent is None or not parent.sampled:
        return replace(identity, traceparent=None)
    return replace(identity, traceparent=str(parent))


def with_trace(headers: Mapping[str, str], identity: ProgramIdentity) -> dict[str, str]:
    """The headers of a call, with the identity's ``traceparent`` if it has one, else the client's."""
    return {**headers, **({} if identity.traceparent is None else {TRACEPARENT: identity.traceparent})}


# --- what is traced ---------------------------------------------------------------------------------------------------


class ExpectedTurn(Protocol):
    """`cluster.dispatch.predictions.PredictedTurn`."""

    async def identity(self) -> ProgramIdentity:
        """The identity of the turn."""
        ...

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None) -> None:
        """The turn has ended. Only the first call counts."""
        ...


class TracedTurn(ExpectedTurn, Protocol):
    """A turn whose placement is traced, too."""

    def placed(self, replica: str, reason: str | None) -> None:
        """The turn is sent to this replica."""
        ...


class Tools(Protocol):
    """`cluster.runs.task.Tools`."""

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """The call's only result."""
        ...

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """The result of an asynchronous call, once it is there."""
        ...

    async def cancel(self, program: str, call_id: str) -> bool:
        """Cancel a call."""
        ...


class Traces(Protocol):
    """The traces of one process."""

    def turn(self, turn: ExpectedTurn, method: str, model: str, identity: ProgramIdentity) -> TracedTurn:
        """Trace a turn that has arrived, until its `over`.

        Args:
            turn: the turn as it is without a trace.
            method: ``chat``, ``completions`` or ``turn``.
            model: the model's id.
            identity: of the turn; ``traceparent`` is the client's.
        """
        ...

    def tools(self, tools: Tools) -> Tools:
        """The same tools, with a trace of each call."""
        ...

    def replay(self, notes: Sequence[Mapping[str, Any]], model: str, clock: Clock) -> None:
        """Trace what a scheduler noted (`replicas.stats`).

        Args:
            notes: their times are seconds on the machine's monotonic clock.
            model: the model's id.
            clock: that clock.
        """
        ...

    def program_ended(self, key: str) -> None:
        """Export the root span of a program. Unknown programs are ignored, also those that have ended before."""
        ...

    def close(self) -> None:
        """Export what is left. Called when the process ends."""
        ...


class NullTraces:
    """Traces nothing."""

    def turn(self, turn: ExpectedTurn, method: str, model: str, identity: ProgramIdentity) -> TracedTurn:
        """The turn without a trace."""
        return NullTracedTurn(turn)

    def tools(self, tools: Tools) -> Tools:
        """The same tools."""
        return tools

    def replay(self, notes: Sequence[Mapping[str, Any]], model: str, clock: Clock) -> None:
        """Do nothing."""

    def program_ended(self, key: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class NullTracedTurn:
    """A turn that is not traced."""

    def __init__(self, turn: ExpectedTurn) -> None:
        self.identity = turn.identity
        self.over = turn.over

    def placed(self, replica: str, reason: str | None) -> None:
        """Do nothing."""
