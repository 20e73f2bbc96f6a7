"""Tools of chat completions: names that parsers can read, and arguments that are an object."""

import json
from typing import Any

import pytest
from starlette.requests import Request

from cluster.api.chat_tools import checked_tools, with_checked_tools
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest
from cluster.http.requests import TurnReader

EMPTY = {"type": "object", "properties": {}}


def tool(name: Any = "ls", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize(
    ("given", "parameters"),
    [
        ({}, EMPTY),
        ({"parameters": None}, EMPTY),
        ({"parameters": {}}, EMPTY),
        ({"parameters": {"properties": {"a": {}}}}, {"type": "object", "properties": {"a": {}}}),
        ({"parameters": {"type": "object"}}, {"type": "object"}),
        ({"parameters": {"type": ["object", "null"]}}, {"type": ["object", "null"]}),
        ({"parameters": {"$ref": "#/$defs/a"}}, {"$ref": "#/$defs/a"}),
        ({"parameters": 5}, 5),
    ],
)
def test_parameters_are_an_object(given: dict[str, Any], parameters: Any) -> None:
    before = tool(**given)
    [made] = checked_tools([before])
    assert made["function"]["parameters"] == parameters
    assert before == tool(**given), "the request's own body does not change"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([tool("ls"), tool("a b")], "tools.1.function.name"),
        ([tool('a"b')], "tools.0.function.name"),
        ([tool("")], "tools.0.function.name"),
        ([tool("x" * 129)], "tools.0.function.name"),
        ([tool("ls"), tool("cat"), tool("ls")], "tools.2.function.name"),
        ([tool(parameters={"type": "string"})], "tools.0.function.parameters.type"),
        ([tool(parameters={"type": ["array", "null"]})], "tools.0.function.parameters.type"),
    ],
)
def test_what_no_tool_can_be_is_refused_by_its_field(tools: list[Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        checked_tools(tools)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(param)


@pytest.mark.parametrize("item", [None, 5, {"type": "function"}, {"type": "function", "function": {}}, tool(5)])
def test_what_is_no_tool_is_left_to_the_replica(item: Any) -> None:
    [made] = checked_tools([item])
    assert made is item or made["function"].items() >= item["function"].items()


@pytest.mark.parametrize("name", ["ls", "mcp__server__do-it", "fs.read", "x" * 128])
def test_names_that_clients_use(name: str) -> None:
    assert checked_tools([tool(name)])[0]["function"]["name"] == name


def allowed(mode: Any = "auto", *names: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered_in_the_order_of_the_request(mode: str) -> None:
    tools = [tool("ls"), tool("cat"), tool("rm")]
    body = with_checked_tools({"messages": [], "tools": tools, "tool_choice": allowed(mode, "cat", "ls")})
    assert [one["function"]["name"] for one in body["tools"]] == ["ls", "cat"]
    assert body["tool_choice"] == mode
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "rm"}]}
    body = with_checked_tools({"tools": tools, "tool_choice": flat})
    assert [one["function"]["name"] for one in body["tools"]] == ["rm"]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "auto"}, "tool_choice.type"),
        ({}, "tool_choice.type"),
        (allowed("none", "ls"), "tool_choice.allowed_tools.mode"),
        (allowed(), "tool_choice.allowed_tools.tools"),
        (allowed("auto", "ls", "rm"), "tool_choice.allowed_tools.tools.1.function.name"),
        (allowed("auto", 5), "tool_choice.allowed_tools.tools.0.function.name"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "allowed_tools": 5}, "tool_choice.allowed_tools.mode"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused_by_its_field(choice: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        with_checked_tools({"tools": [tool("ls")], "tool_choice": choice})
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "function": {"name": "ls"}}])
def test_other_choices_stay(choice: Any) -> None:
    body = with_checked_tools({"tools": [tool("ls")], "tool_choice": choice})
    assert (len(body["tools"]), body["tool_choice"]) == (1, choice)
    assert with_checked_tools({"tool_choice": choice}) == {"tool_choice": choice}


@pytest.mark.parametrize("tools", [[tool("ls")], None])
async def test_a_choice_of_null_is_no_choice(tools: Any) -> None:
    """vLLM does not take null for `auto`, which is the default of OpenAI."""
    raw = json.dumps({"messages": [{"role": "user", "content": "Go."}], "tools": tools, "tool_choice": None}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", b"application/json")]}
    body, _ = await TurnReader(CaesuraConfig()).identified(Request(scope, receive))
    assert "tool_choice" not in body
