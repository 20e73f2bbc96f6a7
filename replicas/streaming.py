"""Tokens of one stream that are ready at about the same time travel together, as bytes that a client can be sent."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

Other = TypeVar("Other")


async def coalesce(chunks: AsyncGenerator[str | Other], interval_s: float) -> AsyncGenerator[bytes | Other]:
    """Server-sent events joined to one piece per ``interval_s``; the first and the last go at once.

    Whatever is not a string (vLLM's refusal) is passed on as it is. Closing the result closes ``chunks``.

    Raises:
        Exception: what ``chunks`` raised, after everything before it has been yielded.
    """
    pending: list[str | Other] = []
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
            for piece in _joined(pending):
                yield piece
            pending.clear()
            # Also ends at once when the reader does, so that the last tokens do not wait.
            await asyncio.wait({reader}, timeout=interval_s)
            if reader.done() and not pending:
                break
        await reader
    finally:
        reader.cancel()
        await asyncio.wait({reader})
        await chunks.aclose()


def _joined(chunks: list[str | Other]) -> list[bytes | Other]:
    text = [chunk for chunk in chunks if isinstance(chunk, str)]
    others: list[bytes | Other] = [chunk for chunk in chunks if not isinstance(chunk, str)]
    return others if not text else ["".join(text).encode(), *others]
