"""What is dropped of a conversation that does not fit in the context window."""

from typing import Any

from cluster.core.turn import pack_ids
from cluster.runs.events import Prior, ToolIntent, Truncated, TurnIntent
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
    assert [message["content"] for message in kept] == ["rules", "second", "", "d"]
    assert without_oldest(LOOP, 0) == tuple(LOOP)


def test_a_call_goes_with_its_answers() -> None:
    roles = [message["role"] for message in without_oldest(LOOP, 2)]
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
