"""What an HTTP tool cannot be led to: every spelling of an address of ours, redirects there, a name that changes.

What the parts do on their own: tests/tools/test_http_tools.py. Here everything that is real, up to the socket.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from cluster.config.tools import HttpTool, ToolsConfig
from cluster.core.errors import ToolError, ToolRefused
from cluster.core.tools import Outcome, ToolCall
from tools_runtime.addresses import Resolver
from tools_runtime.host import ToolHost
from tools_runtime.kind import Invocation
from tools_runtime.kinds.http import HttpKind

FAULT = "SSRF by an HTTP tool"
SPELLINGS = {
    "decimal": "2130706433",
    "octal": "0177.0.0.1",
    "hexadecimal": "0x7f000001",
    "short": "127.1",
    "zero": "0",
    "IPv6": "[::1]",
    "IPv6-mapped": "[::ffff:127.0.0.1]",
    "IPv6-compatible": "[::127.0.0.1]",
    "NAT64": "[64:ff9b::7f00:1]",
    "6to4": "[2002:7f00:1::]",
    "a name": "localhost",
    "full-width digits": "\uff11\uff12\uff17.0.0.1",
    "metadata": "169.254.169.254",
    "metadata, IPv6": "[fd00:ec2::254]",
}


class Site:
    """Counts who connects; answers each with a redirect to where it is told."""

    def __init__(self) -> None:
        self.connections = 0
        self.location = "/"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % self.location.encode())
        await writer.drain()
        writer.close()


@pytest.fixture
async def site() -> AsyncIterator[tuple[Site, int]]:
    site = Site()
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0)
    yield site, server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def test_every_spelling_of_an_address_of_ours(site: tuple[Site, int], promised: Any) -> None:
    there, port = site
    tools = {
        f"t{number}": {"kind": "http", "url": f"http://{host}:{port}/"}
        for number, host in enumerate(SPELLINGS.values())
    }
    host = ToolHost(ToolsConfig.model_validate({"defined": tools}))
    await host.open()
    ends = [(await host.run(ToolCall("a", name))).outcome for name in tools]
    await host.aclose()
    passed = [name for name, end in zip(SPELLINGS, ends, strict=True) if end not in (Outcome.REFUSED, Outcome.ERROR)]
    assert not passed and ends.count(Outcome.REFUSED) > len(ends) - 3, dict(zip(SPELLINGS, ends, strict=True))
    promised(FAULT, f"spellings let through, of {len(SPELLINGS)}", len(passed), exactly=0)
    promised(FAULT, "connections by a spelling", there.connections, exactly=0)


class OnceTrusted(Resolver):
    """DNS in which `start.test` is this machine, as if that were public."""

    async def public_address(self, host: str, port: int) -> str:
        return "127.0.0.1" if host == "start.test" else await super().public_address(host, port)


async def test_redirects_to_addresses_of_ours(site: tuple[Site, int], promised: Any) -> None:
    there, port = site
    config = HttpTool.model_validate({"kind": "http", "url": f"http://start.test:{port}/"})
    kind = HttpKind("t", config, OnceTrusted())
    refused = 0
    for host in SPELLINGS.values():
        there.location = f"http://{host}:{port}/secret"
        try:
            await kind.run(Invocation("t", {}, 1000))
        except ToolError:
            refused += 1
    await kind.aclose()
    followed = there.connections - len(SPELLINGS)
    promised(FAULT, "redirects that did not end in a refusal", len(SPELLINGS) - refused, exactly=0)
    promised(FAULT, "connections by a redirect", followed, exactly=0)


async def test_a_name_that_changes_after_it_was_checked(
    site: tuple[Site, int], monkeypatch: pytest.MonkeyPatch, promised: Any
) -> None:
    """The first look-up tells a public address, every later one this machine's: what was checked is connected to."""
    there, port = site
    real, asked, connected = socket.getaddrinfo, 0, []

    def rebinding(host: Any, *rest: Any, **said: Any) -> Any:
        nonlocal asked
        name = host.decode() if isinstance(host, bytes) else host
        if name != "rebind.test":
            connected.append(name)
            return real(host, *rest, **said)
        asked += 1
        address = "203.0.114.1" if asked == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    kind = HttpKind("t", HttpTool.model_validate({"kind": "http", "url": f"http://rebind.test:{port}/"}))
    with suppress(ToolError, TimeoutError):
        async with asyncio.timeout(1.0):
            await kind.run(Invocation("t", {}, 1000))
    await kind.aclose()
    assert asked == 1, "looked up once"
    promised(FAULT, "connections after a DNS rebind", there.connections, exactly=0)
    again = HttpKind("t", HttpTool.model_validate({"kind": "http", "url": f"http://rebind.test:{port}/"}))
    with pytest.raises(ToolRefused, match="not a public address"):
        await again.run(Invocation("t", {}, 1000))
    await again.aclose()
