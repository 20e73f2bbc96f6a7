"""Runs while Redis is gone, forgets, or has a log that cannot be read."""

import asyncio
import os
import signal

import pytest

from cluster.core.errors import Overloaded
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.runs.renouncing import RENOUNCE_S
from cluster.store.runs.records import Idempotency, NewRun
from tests.programs.runners import LEASE_S, Runners
from tests.programs.scripted_runs import ScriptedReplicas, ScriptedTools, says
from tests.programs.test_runner import ended, outcome, spec
from tests.waiting import WITHIN_S, until


async def test_a_store_that_forgot_everything_gets_the_whole_run_again() -> None:
    gate = asyncio.Event()
    with EmbeddedRedis() as server:
        runners = Runners(server.url)
        runner = runners(
            ScriptedReplicas([says("", ("add", "{}")), [gate, *says("done")]]), ScriptedTools({"add": str})
        )
        await runner.start(spec("r23"), idempotency=Idempotency("key", b"body"))
        await until(lambda: len(runner.written("r23")) > 5)
        server.stop()
        server.start()
        other = runners(ScriptedReplicas([says("another")]))
        await other.start(spec("r24"), idempotency=Idempotency("key", b"body"))  # nobody remembers the key
        gate.set()
        events = await ended(runner, "r23")
        assert outcome(events).status == "completed"
        assert list(await other.load("r23", "t") or []) == events
        await runner.aclose()
        await other.aclose()
        for store in runners.stores:
            await store.close()


async def test_a_run_whose_acceptance_timed_out_is_not_worked_on(runners: Runners, redis: EmbeddedRedis) -> None:
    runner = runners(ScriptedReplicas([]))
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Overloaded):
            await runner.start(spec("r25"))
    finally:
        os.kill(redis.pid, signal.SIGCONT)
    await until(lambda: not runner.uncertain_starts)
    other = runners(ScriptedReplicas([]))
    other.attend()
    await asyncio.sleep(2 * LEASE_S)
    assert not other.written("r25")
    log = await other.load("r25", "t")
    assert log is None or outcome(log).status == "cancelled"


async def test_while_the_store_is_gone_only_the_first_waits_for_it_and_others_are_told_at_once(
    runners: Runners, redis: EmbeddedRedis
) -> None:
    runner = runners(ScriptedReplicas([says("here")]))
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Overloaded):
            await runner.start(spec("r27"))  # now it is known, and asked for in the background
        for number in range(3):
            told = asyncio.create_task(runner.start(spec(f"r28-{number}")))
            await asyncio.sleep(0)
            assert isinstance(told.exception(), Overloaded)
            await asyncio.sleep(2 * RENOUNCE_S)
    finally:
        os.kill(redis.pid, signal.SIGCONT)
    await until(lambda: runners.stores[0].healthy)
    assert (await runner.start(spec("r29"))).new
    assert outcome(await ended(runner, "r29")).status == "completed"


async def test_a_store_that_another_call_found_gone_is_waited_for_by_one_start_at_a_time(
    runners: Runners, redis: EmbeddedRedis
) -> None:
    runner = runners(ScriptedReplicas([]))
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Overloaded):
            await runner.load("r30", "t")
        waiting = asyncio.create_task(runner.start(spec("r31")))
        told = asyncio.create_task(runner.start(spec("r32")))
        await asyncio.sleep(0)
        assert isinstance(told.exception(), Overloaded) and not waiting.done()
        with pytest.raises(Overloaded):
            await waiting
    finally:
        os.kill(redis.pid, signal.SIGCONT)


async def test_a_log_that_cannot_be_read_ends_its_run(runners: Runners) -> None:
    first, second = runners(ScriptedReplicas([])), runners(ScriptedReplicas([]))
    await runners.stores[0].create(NewRun("r26", "t", "p"), [b"\x00 nonsense"])
    second.attend()
    await until(lambda: second.counters["unreadable"] == 1)

    async def head() -> tuple[str, bool]:
        [found] = [run for run in await first.runs("t", program="p") if run.id == "r26"]
        return found.status, found.open

    async with asyncio.timeout(WITHIN_S):
        while await head() != ("failed", False):  # noqa: ASYNC110 - Redis has no event for it
            await asyncio.sleep(0.01)
