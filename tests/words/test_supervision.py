"""Background tasks: a loop that fails is seen, counted and started again, and the owner can say that it is not well."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from cluster.core.clock import ManualClock
from cluster.core.supervision import FIRST_BACKOFF_S, MAX_BACKOFF_S, RECOVERED_S, UNHEALTHY_AFTER, SupervisedTasks


class Owner:
    """Supervised tasks whose backoff ends when the test says so."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.backoffs_s: list[float] = []
        self._resume = asyncio.Semaphore(0)
        self.tasks = SupervisedTasks("the owner", self.clock, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.backoffs_s.append(seconds)
        await self._resume.acquire()
        self.clock.advance(seconds)

    async def restart(self) -> None:
        self._resume.release()
        await settled()


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    made = Owner()
    yield made
    await made.tasks.aclose()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_loop_that_fails_is_logged_by_name_counted_and_started_again(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    runs = 0

    async def loop() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError("a bug")
        await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR, logger="ray.serve"):
        owner.tasks.start("sweeping", loop)
        await settled()
    assert "the owner" in caplog.text and "sweeping" in caplog.text and "a bug" in caplog.text
    assert owner.tasks.failures == {"sweeping": 1}
    await owner.restart()
    assert runs == 2 and owner.tasks.healthy


async def test_a_loop_that_keeps_failing_backs_off_and_makes_the_owner_unhealthy(owner: Owner) -> None:
    async def loop() -> None:
        raise ValueError("a bug")

    owner.tasks.start("sweeping", loop)
    await settled()
    for failures in range(1, 12):
        assert owner.tasks.failures["sweeping"] == failures
        assert owner.tasks.healthy is (failures < UNHEALTHY_AFTER)
        await owner.restart()
    assert owner.tasks.failed == ("sweeping",)
    assert owner.backoffs_s[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert owner.backoffs_s[-1] == MAX_BACKOFF_S


async def test_an_owner_is_healthy_again_when_the_loop_has_run_for_long_enough(owner: Owner) -> None:
    broken = True
    fail = asyncio.Event()

    async def loop() -> None:
        if not broken:
            await fail.wait()
        raise ValueError("a bug")

    owner.tasks.start("sweeping", loop)
    await settled()
    for _ in range(UNHEALTHY_AFTER):
        await owner.restart()
    assert owner.tasks.failed == ("sweeping",)
    broken = False
    await owner.restart()
    assert owner.tasks.failed == ("sweeping",)
    owner.clock.advance(RECOVERED_S)
    assert owner.tasks.healthy
    fail.set()
    await settled()
    assert owner.tasks.healthy, "the first failure of a new row"
    assert owner.backoffs_s[-1] == FIRST_BACKOFF_S


async def test_a_cancellation_inside_a_loop_does_not_end_it(owner: Owner) -> None:
    runs = 0

    async def loop() -> None:
        nonlocal runs
        runs += 1
        inner = asyncio.get_running_loop().create_future()
        inner.cancel()
        await inner

    owner.tasks.start("sweeping", loop)
    await settled()
    await owner.restart()
    assert runs == 2 and owner.tasks.failures["sweeping"] == 2


async def test_a_loop_that_returns_is_over_and_its_name_is_free(owner: Owner) -> None:
    async def loop() -> None:
        pass

    owner.tasks.start("sweeping", loop)
    with pytest.raises(ValueError, match="sweeping"):
        owner.tasks.start("sweeping", loop)
    await settled()
    owner.tasks.start("sweeping", loop)
    assert not owner.tasks.failures


async def test_a_job_that_fails_is_counted_and_not_repeated(owner: Owner) -> None:
    async def job() -> None:
        raise ValueError("a bug")

    owner.tasks.run("forgetting", job())
    assert owner.tasks.pending_jobs == 1
    await settled()
    assert owner.tasks.failures == {"forgetting": 1}
    assert owner.tasks.pending_jobs == 0 and not owner.backoffs_s


async def test_closing_waits_for_the_end_of_all_tasks_even_of_those_that_fail_while_they_end(owner: Owner) -> None:
    ended: list[str] = []

    async def forever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
            raise ValueError("on the way out")

    owner.tasks.start("loop", lambda: forever("loop"))
    owner.tasks.run("job", forever("job"))
    await settled()
    await owner.tasks.aclose()
    assert sorted(ended) == ["job", "loop"]
    assert not owner.tasks.failures and not owner.tasks.pending_jobs
