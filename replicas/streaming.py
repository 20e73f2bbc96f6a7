"""Pieces of one stream that are ready at about the same time travel together."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from cluster.stream import Told, joined

Other = TypeVar("Other")


async def gather(chunks: AsyncGenerator[Other], interval_s: float) -> AsyncGenerator[list[Other]]:
    """What came since the last list, one list per ``interval_s``; the first and the last go at once.

    Closing the result closes ``chunks``.

    Raises:
        Exception: what ``chunks`` raised, after everything before it has been yielded.
    """
    pending: list[Other] = []
    ready = asyncio.Event()

    async def read() -> None:
        try:
            async for chunk in chunks:
                pending.append(chunk)
                ready.set()
        finally:
            ready.set()

    reader = asyncio.create_task(read())
    try:
        while True:
            await ready.wait()
            ready.clear()
            # Emptied before it is yielded: more may come while whoever takes it does something else.
            batch = pending[:]
            pending.clear()
            if batch:
                yield batch
            # Also ends at once when the reader does, so that the last tokens do not wait.
            await asyncio.wait({reader}, timeout=interval_s)
            if reader.done() and not pending:
                break
        await reader
    finally:
        reader.cancel()
        await asyncio.wait({reader})
        await chunks.aclose()


async def coalesce(pieces: AsyncGenerator[Told[str] | Other], interval_s: float) -> AsyncGenerator[Told[bytes] | Other]:
    """Server-sent events joined to one piece per ``interval_s``, as bytes that a client can be sent; see `gather`.

    Whatever is not an event (vLLM's refusal) is passed on as it is, after those that came before it.
    """
    async with aclosing(gather(pieces, interval_s)) as batches:
        async for batch in batches:
            events = [piece for piece in batch if isinstance(piece, Told)]
            if events:
                data = "".join(event.data for event in events).encode()
                yield Told(joined(event.progress for event in events), data)
            for piece in batch:
                if not isinstance(piece, Told):
                    yield piece
