"""Notices of moves: each is sent until the replica acknowledges it, is gone, or has the program again."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from cluster.core.clock import ManualClock
from cluster.core.supervision import SupervisedTasks
from router import move_notifier
from router.move_notifier import GONE_S, MAX_RETRY_S, MoveNotifier

KEY = "default/program"
BOTH = ("r0", "r1")


class Site:
    """A notifier, and the replicas that it notifies."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.tasks = SupervisedTasks("the site", self.clock)
        self.sent: list[tuple[str, str, int]] = []
        self.broken = False
        self.unacknowledged = 0
        self.notifier = MoveNotifier(self._moved_away, self.clock, self.tasks, self._failed)

    async def _moved_away(self, replica: str, key: str, epoch: int) -> None:
        self.sent.append((replica, key, epoch))
        if self.broken:
            raise ValueError("broken")

    def _failed(self) -> None:
        self.unacknowledged += 1

    async def after(self, seconds: float, *reached: str) -> None:
        self.clock.advance(seconds)
        self.notifier.deliver(reached)
        await self.settled()

    async def settled(self) -> None:
        async with asyncio.timeout(30):
            while self.tasks.pending_jobs:  # noqa: ASYNC110 - jobs have no event
                await asyncio.sleep(0)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    yield made
    await made.tasks.aclose()


async def test_a_notice_that_is_acknowledged_is_not_sent_again(site: Site) -> None:
    site.notifier.notify("r0", KEY, 2, BOTH)
    await site.after(0.0, *BOTH)
    await site.after(100.0, *BOTH)
    assert site.sent == [("r0", KEY, 2)]
    assert len(site.notifier) == 0


async def test_a_notice_that_fails_is_sent_again_after_longer_and_longer_waits(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.broken = True
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        site.notifier.notify("r0", KEY, 2, BOTH)
        await site.settled()
    assert "r0" in caplog.text and "broken" in caplog.text
    for wait_s in (1.0, 2.0, 4.0, 8.0, 16.0, MAX_RETRY_S, MAX_RETRY_S):
        before = site.unacknowledged
        await site.after(wait_s - 0.5, *BOTH)
        assert site.unacknowledged == before
        await site.after(0.5, *BOTH)
        assert site.unacknowledged == before + 1
    site.broken = False
    await site.after(MAX_RETRY_S, *BOTH)
    assert len(site.notifier) == 0 and not site.tasks.failures


async def test_a_replica_that_does_not_answer_is_notified_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(move_notifier, "TIMEOUT_S", 0.01)
    stuck = MoveNotifier(never, site.clock, site.tasks, site._failed)
    stuck.notify("r0", KEY, 2, BOTH)
    await asyncio.sleep(0)
    stuck.deliver(BOTH)
    assert site.tasks.pending_jobs == 1, "it is not sent twice at the same time"
    await site.settled()
    assert (len(stuck), site.unacknowledged) == (1, 1)


async def test_a_replica_that_cannot_be_reached_is_notified_when_it_appears(site: Site) -> None:
    site.notifier.notify("r0", KEY, 2, ("r1",))
    await site.after(GONE_S - 1, "r1")
    assert not site.sent
    await site.after(0.5, *BOTH)
    assert site.sent == [("r0", KEY, 2)]


async def test_a_replica_that_is_gone_for_good_needs_no_notice_and_is_no_failure(site: Site) -> None:
    site.notifier.notify("r0", KEY, 2, BOTH)
    site.broken = True
    await site.settled()
    await site.after(GONE_S, "r1")
    assert len(site.notifier) == 0
    assert site.unacknowledged == 1


async def test_a_newer_notice_is_sent_though_an_older_one_is_acknowledged_meanwhile(site: Site) -> None:
    site.notifier.notify("r0", KEY, 2, BOTH)
    site.notifier.notify("r0", KEY, 4, ("r1",))
    await site.settled()
    assert len(site.notifier) == 1
    await site.after(1.0, *BOTH)
    assert site.sent == [("r0", KEY, 2), ("r0", KEY, 4)]


async def test_of_too_many_notices_the_oldest_is_given_up_and_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(move_notifier, "MAX_PENDING", 2)
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        for number in range(3):
            site.notifier.notify("r0", f"default/{number}", 2, ())
    assert site.unacknowledged == 1 and "too many" in caplog.text
    await site.after(1.0, "r0")
    assert [key for _, key, _ in site.sent] == ["default/1", "default/2"]
