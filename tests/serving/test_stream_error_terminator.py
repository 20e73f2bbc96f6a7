"""An answer that Ray's proxy would break off is ended in words. The application here is what is left of an ingress."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.proxy.middleware import StreamErrorTerminator

SSE = [(b"Content-Type", b"text/event-stream; charset=utf-8")]
PLAIN = [(b"content-type", b"application/json")]


async def answer(
    path: str,
    headers: Sequence[tuple[bytes, bytes]] | None,
    *bodies: bytes,
    over: bool = False,
    leaves: bool = False,
) -> Any:
    """What a client is sent when the application said this, and then no more. Perhaps because the client leaves."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if headers is not None:
            await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        for number, body in enumerate(bodies, 1):
            more = not (over and number == len(bodies))
            await send({"type": "http.response.body", "body": body, "more_body": more})
        if leaves:
            await receive()

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    read: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        return read.pop(0) if read else {"type": "http.disconnect"}

    await StreamErrorTerminator(app)({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
    return sent


def text(sent: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


TEXT = b'data: {"choices":[]}\n\n'
DONE = b"data: [DONE]\n\n"
DELTA = b'event: response.output_text.delta\ndata: {"sequence_number":7}\n\n'
COMPLETED = b'event: response.completed\ndata: {"sequence_number":8}\n\n'


async def test_a_stream_that_broke_off_ends_in_an_error_event() -> None:
    sent = await answer("/v1/completions", SSE, TEXT, TEXT)
    *events, last = text(sent).decode().removesuffix("\n\n").split("\n\n")
    assert events[:2] == [TEXT.decode().strip()] * 2 and last == "data: [DONE]"
    assert json.loads(events[2].removeprefix("data: "))["error"]["type"] == "upstream_error"
    assert sent[-1]["more_body"] is False


async def test_a_stream_of_a_response_ends_in_an_error_event_with_the_next_number() -> None:
    sent = await answer("/v1/responses", SSE, DELTA + DELTA)
    kind, data = text(sent).decode().split("\n\n")[2].split("\n")
    told = json.loads(data.removeprefix("data: "))
    assert (kind, told["type"], told["sequence_number"]) == ("event: error", "error", 8)


@pytest.mark.parametrize(
    ("path", "events"), [("/v1/chat/completions", TEXT + DONE), ("/v1/responses/r?stream=true", DELTA + COMPLETED)]
)
@pytest.mark.parametrize("over", [True, False])
async def test_nothing_comes_after_the_last_event(path: str, events: bytes, over: bool) -> None:
    sent = await answer(path, SSE, events, over=over)
    assert text(sent) == events and sent[-1]["more_body"] is False


@pytest.mark.parametrize("headers", [SSE, PLAIN, None], ids=["stream", "plain", "no answer"])
async def test_a_client_that_leaves_is_no_dead_ingress(
    headers: list[tuple[bytes, bytes]] | None, caplog: pytest.LogCaptureFixture
) -> None:
    bodies = [] if headers is None else [TEXT]
    sent = await answer("/v1/chat/completions", headers, *bodies, leaves=True)
    assert text(sent) == b"".join(bodies) and "died" not in caplog.text


async def test_a_request_without_an_answer_gets_one(caplog: pytest.LogCaptureFixture) -> None:
    sent = await answer("/v1/completions", None)
    assert "POST /v1/completions: its ingress died" in caplog.text
    headers = httpx.Headers(sent[0]["headers"])
    assert (sent[0]["status"], headers["retry-after"]) == (502, "1")
    assert json.loads(text(sent))["error"]["message"]


async def test_a_body_with_a_length_is_left_broken() -> None:
    sent = await answer("/v1/models", PLAIN, b'{"half":')
    assert text(sent) == b'{"half":' and sent[-1]["more_body"] is True


@pytest.mark.parametrize("data", [b"no JSON", b"{}", b"[]", b'{"sequence_number":"x"}', b'{"sequence_number":nul'])
async def test_a_response_whose_last_event_has_no_number_ends_in_an_error_event_too(data: bytes) -> None:
    sent = await answer("/v1/responses", SSE, b"event: other\ndata: " + data + b"\n\n")
    assert text(sent).decode().split("\n\n")[1].startswith("event: error\ndata: ")
    assert sent[-1]["more_body"] is False
