"""The body of a run's turn: the messages and the settings that its prompt is made of."""

from typing import Any

import pytest

from cluster.runs.events import Accepted, ToolIntent, TurnIntent
from cluster.runs.state import AskTurn, RunState, begin, step
from cluster.runs.turn_request import body_place, continuation_of, known_body, prompt_fields, turn_body
from tests.responses.run_logs import call, offer, result, spec, tool_round, turn

BRIEF = {"role": "system", "content": "Be brief."}
KIND = {"role": "system", "content": [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be polite."}]}
BOTH = {"role": "system", "content": "Be brief.\n\nBe kind.\nBe polite."}
ASK = {"role": "user", "content": "Go."}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SEEN = {"role": "system", "content": [IMAGE]}


def after(*events: Any, **fields: Any) -> RunState:
    """The state of a run of one registered tool after these events."""
    state = begin(Accepted(spec(offer("clock", here=True), **fields)))
    for event in events:
        state = step(state, event)
    return state


def body_of(state: RunState) -> dict[str, Any]:
    return turn_body(state, AskTurn(len(state.turns) + 1, 1, None))


@pytest.mark.parametrize(
    ("messages", "sent"),
    [
        ((BRIEF, KIND, ASK), [BOTH, ASK]),
        ((BRIEF, ASK), [BRIEF, ASK]),
        ((KIND, ASK), [KIND, ASK]),
        ((ASK, BRIEF, ASK), [ASK, BRIEF, ASK]),
        ((BRIEF, KIND, SEEN, ASK), [BOTH, SEEN, ASK]),
    ],
)
def test_the_first_messages_of_the_system_are_one(messages: Any, sent: Any) -> None:
    """Templates such as those of Qwen accept one, and it must be the first message."""
    state = after(messages=messages)
    assert body_of(state)["messages"] == prompt_fields(state.spec)["messages"] == sent
    assert state.messages == messages, "a later response may replace the instructions alone"


def test_the_messages_of_a_chat_are_the_clients_own() -> None:
    state = after(messages=(BRIEF, KIND, ASK), api="chat")
    assert body_of(state)["messages"] == [BRIEF, KIND, ASK]


def test_the_next_turn_continues_from_as_many_messages_as_were_sent() -> None:
    one = call("clock")
    state = after(*turn(1, "", one), *tool_round(one), messages=(BRIEF, KIND, ASK))
    continuation = continuation_of(state)
    assert continuation is not None
    sent = body_of(state)["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
    assert sent[continuation.messages - 1]["role"] == "assistant"
    assert [sent[body_place(state, place)]["role"] for place in state.unread] == ["tool"]


def test_what_is_known_of_the_next_turn_ends_with_the_output_so_far() -> None:
    one, two = call("clock"), call("clock", index=1)
    events = (TurnIntent(1), result(1, "", one, two), ToolIntent((one.place, two.place)))
    known = known_body(after(*events, messages=(BRIEF, KIND, ASK)), one, "so far")
    assert known is not None
    assert known["messages"][0] == BOTH
    assert known["messages"][-1] == {"role": "tool", "tool_call_id": one.id, "content": "so far"}


@pytest.mark.parametrize(
    ("sampling", "settings"),
    [
        ({}, None),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
    ],
)
def test_a_prompt_is_counted_with_the_settings_with_which_it_is_rendered(sampling: Any, settings: Any) -> None:
    fields = prompt_fields(spec(sampling=sampling))
    assert fields.get("chat_template_kwargs") == settings
    assert "reasoning_effort" not in fields, "the requests of `/tokenize` have no such field"
