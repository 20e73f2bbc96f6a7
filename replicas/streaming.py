"""Pieces of one stream that are ready at about the same time travel together."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

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


async def coalesce(chunks: AsyncGenerator[str | Other], interval_s: float) -> AsyncGenerator[bytes | Other]:
    """Server-sent events joined to one piece per ``interval_s``, as bytes that a client can be sent; see `gather`.

    Whatever is not a string (vLLM's refusal) is passed on as it is.
    """
    async with aclosing(gather(chunks, interval_s)) as batches:
        async for batch in batches:
            for piece in _joined(batch):
                yield piece


def _joined(chunks: list[str | Other]) -> list[bytes | Other]:
    text = [chunk for chunk in chunks if isinstance(chunk, str)]
    others: list[bytes | Other] = [chunk for chunk in chunks if not isinstance(chunk, str)]
    return others if not text else ["".join(text).encode(), *others]
