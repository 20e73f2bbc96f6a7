"""OpenTelemetry spans of GenAI calls, as OTLP JSON: one document, or one ``ExportTraceServiceRequest`` a line.

Spans follow the semantic conventions for generative AI (semantic-conventions-genai, status Development): a span whose
``gen_ai.operation.name`` is ``chat``, ``generate_content`` or ``text_completion`` is a turn, and ``execute_tool`` is
the tool after it. ``gen_ai.conversation.id`` names the program; a span without it belongs to the conversation of its
trace, or is of a program of its trace. What the conventions have no attribute for is written as ``caesura.trace.*``,
so that a trace of ours comes back unchanged. Spans are in memory while a file is read, as a file has no order of
conversations; writing goes line by line.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.core.errors import TraceError
from cluster.core.recorded_turn import RecordedProgram, RecordedTurn, lines_of, parsed
from cluster.offline.traces.calls import UNNAMED_TOOL, Call, program, turns_of
from cluster.offline.traces.format import Options, TraceFormat
from cluster.offline.traces.losses import Losses

MODEL_CALLS = frozenset({"chat", "generate_content", "text_completion"})
TOOL_CALL = "execute_tool"
OPERATION = "gen_ai.operation.name"
CONVERSATION = "gen_ai.conversation.id"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
TOOL_NAME = "gen_ai.tool.name"
OWN = "caesura.trace."
"""Prefix of the attributes that the conventions do not have."""
OWN_PROGRAM = ("category", "source", "split_group", "arrival_s")
OWN_TURN = ("new_prompt_tokens", "tool_duration_s", "tool_return_tokens", "tool_cmd", "kept_output_tokens", "reset")
EPOCH_NS = 10**18
"""Start of a written trace whose programs arrive at 0 (Unix time, ns). OTLP reserves 0 for "unknown"."""


class _Json(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Value(_Json):
    stringValue: str | None = None
    intValue: int | None = None
    doubleValue: float | None = None
    boolValue: bool | None = None

    def plain(self) -> Any:
        given = (self.stringValue, self.intValue, self.doubleValue, self.boolValue)
        return next((value for value in given if value is not None), None)


class _Attribute(_Json):
    key: str
    value: _Value = _Value()


class _Span(_Json):
    traceId: str
    startTimeUnixNano: Annotated[int, Field(ge=0)]
    endTimeUnixNano: Annotated[int, Field(ge=0)]
    attributes: tuple[_Attribute, ...] = ()


class _Scope(_Json):
    spans: tuple[_Span, ...] = ()


class _Resource(_Json):
    scopeSpans: tuple[_Scope, ...] = ()


class Export(_Json):
    """An ``ExportTraceServiceRequest``."""

    resourceSpans: tuple[_Resource, ...]


@dataclass(frozen=True, slots=True)
class _ModelCall:
    where: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    tools: list["_ToolCall"] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _ToolCall:
    where: str
    start_ns: int
    end_ns: int
    name: str


def read(path: Path, _options: Options, losses: Losses) -> Iterator[tuple[str, RecordedProgram]]:
    """Read the conversations of a file, in the order of their first calls."""
    spans = sorted(_spans(path, losses), key=lambda span: span[1].start_ns)
    conversations: dict[str, set[str]] = {}
    for trace_id, _, conversation in spans:
        if conversation is not None:
            conversations.setdefault(trace_id, set()).add(conversation)
    programs: dict[str, list[_ModelCall]] = {}
    for trace_id, span, conversation in spans:
        named = conversations.get(trace_id, set())
        name = conversation or (next(iter(named)) if len(named) == 1 else trace_id)
        calls = programs.setdefault(name, [])
        if isinstance(span, _ModelCall):
            calls.append(span)
        elif calls:
            calls[-1].tools.append(span)
        else:
            losses.add("tool call before the first call of a model (spans)")
    began_ns = min((calls[0].start_ns for calls in programs.values() if calls), default=0)
    for name, calls in programs.items():
        if calls:
            yield calls[0].where, _program(name, calls, began_ns, losses)


def _spans(path: Path, losses: Losses) -> Iterator[tuple[str, _ModelCall | _ToolCall, str | None]]:
    """Yield the trace, the call and the conversation of each span that is a call."""
    for where, export in _exports(path):
        spans = [
            (f"{where}: resourceSpans.{r}.scopeSpans.{s}.spans.{n}", span)
            for r, resource in enumerate(export.resourceSpans)
            for s, scope in enumerate(resource.scopeSpans)
            for n, span in enumerate(scope.spans)
        ]
        for place, span in spans:
            attributes = {one.key: one.value.plain() for one in span.attributes}
            operation = attributes.get(OPERATION)
            conversation = attributes.get(CONVERSATION)
            if span.endTimeUnixNano < span.startTimeUnixNano:
                raise TraceError(f"{place}.endTimeUnixNano: before startTimeUnixNano")
            if operation == TOOL_CALL:
                name = str(attributes.get(TOOL_NAME) or UNNAMED_TOOL)
                yield span.traceId, _ToolCall(place, span.startTimeUnixNano, span.endTimeUnixNano, name), conversation
            elif operation not in MODEL_CALLS:
                losses.add("other spans (spans)")
            elif "error.type" in attributes and INPUT_TOKENS not in attributes:
                losses.add("failed call of a model (spans)")
            else:
                for key in (INPUT_TOKENS, OUTPUT_TOKENS):
                    if not isinstance(attributes.get(key), int):
                        raise TraceError(f"{place}.attributes: {key}: missing, or not an intValue")
                call = _ModelCall(place, span.startTimeUnixNano, span.endTimeUnixNano, attributes)
                yield span.traceId, call, conversation


def _exports(path: Path) -> Iterator[tuple[str, Export]]:
    """Yield the exports of a file: one a line, or all lines together are one."""
    lines = lines_of(path)
    for number, line in lines:
        try:
            json.loads(line)
        except ValueError as error:
            if number > 1:
                raise TraceError(f"{path}:{number}: the line: {error}") from error
            yield f"{path}:1", _document(path, b"".join([line, *(text for _, text in lines)]))
            return
        yield f"{path}:{number}", parsed(line, f"{path}:{number}", Export)


def _document(path: Path, text: bytes) -> Export:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{error.lineno}: {error.msg}") from error
    try:
        return Export.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise TraceError(f"{path}:1: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


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
