"""What predictors learn, through a real Redis: nothing is lost, nothing strange is taken, and it is sent once."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio

from cluster.core.clock import ManualClock
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.client import StoreFailure
from cluster.store.predictor_state import LIMITS, MAX_PART_BYTES, PredictorStateStore
from tests.store.conftest import PATIENT_S


@pytest.fixture
async def writer(server: EmbeddedRedis) -> AsyncIterator[Callable[..., PredictorStateStore]]:
    stores = []

    def make(name: str, **changes: Any) -> PredictorStateStore:
        arguments = {"url": server.url, "space": "s", "timeout_s": PATIENT_S, "expiry_s": 3600.0} | changes
        stores.append(PredictorStateStore(writer=name, clock=ManualClock(), **arguments))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


async def test_each_reads_what_the_others_have_written_last(writer: Callable[..., PredictorStateStore]) -> None:
    a, b, reader = writer("a"), writer("b"), writer("c")
    assert await a.exchange(b"1") == {}
    assert await b.exchange(b"2") == {"a": b"1"}
    assert await a.exchange(b"3") == {"b": b"2"}
    assert await reader.exchange(None) == {"a": b"3", "b": b"2"}
    assert await b.exchange(b"2") == {"a": b"3"}


async def test_a_part_outlives_its_writer(writer: Callable[..., PredictorStateStore]) -> None:
    first = writer("a")
    await first.exchange(b"learnt")
    await first.close()
    assert await writer("successor").exchange(None) == {"a": b"learnt"}


async def test_what_is_known_is_not_sent_again(
    writer: Callable[..., PredictorStateStore], direct: redis.asyncio.Redis
) -> None:
    a, b = writer("a"), writer("b")
    await a.exchange(b"x" * 1_000_000)
    await b.exchange(None)
    before = (await direct.info("stats"))["total_net_output_bytes"]
    for _ in range(5):
        assert await b.exchange(None) == {"a": b"x" * 1_000_000}
    assert (await direct.info("stats"))["total_net_output_bytes"] - before < 100_000


async def test_a_redis_that_has_lost_everything_gets_it_back(
    writer: Callable[..., PredictorStateStore], direct: redis.asyncio.Redis
) -> None:
    a, b = writer("a"), writer("b")
    await a.exchange(b"1")
    await direct.flushall()
    assert await b.exchange(None) == {}
    await a.exchange(b"1")
    assert await b.exchange(None) == {"a": b"1"}


async def test_without_redis_nothing_is_raised_and_the_failure_has_a_name(
    writer: Callable[..., PredictorStateStore],
) -> None:
    gone = writer("a", url="redis://127.0.0.1:1", timeout_s=0.2)
    assert await gone.exchange(b"1") is None
    assert sum(gone.failures.values()) == 1


async def test_a_part_that_is_too_large_is_neither_written_nor_read(
    writer: Callable[..., PredictorStateStore], direct: redis.asyncio.Redis
) -> None:
    a, b = writer("a"), writer("b")
    assert await a.exchange(b"x" * (MAX_PART_BYTES + 1)) == {}
    assert a.failures[StoreFailure.CORRUPT] == 1
    await a.exchange(b"1")
    (key,) = [one async for one in direct.scan_iter("*learnt:a")]
    await direct.hset(key, "part", b"x" * (MAX_PART_BYTES + 1))
    assert await b.exchange(None) == {}
    assert b.failures[StoreFailure.CORRUPT] == 1


async def test_strange_things_under_our_names_are_passed_over(
    writer: Callable[..., PredictorStateStore], direct: redis.asyncio.Redis
) -> None:
    a, b = writer("a"), writer("b")
    await a.exchange(b"1")
    (key,) = [one async for one in direct.scan_iter("*learnt:a")]
    await direct.delete(key)
    await direct.set(key, "a string")
    assert await b.exchange(b"2") == {}
    assert await a.exchange(b"3") == {"b": b"2"}
    assert await b.exchange(b"2") == {"a": b"3"}


async def test_writers_are_bounded(writer: Callable[..., PredictorStateStore], direct: redis.asyncio.Redis) -> None:
    for number in range(LIMITS.writers + 3):
        await writer(f"w{number}").exchange(b"1")
    others = await writer("reader").exchange(None)
    assert others is not None
    assert len(others) == LIMITS.writers
    assert len([one async for one in direct.scan_iter("*learnt:*")]) == LIMITS.writers
