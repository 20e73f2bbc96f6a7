"""A request to an MCP server that is lost on its way costs its own call, and no other that is in progress."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx2
import mcp_types as types
import pydantic_core
import pytest

from cluster.core.errors import ToolFailed, ToolRefused
from cluster.core.tools import Outcome
from tests.tools.test_mcp import Serve, ask, kind, server
from tests.waiting import WITHIN_S, until
from tools_runtime import mcp_streams
from tools_runtime.host import ToolHost

OpenTools = Callable[..., Awaitable[ToolHost]]


class BreaksOff(httpx2.AsyncByteStream):
    """A body of which no more comes."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"\n"
        raise httpx2.ReadError("broke off")

    async def aclose(self) -> None:
        """Nothing."""


class Losses:
    """What becomes of the requests of a tool or a method, once the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of = ""
        self.outcome: Exception | str | None = None
        """An error, or the media type of an answer that breaks off. None: the requests are sent."""
        self.mismatched = False
        """Whether the next such request is answered with HEADER_MISMATCH, before the outcome applies."""
        self.lost = 0
        send = httpx2.AsyncHTTPTransport.handle_async_request

        async def handle(transport: httpx2.AsyncHTTPTransport, request: httpx2.Request) -> httpx2.Response:
            message = pydantic_core.from_json(await request.aread() or b"{}")
            wanted = self.of in (message.get("method"), message.get("params", {}).get("name"))
            if self.outcome is None or not wanted:
                return await send(transport, request)
            if self.mismatched:
                self.mismatched = False
                error = {"code": types.HEADER_MISMATCH, "message": "headers"}
                return httpx2.Response(200, json={"jsonrpc": "2.0", "id": message["id"], "error": error})
            self.lost += 1
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return httpx2.Response(200, headers={"Content-Type": self.outcome}, stream=BreaksOff())

        monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", handle)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Losses:
    return Losses(monkeypatch)


GONE = "unknown: the MCP server s went away during the call"
CASES: dict[str, tuple[Exception | str, str]] = {
    "no connection": (httpx2.ConnectError("no way"), "error: the MCP server s cannot be reached: no way"),
    "no address": (ToolFailed("no name", transient=True), "error: the MCP server s cannot be reached: no name"),
    "forbidden": (ToolRefused("not public"), "refused: the MCP server s cannot be reached: not public"),
    "compressed": (ToolFailed("compressed"), "error: the MCP server s: compressed"),
    "silent": (httpx2.ReadTimeout(""), GONE),
    "JSON breaks off": ("application/json", GONE),
    "events break off": ("text/event-stream", GONE),
}


@pytest.fixture(params=["handshake", "stateless"])
async def host(request: pytest.FixtureRequest, open_tools: OpenTools, serve: Serve) -> ToolHost:
    _, port = serve("mcp_server.py", "http", *(["stateless"] if request.param == "stateless" else []))
    return await open_tools(server(url=f"http://127.0.0.1:{port}/mcp", protocol=request.param))


@pytest.mark.parametrize(("loss", "text"), CASES.values(), ids=CASES.keys())
async def test_a_lost_call_takes_no_other_with_it(
    host: ToolHost, losses: Losses, tmp_path: Path, loss: Exception | str, text: str
) -> None:
    gate = tmp_path / "gate"
    other = asyncio.create_task(ask(host, "gate", {"file": str(gate)}, id="other"))
    await until((tmp_path / "gate.reached").exists)
    losses.of, losses.outcome = "add", loss
    assert [(await ask(host, "add", {"a": 1, "b": 1})).text for _ in range(2)] == [text] * 2
    losses.outcome = None
    assert (await ask(host, "add", {"a": 1, "b": 1})).text == "2", "the connection is still of use"
    gate.touch()
    assert ((await other).outcome, (await other).text) == (Outcome.OK, "open")
    assert (await ask(host, "add", {"a": 1, "b": 1})).text == "2"


@pytest.mark.parametrize(("loss", "text"), CASES.values(), ids=CASES.keys())
async def test_a_call_that_is_lost_when_it_is_repeated_is_lost_as_any_other(
    host: ToolHost, losses: Losses, loss: Exception | str, text: str
) -> None:
    """It is repeated where the server wants other headers."""
    before = kind(host)._connected
    losses.of, losses.outcome, losses.mismatched = "add", loss, True
    result = await ask(host, "add", {"a": 1, "b": 1})
    assert (result.text, losses.lost) == (text, 1)
    losses.outcome = None
    assert (await ask(host, "add", {"a": 1, "b": 1})).text == "2"
    assert (kind(host)._connected is before) == ("compressed" in text or "not public" in text)


async def test_a_connection_whose_call_was_lost_is_made_again_when_no_call_needs_it(
    host: ToolHost, losses: Losses, tmp_path: Path
) -> None:
    """The server may be another one by now, with other tools."""
    before = kind(host)._connected
    losses.of, losses.outcome = "add", httpx2.ConnectError("no way")
    await ask(host, "add", {"a": 1, "b": 1})
    losses.outcome = None
    assert (await ask(host, "add", {"a": 1, "b": 1})).text == "2"
    assert kind(host)._connected is not before


async def test_a_lost_message_to_the_server_ends_no_call(
    open_tools: OpenTools, serve: Serve, losses: Losses, tmp_path: Path
) -> None:
    """Such as that a call was cancelled."""
    _, port = serve("mcp_server.py", "http")
    host = await open_tools(server(url=f"http://127.0.0.1:{port}/mcp", protocol="handshake"))
    calls = [asyncio.create_task(ask(host, "gate", {"file": str(tmp_path / id)}, id=id)) for id in "ab"]
    await until(lambda: all((tmp_path / f"{id}.reached").exists() for id in "ab"))
    losses.of, losses.outcome = "notifications/cancelled", httpx2.ConnectError("no way")
    assert host.executor.cancel("", "a")
    await until(lambda: losses.lost)
    (tmp_path / "b").touch()
    assert [(await call).outcome for call in calls] == [Outcome.CANCELLED, Outcome.OK]


async def test_a_server_that_does_not_end_its_session_delays_no_end(
    open_tools: OpenTools, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port = serve("mcp_server.py", "http")
    host = await open_tools(server(url=f"http://127.0.0.1:{port}/mcp", protocol="handshake"))
    send, asked = httpx2.AsyncHTTPTransport.handle_async_request, asyncio.Event()

    async def handle(transport: httpx2.AsyncHTTPTransport, request: httpx2.Request) -> httpx2.Response:
        if request.method == "DELETE":
            asked.set()
            await asyncio.Event().wait()
        return await send(transport, request)

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", handle)
    monkeypatch.setattr(mcp_streams, "CLOSE_S", 0.05)
    await asyncio.wait_for(host.aclose(), WITHIN_S)
    assert asked.is_set()
