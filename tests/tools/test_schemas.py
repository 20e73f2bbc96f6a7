"""Arguments are checked in bounded time; what a schema or a model writes cannot make it longer."""

import json
from typing import Any

import pytest

from cluster.core.errors import ToolRefused
from tools_runtime.schemas import ArgumentCheck, resolved

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 1}, "days": {"type": "integer", "maximum": 7}},
    "required": ["city"],
    "additionalProperties": False,
}


def complaint(schema: dict[str, Any], arguments: Any, max_bytes: int = 1 << 20) -> str:
    with pytest.raises(ToolRefused) as refused:
        ArgumentCheck(schema).checked(arguments, max_bytes)
    return str(refused.value)


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_right_arguments_as_text_and_as_values(arguments: Any) -> None:
    assert ArgumentCheck(CITY).checked(arguments, 1000) == {"city": "Rome"}


def test_arguments_that_were_never_written_are_no_empty_object() -> None:
    with pytest.raises(ToolRefused, match="there are no arguments"):
        ArgumentCheck({}).checked("", 1000)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('{"city": 5}', 'city: 5 is not of type "string"'),
        ("{}", '"city" is a required property'),
        ('{"city": "Rome", "country": "IT"}', "Additional properties are not allowed ('country'"),
        ('{"city": "", "days": 9}', "days: 9 is greater than the maximum of 7"),
        ('{"city": "Rome"', "not JSON"),
        ('["Rome"]', "not a JSON object"),
        ('{"days": NaN}', "not JSON"),
        ('{"days": 1e999}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"city": {"Rome"}}, "not JSON"),
        ('{"city": "' + "x" * 2_000_000 + '"}', "bytes; at most"),
    ],
)
def test_wrong_arguments_are_told_by_their_path(arguments: Any, says: str) -> None:
    assert says in complaint(CITY, arguments)


def test_complaints_are_few_and_short() -> None:
    schema = {"properties": {f"p{i}": {"enum": ["x" * 500]} for i in range(50)}}
    assert len(complaint(schema, {f"p{i}": "y" for i in range(50)})) < 2000


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "deep": nested(500),
    "large": {"description": "x" * 100_000},
    "exponential": {
        "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}},
        "allOf": [{"$ref": "#/$defs/d0"}],
    },
    "circular": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/a"}]},
    "itself": {"properties": {"a": {"$ref": "#"}}},
    "elsewhere": {"properties": {"a": {"$ref": "http://169.254.169.254/latest"}}},
    "anchor": {"$defs": {"a": {"$anchor": "n"}}, "properties": {"a": {"$ref": "#n"}}},
    "nowhere": {"properties": {"a": {"$ref": "#/$defs/none"}}},
    "many references": {"$defs": {"a": {}}, "allOf": [{"$ref": "#/$defs/a"}] * 1000},
    "dynamic": {"properties": {"a": {"$dynamicRef": "#x"}}},
    "unevaluated": {"unevaluatedProperties": False},
    "back-reference": {"properties": {"a": {"pattern": r"(a)\1"}}},
    "large pattern": {"properties": {"a": {"pattern": "(((a{1000}){1000}){1000})"}}},
    "no schema": {"properties": {"a": {"type": "number or so"}}},
    "no object": {"type": "string"},
}


@pytest.mark.parametrize("schema", BOMBS.values(), ids=BOMBS.keys())
def test_schema_bombs_are_not_admitted(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ArgumentCheck(schema)


def test_a_pattern_takes_linear_time() -> None:
    # Python's re would take longer than the test's limit for a thousand of these.
    assert "does not match" in complaint({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": "a" * 1000 + "b"})
    schema = {"patternProperties": {"^(a+)+$": {"type": "integer"}}, "additionalProperties": False}
    assert "Additional properties are not allowed" in complaint(schema, {"a" * 1000 + "b": 1})
    assert 'is not of type "integer"' in complaint(schema, {"aaa": "b"})
    assert ArgumentCheck(schema).checked({"aaa": 1}, 1000) == {"aaa": 1}


def test_items_are_compared_in_linear_time() -> None:
    schema = {"properties": {"l": {"uniqueItems": True}}}
    many = [{"i": i} for i in range(5000)]
    assert ArgumentCheck(schema).checked({"l": many}, 1 << 20) == {"l": many}
    assert "non-unique elements" in complaint(schema, {"l": [{"i": 1}, {"i": 1}]})


def test_too_many_values_for_a_large_schema_are_refused() -> None:
    schema = {"properties": {"l": {"items": {"anyOf": [{"const": i} for i in range(500)]}}}}
    assert "too many values" in complaint(schema, {"l": list(range(10_000))})


def test_references_within_the_schema_work() -> None:
    schema = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
    assert ArgumentCheck(schema).checked('{"a": 1}', 100) == {"a": 1}
    assert "is not of type" in complaint(schema, '{"a": "x"}')
    assert resolved({"a/b": [{"~": 1}]}, "#/a~1b/0/~0") == 1


def test_an_anchor_that_no_reference_names_has_no_effect() -> None:
    schema = {"$defs": {"n": {"$anchor": "n", "type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
    assert ArgumentCheck(schema).schema == schema
    assert "is not of type" in complaint(schema, '{"a": "x"}')


def test_arguments_nested_too_deep_are_refused() -> None:
    value = json.loads('{"a":' * 100 + "1" + "}" * 100)
    assert "nested deeper" in complaint({}, value)
