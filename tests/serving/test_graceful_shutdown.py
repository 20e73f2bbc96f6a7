"""Requests in flight when an ingress shuts down: they may end, and those that do not end in time get an error."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from cluster.http.server import HttpServer
from cluster.local.ports import free_ports
from cluster.proxy.graceful_shutdown import GracefulShutdown
from tests.waiting import WITHIN_S, until

HOST = "127.0.0.1"
SSE = [(b"content-type", b"text/event-stream")]
EVENT = b'event: response.output_text.delta\ndata: {"sequence_number":7}\n\n'


class App:
    """A stream whose end waits for `go_on`. `/whole` answers in one piece."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.begun = 0
        self.cancelled = False
        self.told = 0
        """How often it was told that requests will be ended."""

    def before_end(self) -> None:
        self.told += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = scope["path"] == "/whole"
        self.begun += 1
        if not is_whole:
            await send({"type": "http.response.start", "status": 200, "headers": SSE})
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if is_whole:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@pytest.fixture
def free_port() -> int:
    return free_ports(1, HOST)[0]


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def requests(app: App) -> GracefulShutdown:
    return GracefulShutdown(app, app.before_end)


@pytest.fixture
async def client(app: App, requests: GracefulShutdown, free_port: int) -> AsyncIterator[httpx.AsyncClient]:
    server = HttpServer(requests, HOST, free_port, 1 << 16)
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{free_port}", timeout=WITHIN_S) as client:
        yield client
    app.go_on.set()
    await server.aclose()


async def begin(app: App, client: httpx.AsyncClient, path: str) -> asyncio.Task[httpx.Response]:
    """Send a request that the application has begun to answer."""
    before, asked = app.begun, asyncio.create_task(client.get(path))
    await until(lambda: app.begun > before)
    assert not asked.done()
    return asked


async def test_what_ends_in_time_ends_as_always(
    app: App, requests: GracefulShutdown, client: httpx.AsyncClient
) -> None:
    begun = await begin(app, client, "/v1/chat/completions")
    stopping = asyncio.create_task(requests.shut_down(WITHIN_S))
    await asyncio.sleep(0.1)
    assert not stopping.done() and not app.told
    refused = await client.get("/v1/chat/completions")
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    assert refused.json()["error"]["code"] == "shutting_down" and int(refused.headers["retry-after"]) > 0
    app.go_on.set()
    assert await stopping == 0
    assert (await begun).content == EVENT + b"data: [DONE]\n\n"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_stream_that_takes_longer_ends_with_an_error_event(
    app: App, requests: GracefulShutdown, client: httpx.AsyncClient, path: str
) -> None:
    begun = await begin(app, client, path)
    assert await requests.shut_down(0.1) == 1
    events = (await begun).text.removesuffix("data: [DONE]\n\n").strip().split("\n\n")
    last = json.loads(events[-1].partition("data: ")[2])
    assert len(events) == 2 and "the server shuts down" in json.dumps(last)
    if path == "/v1/chat/completions":
        assert (await begun).text.endswith("\n\ndata: [DONE]\n\n")
    if path == "/v1/responses":
        assert last["sequence_number"] == 8
    assert (app.told, app.cancelled) == (1, False)


async def test_a_request_without_an_answer_gets_503(
    app: App, requests: GracefulShutdown, client: httpx.AsyncClient
) -> None:
    begun = await begin(app, client, "/whole")
    assert await requests.shut_down(0.1) == 1
    answer = await begun
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert int(answer.headers["retry-after"]) > 0


async def test_the_port_is_closed_and_open_connections_stay(app: App, free_port: int) -> None:
    requests = GracefulShutdown(app, app.before_end)
    server = HttpServer(requests, HOST, free_port, 1 << 16)
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{free_port}") as client:
        begun = await begin(app, client, "/v1/chat/completions")
        server.stop_accepting()
        async with httpx.AsyncClient() as other:
            with pytest.raises(httpx.ConnectError):
                await other.get(f"http://{HOST}:{free_port}/whole")
        app.go_on.set()
        assert (await begun).content.endswith(b"[DONE]\n\n")
    assert server.failed == ()
    await server.aclose()
