"""A cluster's own traces, as it exports them, become programs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from cluster.core.program import ProgramIdentity
from cluster.core.tools import Outcome, ToolCall, ToolResult
from cluster.dispatch.predictions import NullPrediction
from cluster.observing.spans import OpenTelemetryTraces, TracedTools
from tests.traces.programs import contexts
from tests.traces.test_bad_input import export
from tests.traces.test_formats import call, converted, timed


class Lines(SpanExporter):
    """Keeps exports as OTLP's JSON has them; ids are opaque to a reader."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.lines.append(MessageToDict(encode_spans(spans)))
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


class Tool:
    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        return ToolResult(call.id, call.name, Outcome.OK, "text", queue_s=0.0, run_s=0.0, attempts=1)

    async def completion(self, program: str, call_id: str) -> ToolResult:
        raise AssertionError("not asked for")

    async def cancel(self, program: str, call_id: str) -> bool:
        return False

    async def output(self, program: str, call_id: str, known: int) -> str | None:
        raise AssertionError("not asked for")


async def test_a_clusters_own_export(tmp_path: Path) -> None:
    exporter = Lines()
    there = OpenTelemetryTraces(exporter, part="ingress")
    identity = ProgramIdentity(program_id="task")
    for prompt, output in ((90, 5), (120, 7), (130, None)):
        turn = there.turn(NullPrediction(identity), "chat", "tiny", identity)
        await turn.identity()
        turn.over(output_tokens=output, prompt_tokens=prompt)
        if output == 5:
            await TracedTools(Tool(), there).run(ToolCall("c1", "ls", program="default/task"))
    there.close()
    (program,), losses = converted(tmp_path, "otel", *(json.dumps(line) for line in exporter.lines))
    assert program.program_id == "task"
    assert contexts([program]) == [[90, 120]]
    assert [turn.tool for turn in program.turns] == ["ls", None]
    assert program.turns[0].tool_return_tokens == 25
    assert losses["failed call of a model (spans)"] == 1


def test_tokens_of_a_stream_are_on_the_replicas_span(tmp_path: Path) -> None:
    """The ingress exports the turn, and the replica what its engine did, in another export and in any order."""
    usage = {"gen_ai.operation.name": None, "gen_ai.usage.input_tokens": 300, "gen_ai.usage.output_tokens": 8}
    generate = {**timed(1.2, 2, usage), "spanId": "g", "parentSpanId": "s"}
    turn = {**call(1, 2, 0, 9), "spanId": "s"}
    turn["attributes"] = [one for one in turn["attributes"] if one["key"] != "gen_ai.usage.input_tokens"]
    (program,), _ = converted(tmp_path, "otel", export(generate), export(turn))
    assert [(turn.context_tokens, turn.output_tokens) for turn in program.turns] == [(300, 9)]
