"""Requests that have been tampered with: each is a run, or a refusal that names a field; never anything else."""

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.conversations import ConversationItemList

from cluster.core.errors import BadRequest
from cluster.core.program import ProgramIdentity
from cluster.responses.input_items import HOSTED_ITEMS, input_items, page_of, stored_input
from cluster.responses.request import read_request
from cluster.responses.spec import RequestContext, run_spec
from cluster.runs.events import Accepted, decode, encode
from cluster.runs.state import fold
from tests.responses.run_logs import COMPLETED, LIMITS, accepted, call, listed, offer, turn

LOOKED = call("look")
PREVIOUS = fold([accepted(offer("look")), *turn(1, "", LOOKED), COMPLETED])
LISTINGS = {"docs": [listed("docs", "read")]}
BODY = {
    "model": "m",
    "instructions": "be brief",
    "previous_response_id": "resp_1",
    "input": [
        {"type": "function_call_output", "call_id": LOOKED.id, "output": [{"type": "input_text", "text": "a"}]},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "b"},
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"},
                {"type": "input_file", "filename": "a.md", "file_data": "IyBIZWxsbw==", "detail": "low"},
            ],
        },
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "c"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "e"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "refusal", "refusal": "g"}, {"type": "input_image", "image_url": "data:,"}],
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "mcp_call", "id": "m", "server_label": "docs", "name": "read", "arguments": "{}", "error": "f"},
        {"type": "mcp_list_tools", "server_label": "docs", "tools": []},
        {"type": "mcp_approval_request", "id": "r", "server_label": "docs", "name": "read", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "r", "approve": True},
    ],
    "tools": [
        {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True},
        {
            "type": "mcp",
            "server_label": "docs",
            "server_url": "https://docs.example/mcp",
            "allowed_tools": {"tool_names": ["read"]},
            "require_approval": {"never": {"tool_names": ["read"]}},
            "headers": {"X-Key": "k"},
        },
    ],
    "tool_choice": {"type": "function", "name": "look"},
    "tool_choices": [{"type": "mcp", "server_label": "docs", "name": "read"}, "auto"],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"},
    "metadata": {"k": "v"},
    "chat_template_kwargs": {"x": 1},
    "stop": ["a"],
    "user": "u",
}

WORDS = st.sampled_from(
    ["", "look", "docs", "read", "c1", "r", "auto", "function", "mcp", "message", "user", "x" * 300]
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([10**30, 1.5, -1]) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)


def places(value, path=()):
    """Paths to all values within ``value``."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here for key, child in inner for here in [(*path, key), *places(child, (*path, key))]]


@st.composite
def tampered(draw):
    body = copy.deepcopy(BODY)
    for _ in range(draw(st.integers(0, 3))):
        *parents, key = draw(st.sampled_from(places(body) or [("input",)]))
        at = body
        for step in parents:
            at = at[step]
        match draw(st.sampled_from(["replace", "remove", "repeat"])):
            case "replace":
                at[key] = draw(JUNK)
            case "remove":
                del at[key]
            case "repeat" if isinstance(at, list):
                at.append(copy.deepcopy(at[key]))
    return body


def around(body):
    previous = PREVIOUS if body.get("previous_response_id") == "resp_1" else None
    return RequestContext("resp_2", 1.0, ProgramIdentity(), "m", LIMITS, listings=LISTINGS, previous=previous)


def test_the_request_itself_is_fine() -> None:
    made = run_spec(read_request(BODY), around(BODY)).spec
    assert [message["role"] for message in made.messages] == [
        *("system", "user", "assistant", "tool", "user", "assistant", "tool", "assistant", "tool"),
    ] or made.approved
    assert len(made.approved) == 1


@given(tampered())
@settings(max_examples=600, deadline=None)
def test_tampered_requests(body) -> None:
    try:
        made = run_spec(read_request(body), around(body)).spec
    except BadRequest as error:
        assert error.param or "body" in error.message
        assert error.status in (400, 424)
        return
    assert decode(encode(Accepted(made))) == Accepted(made)
    page: dict[str, Any] = {"order": "asc", "limit": 100, "after": None}
    listed = [item["id"] for item in made.echo["input"] if item["type"] not in HOSTED_ITEMS]
    assert [item.id for item in input_items(made, **page).data] == listed
    shown = ConversationItemList.model_validate(page_of(stored_input(made), **page))
    assert [item.id for item in shown.data] == listed
    calls = [one["id"] for message in made.messages for one in message.get("tool_calls", ())]
    answers = [message["tool_call_id"] for message in made.messages if message["role"] == "tool"]
    approved = [one.id for one in made.approved]
    assert sorted(calls) == sorted(answers + approved)
