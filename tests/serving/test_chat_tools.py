"""Tools of chat completions: names that parsers can read, and arguments that are an object."""

from typing import Any

import pytest

from cluster.api.chat_tools import checked_tools
from cluster.core.errors import BadRequest

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
