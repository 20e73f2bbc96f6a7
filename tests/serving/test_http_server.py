"""An ingress's own HTTP server: it shares its port, answers what it has begun, and names each request."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from cluster.http.server import HttpServer
from cluster.proxy.middleware import guarded
from tests.waiting import WITHIN_S

HOST = "127.0.0.1"
MESSAGE_BYTES = 1 << 16


class App:
    """Answers with its name, and waits for `go_on` if the path says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.go_on = asyncio.Event()
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/slow":
            await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
            await self.go_on.wait()
        await send({"type": "http.response.body", "body": self.name.encode()})


@pytest.fixture
def port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
async def server(port: int) -> AsyncIterator[HttpServer]:
    server = HttpServer(App("one"), HOST, port, MESSAGE_BYTES)
    yield server
    await server.aclose()


async def test_two_servers_share_a_port_and_one_goes_on_alone(port: int) -> None:
    apps = [App("one"), App("two")]
    servers = [HttpServer(app, HOST, port, MESSAGE_BYTES) for app in apps]

    async def names() -> set[str]:
        found = set()
        for _ in range(60):  # each on a connection of its own, which the kernel gives to one of them
            async with httpx.AsyncClient(verify=False) as client:  # which reads no certificates
                found.add((await client.get(f"http://{HOST}:{port}/")).text)
        return found

    assert await names() == {"one", "two"}
    await servers[0].aclose()
    assert await names() == {"two"}
    await servers[1].aclose()


async def test_a_server_that_stops_ends_what_it_has_begun(port: int) -> None:
    app = App("one")
    server = HttpServer(app, HOST, port, MESSAGE_BYTES)
    async with httpx.AsyncClient() as client, client.stream("GET", f"http://{HOST}:{port}/slow") as answer:
        pieces = answer.aiter_text()
        assert await anext(pieces) == "begun "
        stopping = asyncio.create_task(server.aclose())
        await asyncio.sleep(0.3)
        assert not stopping.done()
        app.go_on.set()
        assert "".join([piece async for piece in pieces]) == "one"
    async with asyncio.timeout(WITHIN_S):
        await stopping


async def test_a_server_that_cannot_listen_says_so(port: int) -> None:
    with socket.create_server((HOST, port)), pytest.raises(OSError, match="in use"):
        HttpServer(App("one"), HOST, port, MESSAGE_BYTES)


async def test_a_server_that_has_ended_is_reported(server: HttpServer) -> None:
    assert server.failed == ()
    server._server.should_exit = True
    await server._task
    assert server.failed == ("HTTP server",)


async def test_a_client_that_leaves_ends_the_work(port: int) -> None:
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = HttpServer(guarded(app, 8), HOST, port, MESSAGE_BYTES)
    async with httpx.AsyncClient() as client, client.stream("POST", f"http://{HOST}:{port}/", content=b"x") as answer:
        assert await anext(answer.aiter_text()) == "begun"
    async with asyncio.timeout(WITHIN_S):
        await ended.wait()
        await server.aclose()


async def test_work_that_ends_by_itself_is_not_cancelled(port: int) -> None:
    left: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert await receive() == {"type": "http.request", "body": b"x", "more_body": False}
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})
        left.append((await receive())["type"])  # what an application sees that still listens
        await asyncio.sleep(0.01)
        left.append("work after the response")

    server = HttpServer(guarded(app, 8), HOST, port, MESSAGE_BYTES)
    async with httpx.AsyncClient() as client:
        for _ in range(3):
            assert (await client.post(f"http://{HOST}:{port}/", content=b"x")).text == "done"
    await server.aclose()
    assert sorted(left, key=str) == ["http.disconnect"] * 3 + ["work after the response"] * 3


@pytest.mark.parametrize(("sent", "kept"), [("mine-1", True), ("", False), ("x" * 4000, False)])
async def test_each_request_has_an_id_which_the_response_names(sent: str, kept: bool) -> None:
    app = App("one")
    transport = httpx.ASGITransport(guarded(app, 8))
    async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
        answer = await client.get("/", headers={"x-request-id": sent} if sent else {})
    [own] = answer.headers.get_list("x-request-id")
    assert own and (own == sent) is kept
    ids: list[Any] = [value for name, value in app.scopes[0]["headers"] if name == b"x-request-id"]
    assert ids == [own.encode()]
