"""The wire: what is said arrives, late, not at all, or nobody listens."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.faults.proxy import Wire

SOON_S = 0.3


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        with Wire(server.sockets[0].getsockname()[1]) as made:
            yield made


async def test_it_passes_slows_holds_back_and_cuts(wire: Wire) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)

    async def said(words: bytes) -> bytes:
        writer.write(words)
        return await reader.readexactly(len(words))

    assert await said(b"one") == b"one"
    with wire.slow(2 * SOON_S):
        late = asyncio.create_task(said(b"two"))
        assert not (await asyncio.wait([late], timeout=SOON_S))[0]
        assert await late == b"two"
    with wire.partitioned():
        late = asyncio.create_task(said(b"two"))
        assert not (await asyncio.wait([late], timeout=SOON_S))[0]
    assert await late == b"two"
    with wire.cut():
        assert await reader.read(1) == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", wire.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
    assert await said(b"three") == b"three"
    writer.close()
