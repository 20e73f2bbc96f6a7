"""A schema that cannot be satisfied, or a strict one that is not enforced, is refused by name before a stream."""

import time
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.api.structured_output_limits import check_structured_output
from cluster.core.errors import BadRequest

Schema = Mapping[str, Any]
TEXT = {"type": "string"}
TREE = {
    "type": "object",
    "properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "name": TEXT},
    "required": ["left", "name"],
    "additionalProperties": False,
}


def of_chat(schema: Schema, strict: bool = True) -> dict[str, Any]:
    wanted = {"name": "f", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def of_response(schema: Schema) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "f", "schema": schema, "strict": True}}}


def of_completion(schema: Schema) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema}}


def of_tools(schema: Schema) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    other = {"type": "function", "function": {"name": "g", "parameters": {"not": {}}}}
    return {"tools": [other, tool]}


def of_response_tools(schema: Schema) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", "parameters": schema, "strict": True}]}


def refusal(body: Mapping[str, Any]) -> tuple[str | None, str | None]:
    with pytest.raises(BadRequest) as refused:
        check_structured_output(body)
    assert refused.value.status == 400
    return refused.value.param, refused.value.code


PLACES = {
    "response_format.json_schema.schema": of_chat,
    "text.format.schema": of_response,
    "structured_outputs.json": of_completion,
    "tools.1.function.parameters": of_tools,
    "tools.0.parameters": of_response_tools,
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_is_named(place: str) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": TEXT}}}}
    assert refusal(PLACES[place](inner)) == (f"{place}.properties.a.items.not", "unsupported_schema_keyword")
    assert refusal(PLACES[place]({"$ref": "#"})) == (place, "unsatisfiable_schema")
    check_structured_output(PLACES[place](TREE))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"allOf": [{"required": ["a"]}, {"required": ["b"]}]}, "allOf"),
        ({"type": "object", "properties": {"a": TEXT}, "allOf": [{"required": ["a"]}]}, "allOf"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
        ({"type": "string", "not": {"const": "x"}}, "not"),
        ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "object", "properties": {"a": TEXT}, "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"$defs": {"a": TEXT}, "$ref": "#/$defs/a", "minLength": 5}, "$ref"),
        ({"$ref": "https://example.org/schema"}, "$ref"),
        ({"type": "string", "pattern": "^(?!x).*$"}, "pattern"),
        ({"type": "string", "pattern": "(?<=a)b"}, "pattern"),
    ],
)
def test_what_the_grammar_ignores_is_refused_if_strict(schema: Schema, keyword: str) -> None:
    assert refusal(of_chat(schema)) == (f"response_format.json_schema.schema.{keyword}", "unsupported_schema_keyword")
    check_structured_output(of_chat(schema, strict=False))


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}]},
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
    ],
)
def test_what_no_value_satisfies_is_refused_strict_or_not(schema: Schema) -> None:
    for strict in (True, False):
        assert refusal(of_chat(schema, strict)) == ("response_format.json_schema.schema", "unsatisfiable_schema")


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        {"anyOf": [{"$ref": "#"}, TEXT]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "object", "properties": {"not": TEXT, "if": TEXT, "allOf": TEXT}, "required": ["not"]},
        {"$defs": {"a~/b": TEXT}, "$ref": "#/$defs/a~0~1b", "description": "any"},
        {"allOf": [TEXT]},
        {"type": "string", "pattern": r"^\(\?=x$"},
        {"type": ["string", "null"], "enum": ["a", None]},
    ],
)
def test_what_is_enforced_is_accepted(schema: Schema) -> None:
    check_structured_output(of_chat(schema))


def test_a_reference_to_nothing_is_named() -> None:
    place = "response_format.json_schema.schema.items.$ref"
    schema = {"type": "array", "items": {"$ref": "#/$defs/none"}}
    assert refusal(of_chat(schema, strict=False)) == (place, "unsupported_schema_keyword")


def test_the_longest_chain_of_references_costs_little() -> None:
    size = 1500
    chain: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(size)}
    for order in (dict(chain), dict(reversed(chain.items()))):
        properties = {f"p{number}": {"$ref": f"#/$defs/d{number}"} for number in range(0, size, 5)}
        whole = {"type": "object", "properties": properties, "required": list(properties)}
        began_s = time.thread_time()
        check_structured_output(of_chat({**whole, "$defs": {**order, f"d{size}": TEXT}}))
        assert time.thread_time() - began_s < 0.5


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_tools_that_are_not_compiled_are_not_checked(choice: str) -> None:
    tool = {"type": "function", "function": {"name": "g", "parameters": {"$ref": "#"}, "strict": choice == "none"}}
    check_structured_output({"tools": [tool], "tool_choice": choice})
