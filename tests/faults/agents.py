"""Programs without end, each a few short turns, on a cluster of several nodes; and how that is configured."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.faults.stand import until
from tests.faults.under_load import Ended, Outcome, clients, completion, lost, stream
from tests.serving.served import EXACT

AGENTS = 6
TURNS = 5
TOKENS = (8, 24, 64)
PAUSE_S = 0.2
"""Between an agent's turns: its tool."""
CHANGED_WITHIN_S = 900.0
STORIES = 12
"""Different programs; each is always told the same, whatever happens meanwhile."""


def arguments(store_url: str, port: int, **sections: Any) -> dict[str, Any]:
    """Two replicas, two ingresses."""
    base: dict[str, Any] = {
        "redis": {"url": store_url, "refresh_s": 0.2},
        "http": {"host": "127.0.0.1", "port": port, "ingress_replicas": 2},
        "replicas": {"count": 2, "kv_cache_bytes": 32 << 20, "cpus": 0.5},
        "engine": EXACT,
        "programs": {"lease_s": 2.0},
        "policy": {"name": "continuum"},
    }
    return base | sections


class Agents:
    """Programs without end: each has a few short turns, then the next one begins."""

    def __init__(self) -> None:
        self.ended: list[Ended] = []
        self.failed: list[str] = []
        self.false: list[str] = []
        self._numbers = itertools.count()
        self._known: dict[tuple[int, int], str] = {}

    @asynccontextmanager
    async def at_work(self, url: str) -> AsyncIterator[None]:
        """They work inside."""
        async with clients(url) as client:
            stop = asyncio.Event()
            tasks = [asyncio.create_task(self._agent(client, stop)) for _ in range(AGENTS)]
            try:
                yield
            finally:
                stop.set()
                async with asyncio.timeout(CHANGED_WITHIN_S):
                    await asyncio.gather(*tasks)

    async def _agent(self, client: httpx.AsyncClient, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._program(client, next(self._numbers))

    async def _program(self, client: httpx.AsyncClient, number: int) -> None:
        story = number % STORIES
        prompt = f"Story {story}. Once upon a time"
        for turn in range(TURNS):
            tokens = TOKENS[(story + turn) % len(TOKENS)]
            told = await stream(client, completion(prompt, tokens, session_id=f"agent-{number}"))
            self.ended.append(told)
            if told.outcome is not Outcome.DONE:
                self.failed.append(f"{number}/{turn}: {told.outcome.name} {told.status} {told.text[:300]}")
            elif told.text != self._known.setdefault((story, turn), told.text):
                self.false.append(f"{number}/{turn}: {told.text!r} where {self._known[story, turn]!r} was told before")
            prompt += self._known.get((story, turn), "") + f" Then, {turn},"
            await asyncio.sleep(PAUSE_S)

    async def have_told_everything(self) -> None:
        """Until each turn of each story has been told once, before anything happens."""
        await apart(until, lambda: len(self._known) == STORIES * TURNS, "no agent works", CHANGED_WITHIN_S)

    async def have_ended(self, requests: int) -> None:
        """Until so many have."""
        await apart(until, lambda: len(self.ended) >= requests, f"not {requests} turns", CHANGED_WITHIN_S)

    def promise(self, fault: str, promised: Callable[..., None]) -> None:
        """Nothing was lost, and no stream told another story."""
        print("\n".join((*self.failed, *self.false)))
        promised(fault, "turns lost", lost(self.ended), exactly=0)
        promised(fault, "turns with another text", len(self.false), exactly=0)


async def apart(call: Callable[..., Any], *arguments: Any) -> Any:
    """Nothing that waits may hold up the agents."""
    return await asyncio.to_thread(call, *arguments)
