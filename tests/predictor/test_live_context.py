"""What a request shows of its program; nothing that a client can send is too much."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor_service.live_context import ShownRequest, shown
from predictor_service.model import HISTORY, MAX_TEXT

USER = {"role": "user", "content": "Find the bug."}


def called(name: str, arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def returned(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": text}


def test_a_first_turn_is_all_new() -> None:
    request = shown({"messages": [{"role": "system", "content": "Be brief."}, USER]})
    assert (request.structured, request.position, list(request.turns)) == (True, 0, [])
    assert request.new_chars == len("Be brief.") + len("Find the bug.")
    assert request.text == "Be brief.\nFind the bug."


def test_earlier_turns_are_told_apart_with_the_class_of_their_commands() -> None:
    grep = called("bash", json.dumps({"command": "cd src && grep -n x ."}))
    read = called("read_file", json.dumps({"path": "a.py"}))
    request = shown({"messages": [USER, grep, returned("1234567890"), read, returned("abc")]})
    assert request.position == 2
    assert [one.tool for one in request.turns] == ["read_file", "bash:cd"]
    assert [one.returned_chars for one in request.turns] == [3, 10]
    assert (request.new_chars, request.text) == (3, "abc")
    assert request.turns[0].arguments == '{"path": "a.py"}'


def test_tools_that_a_turn_calls_together_are_one_key() -> None:
    both = called("b", "{}")
    both["tool_calls"] += called("a", "{}")["tool_calls"]
    assert shown({"messages": [USER, both, returned("x"), returned("y")]}).turns[0].tool == "a+b"


def test_a_fenced_command_is_a_call_and_plain_talk_is_none() -> None:
    fenced = {"role": "assistant", "content": "I look.\n```bash\npytest -q\n```"}
    talk = {"role": "assistant", "content": [{"type": "text", "text": "Which bug?"}]}
    request = shown({"messages": [USER, fenced, USER, talk, USER]})
    assert [one.tool for one in request.turns] == ["", "pytest"]


def test_of_long_programs_the_last_turns_are_told_and_all_are_counted() -> None:
    messages = [USER]
    for number in range(50):
        messages += [called(f"tool{number}", "{}"), returned("r")]
    request = shown({"messages": messages})
    assert request.position == 50
    assert [one.tool for one in request.turns] == [f"tool{number}" for number in range(49, 49 - HISTORY, -1)]


def test_of_a_huge_prompt_the_end_is_told() -> None:
    request = shown({"messages": [{"role": "user", "content": "x" * 10_000_000 + "end"}]})
    assert request.new_chars == 10_000_003
    assert (len(request.text), request.text[-4:]) == (MAX_TEXT, "xend")


def test_a_prompt_is_no_conversation() -> None:
    assert shown({"prompt": "abc"}) == ShownRequest(structured=False, new_chars=3, text="abc")
    assert shown({"prompt": [1, 2, 3]}).text == ""


def test_the_input_of_a_response_is_read_alike() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "nothing"},
    ]
    request = shown({"input": items, "tools": [{"type": "function", "name": "look"}]})
    assert (request.position, request.turns[0].tool, request.text) == (1, "look", "nothing")
    assert request.offered == ("look",)
    assert shown({"input": "hi"}).text == "hi"


def test_tools_on_offer_are_named() -> None:
    nested = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    assert shown({"messages": [USER], "tools": nested}).offered == ("a", "b")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "tool_calls", "function", "name", "arguments", "text", "type", "output"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)
ROLES = st.sampled_from(["assistant", "user", "tool", "system", "\ud800"])
MESSAGES = st.lists(ANYTHING | st.fixed_dictionaries({"role": ROLES, "content": ANYTHING, "tool_calls": ANYTHING}))


@given(st.fixed_dictionaries({}, optional={"messages": ANYTHING | MESSAGES, "input": ANYTHING, "tools": ANYTHING}))
def test_nothing_is_refused(body: dict[str, Any]) -> None:
    request = shown(body)
    assert len(request.turns) <= min(HISTORY, request.position)
    assert all(isinstance(one.tool, str) and isinstance(one.arguments, str) for one in request.turns)
    assert len(request.text) <= MAX_TEXT


@pytest.mark.parametrize("body", [{}, {"messages": None}, {"messages": {}}, {"messages": [[]]}, {"prompt": {"a": 1}}])
def test_what_is_no_request_shows_nothing(body: dict[str, Any]) -> None:
    request = shown(body)
    assert (request.position, request.new_chars, request.text) == (0, 0, "")
