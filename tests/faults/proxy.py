"""A wire to a TCP server that can be slow, silent or cut: an asyncio proxy in a thread of its own."""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Self

import psutil

CHUNK_BYTES = 1 << 16
ANSWERED_WITHIN_S = 10.0
DIALS = 50
ACCEPTED_WITHIN_S = 0.5
POLL_S = 0.02


class Wire:
    """Passes bytes between those who connect to `port` and a server, until told otherwise.

    Args:
        port: the server's, on the loopback.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._delay_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        """Where it listens."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWERED_WITHIN_S)
        self._loop.close()

    @contextmanager
    def slow(self, delay_s: float) -> Iterator[None]:
        """Inside, whatever is said in either direction arrives so much later."""
        self._delay_s = delay_s / 2
        try:
            yield
        finally:
            self._delay_s = 0.0

    @contextmanager
    def partitioned(self) -> Iterator[None]:
        """Inside, nothing arrives, and nobody is told; afterwards what was said before does, as TCP sends it again."""
        self._call(self._set(self._passes.clear))
        try:
            yield
        finally:
            self._call(self._set(self._passes.set))

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Inside, nobody is connected, and nobody can be."""
        self._call(self._close())
        try:
            yield
        finally:
            self._call(self._open())

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        done: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        done.result(ANSWERED_WITHIN_S)

    async def _set(self, change: Any) -> None:
        change()

    async def _open(self) -> None:
        if not self.port:
            self._passes = asyncio.Event()
            self._passes.set()
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._listener.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._relay(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the server is gone, or the wire is cut: the client sees a closed connection
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        there, back = await self._dial()
        try:
            pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, back), (there, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            back.transport.abort()

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._server_port)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._passes.wait()
                sink.write(data)
                await sink.drain()


class Service(Wire):
    """What stands before several servers of one port, and knows which of them may be asked: a load balancer.

    Args:
        port: of all of them, on the loopback.
        eligible: process ids of those that new connections may go to.
    """

    def __init__(self, port: int, eligible: Callable[[], Collection[int]]) -> None:
        super().__init__(port)
        self._eligible = eligible

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in range(DIALS):
            try:
                there, back = await super()._dial()
            except OSError:  # one that has just ended; nothing was said to it
                continue
            ours = back.get_extra_info("sockname")[1]
            if await asyncio.to_thread(self._is_eligible, ours):
                return there, back
            back.transport.abort()
        raise ConnectionRefusedError("no server that may be asked")

    def _is_eligible(self, port: int) -> bool:
        """Whether one of those that may be asked has the other end. It may take a moment until somebody has it."""
        end_s = time.monotonic() + ACCEPTED_WITHIN_S
        while time.monotonic() < end_s:
            for pid in self._eligible():
                with suppress(psutil.Error):
                    if any(one.raddr and one.raddr.port == port for one in psutil.Process(pid).net_connections("tcp")):
                        return True
            time.sleep(POLL_S)
        return False
