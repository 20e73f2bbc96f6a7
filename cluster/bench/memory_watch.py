"""Looks at a server's memory while a block runs, for its record."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from cluster.bench.result import Memory
from cluster.bench.server import Server
from cluster.clock import Clock

PERIOD_S = 0.25
"""Between two looks. Each asks every replica's scheduler: about a millisecond between two of its steps."""


@asynccontextmanager
async def watched(server: Server, clock: Clock, *, on: bool) -> AsyncIterator[list[Memory]]:
    """What is seen until the block ends; nothing where it is not to be recorded."""
    seen: list[Memory] = []
    if not on:
        yield seen
        return
    task = asyncio.create_task(_look_for_ever(server, clock, seen))
    try:
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _look_for_ever(server: Server, clock: Clock, seen: list[Memory]) -> None:
    while True:
        at_s = clock.now_s()
        replicas = await server.statistics()
        if replicas:
            seen.append(memory_of(at_s, replicas))
        await asyncio.sleep(PERIOD_S)


def memory_of(at_s: float, replicas: list[Mapping[str, Any]]) -> Memory:
    """Of all replicas' statistics together."""
    running = held = cached = empty = host = 0
    for told in replicas:
        size, free = int(told["block_size"]), int(told["free_blocks"])
        in_cache = min(free, int(told.get("cached_blocks", 0)))
        in_hold = min(int(told["held_blocks"]), int(told["total_blocks"]) - free)
        running += (int(told["total_blocks"]) - free - in_hold) * size
        held += in_hold * size
        cached += in_cache * size
        empty += (free - in_cache) * size
        host += int(told["host_used_tokens"])
    return Memory(at_s, running, held, cached, empty, host)
