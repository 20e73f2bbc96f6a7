"""OpenTelemetry spans of GenAI calls, as OTLP JSON: one document, or one ``ExportTraceServiceRequest`` a line.

Spans follow the semantic conventions for generative AI (semantic-conventions-genai, status Development): a span whose
``gen_ai.operation.name`` is ``chat``, ``generate_content`` or ``text_completion`` is a turn, and ``execute_tool`` is
the tool after it. ``gen_ai.conversation.id`` names the program; a span without it belongs to the conversation of its
trace, or is of a program of its trace. Numbers of tokens may be on a span below the call, as in a cluster's own traces.
What the conventions have no attribute for is written as ``caesura.trace.*``, so that a trace of ours comes back
unchanged. Spans are in memory while a file is read, as a file has no order of conversations; writing goes line by line.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from cluster.core.errors import TraceError
from cluster.core.recorded_turn import RecordedProgram, RecordedTurn
from cluster.offline.traces.calls import UNNAMED_TOOL, Call, program, turns_of
from cluster.offline.traces.format import Options, TraceFormat
from cluster.offline.traces.losses import Losses
from cluster.offline.traces.otlp import Span, exports

MODEL_CALLS = frozenset({"chat", "generate_content", "text_completion"})
TOOL_CALL = "execute_tool"
OPERATION = "gen_ai.operation.name"
CONVERSATION = "gen_ai.conversation.id"
USAGE = "gen_ai.usage."
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
TOOL_NAME = "gen_ai.tool.name"
OWN = "caesura.trace."
"""Prefix of the attributes that the conventions do not have."""
OWN_PROGRAM = ("category", "source", "split_group", "arrival_s", "incomplete", "parent_program_id", "parent_turn")
OWN_TURN = ("new_prompt_tokens", "tool_duration_s", "tool_return_tokens", "tool_cmd", "kept_output_tokens", "reset")
EPOCH_NS = 10**18
"""Start of a written trace whose programs arrive at 0 (Unix time, ns). OTLP reserves 0 for "unknown"."""


@dataclass(frozen=True, slots=True)
class _Call:
    where: str
    start_ns: int
    end_ns: int
    trace_id: str
    conversation: str | None


@dataclass(frozen=True, slots=True)
class _ModelCall(_Call):
    span_id: str
    failed: bool
    attributes: dict[str, Any]
    tools: list["_ToolCall"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _ToolCall(_Call):
    name: str


def read(path: Path, _options: Options, losses: Losses) -> Iterator[tuple[str, RecordedProgram]]:
    """Read the conversations of a file, in the order of their first calls."""
    found = _Found()
    for where, export in exports(path):
        for place, span in export.placed(where):
            found.add(place, span)
    programs = found.programs(losses)
    began_ns = min((calls[0].start_ns for calls in programs.values()), default=0)
    for name, calls in programs.items():
        yield calls[0].where, _program(name, calls, began_ns, losses)


class _Found:
    """The spans of a file that are calls, with what other spans have of their tokens."""

    def __init__(self) -> None:
        self._calls: list[_ModelCall | _ToolCall] = []
        self._conversations: dict[str, set[str]] = {}
        """The ids of the conversations that the calls of each trace name."""
        self._usage: dict[str, dict[str, Any]] = {}
        """Numbers of tokens of spans that are no calls themselves, by the span that they are below."""
        self._others = 0

    def add(self, place: str, span: Span) -> None:
        """Add a span.

        Raises:
            TraceError: it ends before it starts. The message begins with ``place``.
        """
        if span.endTimeUnixNano < span.startTimeUnixNano:
            raise TraceError(f"{place}.endTimeUnixNano: before startTimeUnixNano")
        values = span.values()
        conversation = values.get(CONVERSATION) or None
        if conversation is not None:
            self._conversations.setdefault(span.traceId, set()).add(conversation)
        of = (place, span.startTimeUnixNano, span.endTimeUnixNano, span.traceId, conversation)
        operation = values.get(OPERATION)
        if operation == TOOL_CALL:
            self._calls.append(_ToolCall(*of, str(values.get(TOOL_NAME) or UNNAMED_TOOL)))
        elif operation in MODEL_CALLS:
            failed = span.is_error or "error.type" in values
            self._calls.append(_ModelCall(*of, span.spanId, failed, values))
        else:
            self._others += 1
            usage = {key: value for key, value in values.items() if key.startswith(USAGE)}
            if usage and span.parentSpanId:
                self._usage.setdefault(span.parentSpanId, {}).update(usage)

    def programs(self, losses: Losses) -> dict[str, list[_ModelCall]]:
        """Return the calls of each conversation in the order of time, with the tools after each.

        Raises:
            TraceError: a call has no number of tokens, or one that is none. The message names it.
        """
        losses.add("other spans (spans)", self._others)
        programs: dict[str, list[_ModelCall]] = {}
        for call in sorted(self._calls, key=lambda call: call.start_ns):
            named = self._conversations.get(call.trace_id, set())
            name = call.conversation or (next(iter(named)) if len(named) == 1 else call.trace_id)
            if isinstance(call, _ToolCall):
                if name in programs:
                    programs[name][-1].tools.append(call)
                else:
                    losses.add("tool call before the first call of a model (spans)")
                continue
            for key, value in self._usage.get(call.span_id, {}).items():
                call.attributes.setdefault(key, value)
            if call.failed and not {INPUT_TOKENS, OUTPUT_TOKENS} <= call.attributes.keys():
                losses.add("failed call of a model (spans)")
                continue
            for key in (INPUT_TOKENS, OUTPUT_TOKENS):
                if not isinstance(call.attributes.get(key), int):
                    raise TraceError(f"{call.where}.attributes: {key}: missing, or not an intValue")
            reasoning = call.attributes.get(REASONING_TOKENS) or 0
            if not isinstance(reasoning, int) or reasoning < 0:
                raise TraceError(f"{call.where}.attributes: {REASONING_TOKENS}: not an intValue of 0 or more")
            programs.setdefault(name, []).append(call)
        return programs


def _program(name: str, calls: list[_ModelCall], began_ns: int, losses: Losses) -> RecordedProgram:
    first = calls[0]
    fields: dict[str, Any] = {key: first.attributes.get(OWN + key) for key in OWN_PROGRAM}
    if OWN + "prefix_group" in first.attributes:
        tokens = first.attributes.get(OWN + "prefix_tokens")
        fields["shared_prefix"] = {"group": first.attributes[OWN + "prefix_group"], "tokens": tokens}
    if all(OWN + "new_prompt_tokens" in call.attributes for call in calls):
        return program(first.where, program_id=name, turns=[_own_turn(call) for call in calls], **fields)
    fields["arrival_s"] = (first.start_ns - began_ns) / 1e9
    losses.add("duration of a call of a model (turns)", len(calls))
    turns = turns_of([*_foreign_calls(calls, losses)])
    return program(first.where, program_id=name, turns=turns, **fields)


def _own_turn(call: _ModelCall) -> dict[str, Any]:
    return {
        "context_tokens": call.attributes[INPUT_TOKENS],
        "output_tokens": call.attributes[OUTPUT_TOKENS],
        "tool": call.tools[0].name if call.tools else None,
        **{key: call.attributes.get(OWN + key) for key in OWN_TURN},
    }


def _foreign_calls(calls: list[_ModelCall], losses: Losses) -> Iterator[Call]:
    """Yield the calls with their pauses, which last from a call's end to the next call's start."""
    for index, call in enumerate(calls):
        attributes = call.attributes
        output = attributes[OUTPUT_TOKENS]
        reasoning = min(output, attributes.get(REASONING_TOKENS) or 0)
        tool = call.tools[0].name if call.tools else None
        losses.add("second and later tool of a turn (spans)", max(0, len(call.tools) - 1))
        pause_s: float | None = None
        if index + 1 < len(calls):
            gap_ns = calls[index + 1].start_ns - call.end_ns
            losses.add("call that begins before the one before it ends (turns)", gap_ns < 0)
            pause_s = max(0, gap_ns) / 1e9
            if tool is None and pause_s:
                losses.add(f"what happened in a pause without execute_tool, named {UNNAMED_TOOL} (turns)")
                tool = UNNAMED_TOOL
        elif call.tools:
            pause_s = (max(one.end_ns for one in call.tools) - call.tools[0].start_ns) / 1e9
        yield Call(attributes[INPUT_TOKENS], output, tool, pause_s if tool is not None else None, output - reasoning)


def write(programs: Iterable[RecordedProgram], file: BinaryIO, options: Options, losses: Losses) -> None:
    """Write one export a program, on a line of its own."""
    for number, recorded in enumerate(programs):
        arrival_s = number * options.every_s if recorded.arrival_s is None else recorded.arrival_s
        losses.add(
            "time of generation, which is not recorded: spans of calls have no duration (turns)", len(recorded.turns)
        )
        spans = [*_written(recorded, EPOCH_NS + round(arrival_s * 1e9))]
        resource = {"attributes": _attributes({"service.name": "caesura-trace"})}
        scope = {"scope": {"name": "caesura.trace"}, "spans": spans}
        export = {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}
        file.write(json.dumps(export, ensure_ascii=False).encode() + b"\n")


def _written(recorded: RecordedProgram, now_ns: int) -> Iterator[dict[str, Any]]:
    trace_id = hashlib.sha256(recorded.program_id.encode()).hexdigest()
    named = {CONVERSATION: recorded.program_id}
    own: dict[str, Any] = {OWN + key: getattr(recorded, key) for key in OWN_PROGRAM}
    if recorded.shared_prefix is not None:
        own[OWN + "prefix_group"] = recorded.shared_prefix.group
        own[OWN + "prefix_tokens"] = recorded.shared_prefix.tokens
    for index, turn in enumerate(recorded.turns):
        chat = {OPERATION: "chat", "gen_ai.provider.name": "caesura", **named, **_usage(turn)}
        chat |= {OWN + key: getattr(turn, key) for key in OWN_TURN} | (own if index == 0 else {})
        yield _span(trace_id, 2 * index, "chat", now_ns, now_ns, chat)
        ends_ns = now_ns + round((turn.tool_duration_s or 0.0) * 1e9)
        if turn.tool is not None:
            tool = {OPERATION: TOOL_CALL, TOOL_NAME: turn.tool, **named}
            yield _span(trace_id, 2 * index + 1, f"{TOOL_CALL} {turn.tool}", now_ns, ends_ns, tool)
        now_ns = ends_ns


def _usage(turn: RecordedTurn) -> dict[str, int]:
    usage = {INPUT_TOKENS: turn.context_tokens, OUTPUT_TOKENS: turn.output_tokens}
    if turn.kept < turn.output_tokens:
        usage[REASONING_TOKENS] = turn.output_tokens - turn.kept
    return usage


def _span(
    trace_id: str, number: int, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "traceId": trace_id[:32],
        "spanId": hashlib.sha256(f"{trace_id}/{number}".encode()).hexdigest()[:16],
        "name": name,
        "kind": 3 if attributes[OPERATION] == "chat" else 1,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(end_ns),
        "attributes": _attributes(attributes),
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _typed(value)} for key, value in values.items() if value is not None]


def _typed(value: str | int | float) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}


FORMAT = TraceFormat(
    "conversation ids, tokens of each call, tools and their durations, reasoning tokens; arrivals and pauses by time",
    read,
    write,
)
