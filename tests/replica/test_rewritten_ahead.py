"""The next prompt is rendered when a turn has ended, from what the client got."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cluster.core.errors import ControlTimeout
from cluster.core.turn import unpack_ids
from replicas.continuation import Examined
from replicas.render_threads import RenderThreads
from replicas.rewritten_ahead import MAX_RENDERING, TAILS, AnswerSoFar, RewrittenAhead

STABLE, RENDERS_AGAIN = Examined(("<end>",), ()), Examined((), ("tools",))
TIMEOUT_S = 20
BODY = {"model": "m", "messages": [{"role": "user", "content": "List the files."}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


def event(**delta: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n".encode()


def streamed() -> AnswerSoFar:
    """A turn that reasons, writes a word and calls a tool. Its call comes in two parts, with another event between."""
    answer = AnswerSoFar()
    call = {"index": 0, "id": "c1", "function": {"name": "bash", "arguments": '{"command"'}}
    answer.feed(event(role="assistant", content="") + event(reasoning="I should look."))
    answer.feed(event(content="Look") + event(content="ing."))
    answer.feed(event(tool_calls=[call]) + b": a comment\n\n")
    answer.feed(event(tool_calls=[{"index": 0, "function": {"arguments": ': "ls"}'}}]) + b"data: [DONE]\n\n")
    return answer


def test_a_streamed_answer_becomes_the_message_that_its_client_sends_back() -> None:
    answer = streamed()
    assert answer.reasons
    assert answer.messages("x") == [
        {"role": "assistant", "content": "Looking.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ]


def test_a_whole_answer_without_calls_is_answered_by_the_user() -> None:
    answer = AnswerSoFar()
    answer.feed(json.dumps({"choices": [{"index": 0, "message": {"content": "Done.", "tool_calls": []}}]}).encode())
    assert not answer.reasons
    assert answer.messages("x") == [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "x"}]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\u2028data: {"])
def test_separators_of_lines_in_a_text_do_not_end_an_event(separator: str) -> None:
    """JSON has them as they are, and only a newline ends a line of an event."""
    text = f"one{separator}two"
    streamed, whole = AnswerSoFar(), AnswerSoFar()
    streamed.feed(f"data: {json.dumps({'choices': [{'delta': {'content': text}}]}, ensure_ascii=False)}\n\n".encode())
    whole.feed(json.dumps({"choices": [{"message": {"content": text}}]}, ensure_ascii=False).encode())
    for answer in (streamed, whole):
        assert answer.messages("x")[0] == {"role": "assistant", "content": text}


class Text:
    """Renders messages as the letters of their roles and contents."""

    def legible(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def make_plain(self, request: Any) -> None:
        pass

    async def prompt_ids(self, request: Any) -> list[int]:
        return self.ids(request)

    def ids(self, request: Any) -> list[int]:
        return [ord(letter) for message in request.messages for letter in f"{message['role'][0]}{message['content']}"]

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class TextInThreads(Text):
    """Renders in the threads of a replica, and notes what they do, in order."""

    def __init__(self) -> None:
        self.threads = RenderThreads()
        self.done: list[str] = []

    async def prompt_ids(self, request: Any) -> list[int]:
        return await self.in_thread(self.ids, request)

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        def noted() -> Any:
            self.done.append("ahead")
            return function(*arguments)

        return await asyncio.wrap_future(self.threads.submit(noted))


class Scheduler:
    """Keeps what it is sent."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self._error = error

    async def extend(self, **payload: Any) -> dict[str, Any]:
        self.sent.append(payload)
        if self._error is not None:
            raise self._error
        return {"ended": None}


def sent(answer: AnswerSoFar, examined: Examined, *, error: Exception | None = None) -> list[dict[str, Any]]:
    """End a turn. Return what the scheduler gets."""

    async def run() -> list[dict[str, Any]]:
        scheduler, text = Scheduler(error), Text()
        ahead = RewrittenAhead(text, examined, scheduler.extend, enabled=True)  # type: ignore[arg-type]
        ahead.turn_ended("a/p", BODY, answer)
        await ahead.idle()
        return scheduler.sent

    return asyncio.run(run())


def test_the_prompt_is_sent_up_to_the_answer_of_the_tool() -> None:
    [one] = sent(streamed(), STABLE)
    assert (one["key"], one["at"], one["rewrites"]) == ("a/p", 0, True)
    assert "".join(map(chr, unpack_ids(one["ids"]))) == "uList the files.aLooking.t"


def test_it_is_not_rendered_where_it_extends_the_context() -> None:
    plain = AnswerSoFar()
    plain.feed(event(content="Done."))
    assert sent(plain, STABLE) == []
    assert len(sent(plain, RENDERS_AGAIN)) == 1
    several = streamed()
    several.feed(b'data: {"choices": [{"index": 1, "delta": {"content": "another"}}]}')
    assert sent(several, STABLE) == []
    assert sent(AnswerSoFar(), RENDERS_AGAIN) == [], "a turn without an answer"


async def test_a_turn_does_not_wait_for_prompts_that_are_rendered_ahead() -> None:
    text, scheduler, begin = TextInThreads(), Scheduler(), threading.Event()
    ahead = RewrittenAhead(text, STABLE, scheduler.extend, enabled=True)  # type: ignore[arg-type]
    busy = text.threads.submit(begin.wait, TIMEOUT_S)
    for number in range(MAX_RENDERING):
        ahead.turn_ended(f"a/p{number}", BODY, streamed())
    await asyncio.sleep(0)  # each has asked for its first prompt
    turn = text.threads.submit(text.done.append, "turn")
    begin.set()
    assert await asyncio.wrap_future(busy)
    await asyncio.wrap_future(turn)
    await ahead.idle()
    assert text.done == ["turn"] + ["ahead"] * MAX_RENDERING * (len(TAILS) + 1), "the prompts and their comparison"
    assert len(scheduler.sent) == MAX_RENDERING


def test_a_scheduler_that_does_not_answer_does_no_harm() -> None:
    assert len(sent(streamed(), STABLE, error=ControlTimeout("no answer"))) == 1


@pytest.mark.parametrize(
    ("enabled", "method", "key", "watched"),
    [
        (True, "chat", "a/p", True),
        (False, "chat", "a/p", False),
        (True, "completions", "a/p", False),
        (True, "chat", None, False),
    ],
)
def test_only_turns_of_programs_are_watched(enabled: bool, method: str, key: str | None, watched: bool) -> None:
    ahead = RewrittenAhead(Text(), STABLE, Scheduler().extend, enabled=enabled)  # type: ignore[arg-type]
    assert (ahead.watch(method, key) is not None) is watched


@pytest.mark.parametrize(
    ("examined", "may_reason", "watched"),
    [(STABLE, False, False), (STABLE, True, True), (RENDERS_AGAIN, False, True), (RENDERS_AGAIN, True, True)],
)
def test_no_answer_is_collected_where_each_prompt_extends_its_context(
    examined: Examined, may_reason: bool, watched: bool
) -> None:
    ahead = RewrittenAhead(Text(), examined, Scheduler().extend, enabled=True, may_reason=may_reason)  # type: ignore[arg-type]
    assert (ahead.watch("chat", "a/p") is not None) is watched


def test_an_answer_that_began_on_another_replica_is_not_watched() -> None:
    ahead = RewrittenAhead(Text(), STABLE, Scheduler().extend, enabled=True)  # type: ignore[arg-type]
    assert ahead.watch("chat", "a/p", resumed=True) is None
