"""Batches that expire before they begin, share an input, wait for a quota, or lose a line's task."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from openai import InternalServerError

from cluster.batches.content import packed, unpacked
from cluster.batches.input_lines import LineRequest
from cluster.batches.records import Accepted, Batch, Line, Progress, decode
from cluster.batches.results import LineAnswer
from cluster.batches.task import BatchTask
from cluster.core.errors import RunStoreUnavailable
from cluster.local.embedded_redis import EmbeddedRedis
from tests.batches.batch_site import CHAT, LEASE_S, Ingress, Replicas, begin, ended, ids, lines, names, until
from tests.batches.test_takeover import redis_client
from tests.waiting import POLL_S, WITHIN_S
from tests.waiting import until as sync_until

MakeIngress = Callable[..., Ingress]


async def wait_for(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await condition():  # noqa: ASYNC110 - the store is asked
            await asyncio.sleep(POLL_S)


async def test_a_batch_that_expires_before_it_was_checked_ends(ingress: MakeIngress) -> None:
    first, second = ingress(), ingress()
    checked = asyncio.Event()

    async def never(*_: object) -> None:
        checked.set()
        await asyncio.Event().wait()

    async def none() -> None:
        """Look for nothing."""

    first.files.find = never  # type: ignore[method-assign,assignment]
    second.batches._look = none  # type: ignore[method-assign] # it looks late
    client = second.client("early")
    file = await client.files.create(file=lines("a", "b"), purpose="batch")
    batch_id = await first.batches.start(Batch("batch_early", "early", CHAT, file.id, "1h", 0.0, 1.0))
    await asyncio.wait_for(checked.wait(), 30)
    await first.die()
    done = await ended(client, batch_id)
    assert (done.status, done.request_counts.to_dict()) == ("expired", {"total": 2, "completed": 0, "failed": 2})
    assert await ids(client, done.error_file_id) == ["a", "b"]


async def test_lines_of_a_batch_that_expires_are_stopped(ingress: MakeIngress) -> None:
    site = ingress()
    site.replicas.free = 0
    client = site.client()
    batch = await begin(client, lines("a", "b"), completion_window="1h")
    await until(client, batch.id, lambda _: site.batches.in_flight == 2)
    site.ahead_s = 3601.0
    assert (await ended(client, batch.id)).status == "expired"
    assert sorted(site.replicas.stopped) == [1, 2]


async def test_batches_with_one_input_survive_a_store_that_lost_its_data(
    ingress: MakeIngress, redis: EmbeddedRedis
) -> None:
    site = ingress()
    site.replicas.free = 0
    client = site.client()
    first = await begin(client, lines("a", "b"))
    second = await client.batches.create(input_file_id=first.input_file_id, endpoint=CHAT, completion_window="24h")
    await until(client, second.id, lambda _: site.batches.in_flight == 4)
    async with redis_client(redis.url) as direct:
        await direct.flushall()
    for one in (first, second):
        await wait_for(lambda one=one: site.store.read(one.id))
    await wait_for(lambda: site.files.listed("default"))
    await asyncio.sleep(LEASE_S)  # and it is not written once more
    assert not site.batches._background.failures
    site.replicas.gate.set()
    for one in (first, second):
        assert (await ended(client, one.id)).request_counts.completed == 2


async def test_an_input_is_written_again_until_the_store_has_it(
    ingress: MakeIngress, redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, other = ingress(), ingress()
    site.replicas.free = 0
    client = site.client()
    batch = await begin(client, lines("a", "b"))
    await until(client, batch.id, lambda _: site.batches.in_flight == 2)
    write, fails = site.files.write, [True]

    async def write_late(*arguments: Any) -> None:
        if fails and fails.pop():
            raise RunStoreUnavailable("a test", "timeout")
        await write(*arguments)

    monkeypatch.setattr(site.files, "write", write_late)
    async with redis_client(redis.url) as direct:
        await direct.flushall()
    await wait_for(lambda: site.files.listed("default"))
    await site.die()
    assert (await ended(other.client(), batch.id)).request_counts.completed == 2


async def test_batches_that_wait_for_a_quota_do_not_keep_others_out(
    ingress: MakeIngress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.batches.runner.MAX_LOADED", 2)
    content = lines(*names(30))
    site = ingress(max_stored_bytes=len(content) + 500)
    for tenant in ("one", "two"):
        site.replicas.free = 5
        client = site.client(tenant)
        batch = await begin(client, content)
        await until(client, batch.id, lambda one: one.caesura["paused"] == "storage_quota")
        site.replicas.gate.set()
        await until(client, batch.id, lambda _: not site.batches.in_flight)
        site.replicas.gate.clear()
    site.replicas.gate.set()
    client = site.client("three")
    assert (await ended(client, (await begin(client, lines("a"))).id)).request_counts.completed == 1


async def test_lines_with_results_are_skipped_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the ingress that takes a large batch over shortly before its end."""
    numbers, here = range(1, 40), threading.current_thread()
    in_loop: list[bytes] = []

    def unpacked_here(piece: bytes) -> bytes:
        in_loop.extend([piece] * (threading.current_thread() is here))
        return unpacked(piece)

    monkeypatch.setattr("cluster.batches.task.unpacked", unpacked_here)
    batch = Batch("batch_large", "t", CHAT, "file-1", "24h", 0.0, 1.0)
    events = [Accepted(batch), *(Line(number, True, b"", 0) for number in numbers)]
    unused: Any = SimpleNamespace()
    task = BatchTask(batch, Progress("in_progress", 40), events, unused, unused, 1.0, 8, lambda: None)
    task._pieces = [packed(lines(f"l{number}")) for number in range(1, 41)]
    await task.load()
    line = task.take()
    assert line is not None and line.number == 40
    assert in_loop == []
    task.abandon()


class Cancelling(Replicas):
    """The first answer is waited for in a task that something else cancels."""

    async def answer(self, batch: Batch, number: int, request: LineRequest) -> LineAnswer:
        self.calls[request.custom_id] += 1
        if self.calls[request.custom_id] == 1:
            raise asyncio.CancelledError
        return LineAnswer(200, b"{}", "r")


async def test_a_line_whose_work_was_cancelled_elsewhere_is_started_again(ingress: MakeIngress) -> None:
    site = ingress(Cancelling())
    client = site.client()
    done = await ended(client, (await begin(client, lines("c1", "c2"))).id)
    assert done.request_counts.completed == 2
    assert (site.replicas.calls["c1"], site.replicas.calls["c2"]) == (2, 2)


async def test_a_batch_that_was_rejected_is_started_when_it_is_sent_again(
    ingress: MakeIngress, redis: EmbeddedRedis
) -> None:
    """Redis accepts it after the ingress has given up."""
    site = ingress()
    client = site.client("again")
    file = await client.files.create(file=lines("a"), purpose="batch")
    wanted: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    headers = {"Idempotency-Key": "again"}
    create = site.store.create

    async def late(*arguments: Any) -> Any:
        await create(*arguments)
        raise RunStoreUnavailable("a test", "timeout")

    site.store.create = late  # type: ignore[method-assign]
    with pytest.raises(InternalServerError):
        await client.batches.create(**wanted, extra_headers=headers)
    site.store.create = create  # type: ignore[method-assign]
    await sync_until(lambda: not site.batches._background.pending_jobs)
    done = await ended(client, (await client.batches.create(**wanted, extra_headers=headers)).id)
    assert done.status == "completed"
    assert [one.id async for one in client.batches.list()] == [done.id]


async def test_a_batch_whose_client_left_while_it_was_accepted_is_gone(ingress: MakeIngress) -> None:
    site, accepted = ingress(), asyncio.Event()
    client = site.client("left")
    create = site.store.create

    async def late(*arguments: Any) -> None:
        await create(*arguments)
        accepted.set()
        await asyncio.Event().wait()

    site.store.create = late  # type: ignore[method-assign,assignment]
    starting = asyncio.create_task(begin(client, lines("a")))
    await accepted.wait()
    assert [one.id async for one in client.batches.list()]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await sync_until(lambda: not site.batches._background.pending_jobs)
    assert [one.id async for one in client.batches.list()] == []
    assert not site.replicas.calls


async def test_results_without_their_numbers_are_counted(ingress: MakeIngress, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ingress dies between two writes."""
    monkeypatch.setattr("cluster.runs.journal.MAX_WRITE_BYTES", 1)
    first, second = ingress(), ingress()
    first.replicas.free = 0
    batch = await begin(first.client(), lines(*names(4)))
    await until(first.client(), batch.id, lambda _: first.batches.in_flight == 4)
    append = first.store.append

    async def without_numbers(*arguments: Any, status: str | None = None, **others: Any) -> None:
        if status is not None:
            raise RunStoreUnavailable("a test", "timeout")
        await append(*arguments, status=None, **others)

    monkeypatch.setattr(first.store, "append", without_numbers)
    first.replicas.gate.set()

    async def has_a_result() -> bool:
        page = await second.store.read(batch.id)
        return page is not None and any(isinstance(decode(one), Line) for one in page.items)

    await wait_for(has_a_result)
    await first.die()
    client = second.client()
    done = await ended(client, batch.id)
    assert done.request_counts.to_dict() == {"total": 4, "completed": 4, "failed": 0}
    assert sum(second.replicas.calls.values()) < 4


async def test_a_store_that_loses_its_data_while_the_output_is_written(
    ingress: MakeIngress, redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = ingress()
    client = site.client("output")
    append, lost = site.files._append, []

    async def lose_once(*arguments: Any) -> None:
        if arguments[0].startswith("file-") and "-output-" in arguments[0] and not lost:
            lost.append(arguments[0])
            async with redis_client(redis.url) as direct:
                await direct.flushall()
        await append(*arguments)

    monkeypatch.setattr(site.files, "_append", lose_once)
    batch = await begin(client, lines("a", "b"))
    await sync_until(lambda: lost)
    await wait_for(lambda: site.batches.show("output", batch.id))
    done = await ended(client, batch.id)
    assert done.request_counts.completed == 2
    assert await ids(client, done.output_file_id) == ["a", "b"]
