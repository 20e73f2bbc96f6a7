"""Ingresses that die and a store that loses its data: no line is lost, and none is in the files twice."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import redis.asyncio

from cluster.batches.runner import LEASE_SHARE, PAGE
from cluster.core.errors import RunStoreUnavailable
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.runs.records import RunLog
from tests.batches.batch_site import CHAT, Ingress, begin, ended, ids, lines, names, results, until

MakeIngress = Callable[..., Ingress]


async def test_another_ingress_continues_a_batch(ingress: MakeIngress) -> None:
    first, second = ingress(), ingress()
    first.replicas.free = 7
    batch = await begin(first.client(), lines(*names(40)))
    await until(first.client(), batch.id, lambda one: one.request_counts.completed == 7)
    await first.die()
    client = second.client()
    done = await ended(client, batch.id)
    assert done.request_counts.to_dict() == {"total": 40, "completed": 40, "failed": 0}
    assert sorted(await ids(client, done.output_file_id)) == sorted(names(40))
    answered = set(list(first.replicas.calls)[:7])
    assert not answered & second.replicas.calls.keys(), "a line with a result was started again"
    assert answered | second.replicas.calls.keys() == set(names(40))


async def test_an_ingress_that_was_stopped_gives_its_batches_up_at_once(ingress: MakeIngress) -> None:
    first, second = ingress(), ingress()
    first.replicas.free = 3
    batch = await begin(first.client(), lines(*names(9)))
    await until(first.client(), batch.id, lambda one: one.request_counts.completed == 3)
    await first.batches.aclose()
    assert (await ended(second.client(), batch.id)).request_counts.completed == 9


async def test_an_ingress_that_lost_its_lease_writes_nothing(ingress: MakeIngress) -> None:
    """It was frozen, and wakes while the other one is at work."""
    first, second = ingress(), ingress()
    first.replicas.free = second.replicas.free = 2
    batch = await begin(first.client(), lines(*names(12)))
    client = second.client()
    await until(client, batch.id, lambda one: one.request_counts.completed == 2)
    await first.batches._background.aclose()  # nothing renews its leases any more
    await until(client, batch.id, lambda _: second.batches.in_flight > 0)
    first.replicas.gate.set()  # its lines end now
    second.replicas.gate.set()
    done = await ended(client, batch.id)
    assert Counter(await ids(client, done.output_file_id)) == Counter(names(12))
    assert not first.batches.open_by_tenant()


async def test_an_ingress_whose_renewals_failed_stops_its_lines(
    ingress: MakeIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ingress(), ingress()
    first.replicas.free = second.replicas.free = 0
    batch = await begin(first.client(), lines(*names(3)))
    client = second.client()
    await until(client, batch.id, lambda _: first.batches.in_flight == 3)

    async def unreachable(*_: object) -> None:
        raise RunStoreUnavailable("a test", "timeout")

    with monkeypatch.context() as patch:
        patch.setattr(first.store, "renew", unreachable)
        await until(client, batch.id, lambda _: second.batches.open_by_tenant()["default"] > 0)
    second.replicas.gate.set()
    await until(client, batch.id, lambda _: not first.batches.open_by_tenant())
    await until(client, batch.id, lambda _: not first.batches.in_flight)
    assert (await ended(client, batch.id)).request_counts.completed == 3


async def test_leases_are_renewed_while_the_log_of_another_batch_is_read(
    ingress: MakeIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, first, second = ingress(), ingress(), ingress()
    for site in (dead, first, second):
        site.replicas.free = 0
    own = await begin(first.client(), lines("own"))
    orphan = await begin(dead.client(), lines("orphan"))
    await until(first.client(), own.id, lambda _: first.batches.in_flight == dead.batches.in_flight == 1)
    reading, go_on, claims = asyncio.Event(), asyncio.Event(), list[list[str]]()
    read, claim = first.store.read, second.store.claim

    async def slow(batch_id: str, start: int = 0, limit: int | None = None) -> RunLog | None:
        if batch_id == orphan.id and limit == PAGE:
            reading.set()
            await go_on.wait()
        return await read(batch_id, start, limit)

    async def late(limit: int, working: Collection[str] = ()) -> list[str]:
        claims.append(await claim(limit, working) if reading.is_set() else [])
        return claims[-1]

    monkeypatch.setattr(first.store, "read", slow)
    monkeypatch.setattr(second.store, "claim", late)
    await dead.die()
    await reading.wait()
    claims.clear()
    await until(first.client(), own.id, lambda _: len(claims) > 4 * LEASE_SHARE)  # some leases would have ended
    assert [name for names in claims for name in names] == []
    go_on.set()
    first.replicas.gate.set()
    for batch in (own, orphan):
        assert (await ended(first.client(), batch.id)).request_counts.completed == 1
    assert (first.replicas.calls, second.replicas.calls) == (Counter(["own", "orphan"]), Counter())


async def test_an_ingress_that_cannot_read_a_batch_releases_it(
    ingress: MakeIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, first = ingress(), ingress()
    dead.replicas.free = 0
    batch = await begin(dead.client(), lines("a"))
    await until(dead.client(), batch.id, lambda _: dead.batches.in_flight == 1)
    released = list[str]()

    async def unreachable(*_: object) -> None:
        raise RunStoreUnavailable("a test", "timeout")

    async def release(batch_ids: Collection[str]) -> None:
        released.extend(batch_ids)

    with monkeypatch.context() as patch:
        patch.setattr(first.batches, "_log", unreachable)
        patch.setattr(first.store, "release", release)
        await dead.die()
        await until(dead.client(), batch.id, lambda _: bool(released))
    assert released[0] == batch.id
    assert (await ended(first.client(), batch.id)).request_counts.completed == 1


async def test_a_cancel_reaches_the_ingress_that_works_on_it(ingress: MakeIngress) -> None:
    first, second = ingress(), ingress()
    first.replicas.free = 1
    batch = await begin(first.client(), lines(*names(5)))
    client = second.client()
    await until(client, batch.id, lambda one: one.request_counts.completed == 1)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    done = await ended(client, batch.id)
    assert done.request_counts.to_dict() == {"total": 5, "completed": 1, "failed": 4}


async def test_a_batch_in_progress_survives_a_store_that_lost_its_data(
    ingress: MakeIngress, redis: EmbeddedRedis
) -> None:
    site, other = ingress(), ingress()
    site.replicas.free = 6
    client = site.client()
    batch = await begin(client, lines(*names(20)))
    await until(client, batch.id, lambda one: one.request_counts.completed == 6)
    async with redis_client(redis.url) as direct:
        await direct.flushall()
    await found_again(site, batch.id)
    await site.die()  # what was written again suffices for another ingress
    done = await ended(other.client(), batch.id)
    assert done.request_counts.completed == 20
    assert Counter(await ids(other.client(), done.output_file_id)) == Counter(names(20))
    answered = set(list(site.replicas.calls)[:6])
    assert not answered & other.replicas.calls.keys(), "results were lost"


def redis_client(url: str) -> redis.asyncio.Redis:
    return redis.asyncio.Redis.from_url(url)


async def found_again(site: Ingress, batch_id: str) -> None:
    async with asyncio.timeout(30):
        while True:
            page = await site.store.read(batch_id)
            if page is not None and page.length > 6 and await site.files.listed("default"):
                return
            await asyncio.sleep(0.02)


async def test_files_of_an_ingress_that_died_while_it_wrote_them_are_gone(ingress: MakeIngress) -> None:
    first, second = ingress(), ingress()
    written = asyncio.Event()
    store_file = first.files.write

    async def write_and_freeze(file: object, *rest: object) -> None:
        await store_file(file, *rest)  # type: ignore[arg-type]
        if file.purpose == "batch_output":  # type: ignore[attr-defined]
            written.set()
            await asyncio.Event().wait()

    first.files.write = write_and_freeze  # type: ignore[method-assign,assignment]
    batch = await begin(first.client("late"), lines(*names(4)))
    await asyncio.wait_for(written.wait(), 30)
    await first.die()
    client = second.client("late")
    done = await ended(client, batch.id)
    assert await ids(client, done.output_file_id) == names(4)
    assert second.replicas.calls == Counter()
    assert {one.id async for one in client.files.list()} == {batch.input_file_id, done.output_file_id}


async def test_an_input_that_the_store_has_lost_fails_the_batch(ingress: MakeIngress) -> None:
    first, second = ingress(), ingress()
    first.replicas.free = 1
    batch = await begin(first.client(), lines(*names(3)))
    await until(first.client(), batch.id, lambda one: one.request_counts.completed == 1)
    await first.die()
    await first.files.delete(batch.input_file_id)
    done = await ended(second.client(), batch.id)
    assert (done.status, done.errors.data[0].code) == ("failed", "input_file_not_found")
    assert len(await results(second.client(), done.output_file_id)) == 1


async def test_half_an_upload_is_deleted(ingress: MakeIngress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.store.files.LEASE_S", 0.2)
    first, second = ingress(), ingress()

    def breaking() -> object:
        yield b"piece"
        raise RuntimeError("the ingress dies")

    client = second.client("half")
    file = await client.files.create(file=lines("a"), purpose="batch")
    stored = await second.files.find("half", file.id)
    assert stored is not None
    with pytest.raises(RuntimeError):
        await first.files.write(replace(stored, id="file-half"), breaking())  # type: ignore[arg-type]
    assert await first.files.find("half", "file-half") is None
    assert (await first.files.reserved_bytes("half"))[0] == 2
    async with asyncio.timeout(30):
        while True:
            if await second.files.sweep():
                break
            await asyncio.sleep(0.05)
    assert (await first.files.reserved_bytes("half"))[0] == 1
    assert [one.id async for one in client.files.list()] == [file.id]


async def test_a_closed_batch_keeps_no_results_in_its_log(ingress: MakeIngress) -> None:
    site = ingress()
    client = site.client()
    done = await ended(client, (await begin(client, lines(*names(10)))).id)
    page = await site.store.read(done.id)
    assert page is not None and (page.length, len(page.items), page.closed) == (2, 2, True)
    assert done.endpoint == CHAT


async def test_a_cancel_stops_the_programs_that_an_earlier_ingress_has_started(ingress: MakeIngress) -> None:
    first, second = ingress(), ingress(max_concurrent=1)
    first.replicas.free, second.replicas.free = 2, 0
    batch = await begin(first.client(), lines(*names(5)))
    client = second.client()
    await until(client, batch.id, lambda one: one.request_counts.completed == 2 and first.batches.in_flight == 3)
    await first.die()
    await until(client, batch.id, lambda _: second.batches.in_flight == 1)
    await client.batches.cancel(batch.id)
    assert (await ended(client, batch.id)).status == "cancelled"
    await until(client, batch.id, lambda _: sorted(second.replicas.stopped) == [3, 4, 5])
