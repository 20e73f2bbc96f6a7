"""A Redis that is nearly full: ended runs go first, the oldest before others, and new runs are rejected by name."""

import redis.asyncio

from cluster.runs.store_memory import EVICT_SHARE, FULL_SHARE, StoreMemoryWatch
from cluster.store.client import StoreMemory
from cluster.store.runs.records import NewRun
from cluster.store.runs.store import RunStore
from tests.store.conftest import MakeRunStore

ITEM = b"x" * 20_000
RUNS = 40


async def write(store: RunStore, name: str, *, ended: bool) -> None:
    await store.create(NewRun(name, "tenant", "program"), [ITEM])
    if ended:
        await store.append(name, 1, [b"end"], status="completed", final=True)


async def limit(store: RunStore, share: float) -> None:
    """Let Redis use this share of its memory."""
    used = (await store.memory()).used_bytes
    await store.redis.config_set("maxmemory", int(used / share))


async def test_runs_that_ended_first_are_deleted_first_until_memory_suffices(ingress: MakeRunStore) -> None:
    store = ingress("a")
    for number in range(RUNS):
        await write(store, f"old-{number}", ended=True)
    await write(store, "open", ended=False)
    await write(store, "young", ended=True)
    watch = StoreMemoryWatch(store)
    await watch.look()
    assert (watch.memory.max_bytes > 0, watch.evicted, watch.is_full) == (True, 0, False)
    assert await store.evict(1) == 1
    assert await store.read("old-0") is None and await store.read("old-1") is not None
    await limit(store, EVICT_SHARE + 0.02)
    await watch.look()
    assert watch.memory.share < EVICT_SHARE
    assert watch.evicted > 0
    assert await store.read("open") is not None
    assert len(await store.runs("tenant")) == RUNS + 2 - 1 - watch.evicted


async def test_runs_that_are_gone_leave_the_lists_and_count_for_nothing(
    ingress: MakeRunStore, direct: redis.asyncio.Redis
) -> None:
    """Another process, or a Redis that evicts keys by itself, has deleted the keys of the oldest runs."""
    store = ingress("a")
    for number in range(6):
        await write(store, f"run-{number}", ended=True)
    space = "caesura:v1:{runs}:"
    for number, parts in enumerate((("run", "log"), ("run",), ("log",))):
        await direct.delete(*(f"{space}{part}:run-{number}" for part in parts))
    assert await store.evict(2) == 2
    for index in ("tenant:tenant", "program:tenant/program"):
        assert await direct.zrange(space + index, 0, -1) == [b"run-5"]
    assert await direct.zrange(space + "ended", 0, -1) == [b"tenant/program/run-5"]
    assert [await store.evict(2) for _ in range(2)] == [1, 0]


async def test_open_runs_stay_and_new_ones_are_not_accepted(ingress: MakeRunStore) -> None:
    store = ingress("a")
    for number in range(RUNS):
        await write(store, f"open-{number}", ended=False)
    await limit(store, FULL_SHARE + 0.03)
    watch = StoreMemoryWatch(store)
    await watch.look()
    assert (watch.is_full, watch.evicted) == (True, 0)
    await store.append("open-0", 1, [b"end"], status="completed", final=True)  # what was accepted ends
    assert len(await store.runs("tenant")) == RUNS


def test_a_redis_without_a_limit_is_never_full() -> None:
    assert StoreMemory(1 << 40, 0).share == 0.0
