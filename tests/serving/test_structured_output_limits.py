"""A schema, grammar or regex that would take an engine minutes to compile is rejected before admission."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.requests import Request

from cluster.api.structured_output_limits import MAX_CHARACTERS, MAX_PARTS, MAX_STATES
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest
from cluster.http.requests import TurnReader

OVER_CHARACTERS = {"enum": ["x" * MAX_CHARACTERS]}
OVER_PARTS = {"properties": {f"p{number}": {} for number in range(MAX_PARTS + 1)}}
OVER_STATES = {
    "properties": {f"p{number}": {"type": "string", "maxLength": 200} for number in range(MAX_STATES // 200 + 1)}
}
FITTING = {
    "type": "object",
    "properties": {f"p{number}": {"type": "string", "maxLength": 50} for number in range(10)},
    "required": ["p1"],
}


def of_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}}


def of_response(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "f", "schema": schema}}}


def of_tool(schema: Mapping[str, Any], **function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema, **function}}]}


async def read(body: Mapping[str, Any]) -> None:
    raw = json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", b"application/json")]}
    await TurnReader(CaesuraConfig()).identified(Request(scope, receive))


@pytest.mark.parametrize("schema", [OVER_CHARACTERS, OVER_PARTS, OVER_STATES], ids=["characters", "parts", "states"])
@pytest.mark.parametrize(
    ("place", "param"),
    [
        (of_schema, "response_format"),
        (of_response, "text.format"),
        (lambda schema: {"structured_outputs": {"json": schema}}, "structured_outputs"),
        (lambda schema: {"structured_outputs": {"json": json.dumps(schema)}}, "structured_outputs"),
        (lambda schema: of_tool(schema) | {"tool_choice": "required"}, "tools"),
        (lambda schema: of_tool(schema, strict=True), "tools"),
        (lambda schema: {"tools": [{"type": "function", "name": "f", "parameters": schema, "strict": True}]}, "tools"),
    ],
    ids=["chat", "responses", "json", "json as text", "required tool", "strict tool", "strict tool of responses"],
)
async def test_a_schema_over_a_limit_is_rejected_by_name(place: Any, param: str, schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        await read(place(schema))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.code == "structured_output_too_complex"


@pytest.mark.parametrize(
    "outputs",
    [
        {"regex": "x.{0,2000}y" * 5},
        {"regex": "(a.{200}){1,200}" * 3},
        {"regex": "a" * (MAX_CHARACTERS + 1)},
        {"grammar": "root ::= " + "[a-z]{1,5000}" * 5},
        {"grammar": "root ::= " + " | ".join('"a"' for _ in range(MAX_PARTS + 1))},
        {"choice": [f"c{number}" for number in range(MAX_PARTS + 1)]},
        {"structural_tag": json.dumps({"structures": [{"begin": "<", "schema": OVER_STATES, "end": ">"}]})},
    ],
    ids=["repetition", "many repetitions", "long regex", "grammar", "alternatives", "choices", "structural tag"],
)
async def test_a_regex_or_grammar_over_a_limit_is_rejected(outputs: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        await read({"structured_outputs": outputs})
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "body",
    [
        of_schema(FITTING),
        of_response(FITTING),
        of_tool(FITTING) | {"tool_choice": "required"},
        of_tool(OVER_PARTS) | {"tool_choice": "auto"},
        of_tool({"properties": {"description": {"description": "x" * MAX_CHARACTERS}}}, strict=True),
        {"structured_outputs": {"regex": r"\d{4}-\d{2}-\d{2}[{,}]{1,1000}"}},
        {"structured_outputs": {"json": "no JSON"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {
            "structured_outputs": 5,
            "response_format": "x",
            "text": 5,
            "tools": [7, {"function": 8}],
            "tool_choice": "required",
        },
    ],
    ids=[
        "chat",
        "responses",
        "tool",
        "tool of free choice",
        "long description",
        "regex",
        "no JSON",
        "choice",
        "wrong types",
    ],
)
async def test_what_is_within_the_limits_or_for_vllm_to_judge_passes(body: dict[str, Any]) -> None:
    await read(body)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("filler", [" ", "1", "{", "{ 1 , 2 ", "\t,"])
async def test_the_search_for_repetitions_takes_linear_time(filler: str) -> None:
    """A search with backtracking takes days for some of these patterns."""
    await read({"structured_outputs": {"regex": "{" + filler * (50_000 // len(filler))}})
