"""What is dropped of a conversation that does not fit in the context window."""

from typing import Any

from cluster.core.tools import late_message
from cluster.core.turn import pack_ids
from cluster.runs.compaction import summary_message
from cluster.runs.events import LateAnswer, Prior, ToolIntent, Truncated, TurnIntent
from cluster.runs.state import AskTurn, next_step
from cluster.runs.truncation import droppable, without_oldest
from tests.words.test_run import accepted, after, call, ok, result


def said(role: str, content: str = "x", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


LOOP = [
    said("system", "rules"), said("user", "first"), said("assistant", "hm", tool_calls=[1, 2]), said("tool", "a"),
    said("tool", "b"), said("assistant", "done"), said("user", "second"), said("assistant", "", tool_calls=[3]),
    said("tool", "c"), said("assistant", "", tool_calls=[4]), said("tool", "d"),
]  # fmt: skip


def test_rules_the_last_question_and_the_last_round_stay() -> None:
    assert droppable(LOOP) == [(1,), (2, 3, 4), (5,), (7, 8)]
    kept = without_oldest(LOOP, 4)
    assert [LOOP[place]["content"] for place in kept] == ["rules", "second", "", "d"]
    assert without_oldest(LOOP, 0) == list(range(len(LOOP)))


def test_a_call_goes_with_its_answers() -> None:
    roles = [LOOP[place]["role"] for place in without_oldest(LOOP, 2)]
    assert roles == ["system", "assistant", "user", "assistant", "tool", "assistant", "tool"]


def test_of_one_question_nothing_can_be_dropped() -> None:
    assert droppable([said("system"), said("user")]) == []
    assert droppable([]) == []


def test_the_turn_is_tried_again_without_counting_and_from_no_ids() -> None:
    began = accepted(messages=tuple(LOOP), prior=Prior(pack_ids([1, 2]), 6), truncate=True)
    state = after(began, TurnIntent(1), Truncated(2))
    assert len(state.messages) == len(LOOP) - 4
    assert (state.token_ids, state.covered) == (b"", 0)
    assert next_step(state) == AskTurn(1, 1, None)
    # An attempt that was lost before still counts.
    state = after(began, TurnIntent(1), TurnIntent(1, 2), Truncated(1))
    assert state.attempt == 1


def test_unread_answers_keep_their_places() -> None:
    events = (accepted(truncate=True, messages=(said("user", "a"), said("assistant", "b"), said("user", "c"))),
              TurnIntent(1), result(1, call(1)), ToolIntent(((1, 0),)), ok(1), TurnIntent(2))  # fmt: skip
    before = after(*events)
    state = after(*events, Truncated(2))
    assert [state.messages[place]["content"] for place in state.unread] == ["42"]
    assert [before.messages[place]["content"] for place in before.unread] == ["42"]


def test_an_unread_answer_that_is_dropped_leaves_no_place_and_another_keeps_its_own() -> None:
    messages = (said("system", "rules"), said("user", "a"), said("assistant", tool_calls=[1]), said("tool", "unread"),
                said("user", "huge"))  # fmt: skip
    state = after(accepted(truncate=True, messages=messages, unread=(3,)), TurnIntent(1), Truncated(1))
    assert [state.messages[place]["content"] for place in state.unread] == ["unread"]
    state = after(accepted(truncate=True, messages=messages, unread=(3,)), TurnIntent(1), Truncated(1), Truncated(1))
    assert [message["role"] for message in state.messages] == ["system", "user"]
    assert state.unread == ()
    # A group after the last question is dropped, too: places before it stay.
    rounds = (*messages[:4], said("user", "b"), said("assistant", tool_calls=[2]), said("tool", "c"), said("assistant"))
    state = after(accepted(truncate=True, messages=rounds, unread=(3, 6)), TurnIntent(1), Truncated(3))
    assert [message["content"] for message in state.messages] == ["rules", "b", "x"]
    assert state.unread == ()


def test_a_turn_that_brings_a_late_answer_is_tried_again() -> None:
    started = ok(1, text="started", outcome="started")
    events = (accepted(truncate=True), TurnIntent(1), result(1, call(1)), ToolIntent(((1, 0),)), started,
              TurnIntent(2), result(2, content="meanwhile"), LateAnswer(ok(1)), TurnIntent(3))  # fmt: skip
    state = after(*events, Truncated(1))
    assert "42" in state.messages[-1]["content"]
    assert next_step(state) == AskTurn(3, 1, None)


def test_a_late_answer_and_a_summary_are_no_questions() -> None:
    late = late_message("calc", "42")
    image = said("user", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,UkVE"}}])  # type: ignore[arg-type]
    begun = [said("system"), said("user", "question"), said("assistant", tool_calls=[1]), said("tool", "started")]
    assert droppable([*begun, said("assistant"), late]) == [(2, 3), (4,)]
    assert droppable([*begun, said("assistant"), late, image, said("assistant")]) == [(2, 3), (4,), (5, 6)]
    assert droppable([*begun[:2], summary_message("hm"), said("assistant", tool_calls=[1]), said("tool")]) == [(2,)]
