"""OpenTelemetry spans of programs: one trace per program, or the trace that a client sends.

    invoke_agent             the program, exported when it has ended; its ids follow from its key, so that the spans of
      |                      its turns can be exported before it, by any process
      chat MODEL             a turn, from its arrival at an ingress to the last piece of its answer
        queue                at its replica, from arrival to admission
        generate             from admission to the last token; an event has the decision about its pause
        hold                 from that decision to the end of the hold, with the reason of the end
      execute_tool TOOL      a call of a tool that runs in the cluster

Names and attributes are those of OpenTelemetry's GenAI semantic conventions where these exist.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from cluster.core.clock import Clock
from cluster.core.program import ProgramIdentity
from cluster.core.tools import Outcome, ToolCall, ToolResult
from cluster.observing.trace_context import TRACEPARENT, ExpectedTurn, Tools, TraceContext, TracedTurn, parent_of

MAX_PROGRAMS = 20_000
"""Open root spans of a process. Beyond that, the span of the program that has been idle for longest is exported."""
EXPORT_PERIOD_MS = 1000

OPERATIONS = {"chat": "chat", "turn": "chat", "completions": "text_completion", "generate": "text_completion"}
"""GenAI operation names by the replica's method."""
TOOL_SUCCESSES = frozenset({Outcome.OK, Outcome.STARTED})


class Moment(NamedTuple):
    """The time of a beginning. Later times are measured from it, since the wall clock may jump."""

    unix_ns: int
    monotonic_ns: int

    @classmethod
    def now(cls) -> "Moment":
        """Return the current time."""
        return cls(time.time_ns(), time.monotonic_ns())

    def later_ns(self) -> int:
        """Return the Unix time now in nanoseconds: that of the beginning plus the monotonic time since."""
        return self.unix_ns + time.monotonic_ns() - self.monotonic_ns


@dataclass(slots=True)
class _Program:
    """A program whose root span is not exported yet."""

    began: Moment
    last_ns: int
    """Unix time of the end of the last turn, as `Moment.later_ns` of ``began`` returned it."""
    model: str
    tenant: str
    turns: int = 0
    failed: int = 0


class _Ids(RandomIdGenerator):
    """Random ids, except for the root span of a program."""

    root: TraceContext | None = None

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.root is None else self.root.trace_id

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self.root is None else self.root.span_id


class OpenTelemetryTraces:
    """The `Traces` of one process.

    Args:
        exporter: gets the spans.
        part: the role of the process, such as ``ingress``.
        sample_ratio: fraction of the programs that are traced.
        idle_s: seconds without a turn after which a program has ended.
    """

    def __init__(self, exporter: SpanExporter, *, part: str, sample_ratio: float = 1.0, idle_s: float = 3600.0) -> None:
        self._ratio = sample_ratio
        self._idle_ns = int(idle_s * 1e9)
        self._ids = _Ids()
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "caesura", "caesura.part": part}),
            id_generator=self._ids,
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            shutdown_on_exit=True,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_PERIOD_MS))
        self._tracer = self._provider.get_tracer("caesura")

    def turn(self, turn: ExpectedTurn, method: str, model: str, identity: ProgramIdentity) -> TracedTurn:
        """See `Traces.turn`. The turn's identity has the span as its ``traceparent``."""
        key, operation, began = identity.key, OPERATIONS[method], Moment.now()
        span = self.begin(
            f"{operation} {model}",
            identity.traceparent,
            key,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "caesura",
                "gen_ai.request.model": model,
                "caesura.tenant": identity.tenant,
            },
            at_ns=began.unix_ns,
            kind=SpanKind.SERVER,
        )
        if key is not None:
            self._sweep()
            program = self._programs.setdefault(key, _Program(began, began.unix_ns, model, identity.tenant))
            program.turns += 1
            self._programs.move_to_end(key)
        return _TracedTurn(self, turn, span, began, key, last=identity.last_turn)

    def tools(self, tools: Tools) -> Tools:
        """See `Traces.tools`."""
        return TracedTools(tools, self)

    def begin(
        self,
        name: str,
        traceparent: str | None,
        key: str | None,
        attributes: Mapping[str, Any],
        *,
        at_ns: int | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Begin a span. Its parent is the client's span, or else its program's root span. Without both it has no
        parent.

        Args:
            name: the span's name.
            traceparent: the client's header; None: the client sent none.
            key: the program's key; None: there is no program.
            attributes: the span's attributes. The conversation's id is added.
            at_ns: Unix time of the beginning in nanoseconds; None: now.
            kind: the span's kind.
        """
        parent = parent_of(traceparent, key, self._ratio)
        program = TraceContext.of_program(key, self._ratio) if key is not None else None
        in_other_trace = parent is not None and program is not None and parent.trace_id != program.trace_id
        return self._tracer.start_span(
            name,
            context=Context() if parent is None else _context(parent),
            kind=kind,
            attributes={**attributes, **({} if key is None else {"gen_ai.conversation.id": key.partition("/")[2]})},
            links=[Link(_span_context(program))] if in_other_trace and program is not None else (),
            start_time=at_ns,
        )

    def turn_ended(self, key: str, *, last: bool, complete: bool) -> None:
        """Record the end of a turn of this program."""
        program = self._programs.get(key)
        if program is not None:
            program.last_ns = program.began.later_ns()
            program.failed += not complete
            if last:
                self.program_ended(key)

    def program_ended(self, key: str) -> None:
        """See `Traces.program_ended`."""
        program = self._programs.pop(key, None)
        if program is None:
            return
        self._ids.root = TraceContext.of_program(key, self._ratio)
        try:
            span = self._tracer.start_span(
                f"invoke_agent {program.model}",
                context=Context(),
                attributes={
                    "gen_ai.operation.name": "invoke_agent",
                    "gen_ai.provider.name": "caesura",
                    "gen_ai.request.model": program.model,
                    "gen_ai.conversation.id": key.partition("/")[2],
                    "caesura.tenant": program.tenant,
                    "caesura.turns": program.turns,
                    "caesura.turns_failed": program.failed,
                },
                start_time=program.began.unix_ns,
            )
        finally:
            self._ids.root = None
        span.end(program.last_ns)

    def replay(self, notes: Sequence[Mapping[str, Any]], model: str, clock: Clock) -> None:
        """See `Traces.replay`. Each span is a child of its note's ``traceparent``."""
        zero_ns = time.time_ns() - int(clock.now_s() * 1e9)

        def at_ns(seconds: float) -> int:
            return zero_ns + int(seconds * 1e9)

        for note in notes:
            if note["what"] == "hold":
                reason = {"caesura.hold.end": note["how"]}
                hold = self.begin("hold", note[TRACEPARENT], None, reason, at_ns=at_ns(note["since_s"]))
                hold.end(at_ns(note["until_s"]))
            else:
                self._replay_turn(note, model, at_ns)

    def close(self) -> None:
        """See `Traces.close`. It waits for the exporter for a short time."""
        for key in list(self._programs):
            self.program_ended(key)
        self._provider.shutdown()

    def _replay_turn(self, note: Mapping[str, Any], model: str, at_ns: Callable[[float], int]) -> None:
        admitted_s = note["ended_s"] if note["admitted_s"] is None else note["admitted_s"]
        queue = self.begin("queue", note[TRACEPARENT], None, {}, at_ns=at_ns(note["arrived_s"]))
        queue.end(at_ns(admitted_s))
        if note["admitted_s"] is None:
            return
        attributes = {
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": note["prompt_tokens"],
            "gen_ai.usage.output_tokens": note["output_tokens"],
            "gen_ai.usage.cache_read.input_tokens": note["cached_tokens"],
            "gen_ai.response.finish_reasons": [note["outcome"]],
            "caesura.preemptions": note["preemptions"],
        }
        span = self.begin("generate", note[TRACEPARENT], None, attributes, at_ns=at_ns(admitted_s))
        if note["first_token_s"] is not None:
            span.add_event("first token", timestamp=at_ns(note["first_token_s"]))
        if note["tools"]:
            decided = {"caesura.decision": note["decision"], "gen_ai.tool.name": list(note["tools"])}
            span.add_event("pause", decided, timestamp=at_ns(note["ended_s"]))
        span.end(at_ns(note["ended_s"]))

    def _sweep(self) -> None:
        """Export the programs that have been idle for too long."""
        while self._programs:
            key, program = next(iter(self._programs.items()))
            if len(self._programs) < MAX_PROGRAMS and program.began.later_ns() - program.last_ns < self._idle_ns:
                break
            self.program_ended(key)


class _TracedTurn:
    """A turn and its span."""

    def __init__(
        self, traces: OpenTelemetryTraces, turn: ExpectedTurn, span: Span, began: Moment, key: str | None, *, last: bool
    ) -> None:
        self._traces = traces
        self._turn = turn
        self._span = span
        self._began = began
        self._key = key
        self._last = last
        self._over = False

    async def identity(self) -> ProgramIdentity:
        """Return the identity of the turn, with its span as ``traceparent``."""
        return replace(await self._turn.identity(), traceparent=traceparent_of(self._span))

    def placed(self, replica: str, reason: str | None) -> None:
        """Add an event to the span."""
        attributes = {"caesura.replica": replica, "caesura.reason": reason or "ray"}
        self._span.add_event("placed", attributes, self._began.later_ns())

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None, refused: bool = False) -> None:
        """End the span. Only the first call has an effect."""
        self._turn.over(output_tokens=output_tokens, prompt_tokens=prompt_tokens, refused=refused)
        if self._over:
            return
        self._over = True
        for name, tokens in (("input", prompt_tokens), ("output", output_tokens)):
            if tokens is not None:
                self._span.set_attribute(f"gen_ai.usage.{name}_tokens", tokens)
        if output_tokens is None:
            self._span.set_status(StatusCode.ERROR, "the answer is incomplete")
        self._span.end(self._began.later_ns())
        if self._key is not None:
            self._traces.turn_ended(self._key, last=self._last, complete=output_tokens is not None)


class TracedTools:
    """Tools whose calls are spans of their program's trace.

    Args:
        tools: run the calls.
        traces: get the spans.
    """

    def __init__(self, tools: Tools, traces: OpenTelemetryTraces) -> None:
        self._traces = traces
        self._run = tools.run
        self.output = tools.output
        self.completion = tools.completion
        self.cancel = tools.cancel

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """See `Tools.run`. The call's ``traceparent`` is the span."""
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.name,
            "gen_ai.tool.call.id": call.id,
            "gen_ai.tool.type": "function",
        }
        began = Moment.now()
        span = self._traces.begin(
            f"execute_tool {call.name}", call.traceparent, call.program or None, attributes, at_ns=began.unix_ns
        )
        try:
            result = await self._run(replace(call, traceparent=traceparent_of(span)), definitions, resumed=resumed)
            span.set_attributes(
                {
                    "caesura.tool.outcome": result.outcome.value,
                    "caesura.tool.queue_s": result.queue_s,
                    "caesura.tool.run_s": result.run_s,
                    "caesura.tool.attempts": result.attempts,
                }
            )
            if result.outcome not in TOOL_SUCCESSES:
                span.set_status(StatusCode.ERROR, result.outcome.value)
            return result
        finally:
            span.end(began.later_ns())


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Make an exporter to an OTLP endpoint over HTTP."""
    return OTLPSpanExporter(endpoint=endpoint)


def traceparent_of(span: Span) -> str | None:
    """Return the `traceparent` header for children of this span; None: the span is not recorded."""
    if not span.is_recording():
        return None
    context = span.get_span_context()
    return str(TraceContext(context.trace_id, context.span_id, sampled=True))


def _span_context(context: TraceContext) -> SpanContext:
    trace_flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=trace_flags)


def _context(parent: TraceContext) -> Context:
    return set_span_in_context(NonRecordingSpan(_span_context(parent)))
