"""Concurrent calls of a script go to a real Redis in a few pipelines, and each gets its own answer."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.script_batches import ScriptBatches
from tests.store.outages import SHORT_S, frozen

ADD = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
PATIENT_S = 60.0


class Counted(ScriptBatches):
    """Counts pipelines."""

    sizes: list[int]

    async def _pipeline(self, batch):  # type: ignore[no-untyped-def]
        self.sizes.append(len(batch))
        return await super()._pipeline(batch)


@pytest.fixture
async def batches(direct: redis.asyncio.Redis) -> AsyncIterator[Counted]:
    made = Counted(direct, ADD, PATIENT_S)
    made.sizes = []
    await made.run(["warm"], [1])
    made.sizes.clear()
    yield made


async def test_calls_that_come_together_need_two_pipelines(batches: Counted) -> None:
    answers = await asyncio.gather(*(batches.run([f"k{n}"], [n]) for n in range(200)))
    assert answers == list(range(200))
    assert sum(batches.sizes) == 200
    assert len(batches.sizes) <= 2


async def test_a_call_alone_does_not_wait_for_others(batches: Counted) -> None:
    assert [await batches.run(["k"], [2]) for _ in range(5)] == [2, 4, 6, 8, 10]
    assert batches.sizes == [1] * 5


async def test_one_call_that_fails_does_not_fail_the_others(batches: Counted, direct: redis.asyncio.Redis) -> None:
    await direct.lpush("list", "x")
    calls = (batches.run([key], [1]) for key in ("a", "list", "b"))
    first, wrong, last = await asyncio.gather(*calls, return_exceptions=True)
    assert (first, last) == (1, 1)
    assert isinstance(wrong, ResponseError)


async def test_a_redis_that_has_forgotten_the_script_gets_it_again(
    batches: Counted, direct: redis.asyncio.Redis
) -> None:
    await direct.script_flush()
    assert await asyncio.gather(*(batches.run([f"k{n}"], [n]) for n in range(9))) == list(range(9))


async def test_a_caller_that_leaves_does_not_disturb_the_others(batches: Counted) -> None:
    tasks = [asyncio.create_task(batches.run([f"k{n}"], [n])) for n in range(9)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [answer for n, answer in enumerate(answers) if n != 3] == [n for n in range(9) if n != 3]
    assert isinstance(answers[3], asyncio.CancelledError)
    assert await batches.run(["k1"], [1]) == 2


async def test_a_frozen_redis_times_out_for_all_and_then_answers_again(server: EmbeddedRedis) -> None:
    async with redis.asyncio.Redis.from_url(server.url) as client:
        batches = ScriptBatches(client, ADD, SHORT_S)
        await batches.run(["k"], [1])
        assert server.pid is not None
        async with frozen(server.pid):
            answers = await asyncio.gather(*(batches.run(["k"], [0]) for _ in range(9)), return_exceptions=True)
        assert all(isinstance(answer, TimeoutError) for answer in answers)
        patient = ScriptBatches(client, ADD, PATIENT_S)
        assert await patient.run(["k"], [1]) >= 2


async def test_the_end_of_the_event_loop_ends_the_calls(batches: Counted) -> None:
    call = asyncio.create_task(batches.run(["k"], [1]))
    await asyncio.sleep(0)
    assert batches._worker is not None
    batches._worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
