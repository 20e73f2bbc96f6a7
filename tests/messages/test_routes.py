"""The routes over turns that the test writes: errors before and within a stream, pings, and what is measured."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.api.anthropic.answer import MessageFold
from cluster.core.errors import BadRequest, HttpError, Overloaded, UpstreamFailed
from cluster.core.slo import Outcome
from cluster.core.turn import PromptMode, TurnBegan, TurnDelta, TurnDone, pack_ids
from cluster.http import messages
from cluster.http.messages import _Answer

BEGAN = TurnBegan(PromptMode.FIRST, pack_ids(range(4)))
HI = TurnDelta(pack_ids([1, 2]), content="Hi")
DONE = TurnDone("stop", 4, 0, 2, alone_s=0.25)


class Measured:
    """Records how a turn ended, once."""

    def __init__(self) -> None:
        self.ends: list[Any] = []
        self.tokens = 0
        self.alone_s: float | None = None

    def received(self, tokens: int) -> None:
        self.tokens = tokens

    def takes_alone(self, alone_s: float | None) -> None:
        self.alone_s = alone_s

    def over(self, outcome: Outcome | None) -> None:
        self.ends = self.ends or [outcome]

    def gone(self) -> None:
        self.ends = self.ends or ["gone"]


class Turn:
    """A turn of these pieces. An exception among them is raised, an event is waited for."""

    def __init__(self, *pieces: Any) -> None:
        self._pieces = pieces
        self.closed = False

    async def run(self) -> AsyncIterator[Any]:
        try:
            for piece in self._pieces:
                if isinstance(piece, asyncio.Event):
                    await piece.wait()
                elif isinstance(piece, RuntimeError):
                    raise piece
                else:
                    yield piece
        finally:
            self.closed = True


def as_error(error: BaseException) -> HttpError:
    if isinstance(error, TimeoutError):
        return HttpError("late", status=504)
    return error if isinstance(error, HttpError) else HttpError("internal error")


def answer_of(turn: Turn, within_s: float = 60.0) -> tuple[_Answer, Measured]:
    measured = Measured()
    deadline_s = asyncio.get_running_loop().time() + within_s
    fold = MessageFold("msg_1", "tiny")
    return _Answer(turn.run(), fold, measured, as_error, deadline_s), measured  # type: ignore[arg-type]


async def events_of(answer: _Answer) -> list[dict[str, Any]]:
    raw = [piece async for piece in answer.events("r1")]
    return [json.loads(piece.partition(b"data: ")[2]) for piece in raw]


@pytest.mark.parametrize(
    ("pieces", "last", "outcome"),
    [
        ([BEGAN, HI, DONE], "message_stop", Outcome.OK),
        ([BEGAN, HI, UpstreamFailed("died")], "error", Outcome.FAILED),
        ([BEGAN, HI, RuntimeError("bug")], "error", Outcome.FAILED),
        ([BEGAN, HI], "error", Outcome.FAILED),
    ],
)
async def test_a_stream_ends_with_its_end_or_an_error(pieces: list[Any], last: str, outcome: Outcome) -> None:
    turn = Turn(*pieces)
    answer, measured = answer_of(turn)
    events = await events_of(answer)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", last)
    assert (measured.ends, measured.tokens, turn.closed) == ([outcome], 2, True)
    assert measured.alone_s == (0.25 if outcome is Outcome.OK else None)


@pytest.mark.parametrize(
    ("error", "outcome"), [(BadRequest("no"), None), (Overloaded("full"), Outcome.REJECTED), (None, Outcome.FAILED)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_event_is_the_requests_own(error: Any, outcome: Any, stream: bool) -> None:
    answer, measured = answer_of(Turn(*([error] if error is not None else [])))
    with pytest.raises(type(error) if error is not None else UpstreamFailed):
        await (events_of(answer) if stream else answer.whole())
    assert measured.ends == [outcome]


async def test_a_silent_stream_gets_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PING_S", 0.01)
    ready = asyncio.Event()
    answer, _ = answer_of(Turn(BEGAN, ready, HI, DONE))
    kinds = []
    async for piece in answer.events("r1"):
        kinds.append(json.loads(piece.partition(b"data: ")[2])["type"])
        if kinds.count("ping") == 2:
            ready.set()
    assert kinds[:3] == ["message_start", "ping", "ping"]
    assert kinds[-1] == "message_stop"


async def test_a_stream_that_is_closed_stops_its_turn() -> None:
    turn = Turn(BEGAN, asyncio.Event())
    answer, measured = answer_of(turn)
    events = answer.events("r1")
    await anext(events)
    await events.aclose()  # type: ignore[attr-defined]
    assert (turn.closed, measured.ends) == (True, ["gone"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_takes_too_long_is_stopped(stream: bool) -> None:
    turn = Turn(asyncio.Event())
    answer, measured = answer_of(turn, within_s=0.01)
    with pytest.raises(TimeoutError):
        await (events_of(answer) if stream else answer.whole())
    assert turn.closed
    assert measured.ends != [Outcome.OK]
