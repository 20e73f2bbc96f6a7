"""What `cluster.api.schema_keywords` refuses is what the pinned xgrammar does not enforce."""

import json
from typing import Any

import pytest
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string

from cluster.api.schema_keywords import check_schema
from cluster.core.errors import BadRequest

TEXT = {"type": "string"}
A_OR_B = {"properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False, "type": "object"}
VIOLATIONS: list[tuple[dict[str, Any], str]] = [
    ({"allOf": [{**A_OR_B, "required": ["a"]}, {**A_OR_B, "required": ["b"]}]}, '{"a":"x"}'),
    ({**A_OR_B, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a":"x"}'),
    ({"type": "string", "not": {"const": "x"}}, '"x"'),
    ({**A_OR_B, "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a":"x"}'),
    ({**A_OR_B, "dependentRequired": {"a": ["b"]}}, '{"a":"x"}'),
    ({"$defs": {"a": TEXT}, "$ref": "#/$defs/a", "minLength": 5}, '"x"'),
    ({"type": "string", "pattern": "^(?!x).*$"}, '"xa"'),
]


@pytest.mark.parametrize(("schema", "value"), VIOLATIONS, ids=str)
def test_xgrammar_accepts_a_violation_of_what_is_refused(schema: dict[str, Any], value: str) -> None:
    assert _is_grammar_accept_string(Grammar.from_json_schema(json.dumps(schema)), value)
    with pytest.raises(BadRequest):
        check_schema("schema", schema, strict=True)


def test_xgrammar_enforces_what_is_accepted() -> None:
    for schema, value in (({"allOf": [{"type": "integer"}]}, '"x"'), ({**A_OR_B, "required": ["a"]}, '{"b":"x"}')):
        assert not _is_grammar_accept_string(Grammar.from_json_schema(json.dumps(schema)), value)
        check_schema("schema", schema, strict=True)
