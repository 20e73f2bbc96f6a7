"""A file that cannot be used is named with its line and its field."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigError, TraceError
from cluster.offline.traces.conversion import check, convert
from cluster.offline.traces.format import Options
from tests.traces.programs import written

MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
AIPERF = {"session_id": "a", "input_length": 600, "output_length": 5}
TURN = {
    "new_prompt_tokens": 9,
    "context_tokens": 9,
    "output_tokens": 5,
    "tool": None,
    "tool_duration_s": None,
    "tool_return_tokens": None,
}


OURS = {"program_id": "a", "turns": [TURN]}
SPANS = "resourceSpans.0.scopeSpans.0.spans"


def span(**changes: Any) -> dict[str, Any]:
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 5}
    attributes |= changes.pop("attributes", {})
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}
    listed = [
        {"key": key, "value": {kinds[type(value)]: value}} for key, value in attributes.items() if value is not None
    ]
    return {"traceId": "t", "startTimeUnixNano": "7", "endTimeUnixNano": "8", "attributes": listed, **changes}


def export(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


@pytest.mark.parametrize(
    ("name", "good", "bad", "field"),
    [
        ("caesura", OURS, {"program_id": "b", "turns": []}, "turns"),
        ("caesura", OURS, OURS, "program_id"),
        ("caesura", OURS, {"program_id": "b", "turns": [TURN, TURN]}, "turns.1.context_tokens"),
        ("caesura", OURS, {"program_id": "b", "turns": [{**TURN, "output_tokens": "5"}]}, "turns.0.output_tokens"),
        ("caesura", OURS, {"program_id": "b", "turns": [TURN], "arrival_s": -1}, "arrival_s"),
        ("mooncake", MOONCAKE, {**MOONCAKE, "hash_ids": [1]}, "hash_ids"),
        ("mooncake", MOONCAKE, {**MOONCAKE, "timestamp": -1}, "timestamp"),
        ("mooncake", MOONCAKE, {**MOONCAKE, "timestamp": 1e16}, "timestamp"),
        ("mooncake", MOONCAKE, {**MOONCAKE, "input_length": 0}, "input_length"),
        ("mooncake", MOONCAKE, {**MOONCAKE, "output_length": None}, "output_length"),
        ("mooncake", MOONCAKE, "{", "the line"),
        ("aiperf", AIPERF, {**AIPERF, "output_length": None}, "output_length"),
        ("aiperf", AIPERF, {**AIPERF, "input_length": None}, "input_length"),
        ("aiperf", AIPERF, {**AIPERF, "text_input": "both"}, "input_length"),
        ("aiperf", AIPERF, {"text_input": "no tokenizer", "output_length": 5}, "text_input"),
        ("aiperf", AIPERF, {"messages": [{"role": "user", "content": "x"}], "output_length": 5}, "messages"),
        ("aiperf", AIPERF, {"payload": {"prompt": "x"}, "output_length": 5}, "payload"),
        ("aiperf", AIPERF, {**AIPERF, "delay": -1}, "delay"),
        ("aiperf", AIPERF, {**AIPERF, "hash_ids": [1, 2, 3]}, "hash_ids"),
        ("aiperf", {**AIPERF, "timestamp": 5}, {**AIPERF, "timestamp": 4}, "timestamp"),
        ("aiperf", AIPERF, {"turns": [{"text": "hello", "output_length": 5}]}, "turns.0.text"),
        ("aiperf", AIPERF, {"turns": [{"output_length": 5}]}, "turns.0.text"),
        ("otel", export(span()), {"spans": []}, "resourceSpans"),
        ("otel", export(span()), export(span(endTimeUnixNano="6")), f"{SPANS}.0.endTimeUnixNano"),
        ("otel", export(span()), export(span(startTimeUnixNano="x")), f"{SPANS}.0.startTimeUnixNano"),
        ("otel", export(span()), export(span(), span(attributes={"gen_ai.usage.input_tokens": None})),
         f"{SPANS}.1.attributes: gen_ai.usage.input_tokens"),
        ("otel", export(span()), export(span(attributes={"gen_ai.usage.output_tokens": "5"})),
         f"{SPANS}.0.attributes: gen_ai.usage.output_tokens"),
        ("otel", export(span()), export(span(attributes={"gen_ai.usage.reasoning.output_tokens": "3"})),
         f"{SPANS}.0.attributes: gen_ai.usage.reasoning.output_tokens"),
        ("otel", export(span()), export(span(attributes={"gen_ai.usage.reasoning.output_tokens": -3})),
         f"{SPANS}.0.attributes: gen_ai.usage.reasoning.output_tokens"),
        ("otel", export(span()), "nonsense", "the line"),
    ],
)  # fmt: skip
def test_the_second_line_is_named_with_its_field(tmp_path: Path, name: str, good: Any, bad: Any, field: str) -> None:
    file = written(tmp_path / "in.jsonl", good, bad)
    out = tmp_path / "out.jsonl"
    with pytest.raises(TraceError) as error:
        convert(file, name, out, "caesura", Options())
    assert str(error.value).startswith(f"{file}:2: {field}: "), error.value
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"], "no half of a trace is left behind"
    check(written(file, good), name, Options())


def test_a_session_that_grows_too_long_is_named(tmp_path: Path) -> None:
    file = written(
        tmp_path / "in.jsonl", AIPERF, *[{"session_id": "b", "input_length": 1 << 23, "output_length": 9}] * 3
    )
    with pytest.raises(TraceError, match=r"in.jsonl:2: turns.1.context_tokens: "):
        check(file, "aiperf", Options())


@pytest.mark.parametrize("name", ["caesura", "mooncake", "aiperf", "otel"])
def test_an_empty_file_is_no_trace(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match="no programs in it"):
        check(written(tmp_path / "in.jsonl"), name, Options())


def test_a_document_of_spans_is_named_with_the_place_in_it(tmp_path: Path) -> None:
    file = tmp_path / "in.json"
    file.write_text(json.dumps(export(span(traceId=5)), indent=1), encoding="utf-8")
    with pytest.raises(TraceError, match=r"in.json:1: resourceSpans.0.scopeSpans.0.spans.0.traceId: "):
        check(file, "otel", Options())
    file.write_text('{\n"resourceSpans": [\n{]}', encoding="utf-8")
    with pytest.raises(TraceError, match=r"in.json:3: "):
        check(file, "otel", Options())


@pytest.mark.parametrize("text", [b'{"resourceSpans": [\n"\xff"]}', b"[" * 200_000, b'{"a":\n' + b"9" * 5000 + b"}"])
def test_bytes_that_are_no_document_are_named(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "in.json"
    file.write_bytes(text)
    with pytest.raises(TraceError, match=r"in.json:[12]: "):
        check(file, "otel", Options())


def test_the_name_of_a_file_does_not_change_the_message(tmp_path: Path) -> None:
    file = written(tmp_path / "turns.jsonl", {**AIPERF, "output_length": None})
    with pytest.raises(TraceError) as error:
        check(file, "aiperf", Options())
    assert str(error.value).startswith(f"{file}:1: output_length: ")


def test_names_and_files_of_the_command_line(tmp_path: Path) -> None:
    file = written(tmp_path / "in.jsonl", MOONCAKE)
    with pytest.raises(ConfigError, match="unknown trace format 'csv'; choose one of: caesura, mooncake, aiperf, otel"):
        convert(file, "csv", tmp_path / "out", "caesura", Options())
    with pytest.raises(ConfigError, match="cannot be written"):
        convert(file, "mooncake", tmp_path / "absent" / "out", "caesura", Options())
    with pytest.raises(TraceError, match="cannot be read"):
        convert(tmp_path / "absent", "mooncake", tmp_path / "out", "caesura", Options())
    with pytest.raises(ConfigError, match="--tokenizer: "):
        check(file, "aiperf", Options(tokenizer=tmp_path / "absent"))
