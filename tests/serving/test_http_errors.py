"""Every exception becomes an OpenAI error body, and a stream never ends silently."""

import asyncio
import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from cluster.api import sse
from cluster.api.openai import MAX_MESSAGE_LENGTH, SSE_DONE, ErrorBoundary, error_body
from cluster.api.sse import RelayedStream, first_answer
from cluster.core.errors import BadRequest, HttpError, Overloaded, UpstreamFailed
from cluster.http import requests


def as_error(exception: BaseException) -> HttpError:
    return exception if isinstance(exception, HttpError) else HttpError("internal error")


def client_of(handler):
    limits = {"error_map": as_error, "max_header_bytes": 1000, "max_in_flight": 1, "limited_paths": {"/work"}}
    boundary = Middleware(ErrorBoundary, **limits)
    app = Starlette(routes=[Route("/work", handler), Route("/health", handler)], middleware=[boundary])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")


def test_the_body_is_openais() -> None:
    error = BadRequest("no", param="messages.0.role", code="bad")
    told = {"message": "no", "type": "invalid_request_error", "param": "messages.0.role", "code": "bad"}
    assert error_body(error) == {"error": told}


def test_the_code_falls_back_to_the_status_and_the_message_is_bounded() -> None:
    told = error_body(Overloaded("x" * 10_000))["error"]
    assert told["code"] == 503
    assert len(told["message"]) == MAX_MESSAGE_LENGTH


async def test_an_unforeseen_exception_is_a_500_without_internals() -> None:
    async def handler(_):
        raise RuntimeError("secret")

    async with client_of(handler) as client:
        answer = await client.get("/work")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["message"] == "internal error"


async def test_headers_above_the_limit_are_431() -> None:
    async def handler(_):
        return PlainTextResponse("ok")

    async with client_of(handler) as client:
        answer = await client.get("/work", headers={"x-long": "a" * 1000})
    assert answer.status_code == 431
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_above_the_limit_in_flight_503_with_retry_after_and_probes_still_answer() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def body():
        entered.set()
        yield b"a"
        await leave.wait()

    async def handler(request):
        return StreamingResponse(body()) if request.url.path == "/work" else PlainTextResponse("ok")

    async with client_of(handler) as client:
        first = asyncio.create_task(client.get("/work"))
        await entered.wait()
        refused, probe = await client.get("/work"), await client.get("/health")
        leave.set()
        assert (await first).status_code == 200
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["type"] == "overloaded_error"
        assert probe.status_code == 200
        assert (await client.get("/work")).status_code == 200


class Pieces:
    """What a replica answers; an exception among the pieces is raised."""

    def __init__(self, *pieces) -> None:
        self._pieces = list(pieces)
        self.cancelled = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._pieces:
            raise StopAsyncIteration
        piece = self._pieces.pop(0)
        if isinstance(piece, asyncio.Event):
            await piece.wait()
        if isinstance(piece, Exception):
            raise piece
        return piece

    def cancel(self) -> None:
        self.cancelled = True


async def told(first: bytes, rest: Pieces, *, within_s: float = 60.0):
    """The bytes that a client gets, and the error that the stream reported."""
    sent, breaks = [], []
    deadline_s = asyncio.get_running_loop().time() + within_s
    arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    arrived.set_result(first)
    stream = RelayedStream(
        arrived, rest, deadline_s=deadline_s, error_map=as_error, on_break=lambda error, _: breaks.append(error)
    )

    async def send(message) -> None:
        sent.append(message)

    await stream({"type": "http"}, None, send)
    assert sent[0]["status"] == 200
    assert [m["more_body"] for m in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert rest.cancelled
    return b"".join(m["body"] for m in sent[1:]), breaks


async def test_a_complete_stream_is_passed_on_as_it_is() -> None:
    body, breaks = await told(b"data: 1\n\n", Pieces(b"data: 2\n\n" + SSE_DONE))
    assert body == b"data: 1\n\ndata: 2\n\n" + SSE_DONE
    assert breaks == []


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (Pieces(b"data: 2\n\n"), "the replica ended before the stream was complete"),
        (Pieces(b"data: 2\n\n", UpstreamFailed("gone")), "gone"),
        (Pieces(b"data: 2\n\n", RuntimeError("secret")), "internal error"),
    ],
)
async def test_a_broken_stream_ends_with_an_error_event_and_done(rest, message) -> None:
    body, breaks = await told(b"data: 1\n\n", rest)
    *_, event, done, end = body.split(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == message
    assert (done, end) == (b"data: [DONE]", b"")
    assert [error.message for error in breaks] == [message]


async def test_a_stream_past_its_deadline_ends_with_an_error_event() -> None:
    body, breaks = await told(b"data: 1\n\n", Pieces(asyncio.Event()), within_s=0.0)
    assert body.endswith(b"}\n\n" + SSE_DONE)
    assert len(breaks) == 1


async def test_a_call_without_an_answer_is_an_upstream_failure() -> None:
    with pytest.raises(UpstreamFailed):
        await first_answer(Pieces(), asyncio.get_running_loop().time() + 60)


async def test_a_call_that_is_rejected_is_cancelled() -> None:
    answers = Pieces(UpstreamFailed("no"))
    with pytest.raises(UpstreamFailed):
        await first_answer(answers, asyncio.get_running_loop().time() + 60)
    assert answers.cancelled


class Rejected(Pieces):
    """A call whose rejection is a piece."""

    async def __anext__(self) -> object:
        return UpstreamFailed("no")


async def test_a_call_whose_piece_is_a_rejection_is_cancelled() -> None:
    answers = Rejected()
    with pytest.raises(UpstreamFailed):
        await first_answer(answers, asyncio.get_running_loop().time() + 60)
    assert answers.cancelled


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_call_whose_client_leaves_as_its_first_piece_comes_is_cancelled(is_stream: bool) -> None:
    comes = asyncio.Event()
    answers = Leaving(comes)
    task = asyncio.create_task(requests.answered(answers, 60.0, as_error, is_stream=is_stream))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answers.client = task
    comes.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answers.cancelled


class Leaving(Pieces):
    """A call whose client leaves in the moment of its first piece."""

    client: asyncio.Task[object]

    async def __anext__(self) -> object:
        [comes] = self._pieces
        await comes.wait()
        asyncio.get_running_loop().call_soon(self.client.cancel)
        return b'{"id": 1}'


async def test_a_call_that_is_not_answered_in_time_is_cancelled() -> None:
    answers = Pieces(asyncio.Event())
    with pytest.raises(TimeoutError):
        await first_answer(answers, asyncio.get_running_loop().time())
    assert answers.cancelled


# --- streams that are silent for a while ------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "COMMENT_S", 0.02)
    monkeypatch.setattr(requests, "COMMENT_S", 0.02)
    monkeypatch.setattr(sse, "LOOK_S", 0.01)


async def received(response, until_comments: int, go: asyncio.Event) -> list[bytes]:
    """The parts of a body. What is awaited comes once there have been so many comments."""
    parts = []

    async def send(message) -> None:
        if body := message.get("body"):
            parts.append(body)
            if parts.count(sse.COMMENT) >= until_comments:
                go.set()

    async def receive():
        await asyncio.Event().wait()

    await response({"type": "http"}, receive, send)
    return parts


@pytest.mark.usefixtures("impatient")
async def test_an_idle_stream_gets_comments_between_its_events() -> None:
    go = asyncio.Event()

    async def events():
        yield b"data: 1\n\n"
        await go.wait()
        yield b"data: 2\n\n"

    parts = await received(sse.EventStream(events()), 2, go)
    assert [part for part in parts if part != sse.COMMENT] == [b"data: 1\n\n", b"data: 2\n\n"]
    assert parts[0] != sse.COMMENT != parts[-1]


@pytest.mark.usefixtures("impatient")
async def test_a_turn_that_waits_begins_its_stream_and_a_late_rejection_is_its_last_event() -> None:
    go = asyncio.Event()

    class Waiting(Pieces):
        async def __anext__(self):
            await go.wait()
            return BadRequest("too late")

    response = await requests.answered(Waiting(), 60.0, as_error, is_stream=True)
    *comments, end = await received(response, 1, go)
    assert set(comments) == {sse.COMMENT}
    assert json.loads(end.split(b"\n\n")[0].removeprefix(b"data: "))["error"]["message"] == "too late"
    assert end.endswith(SSE_DONE)


async def test_a_rejection_that_comes_soon_is_a_status() -> None:
    with pytest.raises(BadRequest, match="at once"):
        await requests.answered(Pieces(BadRequest("at once")), 60.0, as_error, is_stream=True)
