"""Images of tools' answers in a run: where the model reads them, how many are kept, and what is dropped with them."""

from typing import Any

import pytest

from cluster.core.tools import IN_NEXT_MESSAGE, Outcome, ToolResult, late_message
from cluster.runs import tool_images
from cluster.runs.compaction import kept
from cluster.runs.events import LateAnswer, ToolAnswer, ToolIntent, TurnIntent
from cluster.runs.state import conversation
from cluster.runs.tool_images import LEFT_OUT, MAX_IMAGES, kept_images
from cluster.runs.truncation import droppable
from tests.words.test_run import accepted, after, call, ok, result

RED, BLUE = "data:image/png;base64,UkVE", "data:image/png;base64,QkxVRQ=="


def shown(*urls: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}


def shot(turn: int, index: int, *images: str, outcome: str = "ok") -> ToolAnswer:
    return ToolAnswer(turn, index, outcome, "\n".join([IN_NEXT_MESSAGE] * len(images)), images=images)


def test_the_images_of_a_round_follow_its_answers_and_are_no_text_to_shorten() -> None:
    begun = (accepted(sees=True), TurnIntent(1), result(1, call(1), call(1, 1)), ToolIntent(((1, 0), (1, 1))))
    state = after(*begun, shot(1, 1, BLUE), shot(1, 0, RED))
    assert [message["role"] for message in state.messages] == ["user", "assistant", "tool", "tool", "user"]
    assert state.messages[-1] == shown(RED, BLUE), "in the order of the calls"
    assert state.unread == (2, 3)
    assert list(state.images) == [BLUE, RED]


def test_the_images_of_an_asynchronous_tool_follow_its_message() -> None:
    begun = (accepted(sees=True), TurnIntent(1), result(1, call(1)), ToolIntent(((1, 0),)), ok(1, outcome="started"),
             TurnIntent(2), result(2), LateAnswer(shot(1, 0, RED)))  # fmt: skip
    state = after(*begun)
    assert conversation(state)[-1] == shown(RED)
    state = after(*begun, TurnIntent(3))
    assert state.messages[-1] == shown(RED)
    assert state.unread == (len(state.messages) - 2,)


def test_a_run_keeps_so_many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ToolResult("c", "shot", Outcome.OK, f"a {IN_NEXT_MESSAGE} b {IN_NEXT_MESSAGE} c", images=(RED, BLUE))
    assert kept_images([RED] * (MAX_IMAGES - 2), answer) == (answer.text, (RED, BLUE))
    assert kept_images([RED] * (MAX_IMAGES - 1), answer) == (f"a {IN_NEXT_MESSAGE} b {LEFT_OUT} c", (RED,))
    assert kept_images([RED] * MAX_IMAGES, answer) == (f"a {LEFT_OUT} b {LEFT_OUT} c", ())
    monkeypatch.setattr(tool_images, "MAX_CHARS", len(RED) + len(BLUE) - 1)
    assert kept_images([], answer) == (f"a {IN_NEXT_MESSAGE} b {LEFT_OUT} c", (RED,))


def test_the_images_of_the_responses_before_count() -> None:
    begun = (accepted(sees=True), TurnIntent(1), result(1, call(1)), ToolIntent(((1, 0),)))
    first = after(*begun, shot(1, 0, RED))
    asked = {"role": "user", "content": [{"type": "text", "text": "and this?"}, *shown(BLUE)["content"]]}
    state = after(accepted(sees=True, messages=(*conversation(first), asked)), *begun[1:], shot(1, 0, BLUE))
    assert list(state.images) == [RED, BLUE], "the user's own image does not count"


def test_images_are_dropped_with_the_answers_that_had_them() -> None:
    asked, call_, tool = {"role": "user", "content": "look"}, {"role": "assistant", "content": ""}, {"role": "tool"}
    messages = [asked, call_, {**tool, "content": "x"}, shown(RED), call_, {**tool, "content": "y"}, shown(BLUE)]
    assert droppable(messages) == [(1, 2, 3)], "the user's question stays"
    assert kept(messages) == (asked,)
    late = [asked, call_, {**tool, "content": "x"}, call_, late_message("shot", "y"), shown(RED)]
    assert kept(late) == (asked,), "what a tool has said late is replaced as any other answer"
    own = [asked, {"role": "assistant", "content": "ok"}, shown(RED)]
    assert kept(own) == (asked, shown(RED)), "an image that the user has sent alone"
