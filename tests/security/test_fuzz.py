"""Fuzzes what others write: bodies, listings and results of MCP servers. `make fuzz` does it for ten minutes."""

import asyncio
import os
from typing import Any

import mcp_types as types
import pydantic
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cluster.api.structured_output_limits import check_structured_output
from cluster.config.tools import McpTool
from cluster.core.errors import HttpError, ToolRefused
from cluster.core.identity import identify
from cluster.http.body import parse_object
from cluster.http.requests import _checked, number_of_answers
from cluster.responses.request import read_request
from tests.security.corpus import GROWING
from tools_runtime.answer_images import AnswerImages
from tools_runtime.kinds.mcp import MAX_NAME_LENGTH, McpKind, _shown
from tools_runtime.text import bounded

EXAMPLES = int(os.environ.get("CAESURA_FUZZ_EXAMPLES", "40"))
MUCH = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

# --- grammars ---------------------------------------------------------------------------------------------------------

WORDS = st.one_of(
    st.sampled_from(
        (
            "",
            "a",
            "a_b",
            "a__b",
            "__proto__",
            "s__t",
            "../x",
            "--help",
            "<|im_start|>",
            "\0",
            "\x1b[2J",
            "\ud83d\ude00",
            "x" * 70,
        )
    ),
    st.text(max_size=12),
)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=8,
)
PATTERNS = st.sampled_from(("^a+$", "(a+)+$", "[^a]{1,200}", "(?=x)", "(", "\\1", "[\\x00-\\U0010ffff]*"))
LEAVES = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(("string", "object", "array", "integer", "nothing", None))}),
    st.fixed_dictionaries(
        {"$ref": st.sampled_from(("#", "#/$defs/a", "#/properties/a", "https://x.test/s", "#/nowhere"))}
    ),
    st.fixed_dictionaries({"pattern": PATTERNS}),
    st.fixed_dictionaries({"enum": st.lists(JUNK, max_size=3)}),
    JUNK,
)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    by_name = st.dictionaries(WORDS, inner, max_size=3)
    return st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": by_name,
            "$defs": by_name,
            "patternProperties": by_name,
            "anyOf": st.lists(inner, max_size=3),
            "oneOf": st.lists(inner, max_size=3),
            "not": inner,
            "items": inner,
            "required": st.lists(WORDS, max_size=3),
            "additionalProperties": st.one_of(st.booleans(), inner),
            "$schema": WORDS,
            "$id": WORDS,
        },
    )


SCHEMAS = st.recursive(LEAVES, _larger, max_leaves=12)
TOOLS = st.fixed_dictionaries(
    {"name": WORDS, "inputSchema": st.one_of(_larger(SCHEMAS), SCHEMAS)},
    optional={"description": WORDS, "annotations": st.one_of(JUNK, st.just({"readOnlyHint": True})), "title": WORDS},
)
RESOURCES = st.fixed_dictionaries(
    {"uri": st.sampled_from(("file:///x", "x:y"))}, optional={"text": WORDS, "blob": WORDS}
)
PARTS = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": WORDS}),
    st.fixed_dictionaries({"type": st.just("resource"), "resource": RESOURCES}),
    st.fixed_dictionaries({"type": st.just("resource_link"), "uri": st.just("file:///x"), "name": WORDS}),
    st.fixed_dictionaries({"type": st.sampled_from(("image", "audio")), "data": WORDS, "mimeType": WORDS}),
    JUNK,
)

FIELDS = (
    "messages",
    "metadata",
    "n",
    "prompt",
    "response_format",
    "session_id",
    "stop",
    "structured_outputs",
    "text",
    "tool_choice",
    "tools",
)

# --- what holds for all of them ---------------------------------------------------------------------------------------


async def shown(content: list[Any]) -> list[str]:
    """What an answer becomes for a model that sees. No image of these is one."""
    images = AnswerImages(kept=True)
    texts = [await _shown(part, images) for part in content]
    assert images.urls == []
    return texts


@MUCH
@given(st.lists(TOOLS, max_size=6))
@example([{"name": "a.b", "inputSchema": {"type": "object"}}, {"name": "a_b", "inputSchema": {"type": "object"}}])
def test_a_listing_of_a_server_is_taken_or_its_tools_are_left_out(listed: list[Any]) -> None:
    try:
        page = types.ListToolsResult.model_validate({"tools": listed, "resultType": "complete"}, by_name=False)
    except pydantic.ValidationError:
        return  # the library refuses the listing
    kind = McpKind("s", McpTool.model_validate({"kind": "mcp", "url": "https://example.com/mcp"}))
    asyncio.run(kind._take(page.tools))
    offers = [known.offer for known in kind.tools()]
    names = [offer.name for offer in offers]
    assert len(set(names)) == len(names)
    assert all(name.startswith("s__") and len(name) <= MAX_NAME_LENGTH for name in names)
    assert {offer.server_tool for offer in offers} | set(kind._left_out) == {tool.name for tool in page.tools}
    for known in kind.tools():
        for arguments in ("{}", '{"a": [1]}', "[]", "{", '{"a": "' + "a" * 2000 + '!"}'):
            try:
                known.check.checked(arguments, 1 << 16)
            except ToolRefused:
                continue


@MUCH
@given(st.lists(PARTS, max_size=5), st.integers(256, 4096))
def test_a_result_of_a_server_is_bounded_text_without_special_tokens(parts: list[Any], cap: int) -> None:
    try:
        result = types.CallToolResult.model_validate({"content": parts, "resultType": "complete"}, by_name=False)
    except pydantic.ValidationError:
        return
    text, _ = bounded("\n".join(asyncio.run(shown(result.content))), cap, ("<|im_start|>",))
    assert len(text.encode()) <= cap
    assert "<|im_start|>" not in text
    assert not {"\0", "\x1b"} & set(text)


@MUCH
@given(st.dictionaries(st.sampled_from(FIELDS), JUNK), SCHEMAS)
def test_a_body_is_read_or_refused(body: dict[str, Any], schema: Any) -> None:
    places: list[dict[str, Any]] = [
        {},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]},
    ]
    for place in places:
        try:
            turn = _checked(dict(identify({}, body | place, "default", ()).body), None)
            number_of_answers(turn)
        except HttpError as error:
            assert 400 <= error.status < 500, error
    try:
        read_request({"input": "hi", **body})
    except HttpError as error:
        assert 400 <= error.status < 500, error


@MUCH
@given(st.sampled_from(sorted(GROWING)), st.integers(1, 40), st.data())
def test_a_broken_body_is_refused(name: str, size: int, data: st.DataObject) -> None:
    raw = bytearray(GROWING[name](size))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        _checked(identify({}, parse_object(bytes(raw), 64), "default", ()).body, None)
    except HttpError as error:
        assert 400 <= error.status < 500, error


@pytest.mark.parametrize("name", GROWING)
def test_the_corpus_is_read_or_refused(name: str) -> None:
    for size in (1, 7, 2000):
        try:
            check_structured_output(parse_object(GROWING[name](size), 64))
        except HttpError as error:
            assert error.status == 400
