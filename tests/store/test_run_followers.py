"""Followers of a run read every item once and in order, whoever appends it and whatever Redis does meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest
import redis.asyncio

from cluster.core.errors import RunStoreUnavailable, RunUnknown
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.client import StoreFailure
from cluster.store.runs import followers as run_followers
from cluster.store.runs.followers import MAX_WAITING_BYTES, LogUpdate, RunFollowers
from cluster.store.runs.records import NewRun
from cluster.store.runs.store import FOLLOW_ITEMS, MAX_PAGE_ITEMS, RunStore
from tests.store.conftest import MakeRunStore
from tests.store.outages import SHORT_S, eventually, frozen, kill

RUN = NewRun("run", "tenant", "program")


def items(first: int, end: int) -> list[bytes]:
    return [b"item %d" % number for number in range(first, end)]


class Reader:
    """Takes what a follower is given, in the background."""

    def __init__(self, store: RunStore, start: int = 0, run_id: str = "run") -> None:
        self.seen: list[bytes] = []
        self.come = asyncio.Event()
        self.task = asyncio.create_task(self._read(store.follow(run_id, start)))

    async def _read(self, batches: AsyncIterator[list[bytes]]) -> None:
        async for batch in batches:
            assert batch
            self.seen += batch
            self.come.set()

    async def until(self, count: int) -> list[bytes]:
        async with asyncio.timeout(60):
            while len(self.seen) < count and not self.task.done():
                self.come.clear()
                await self.come.wait()
        return self.seen

    async def whole(self) -> list[bytes]:
        async with asyncio.timeout(60):
            await self.task
        return self.seen


async def test_followers_go_from_one_owner_to_the_next(ingress: MakeRunStore) -> None:
    a, b, c = ingress("a"), ingress("b"), ingress("c")
    await a.create(RUN, items(0, 3))
    readers = [Reader(store, start) for store in (a, b, c) for start in (0, 2, 5)]
    await a.append("run", 3, items(3, 5))
    for reader, start in zip(readers, (0, 2, 5) * 3, strict=True):
        assert await reader.until(5 - start) == items(start, 5)
    await a.release(["run"])
    assert await b.claim(1) == ["run"]
    await b.append("run", 5, items(5, 6))
    late = Reader(c, 4)
    assert await late.until(2) == items(4, 6)
    await b.append("run", 6, items(6, 8), final=True)
    for reader, start in zip([*readers, late], (*(0, 2, 5) * 3, 4), strict=True):
        assert await reader.whole() == items(start, 8)
    after = [Reader(c, start) for start in (0, 7, 8, 9)]
    assert [await reader.whole() for reader in after] == [items(0, 8), items(7, 8), [], []]


async def test_a_log_of_many_pages_is_followed(ingress: MakeRunStore) -> None:
    a, count = ingress("a"), 2 * MAX_PAGE_ITEMS + 3
    await a.create(RUN, items(0, count))
    reader = Reader(a)
    await reader.until(count)
    await a.append("run", count, items(count, count + 5 * FOLLOW_ITEMS))
    await a.append("run", count + 5 * FOLLOW_ITEMS, [], final=True)
    assert await reader.whole() == items(0, count + 5 * FOLLOW_ITEMS)
    assert await Reader(a).whole() == items(0, count + 5 * FOLLOW_ITEMS), "closed already"


async def test_many_runs_are_followed_over_one_connection(ingress: MakeRunStore, direct: redis.asyncio.Redis) -> None:
    a, b, count = ingress("a"), ingress("b"), 100
    names = [f"run-{number}" for number in range(count)]
    for name in names:
        await a.create(NewRun(name, "tenant", "program"), [name.encode()])
    readers = [Reader(b, 0, name) for name in names]
    for reader in readers:
        await reader.until(1)
    for number in range(1, 4):
        await asyncio.gather(*(a.append(name, number, [b"%d" % number], final=number == 3) for name in names))
    for name, reader in zip(names, readers, strict=True):
        assert await reader.whole() == [name.encode(), b"1", b"2", b"3"]
    clients = await direct.client_list()
    assert sum(client["cmd"] == "xread" for client in clients) == 1


async def test_other_calls_go_on_beside_followers_that_wait(ingress: MakeRunStore) -> None:
    a = ingress("a")
    await a.create(RUN, items(0, 1))
    readers = [Reader(a) for _ in range(50)]
    for reader in readers:
        await reader.until(1)
    for number in range(1, 100):
        await a.append("run", number, items(number, number + 1), final=number == 99)
    for reader in readers:
        assert await reader.whole() == items(0, 100)
    assert not a.failures


async def test_a_new_follower_is_heard_while_others_wait(
    ingress: MakeRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the read that the others share would take for ever."""
    monkeypatch.setattr("cluster.store.runs.store.FOLLOW_S", 1000.0)
    a = ingress("a")
    for name in ("silent", "run"):
        await a.create(NewRun(name, "tenant", "program"), items(0, 1))
    silent = Reader(a, 0, "silent")
    await silent.until(1)
    for _ in range(3):
        reader = Reader(a)
        await reader.until(1)
        await asyncio.sleep(0.05)  # it may be joining still; then it hears all the same
        number = (await a.read("run")).length
        await a.append("run", number, items(number, number + 1))
        assert await reader.until(number + 1) == items(0, number + 1)
        reader.task.cancel()
    silent.task.cancel()


async def test_an_unknown_run_cannot_be_followed(ingress: MakeRunStore) -> None:
    with pytest.raises(RunUnknown):
        await Reader(ingress("a")).whole()


async def test_a_follower_waits_for_a_run_that_is_written_again(
    ingress: MakeRunStore, direct: redis.asyncio.Redis
) -> None:
    a, b = ingress("a"), ingress("b")
    await a.create(RUN, items(0, 3))
    reader = Reader(b)
    await reader.until(3)
    await direct.flushall()
    await a.create(RUN, items(0, 4))
    await reader.until(4)
    await a.append("run", 4, items(4, 5), final=True)
    assert await reader.whole() == items(0, 5)


async def test_its_owner_has_time_to_write_it_again(
    server: EmbeddedRedis, ingress: MakeRunStore, direct: redis.asyncio.Redis
) -> None:
    a = ingress("a")

    class Patient(RunStore):
        async def read(self, run_id: str, start: int = 0, limit: int | None = None):
            log = await super().read(run_id, start, limit)
            if log is None:
                await a.create(RUN, items(0, 4))
            return log

    b = Patient(server.url, owner="b", timeout_s=10.0, lease_s=0.1, retention_s=1.0)
    await a.create(RUN, items(0, 3))
    reader = Reader(b)
    await reader.until(3)
    await direct.flushall()
    await reader.until(4)
    await a.append("run", 4, items(4, 5), final=True)
    assert await reader.whole() == items(0, 5)
    await b.close()


async def test_a_follower_of_a_run_that_is_lost_is_told(ingress: MakeRunStore, direct: redis.asyncio.Redis) -> None:
    a, b = ingress("a"), ingress("b", lease_s=0.1)
    await a.create(RUN, items(0, 3))
    reader = Reader(b)
    await reader.until(3)
    await direct.flushall()
    with pytest.raises(RunUnknown):
        await reader.whole()


async def test_a_log_that_cannot_be_read_holds_up_no_other_for_long(
    ingress: MakeRunStore, direct: redis.asyncio.Redis
) -> None:
    a, b = ingress("a"), ingress("b", lease_s=0.1)
    for name in ("run", "spoilt"):
        await a.create(NewRun(name, "tenant", "program"), items(0, 1))
    reader, spoilt = Reader(b), Reader(b, 0, "spoilt")
    await reader.until(1)
    await spoilt.until(1)
    await direct.delete("caesura:v1:{runs}:log:spoilt")
    await direct.set("caesura:v1:{runs}:log:spoilt", "not a stream")
    await a.append("run", 1, items(1, 3), final=True)
    assert await reader.whole() == items(0, 3)
    with pytest.raises(RunUnknown):
        await spoilt.whole()


async def test_an_outage_is_waited_out(server: EmbeddedRedis, ingress: MakeRunStore) -> None:
    a, b = ingress("a"), ingress("b", timeout_s=SHORT_S, lease_s=0.1)
    await a.create(RUN, items(0, 3))
    reader = Reader(b)
    await reader.until(3)

    async def noticed() -> bool | None:
        await asyncio.sleep(0.01)
        return True if b.failures else None

    async with frozen(server.pid):
        await eventually(noticed)
    kill(server)
    b.failures.clear()
    await eventually(noticed)
    assert not reader.task.done()
    with pytest.raises(RunStoreUnavailable):
        await Reader(b).whole()
    server.start()
    await a.create(RUN, items(0, 5))
    await a.append("run", 5, items(5, 6), final=True)
    assert await reader.whole() == items(0, 6)


async def test_a_slow_follower_is_given_no_more_than_it_can_hold() -> None:
    """It is left out until it has taken what waits for it, and then goes on where it was."""
    log = [bytes(MAX_WAITING_BYTES // 4) for _ in range(40)]
    reads = asyncio.Queue[int]()

    async def read(wanted: Mapping[str, int]):
        await asyncio.sleep(0)
        reads.put_nowait(wanted["run"])
        start = wanted["run"]
        return {"run": LogUpdate(start, log[start : start + 1], ended=start + 1 >= len(log))}

    async def interrupt() -> None:
        pass

    followers = RunFollowers(read, interrupt)
    with followers.follower("run", 0) as slow:
        for _ in range(5):
            await reads.get()
        for _ in range(100):
            await asyncio.sleep(0)
        assert reads.empty(), "five quarters of what it may hold, and no more"
        taken = []
        async with asyncio.timeout(60):
            while not (taken and taken[-1].ended):
                taken.append(await followers.take(slow, 60.0))
    assert [item for news in taken for item in news.items] == log
    assert max(len(news.items) for news in taken) == 5
    await followers.close()


async def test_the_shared_read_goes_on_after_an_outage() -> None:
    failures = 2

    async def read(wanted: Mapping[str, int]):
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RunStoreUnavailable("away", StoreFailure.UNREACHABLE)
        return {"run": LogUpdate(wanted["run"], [b"item"], ended=True)}

    async def interrupt():
        raise RunStoreUnavailable("away", StoreFailure.UNREACHABLE)

    followers = RunFollowers(read, interrupt)
    with followers.follower("run", 3) as follower:
        assert await followers.take(follower, 60.0) == LogUpdate(3, [b"item"], ended=True)
    await followers.close()


async def test_followers_of_one_log_at_different_places_get_what_is_theirs() -> None:
    all_of = [run_followers.Follower("run", start) for start in (0, 2, 4)]
    for news in (LogUpdate(0, [b"0", b"1", b"2"], False), LogUpdate(2, [b"2", b"3"], True), LogUpdate(9, [b"9"], True)):
        for follower in all_of:
            follower.offer(news)
    given = [await follower.take(0.01) for follower in all_of]
    assert given == [
        LogUpdate(0, [b"0", b"1", b"2", b"3"], True),
        LogUpdate(2, [b"2", b"3"], True),
        LogUpdate(4, [], True),
    ]
