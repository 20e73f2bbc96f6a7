"""W3C trace context: read, written, and derived from a program's key, so that every process knows a program's trace."""

import re
from dataclasses import dataclass, replace
from hashlib import blake2b

from cluster.observing_config import TracingConfig
from cluster.program import ProgramIdentity

TRACEPARENT = "traceparent"
"""The header."""

_FORM = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 0x01
_RATIO_BITS = 64
"""As OpenTelemetry's TraceIdRatioBased, which looks at so many low bits of the trace's id."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span, as others may go on from it."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        """As the header says it."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.sampled else 0:02x}"

    @classmethod
    def read(cls, header: str | None) -> "TraceContext | None":
        """Of a header; None where it says nothing that can be used: a new trace begins then."""
        found = _FORM.fullmatch(header.strip()) if header else None
        if found is None or header is None or header.startswith("ff") or (found[4] and header.startswith("00")):
            return None
        context = cls(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & _SAMPLED))
        return context if context.trace_id and context.span_id else None

    @classmethod
    def of_program(cls, key: str, sample_ratio: float) -> "TraceContext":
        """The root of a program's own trace.

        Args:
            key: `ProgramIdentity.key`.
            sample_ratio: the part of the programs that is traced; the same ones in every process.
        """
        digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=24, person=b"caesura-trace").digest()
        trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:])
        return cls(trace_id, span_id, is_sampled(trace_id, sample_ratio))


def is_sampled(trace_id: int, sample_ratio: float) -> bool:
    """Whether a trace that begins here is recorded."""
    return trace_id & ((1 << _RATIO_BITS) - 1) < round(sample_ratio * (1 << _RATIO_BITS))


def parent_of(traceparent: str | None, key: str | None, sample_ratio: float) -> TraceContext | None:
    """What a turn or a tool call is part of: what its client says, else its program; None: it is alone."""
    given = TraceContext.read(traceparent)
    if given is not None or key is None:
        return given
    return TraceContext.of_program(key, sample_ratio)


def part_of_its_program(identity: ProgramIdentity, tracing: TracingConfig) -> ProgramIdentity:
    """The identity of a turn whose door tells no span of its own: its replica's are directly its program's."""
    parent = parent_of(identity.traceparent, identity.key, tracing.sample_ratio)
    if tracing.otlp_endpoint is None or parent is None or not parent.sampled:
        return replace(identity, traceparent=None)
    return replace(identity, traceparent=str(parent))
