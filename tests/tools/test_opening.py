"""How the configured tools of a process are opened: at the same time, and without delaying a call of another tool."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.config.tools import ToolsConfig
from cluster.core.tools import Outcome, ToolCall
from tests.tools.scripted import ManualTimers
from tests.waiting import WITHIN_S, until
from tools_runtime import actor_process
from tools_runtime import host as hosting
from tools_runtime.actor_process import ToolActor
from tools_runtime.host import ToolHost

PYTHON = {"kind": "python", "entry": "tests.tools.actor_tools:wait"}
WAIT = ToolCall("a", "wait", {"seconds": 0})


class Silent:
    """A server that accepts connections, and says nothing until the client ends them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connected = 0


@pytest.fixture
async def silent() -> AsyncIterator[Silent]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.connected += 1
        await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        made = Silent(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp")
        yield made


def defined(silent: Silent) -> ToolsConfig:
    """Three servers that cannot be reached within the test's time, and then a function."""
    server = {"kind": "mcp", "url": silent.url, "private_addresses": True, "connect_timeout_s": 600}
    tools = {**{f"s{number}": server for number in range(3)}, "wait": PYTHON}
    return ToolsConfig.model_validate({"defined": tools, "unattended_s": 1e6})


@pytest.fixture
async def host(silent: Silent) -> AsyncIterator[ToolHost]:
    host = ToolHost(defined(silent))
    yield host
    await asyncio.wait_for(host.aclose(), WITHIN_S)
    host.executor.check_integrity()


async def test_no_tool_waits_for_another_one_to_be_opened(host: ToolHost, silent: Silent) -> None:
    opening = host.begin()
    assert host.begin() is opening
    await until(lambda: silent.connected >= 3)
    assert (await asyncio.wait_for(host.run(WAIT), WITHIN_S)).outcome is Outcome.OK
    assert not opening.done()


async def test_a_listing_waits_for_the_tools_for_a_while_only(
    host: ToolHost, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "OPENING_S", 0.05)
    monkeypatch.setattr(hosting, "REFRESH_S", 0.05)
    opening = host.begin()
    assert [offer.name for offer in await asyncio.wait_for(host.offers(), WITHIN_S)] == ["wait"]
    assert not opening.done()


async def test_a_listing_waits_for_a_server_that_hangs_until_a_time_from_when_it_was_called(
    silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listings that come later do not begin to wait anew."""
    monkeypatch.setattr(hosting, "REFRESH_S", 1e6)
    clock = ManualTimers()
    host = ToolHost(defined(silent), clock)
    first = asyncio.create_task(host.offers())
    await until(lambda: silent.connected >= 3)
    for waited_s in (1e6 - 0.05, 10.0):
        clock.advance(waited_s)
        assert [offer.name for offer in await asyncio.wait_for(host.offers(), WITHIN_S)] == ["wait"]
    assert not first.done()
    first.cancel()
    await asyncio.wait_for(host.aclose(), WITHIN_S)


async def test_tools_that_could_not_be_opened_are_opened_again(host: ToolHost, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    async def fails_once() -> None:
        opened.append(0)
        if len(opened) == 1:
            raise OSError("too many open files")

    monkeypatch.setattr(host._tools, "open", fails_once)
    with pytest.raises(OSError, match="too many"):
        await host.open()
    await host.open()
    await host.open()
    assert len(opened) == 2


async def test_an_actor_runs_calls_while_its_tools_are_opened(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))
    monkeypatch.setattr(actor_process, "configure_from_environment", lambda component: None)
    actor: Any = ToolActor(defined(silent).model_dump_json())
    starting = asyncio.create_task(actor.ready())
    await until(lambda: silent.connected >= 3)
    result = await asyncio.wait_for(actor.run(WAIT, None, False, "1"), WITHIN_S)
    assert result.outcome is Outcome.OK
    assert await asyncio.wait_for(actor.ready(opened=False), WITHIN_S)
    assert not starting.done(), "a pool that begins waits until the tools can be listed"
    starting.cancel()
    await asyncio.wait_for(actor._host.aclose(), WITHIN_S)
