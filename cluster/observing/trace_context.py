"""Traces of programs: the W3C trace context, the protocols of traces, and traces that do nothing.

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
    """The ids of a span that can be the parent of others."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        """Return the value of the `traceparent` header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.sampled else 0:02x}"

    @classmethod
    def read(cls, header: str | None) -> "TraceContext | None":
        """Parse a `traceparent` header; None: it is missing or invalid, so that a new trace has to begin."""
        found = _FORM.fullmatch(header.strip()) if header else None
        if found is None or header is None or header.startswith("ff") or (found[4] and header.startswith("00")):
            return None
        context = cls(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & _SAMPLED))
        return context if context.trace_id and context.span_id else None

    @classmethod
    def of_program(cls, key: str, sample_ratio: float) -> "TraceContext":
        """Return the root span of a program's own trace.

        Args:
            key: `ProgramIdentity.key`.
            sample_ratio: fraction of the programs that are traced. All processes choose the same programs.
        """
        digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=24, person=b"caesura-trace").digest()
        trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
        return cls(trace_id, span_id, is_sampled(trace_id, sample_ratio))


def is_sampled(trace_id: int, sample_ratio: float) -> bool:
    """Return whether a trace that begins in this cluster is recorded."""
    return trace_id & ((1 << _RATIO_BITS) - 1) < round(sample_ratio * (1 << _RATIO_BITS))


def parent_of(traceparent: str | None, key: str | None, sample_ratio: float) -> TraceContext | None:
    """Return the parent of a turn or a tool call: the client's span, or else the program's root; None: neither
    exists.
    """
    given = TraceContext.read(traceparent)
    if given is not None or key is None:
        return given
    return TraceContext.of_program(key, sample_ratio)


def child_of_program(identity: ProgramIdentity, tracing: TracingConfig) -> ProgramIdentity:
    """Return the identity of a turn for which the ingress has no span.

    Its ``traceparent`` is the client's span or the program's root, so that the replica's spans are children of it;
    None: the turn is not traced.
    """
    parent = parent_of(identity.traceparent, identity.key, tracing.sample_ratio)
    if tracing.otlp_endpoint is None or parent is None or not parent.sampled:
        return replace(identity, traceparent=None)
    return replace(identity, traceparent=str(parent))


def with_trace(headers: Mapping[str, str], identity: ProgramIdentity) -> dict[str, str]:
    """Return the headers of a call, with the identity's ``traceparent`` if it has one, or else the client's."""
    return {**headers, **({} if identity.traceparent is None else {TRACEPARENT: identity.traceparent})}


# --- what is traced ---------------------------------------------------------------------------------------------------


class ExpectedTurn(Protocol):
    """`cluster.dispatch.predictions.PredictedTurn`."""

    async def identity(self) -> ProgramIdentity:
        """Return the identity of the turn."""
        ...

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None, refused: bool = False) -> None:
        """Record the end of the turn; ``output_tokens`` None: the answer is incomplete. Only the first call has an
        effect.
        """
        ...


class TracedTurn(ExpectedTurn, Protocol):
    """A turn whose placement is traced too."""

    def placed(self, replica: str, reason: str | None) -> None:
        """Record that the turn is sent to this replica; ``reason`` None: Ray's router chose it."""
        ...


class Tools(Protocol):
    """`cluster.runs.task.Tools`."""

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """Run the call, and return its result."""
        ...

    async def output(self, program: str, call_id: str, known: int) -> str | None:
        """Wait for more output of a running call."""
        ...

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """Wait for the result of an asynchronous call."""
        ...

    async def cancel(self, program: str, call_id: str) -> bool:
        """End a call with CANCELLED. Return False if there is no such call."""
        ...


class Traces(Protocol):
    """The traces of one process."""

    def turn(self, turn: ExpectedTurn, method: str, model: str, identity: ProgramIdentity) -> TracedTurn:
        """Trace a turn that has arrived, until its `over`.

        Args:
            turn: the turn without a trace.
            method: ``chat``, ``completions`` or ``turn``.
            model: the model's id.
            identity: the identity of the turn, with the client's ``traceparent``.
        """
        ...

    def tools(self, tools: Tools) -> Tools:
        """Return the same tools, with a trace of each call."""
        ...

    def replay(self, notes: Sequence[Mapping[str, Any]], model: str, clock: Clock) -> None:
        """Trace the turns and holds that a scheduler has recorded (`replicas.stats`).

        Args:
            notes: the records. Their times are seconds on the machine's monotonic clock.
            model: the model's id.
            clock: the machine's monotonic clock.
        """
        ...

    def program_ended(self, key: str) -> None:
        """Export the root span of a program. Programs that are unknown or have already ended are ignored."""
        ...

    def close(self) -> None:
        """Export the remaining spans. It is called when the process ends."""
        ...


class NullTraces:
    """Traces that record nothing."""

    def turn(self, turn: ExpectedTurn, method: str, model: str, identity: ProgramIdentity) -> TracedTurn:
        """Return the turn without a trace."""
        return NullTracedTurn(turn)

    def tools(self, tools: Tools) -> Tools:
        """Return the same tools."""
        return tools

    def replay(self, notes: Sequence[Mapping[str, Any]], model: str, clock: Clock) -> None:
        """Ignore the records: no span is exported."""

    def program_ended(self, key: str) -> None:
        """Ignore the end: the program has no root span."""

    def close(self) -> None:
        """Return at once: there are no spans to export."""


class NullTracedTurn:
    """A turn that is not traced."""

    def __init__(self, turn: ExpectedTurn) -> None:
        self.identity = turn.identity
        self.over = turn.over

    def placed(self, replica: str, reason: str | None) -> None:
        """Ignore the place: there is no span to which it belongs."""
