"""When a run summarises its conversation, and what the model reads afterwards."""

from typing import Any

import pytest

from cluster.core.turn import pack_ids
from cluster.runs.compaction import HEAD, MAX_SUMMARY_TOKENS, MIN_SUMMARY_TOKENS, REQUEST, compacted, kept
from cluster.runs.events import Compaction, Limits, ToolIntent, TurnIntent, TurnResult
from cluster.runs.state import AskTurn, CallTools, Finish, next_step
from cluster.runs.turn_request import turn_body
from tests.words.test_run import accepted, after, call, ok

ASK = {"role": "user", "content": "sum up the files"}
RULES = {"role": "system", "content": "be brief"}


def used(turn: int, tokens: int, *calls: Any, content: str = "") -> TurnResult:
    """A turn after which the conversation has this many tokens."""
    ids = pack_ids([turn])
    return TurnResult(turn, turn > 1, "continued", ids, ids, "stop", tokens - 5, 0, 5, 0.0, 1.0, content, calls=calls)


def summary(turn: int, content: str, finish: str = "stop") -> TurnResult:
    ids = pack_ids([turn])
    return TurnResult(turn, True, "continued", ids, ids, finish, 900, 890, 5, 0.0, 1.0, content, summary=True)


def begun(**fields: Any) -> Any:
    return accepted(messages=(RULES, ASK), **{"compaction": Compaction(threshold=500)} | fields)


def test_a_conversation_that_has_grown_is_summarised_before_its_next_turn() -> None:
    short = (begun(), TurnIntent(1), used(1, 400, call(1)), ToolIntent(((1, 0),)), ok(1))
    assert next_step(after(*short)) == AskTurn(2, 1, None)
    grown = (*short, TurnIntent(2), used(2, 600, call(2)))
    assert isinstance(next_step(after(*grown)), CallTools)
    grown = (*grown, ToolIntent(((2, 0),)), ok(2))
    asked = AskTurn(3, 1, "none", summary=True)
    assert next_step(after(*grown)) == asked
    # Whoever takes it over asks for the same again.
    assert next_step(after(*grown, TurnIntent(3, 1, summary=True))) == AskTurn(3, 2, "none", summary=True)
    state = after(*grown, TurnIntent(3, 1, summary=True), summary(3, "there are two files"))
    assert state.messages == (RULES, ASK, {"role": "user", "content": f"{HEAD}\nthere are two files"})
    assert (state.token_ids, state.covered) == (b"", 0)
    assert next_step(state) == AskTurn(4, 1, None)
    # The next summary comes when the conversation has grown again, and replaces the first.
    again = (*grown, TurnIntent(3, 1, summary=True), summary(3, "two files"), TurnIntent(4), used(4, 700, call(4)),
             ToolIntent(((4, 0),)), ok(4))  # fmt: skip
    assert next_step(after(*again)) == AskTurn(5, 1, "none", summary=True)
    state = after(*again, TurnIntent(5, 1, summary=True), summary(5, "three files"))
    assert [message["content"] for message in state.messages] == ["be brief", ASK["content"], f"{HEAD}\nthree files"]


def test_a_long_input_is_summarised_first() -> None:
    assert next_step(after(begun(compaction=Compaction(500, tokens=499)))) == AskTurn(1, 1, None)
    long = begun(compaction=Compaction(500, tokens=500))
    assert next_step(after(long)) == AskTurn(1, 1, "none", summary=True)


def test_the_turn_of_a_summary_extends_the_conversation_and_calls_no_tool() -> None:
    fields = {"sampling": {"response_format": {"type": "json_object"}, "stop": "x", "temperature": 0.5}}
    state = after(begun(compaction=Compaction(0, alone=True), **fields))
    body = turn_body(state, AskTurn(1, 1, "none", summary=True))
    assert body["messages"] == [RULES, ASK, REQUEST]
    assert body["tool_choice"] == "none"
    assert body["max_completion_tokens"] <= MAX_SUMMARY_TOKENS
    assert body["temperature"] == 0.5
    assert not {"response_format", "stop"} & set(body)


def test_without_a_summary_the_conversation_stays_and_the_run_goes_on() -> None:
    grown = (begun(), TurnIntent(1), used(1, 600, call(1)), ToolIntent(((1, 0),)), ok(1))
    state = after(*grown, TurnIntent(2, 1, summary=True), summary(2, " "))
    assert state.messages == after(*grown).messages
    assert state.token_ids == after(*grown).token_ids
    assert next_step(state) == AskTurn(3, 1, None)


def test_a_summary_that_is_cut_replaces_nothing() -> None:
    grown = (begun(), TurnIntent(1), used(1, 600, call(1)), ToolIntent(((1, 0),)), ok(1))
    state = after(*grown, TurnIntent(2, 1, summary=True), summary(2, "two fi", finish="length"))
    assert (state.messages, state.token_ids) == (after(*grown).messages, after(*grown).token_ids)
    assert next_step(state) == AskTurn(3, 1, None)


@pytest.mark.parametrize(("text", "finish"), [("two fi", "length"), (" ", "stop")])
def test_after_a_turn_without_a_summary_the_next_is_asked_at_twice_the_size(text: str, finish: str) -> None:
    grown = (begun(), TurnIntent(1), used(1, 600, call(1)), ToolIntent(((1, 0),)), ok(1),
             TurnIntent(2, 1, summary=True), summary(2, text, finish))  # fmt: skip
    for tokens, summarises in ((999, False), (1000, True)):
        more = (*grown, TurnIntent(3), used(3, tokens, call(3)), ToolIntent(((3, 0),)), ok(3))
        todo = next_step(after(*more))
        assert isinstance(todo, AskTurn) and todo.summary == summarises


def test_a_summary_leaves_half_of_the_tokens_for_the_answer() -> None:
    for left, most in ((2 * MIN_SUMMARY_TOKENS, MIN_SUMMARY_TOKENS), (1000, 500), (100_000, MAX_SUMMARY_TOKENS)):
        limits = Limits(turns=8, tool_calls=8, output_tokens=left + 5, wall_s=60.0, turn_attempts=2)
        state = after(begun(limits=limits), TurnIntent(1), used(1, 600, call(1)), ToolIntent(((1, 0),)), ok(1))
        todo = next_step(state)
        assert isinstance(todo, AskTurn) and todo.summary
        assert turn_body(state, todo)["max_completion_tokens"] == most


def test_no_summary_is_asked_for_which_too_few_tokens_are_left() -> None:
    limits = Limits(turns=8, tool_calls=8, output_tokens=2 * MIN_SUMMARY_TOKENS - 1, wall_s=60.0, turn_attempts=2)
    assert next_step(after(begun(limits=limits, compaction=Compaction(5, tokens=9)))) == AskTurn(1, 1, None)
    alone = begun(limits=limits, compaction=Compaction(0, alone=True))
    todo = next_step(after(alone))
    assert isinstance(todo, AskTurn) and todo.summary
    assert turn_body(after(alone), todo)["max_completion_tokens"] == limits.output_tokens


def test_forced_choices_are_for_the_turns_that_answer() -> None:
    forced = {"tool_choices": ("first", "second")}
    state = after(begun(compaction=Compaction(5, tokens=9), **forced))
    assert next_step(state) == AskTurn(1, 1, "none", summary=True)
    state = after(begun(compaction=Compaction(5, tokens=9), **forced), TurnIntent(1, 1, True), summary(1, "a"))
    assert next_step(state) == AskTurn(2, 1, "first")


@pytest.mark.parametrize(
    ("text", "finish", "end"),
    [("two files", "stop", "completed"), ("two fi", "length", "completed"), ("", "stop", "failed")],
)
def test_a_run_may_be_a_summary_alone(text: str, finish: str, end: str) -> None:
    alone = begun(compaction=Compaction(0, alone=True))
    assert next_step(after(alone)) == AskTurn(1, 1, "none", summary=True)
    todo = next_step(after(alone, TurnIntent(1, 1, summary=True), summary(1, text, finish)))
    assert isinstance(todo, Finish) and todo.status == end


def test_the_last_turn_that_the_limits_allow_is_no_summary() -> None:
    for turns, summarises in ((2, False), (3, True)):
        limits = Limits(turns=turns, tool_calls=8, output_tokens=1000, wall_s=60.0, turn_attempts=2)
        grown = (begun(limits=limits), TurnIntent(1), used(1, 600, call(1)), ToolIntent(((1, 0),)), ok(1))
        assert next_step(after(*grown)) == AskTurn(2, 1, "none", summary=summarises)


def test_what_a_summary_keeps() -> None:
    said = [RULES, ASK, {"role": "assistant", "content": "hm"}, {"role": "tool", "tool_call_id": "c", "content": "x"}]
    parts = {"role": "user", "content": [{"type": "text", "text": HEAD}]}
    assert compacted([*said, parts], "a") == (RULES, ASK, parts, compacted([], "a")[0])
    assert kept(compacted(said, "a")) == (RULES, ASK)
