"""Raw bytes to a real uvicorn that speaks our wire: no HTTP, headers without an end, answers that have begun."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
import uvicorn.config

from cluster.proxy import http_protocol as proxy_http_protocol


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says hello; under /stream, in two parts, the second after the request's body."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/stream":
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.body", "body": scope["type"].encode()})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    proxy_http_protocol.install()
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, timeout_keep_alive=300))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def answer_to(port: int, *parts: bytes) -> bytes:
    """Everything that comes back until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answer


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower() and b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
        b"GET\r\n\r\n",
        b"NONSENSE / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: a\x00b\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_told_so_in_json(port: int, junk: bytes) -> None:
    status, error = error_of(await answer_to(port, junk))
    assert (status, error["code"], error["type"]) == (400, "invalid_http", "invalid_request_error")


async def test_headers_without_an_end_are_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_http_protocol, "MAX_HEAD_BYTES", 100_000)
    status, _ = error_of(await answer_to(port, b"GET / HTTP/1.1\r\n", b"x: " + b"a" * 120_000))
    assert status == 431


async def test_headers_that_come_slowly_are_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await reader.readuntil(b"http\r\n0\r\n\r\n")
    monkeypatch.setattr(proxy_http_protocol, "HEADERS_WITHIN_S", 0.05)
    writer.write(b"\r\n")
    assert await asyncio.wait_for(reader.read(), 20) == b"", "an empty line is no request"
    writer.close()
    assert await answer_to(port) == b"", "a connection on which nothing comes"
    late = socket.create_connection(("127.0.0.1", port))
    late.sendall(b"GET / HTTP/1.1\r\nx: ")  # at once: these bytes are there before the server sees the connection
    reader, writer = await asyncio.open_connection(sock=late)
    assert error_of(await asyncio.wait_for(reader.read(), 20))[0] == 408
    writer.close()


async def test_an_answer_that_has_begun_is_not_written_into(port: int) -> None:
    head = b"POST /stream HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    begun = await reader.readuntil(b"first")
    writer.write(b"this is no chunk\r\n")
    rest = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert begun.startswith(b"HTTP/1.1 200") and b"HTTP/1.1" not in rest


async def test_there_are_no_websockets(port: int) -> None:
    upgrade = (
        b"connection: upgrade, close\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AA==\r\n"
    )
    told = await answer_to(port, b"GET / HTTP/1.1\r\nhost: a\r\n" + upgrade + b"\r\n")
    assert told.startswith(b"HTTP/1.1 200") and b"http\r\n" in told
