"""What a recursive schema allows is allowed without its recursion too, and is checked in bounded time."""

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools_runtime.recursive_schemas import without_recursion
from tools_runtime.schemas import ArgumentCheck, RecursiveSchema

TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node", "title": "a child"}},
            },
            "required": ["value"],
        }
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
}


def test_the_first_level_of_a_tree_is_checked_and_the_tool_checks_the_rest() -> None:
    with pytest.raises(RecursiveSchema):
        ArgumentCheck(TREE)
    check = ArgumentCheck(without_recursion(TREE))
    tree = {"root": {"value": 1, "children": [{"value": 2, "children": [{}]}]}}
    assert check.checked(tree, 1000) == tree
    children = check.schema["$defs"]["node"]["properties"]["children"]
    assert children["items"] == {"title": "a child", "description": "As #/$defs/node.", "type": "object"}
    wrong: Any
    for wrong in ({"root": {}}, {"root": {"value": 1, "children": [1]}}):
        assert list(check._validator.iter_errors(wrong))


def test_a_schema_without_recursion_is_not_changed() -> None:
    plain = {"$defs": {"n": {"type": "integer"}}, "properties": {"not": {"$ref": "#/$defs/n"}, "$ref": {}}}
    assert without_recursion(plain) == plain


@pytest.mark.parametrize(
    "part",
    [
        {"$ref": "#/$defs/a"},
        {"not": {"$ref": "#/$defs/a"}},
        {"oneOf": [{"$ref": "#/$defs/a"}], "allOf": {}},
        {"properties": {"if": {"$ref": "#"}}, "if": {"$ref": "#/$defs/b"}, "then": False},
    ],
    ids=["itself", "not", "no list", "if"],
)
def test_whatever_refers_to_itself_is_a_schema_or_a_value_error(part: dict[str, Any]) -> None:
    schema = {"$defs": {"a": part, "b": {"properties": {"x": {"$ref": "#/$defs/b"}}}}, **part}
    try:
        ArgumentCheck(without_recursion(schema))
    except RecursiveSchema:
        raise
    except ValueError as error:
        assert "JSON Schema" in str(error)


@pytest.mark.parametrize(
    ("keyword", "inner"),
    [("not", {"$ref": "#/properties/a"}), ("oneOf", [{"$ref": "#/properties/a"}]), ("if", {"$ref": "#/properties/a"})],
    ids=["not", "oneOf", "if"],
)
def test_a_keyword_that_leads_back_to_its_own_schema_is_changed_once(keyword: str, inner: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", keyword: inner}}}
    check = ArgumentCheck(without_recursion(schema))
    assert check.checked({"a": {"b": 1}}, 1000) == {"a": {"b": 1}}
    assert list(check._validator.iter_errors({"a": 1}))


def test_references_that_are_nested_too_deeply_are_a_value_error() -> None:
    below: dict[str, Any] = {f"d{i}": {"items": {"items": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(250)}
    schema = {"$defs": {**below, "d250": {}}, "properties": {"a": {"$ref": "#/$defs/d0"}}}
    for read in (ArgumentCheck, without_recursion):
        with pytest.raises(ValueError, match="nested too deeply"):
            read(schema)


NAMES = st.sampled_from(["a", "b"])
LEAVES = st.sampled_from([{"type": "integer"}, {"type": "object"}, {"type": "array"}, {"required": ["a"]}, True, {}])


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    return (
        st.builds(lambda schemas: {"properties": schemas}, st.dictionaries(NAMES, inner, min_size=1))
        | st.builds(lambda key, schema: {key: schema}, st.sampled_from(["items", "additionalProperties", "not"]), inner)
        | st.builds(
            lambda schema, least, most: {"contains": schema, "minContains": least, "maxContains": most},
            inner,
            st.integers(0, 1),
            st.integers(1, 2),
        )
        | st.builds(lambda key, schemas: {key: schemas}, st.sampled_from(["allOf", "anyOf", "oneOf"]), some)
        | st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner)
    )


DEEPER = st.sampled_from(["#", "#/$defs/a", "#/$defs/b"]).flatmap(
    lambda target: st.sampled_from([{"properties": {"a": {"$ref": target}}}, {"items": {"$ref": target}}])
)
"""References that lead into the value, as otherwise the recursive schema itself has no end."""
SCHEMAS = st.recursive(LEAVES | DEEPER, combined, max_leaves=6)
VALUES = st.recursive(
    st.integers(0, 1), lambda inner: st.dictionaries(NAMES, inner) | st.lists(inner, max_size=3), max_leaves=8
)


@settings(max_examples=500, deadline=None)
@given(SCHEMAS, SCHEMAS, SCHEMAS, st.lists(VALUES, min_size=5, max_size=20))
def test_what_the_recursive_schema_allows_is_allowed(root: Any, a: Any, b: Any, values: list[Any]) -> None:
    schema = {"$defs": {"a": a, "b": b}, "allOf": [root, {"properties": {"b": {"$ref": "#/$defs/a"}}}]}
    cut = jsonschema_rs.validator_for(without_recursion(schema))
    whole = jsonschema_rs.validator_for(schema)
    for value in values:
        assert cut.is_valid(value) or not whole.is_valid(value)
