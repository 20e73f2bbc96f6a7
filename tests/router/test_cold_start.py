"""The turns of a model without replicas wait, bounded in number and time, and ask once for a replica."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from cluster.core.clock import ManualClock
from cluster.core.errors import Overloaded
from cluster.core.supervision import SupervisedTasks
from router.cold_start import ColdStart
from tests.waiting import until


class Site:
    """A model without replicas."""

    def __init__(self, limit_s: float, max_waiting: int) -> None:
        self.clock = ManualClock()
        self.tasks = SupervisedTasks("test", self.clock)
        self.asked = 0
        self.fails = False
        self.cold = ColdStart(self._wake, self.clock, self.tasks, limit_s=limit_s, max_waiting=max_waiting)

    async def _wake(self) -> None:
        self.asked += 1
        if self.fails:
            raise RuntimeError("no node has room")
        await asyncio.Event().wait()

    def turns(self, number: int) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.cold.replica()) for _ in range(number)]


@pytest.fixture
async def site() -> AsyncIterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(limit_s: float = 60.0, max_waiting: int = 10) -> Site:
        made.append(Site(limit_s, max_waiting))
        return made[-1]

    yield make
    for one in made:
        await one.tasks.aclose()


async def passes(steps: int = 5) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)


async def refused(turn: Awaitable[None]) -> Overloaded:
    with pytest.raises(Overloaded) as raised:
        await turn
    return raised.value


async def test_turns_wait_for_the_first_replica_which_is_asked_for_once(site: Callable[..., Site]) -> None:
    s = site()
    turns = s.turns(3)
    await passes()
    assert (s.cold.waiting, s.asked, [turn.done() for turn in turns]) == (3, 1, [False] * 3)
    s.cold.observe(1)
    await asyncio.gather(*turns)
    assert s.cold.waiting == 0
    await s.cold.replica()  # while there are replicas, nothing waits
    s.cold.observe(0)
    (late,) = s.turns(1)
    await passes()
    assert not late.done(), "the model has been scaled to zero again"
    late.cancel()


async def test_a_turn_beyond_the_bound_is_told_when_a_replica_is_expected(site: Callable[..., Site]) -> None:
    s = site(max_waiting=2)
    s.cold.start_s = 30.0
    waiting = s.turns(2)
    await passes()
    s.clock.advance(12.0)
    error = await refused(s.cold.replica())
    assert (error.status, error.code, error.retry_after_s) == (503, "queue_full", 18)
    for turn in waiting:
        turn.cancel()


async def test_no_turn_waits_for_ever(site: Callable[..., Site]) -> None:
    s = site(limit_s=0.01)
    error = await refused(s.cold.replica())
    assert (error.status, error.code, error.retry_after_s) == (503, "no_replica", 60)
    assert s.cold.waiting == 0


async def test_a_client_that_leaves_makes_room(site: Callable[..., Site]) -> None:
    s = site(max_waiting=1)
    (turn,) = s.turns(1)
    await passes()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    (next_turn,) = s.turns(1)
    await passes()
    assert s.cold.waiting == 1
    next_turn.cancel()


async def test_a_replica_is_asked_for_again_after_a_failure(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.cold_start.ASK_AGAIN_S", 0.0)
    s = site()
    s.fails = True
    (turn,) = s.turns(1)
    await until(lambda: s.asked >= 3)
    s.cold.observe(1)
    await turn
    await until(lambda: s.tasks.pending_jobs == 0)
    s.fails = False
    s.cold.observe(0)
    (later,) = s.turns(1)
    asked = s.asked
    await until(lambda: s.asked == asked + 1)
    later.cancel()
