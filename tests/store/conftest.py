"""A real Redis, and peers that share their statistics through it."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis.asyncio

from cluster.core.clock import ManualClock
from cluster.durations.table import DurationTable
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.durations import DurationStore
from cluster.store.runs.store import RunStore

PATIENT_S = 60.0
"""An exchange takes a millisecond; a busy machine may need far more."""


class Peer:
    """A writer: its own observations, and its store."""

    def __init__(self, store: DurationStore) -> None:
        self.store = store
        self.table = DurationTable()

    def observe(self, tool: str, *durations: float) -> "Peer":
        for seconds in durations:
            self.table.observe(tool, seconds)
        return self

    async def exchange(self) -> dict[str, int] | None:
        """One exchange; how many durations of which tool the others have seen."""
        others = await self.store.exchange(self.table.own())
        if others is None:
            return None
        self.table.replace_others(others)
        return {tool: part.count for tool, part in others.items() if part.count}


MakePeer = Callable[..., Peer]
MakeRunStore = Callable[..., RunStore]


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """An empty Redis."""
    with EmbeddedRedis() as embedded:
        yield embedded


@pytest.fixture
async def peer(server: EmbeddedRedis) -> AsyncIterator[Callable[..., Peer]]:
    """Makes a peer of that name."""
    stores = []

    def make(name: str, **changes: Any) -> Peer:
        arguments = {"url": server.url, "model": "tiny", "timeout_s": PATIENT_S, "expiry_s": 3600.0} | changes
        stores.append(DurationStore(writer=name, clock=ManualClock(), **arguments))
        return Peer(stores[-1])

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
async def ingress(server: EmbeddedRedis) -> AsyncIterator[Callable[..., RunStore]]:
    """Makes the store of runs of an ingress of that name. Its leases hold unless a test ends them."""
    stores = []

    def make(name: str, **changes: Any) -> RunStore:
        arguments = {"url": server.url, "timeout_s": PATIENT_S, "lease_s": 600.0, "retention_s": 3600.0} | changes
        stores.append(RunStore(owner=name, **arguments))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
async def direct(server: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    """A plain client."""
    async with redis.asyncio.Redis.from_url(server.url) as client:
        yield client
