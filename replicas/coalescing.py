"""Joins the pieces of a stream that come within an interval, because each message costs more than the tokens in it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from cluster.core.stream import StreamChunk, joined

Other = TypeVar("Other")


class Ticks:
    """The ends of intervals, for all streams of a process. Streams that send at the same time wake the receiver once.

    Args:
        interval_s: seconds of an interval. It begins when somebody waits.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._waiting: list[asyncio.Future[None]] = []

    def wait(self) -> asyncio.Future[None]:
        """Return a future that is done at the end of the interval."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(self._interval_s, self._end)
        future = loop.create_future()
        self._waiting.append(future)
        return future

    def _end(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            end(future)


def end(future: asyncio.Future[None]) -> None:
    """Complete a future, unless it is done or cancelled."""
    if not future.done():
        future.set_result(None)


async def gather(chunks: AsyncGenerator[Other], ticks: Ticks) -> AsyncGenerator[list[Other]]:
    """Yield lists of the chunks since the last list, at most one list an interval. The first and the last come at once,
    and so does a chunk that comes when the interval has ended. Nothing runs while there is no chunk.

    Closing the result closes ``chunks``.

    Raises:
        Exception: what ``chunks`` raised, after everything before it was yielded.
    """
    pending: list[Other] = []
    come = asyncio.Event()
    tick: asyncio.Future[None] | None = None
    ended = False

    async def read() -> None:
        nonlocal ended
        try:
            async for chunk in chunks:
                pending.append(chunk)
                come.set()
        finally:
            ended = True
            come.set()
            if tick is not None:
                end(tick)

    reader = asyncio.create_task(read())
    try:
        while True:
            await come.wait()
            if pending:
                # Emptied before it is yielded: more may come while whoever takes it does something else.
                batch = pending[:]
                pending.clear()
                if not ended:
                    come.clear()
                yield batch
            elif ended:
                break
            if not ended:
                tick = ticks.wait()
                await tick
        await reader
    finally:
        reader.cancel()
        await asyncio.wait({reader})
        await chunks.aclose()


async def coalesce(
    pieces: AsyncGenerator[StreamChunk[str] | Other], ticks: Ticks
) -> AsyncGenerator[StreamChunk[bytes] | Other]:
    """Join server-sent events to one piece of bytes an interval; see `gather`.

    Other pieces (vLLM's errors) are passed on unchanged, after the events that came before them.
    """
    async with aclosing(gather(pieces, ticks)) as batches:
        async for batch in batches:
            events = [piece for piece in batch if isinstance(piece, StreamChunk)]
            if events:
                data = "".join([event.data for event in events]).encode()
                yield StreamChunk(joined([event.progress for event in events]), data)
            for piece in batch:
                if not isinstance(piece, StreamChunk):
                    yield piece
