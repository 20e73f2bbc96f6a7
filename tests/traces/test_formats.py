"""Traces that others wrote: Mooncake's requests, AIPerf's sessions and OpenTelemetry's spans as programs of ours."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster.core.recorded_turn import RecordedProgram, recorded_programs
from cluster.offline.traces.conversion import convert
from cluster.offline.traces.format import Options
from replicas.tiny.model import tiny_model_directory
from tests.traces.programs import DATA, contexts, needs_data, written
from tests.traces.test_bad_input import export, span

SECOND = 10**9


def converted(
    tmp_path: Path, name: str, *lines: dict[str, Any] | str, options: Options | None = None
) -> tuple[list[RecordedProgram], dict[str, int]]:
    _, losses = convert(
        written(tmp_path / "in.jsonl", *lines), name, tmp_path / "out.jsonl", "caesura", options or Options()
    )
    return [program for _, program in recorded_programs(tmp_path / "out.jsonl")], losses.counts()


def request(timestamp: int, tokens: int, output: int, *ids: int) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": list(ids)}


def test_mooncake_requests_are_linked_by_their_blocks(tmp_path: Path) -> None:
    """Two conversations share block 0. Block 3 is partly filled, so that its id changes in the next turn."""
    found, losses = converted(
        tmp_path,
        "mooncake",
        request(1000, 1200, 300, 0, 2, 3),
        request(2500, 700, 10, 0, 9),
        request(4000, 1600, 20, 0, 2, 4, 5),
        request(5000, 1610, 20, 0, 2, 4, 6),
    )
    assert contexts(found) == [[1200, 1600, 1610], [700]]
    first = found[0].turns
    assert [turn.tool_duration_s for turn in first] == [3.0, 1.0, None]
    assert [turn.tool_return_tokens for turn in first] == [100, 0, None]
    assert [turn.kept_output_tokens for turn in first] == [None, 10, None], "the second answer is not all sent again"
    assert [program.arrival_s for program in found] == [1.0, 2.5]
    assert [program.shared_prefix and program.shared_prefix.tokens for program in found] == [512, 512]
    assert losses == {"time of generation, which is part of the pause after it (turns)": 2}


def test_mooncake_prompts_that_part_are_programs_of_their_own(tmp_path: Path) -> None:
    """Both of the later prompts begin with the first one: which of them continues it is not recorded."""
    found, losses = converted(
        tmp_path, "mooncake", request(0, 600, 5, 1, 2), request(1, 1100, 5, 1, 3, 4), request(2, 1100, 5, 1, 5, 6)
    )
    assert contexts(found) == [[600], [1100], [1100]]
    assert losses == {}


def test_mooncake_lines_may_be_out_of_order(tmp_path: Path) -> None:
    found, _ = converted(tmp_path, "mooncake", request(9, 1600, 5, 1, 2, 3, 4), request(4, 1024, 5, 1, 2))
    assert contexts(found) == [[1024, 1600]]


def test_mooncake_lines_are_written_in_the_order_of_time(tmp_path: Path) -> None:
    turns = [_turn(tool_duration_s=5.0), _turn(context_tokens=17)]
    written(tmp_path / "in.jsonl", *({"program_id": name, "turns": turns} for name in "ab"))
    convert(tmp_path / "in.jsonl", "caesura", tmp_path / "out.jsonl", "mooncake", Options(every_s=2.0))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["timestamp"] for row in rows] == [0, 2000, 5000, 7000]
    assert len({row["hash_ids"][0] for row in rows}) == 4, "a block that is partly filled is not the same block later"


def test_mooncake_blocks_of_another_size(tmp_path: Path) -> None:
    lines = request(0, 32, 8, 1, 2), request(1, 48, 8, 1, 2, 3)
    found, _ = converted(tmp_path, "mooncake", *lines, options=Options(block_tokens=16))
    assert contexts(found) == [[32, 48]]


@needs_data
def test_mooncakes_conversations_are_found_as_its_readers_found_them(tmp_path: Path) -> None:
    with gzip.open(DATA / "requests" / "mooncake_conversation.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    requests = [
        request(round(row["arrival_s"] * 1000), row["input_tokens"], row["output_tokens"], *row["hash_ids"])
        for row in rows
    ]
    found, _ = converted(tmp_path, "mooncake", *requests)
    inferred = Counter(row["conv_inferred"] for row in rows)
    assert sum(len(program.turns) for program in found) == len(rows)
    later, expected = len(rows) - len(found), len(rows) - len(inferred)
    assert 0.97 * expected < later <= expected
    firsts = [rows[int(program.program_id.rpartition("-")[2]) - 1] for program in found]
    of_one = [(inferred[row["conv_inferred"]], len(p.turns)) for row, p in zip(firsts, found, strict=True)]
    assert sum(whole == turns for whole, turns in of_one) > 0.97 * len(inferred)


def session(name: str, tokens: int, output: int, *ids: int, **more: Any) -> dict[str, Any]:
    return {"session_id": name, "input_length": tokens, "output_length": output, "hash_ids": list(ids), **more}


def test_aiperf_sessions_add_up_prompts_and_answers(tmp_path: Path) -> None:
    found, losses = converted(
        tmp_path,
        "aiperf",
        session("a", 1030, 30, 0, 1, 7, timestamp=0.0, group_id=0),
        session("b", 1100, 9, 0, 1, 8, timestamp=1500.0, group_id=0),
        session("a", 40, 5, 9, delay=250.0),
    )
    assert contexts(found) == [[1030, 1100], [1100]]
    assert [program.program_id for program in found] == ["a", "b"]
    first = found[0].turns[0]
    assert (first.tool, first.tool_duration_s, first.tool_return_tokens) == ("tool_call", 0.25, 40)
    assert [program.arrival_s for program in found] == [0.0, 1.5]
    assert [program.shared_prefix and program.shared_prefix.tokens for program in found] == [1024, 1024]
    assert losses == {}


def test_aiperf_texts_are_counted_by_a_tokenizer(tmp_path: Path) -> None:
    """A leading system text belongs to the first turn, as AIPerf sends it."""
    tokenizer = tiny_model_directory() / "tokenizer.json"
    turns = [{"role": "system", "text": "Be brief."}, {"text": "Hello there"}, {"texts": ["One", "Two"], "delay": 500}]
    lines = [{"session_id": "s", "turns": turns}, {"text_input": "Hello there"}]
    options = Options(output_tokens=7, tokenizer=tokenizer)
    (session, single), losses = converted(tmp_path, "aiperf", *lines, options=options)
    system, hello = (_count(tokenizer, text) for text in ("Be brief.", "Hello there"))
    first = system + hello
    assert contexts([session]) == [[first, first + 7 + _count(tokenizer, "One") + _count(tokenizer, "Two")]]
    assert session.turns[0].tool_duration_s == 0.5
    assert contexts([single]) == [[hello]]
    assert losses["missing output_length, replaced by --output-tokens (turns)"] == 3


def _count(tokenizer: Path, text: str) -> int:
    from tokenizers import Tokenizer

    return len(Tokenizer.from_file(str(tokenizer)).encode(text).ids)


def call(
    start: float, end: float, tokens: int, output: int, conversation: str | None = "c", **more: Any
) -> dict[str, Any]:
    usage = {"gen_ai.usage.input_tokens": tokens, "gen_ai.usage.output_tokens": output}
    return timed(start, end, {**usage, "gen_ai.conversation.id": conversation, **more})


def tool(start: float, end: float, name: str, **more: Any) -> dict[str, Any]:
    usage = {"gen_ai.usage.input_tokens": None, "gen_ai.usage.output_tokens": None}
    return timed(start, end, {**usage, "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, **more})


def timed(start: float, end: float, attributes: dict[str, Any]) -> dict[str, Any]:
    times = {"startTimeUnixNano": str(int(start * SECOND)), "endTimeUnixNano": str(int(end * SECOND))}
    return span(attributes=attributes, **times)


def test_spans_of_an_agent_become_a_program(tmp_path: Path) -> None:
    """Tool spans have no conversation of their own: their trace has one. Spans arrive in any order, in two exports."""
    later = export(
        call(20, 22, 1500, 90, **{"gen_ai.usage.reasoning.output_tokens": 60}),
        call(30, 31, 1600, 10),
        call(50, 51, 700, 10),
        call(51, 52, 650, 10),
    )
    early = export(
        timed(0, 60, {"gen_ai.operation.name": "invoke_agent", "gen_ai.conversation.id": "c"}),
        tool(12, 19, "bash"),
        tool(13, 15, "grep"),
        call(10, 12, 1000, 100),
    )
    (program,), losses = converted(tmp_path, "otel", later, early)
    assert program.program_id == "c"
    assert contexts([program]) == [[1000, 1500, 1600, 700, 650]]
    turns = program.turns
    assert [turn.tool for turn in turns] == ["bash", "tool_call", "tool_call", None, None]
    assert [turn.tool_duration_s for turn in turns] == [8.0, 8.0, 19.0, None, None]
    assert [turn.tool_return_tokens for turn in turns] == [400, 70, None, None, None]
    assert [turn.kept_output_tokens for turn in turns] == [None, 30, None, None, None], "reasoning is not sent again"
    assert [turn.reset for turn in turns] == [None, None, None, 2, 1]
    assert losses == {
        "other spans (spans)": 1,
        "duration of a call of a model (turns)": 5,
        "second and later tool of a turn (spans)": 1,
        "what happened in a pause without execute_tool, named tool_call (turns)": 2,
    }


def test_spans_without_a_conversation_are_programs_of_their_traces(tmp_path: Path) -> None:
    spans = [call(1, 2, 10, 1, None), {**call(3, 4, 20, 1, ""), "traceId": "u"}, tool(0, 1, "early")]
    timed_out = span(attributes={"gen_ai.usage.input_tokens": None, "error.type": "timeout"})
    cut = [
        span(attributes={"gen_ai.usage.output_tokens": None}, status={"code": code})
        for code in (2, "STATUS_CODE_ERROR")
    ]
    found, losses = converted(tmp_path, "otel", export(*spans, timed_out, *cut))
    assert [program.program_id for program in found] == ["t", "u"]
    assert [program.arrival_s for program in found] == [0.0, 2.0]
    assert losses["failed call of a model (spans)"] == 3
    assert losses["tool call before the first call of a model (spans)"] == 1


def test_a_document_over_many_lines_is_read_too(tmp_path: Path) -> None:
    (program,), _ = converted(tmp_path, "otel", json.dumps(export(call(1, 2, 10, 1)), indent=2))
    assert contexts([program]) == [[10]]


def test_what_is_written_is_otlp(tmp_path: Path) -> None:
    """Protobuf's parser of OTLP's messages accepts it. In OTLP's JSON, ids are hexadecimal digits and not base 64."""
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    turns = [_turn(tool="bash", tool_duration_s=0.25), _turn(context_tokens=17)]
    written(tmp_path / "in.jsonl", {"program_id": "a", "turns": turns})
    convert(tmp_path / "in.jsonl", "caesura", tmp_path / "out.jsonl", "otel", Options())
    line = json.loads((tmp_path / "out.jsonl").read_text())
    spans = line["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert [(len(one["traceId"]), len(one["spanId"])) for one in spans] == [(32, 16)] * 3
    for one in spans:
        one["traceId"], one["spanId"] = "", ""
    request = ParseDict(line, ExportTraceServiceRequest())
    chat, ran, _ = request.resource_spans[0].scope_spans[0].spans
    assert (chat.name, ran.name) == ("chat", "execute_tool bash")
    assert ran.end_time_unix_nano - ran.start_time_unix_nano == SECOND // 4


def _turn(**changes: Any) -> dict[str, Any]:
    unknown = {"tool": None, "tool_duration_s": None, "tool_return_tokens": None}
    return {"new_prompt_tokens": 0, "context_tokens": 10, "output_tokens": 7, **unknown, **changes}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_compressed_files(tmp_path: Path, suffix: str) -> None:
    written(tmp_path / "in.jsonl", {"program_id": "a", "turns": [_turn(new_prompt_tokens=10)]})
    middle = tmp_path / f"m{suffix}"
    convert(tmp_path / "in.jsonl", "caesura", middle, "aiperf", Options())
    assert middle.read_bytes().startswith(b"\x1f\x8b") == suffix.endswith(".gz")
    convert(middle, "aiperf", tmp_path / "back.jsonl", "caesura", Options())
    assert [len(program.turns) for _, program in recorded_programs(tmp_path / "back.jsonl")] == [1]
