"""Traces of programs, by OpenTelemetry: one trace a program, or the trace of a client that brings one.

    invoke_agent             the program, told when it has ended; its ids follow from its key, so that turns may be told
      chat MODEL             a turn, from its arrival at a door until its last piece         (before it, by any process)
        queue                on its replica, from arrival to admission                (`cluster.observing.replayed`)
        generate             from admission to its last token, with what was decided of its pause
        hold                 from that decision to the hold's end, with how it ended
      execute_tool TOOL      a call of a tool that runs in the cluster

Names and attributes are those of OpenTelemetry's GenAI semantic conventions where they have one. With no endpoint
configured nothing of OpenTelemetry is imported.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cluster.config import CaesuraConfig
from cluster.observing.trace_context import TRACEPARENT, TraceContext, parent_of
from cluster.program import ProgramIdentity

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

MAX_PROGRAMS = 20_000
"""Whose roots a process keeps open; of more, the one that has been quiet for longest is told as it is."""
EXPORT_PERIOD_MS = 1000
"""Between two exports."""

OPERATIONS = {"chat": "chat", "turn": "chat", "completions": "text_completion"}
"""GenAI names of what a replica is asked for."""


class ExpectedTurn(Protocol):
    """`cluster.forecasting.ForeseenTurn`."""

    async def identity(self) -> ProgramIdentity:
        """Whose turn it is."""
        ...

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None) -> None:
        """The turn is over; again is nothing."""
        ...


class WatchedTurn(ExpectedTurn, Protocol):
    """A turn whose way is watched."""

    def placed(self, replica: str, reason: str | None) -> None:
        """It goes to this replica."""
        ...


class Untraced:
    """A turn that is not traced."""

    def __init__(self, turn: ExpectedTurn) -> None:
        self._turn = turn

    async def identity(self) -> ProgramIdentity:
        """As it was."""
        return await self._turn.identity()

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None) -> None:
        """Passed on."""
        self._turn.over(output_tokens=output_tokens, prompt_tokens=prompt_tokens)

    def placed(self, replica: str, reason: str | None) -> None:
        """Nothing is told."""


class NoTraces:
    """Where nothing is traced."""

    def turn(self, turn: ExpectedTurn, method: str, model: str, identity: ProgramIdentity) -> WatchedTurn:
        """Nothing is told of it."""
        return Untraced(turn)

    def program_ended(self, key: str) -> None:
        """Nothing is told."""

    def close(self) -> None:
        """There is nothing to end."""


class Moment(NamedTuple):
    """When something began. What comes after is counted from it: the wall clock may jump meanwhile."""

    unix_ns: int
    steady_ns: int

    @classmethod
    def now(cls) -> "Moment":
        """The present one."""
        return cls(time.time_ns(), time.monotonic_ns())

    def later_ns(self) -> int:
        """Unix time of now, as it was when this began, and what has passed since; never before it."""
        return self.unix_ns + time.monotonic_ns() - self.steady_ns


@dataclass(slots=True)
class _Program:
    """One whose root is not told yet."""

    began: Moment
    last_ns: int
    """By ``began``."""
    model: str
    tenant: str
    turns: int = 0
    failed: int = 0


class Traces:
    """What one process tells of programs.

    Args:
        exporter: takes spans.
        part: what the process is, such as ``ingress``.
        sample_ratio: the part of the programs that is traced.
        idle_s: a program without a turn for so long has ended.
    """

    def __init__(
        self,
        exporter: "SpanExporter",
        *,
        part: str,
        sample_ratio: float = 1.0,
        idle_s: float = 3600.0,
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        class Ids(RandomIdGenerator):
            """Random ones, but for the root of a program."""

            root: TraceContext | None = None

            def generate_trace_id(self) -> int:
                return super().generate_trace_id() if self.root is None else self.root.trace_id

            def generate_span_id(self) -> int:
                return super().generate_span_id() if self.root is None else self.root.span_id

        self._ratio = sample_ratio
        self._idle_ns = int(idle_s * 1e9)
        self._ids = Ids()
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "caesura", "caesura.part": part}),
            id_generator=self._ids,
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            shutdown_on_exit=True,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_PERIOD_MS))
        self._tracer = self._provider.get_tracer("caesura")

    # --- at a door ----------------------------------------------------------------------------------------------------

    def turn(self, turn: ExpectedTurn, method: str, model: str, identity: ProgramIdentity) -> WatchedTurn:
        """A turn has come. Its span ends with `over`; what it becomes part of further on is in its identity.

        Args:
            turn: the turn as it is without being traced.
            method: ``chat``, ``completions`` or ``turn``.
            model: the model's id.
            identity: whose turn it is; ``traceparent`` as its client said.
        """
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
            at_a_door=True,
        )
        if key is not None:
            self._sweep()
            program = self._programs.setdefault(key, _Program(began, began.unix_ns, model, identity.tenant))
            program.turns += 1
            self._programs.move_to_end(key)
        return _TracedTurn(self, turn, span, began, key, last=identity.last_turn)

    def begin(
        self,
        name: str,
        traceparent: str | None,
        key: str | None,
        attributes: Mapping[str, Any],
        *,
        at_ns: int | None = None,
        at_a_door: bool = False,
    ) -> "Span":
        """A span that is part of what a client named, else of its program, else of nothing.

        Args:
            name: of the span.
            traceparent: what the client said.
            key: of the program.
            attributes: of the span; the conversation's id is added.
            at_ns: Unix time; None: now.
            at_a_door: somebody outside waits for it.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, SpanKind

        parent = parent_of(traceparent, key, self._ratio)
        program = TraceContext.of_program(key, self._ratio) if key is not None else None
        elsewhere = parent is not None and program is not None and parent.trace_id != program.trace_id
        return self._tracer.start_span(
            name,
            context=Context() if parent is None else _within(parent),
            kind=SpanKind.SERVER if at_a_door else SpanKind.INTERNAL,
            attributes={**attributes, **({} if key is None else {"gen_ai.conversation.id": key.partition("/")[2]})},
            links=[Link(_span_context(program))] if elsewhere and program is not None else (),
            start_time=at_ns,
        )

    def turn_over(self, key: str, *, last: bool, complete: bool) -> None:
        """A turn of this program has ended."""
        program = self._programs.get(key)
        if program is not None:
            program.last_ns = program.began.later_ns()
            program.failed += not complete
            if last:
                self.program_ended(key)

    def program_ended(self, key: str) -> None:
        """Tell the root of its trace. Again, or of a program that was never here, is nothing."""
        from opentelemetry.context import Context

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

    def _sweep(self) -> None:
        """Tell of programs that have been quiet for too long."""
        while self._programs:
            key, program = next(iter(self._programs.items()))
            if len(self._programs) < MAX_PROGRAMS and program.began.later_ns() - program.last_ns < self._idle_ns:
                break
            self.program_ended(key)

    def close(self) -> None:
        """Tell of all programs, and wait for the exporter a little. Called when the process ends."""
        for key in list(self._programs):
            self.program_ended(key)
        self._provider.shutdown()


class _TracedTurn:
    """A turn and its span."""

    def __init__(
        self, traces: Traces, turn: ExpectedTurn, span: "Span", began: Moment, key: str | None, *, last: bool
    ) -> None:
        self._traces = traces
        self._turn = turn
        self._span = span
        self._began = began
        self._key = key
        self._last = last
        self._over = False

    async def identity(self) -> ProgramIdentity:
        """Whose turn it is, and part of what it is from here on."""
        return replace(await self._turn.identity(), traceparent=traceparent_of(self._span))

    def placed(self, replica: str, reason: str | None) -> None:
        """An event of the span."""
        attributes = {"caesura.replica": replica, "caesura.reason": reason or "ray"}
        self._span.add_event("placed", attributes, self._began.later_ns())

    def over(self, *, output_tokens: int | None, prompt_tokens: int | None = None) -> None:
        """The end of the span; again is nothing."""
        from opentelemetry.trace import StatusCode

        self._turn.over(output_tokens=output_tokens, prompt_tokens=prompt_tokens)
        if self._over:
            return
        self._over = True
        for name, tokens in (("input", prompt_tokens), ("output", output_tokens)):
            if tokens is not None:
                self._span.set_attribute(f"gen_ai.usage.{name}_tokens", tokens)
        if output_tokens is None:
            self._span.set_status(StatusCode.ERROR, "it did not come to its proper end")
        self._span.end(self._began.later_ns())
        if self._key is not None:
            self._traces.turn_over(self._key, last=self._last, complete=output_tokens is not None)


def traceparent_of(span: "Span") -> str | None:
    """What others are told to go on from it; None: it is not recorded."""
    if not span.is_recording():
        return None
    context = span.get_span_context()
    return str(TraceContext(context.trace_id, context.span_id, sampled=True))


def with_trace(headers: Mapping[str, str], identity: ProgramIdentity) -> dict[str, str]:
    """The headers of a call, part of what the identity says; where that says nothing, as the client sent them."""
    return {**headers, **({} if identity.traceparent is None else {TRACEPARENT: identity.traceparent})}


def traces(config: CaesuraConfig, part: str) -> Traces | NoTraces:
    """As the configuration wants them.

    Args:
        config: the whole configuration.
        part: what this process is, such as ``ingress``.
    """
    tracing = config.tracing
    if tracing.otlp_endpoint is None:
        return NoTraces()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=tracing.otlp_endpoint)
    return Traces(exporter, part=part, sample_ratio=tracing.sample_ratio, idle_s=config.control.idle_program_s)


def _span_context(context: TraceContext) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=flags)


def _within(context: TraceContext) -> Any:
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    return set_span_in_context(NonRecordingSpan(_span_context(context)))
