"""The usage of days in a real Redis, and the page of it."""

from collections.abc import AsyncIterator
from datetime import date

import pytest

from cluster.core.clock import ManualClock
from cluster.core.errors import BadRequest, HttpError
from cluster.core.usage import DayUsage, ProgramUsage
from cluster.http.usage import as_csv, read_day, usage_of_day
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.client import StoreFailure
from cluster.store.usage import KEPT, UsageStore, _part, _writers

DAY = "2026-09-21"
NOON = 1_789_992_000.0


@pytest.fixture
async def store(server: EmbeddedRedis) -> AsyncIterator[UsageStore]:
    made = UsageStore(server.url, timeout_s=60.0, clock=ManualClock())
    yield made
    await made.close()


def row(number: int, program: str, decode_s: float, day: str = DAY) -> DayUsage:
    return DayUsage(number, day, ProgramUsage("acme", program, 1, 10, 5, 2, decode_s=decode_s))


async def test_a_later_row_replaces_the_earlier_one_and_replicas_add_up(store: UsageStore) -> None:
    await store.write("tiny", "r1", [row(1, "a", 1.0), row(2, "b", 2.0)])
    await store.write("tiny", "r1", [row(1, "a", 1.5), row(3, "a", 9.0, "2026-09-22")])
    await store.write("tiny", "r1", [row(1, "a", 1.5)])
    await store.write("tiny", "r2", [row(1, "a", 4.0)])
    await store.write("large", "r3", [row(1, "a", 8.0)])
    await store.write("tiny", "r4", [])
    found = await store.read(DAY)
    assert {key: usage.decode_s for key, usage in found.items()} == {
        ("acme", "tiny", "a"): 5.5,
        ("acme", "tiny", "b"): 2.0,
        ("acme", "large", "a"): 8.0,
    }
    assert found["acme", "tiny", "a"].prompt_tokens == 20
    assert (await store.read("2026-09-22"))["acme", "tiny", "a"].decode_s == 9.0


async def test_usage_expires_and_damaged_rows_are_counted(store: UsageStore) -> None:
    await store.write("tiny", "r1", [row(1, "a", 1.0)])
    for key in (_writers(DAY), _part(DAY, "tiny\nr1")):
        assert 0 < await store.redis.ttl(key) <= KEPT.total_seconds()
    await store.redis.hset(_part(DAY, "tiny\nr1"), "2", b"\xc1 not msgpack")
    assert len(await store.read(DAY)) == 1
    assert store.failures[StoreFailure.CORRUPT] == 1


async def test_the_page(store: UsageStore) -> None:
    await store.write("tiny", "r1", [row(1, "b", 2.0), row(2, "=1+1", 1.0)])
    page = await usage_of_day(store, None, lambda: NOON)
    assert page.media_type == "text/csv"
    assert bytes(page.body).decode().splitlines() == [
        "day,tenant,model,program,turns,prompt_tokens,cached_tokens,output_tokens,"
        "prefill_s,decode_s,recomputed_s,held_s,caused_s",
        f"{DAY},acme,tiny,'=1+1,1,10,5,2,0.000000,1.000000,0.000000,0.000000,0.000000",
        f"{DAY},acme,tiny,b,1,10,5,2,0.000000,2.000000,0.000000,0.000000,0.000000",
    ]
    empty = await usage_of_day(store, "2026-09-20", lambda: NOON)
    assert len(bytes(empty.body).splitlines()) == 1


@pytest.mark.parametrize("day", ["yesterday", "", "2026-13-01", "2026-09-22", "2026-09-13", "21.09.2026", "1" * 5000])
async def test_a_day_that_cannot_be_is_refused_by_name(store: UsageStore, day: str) -> None:
    with pytest.raises(BadRequest) as caught:
        await usage_of_day(store, day, lambda: NOON)
    assert caught.value.param == "day"
    assert len(caught.value.message) < 200


def test_a_week_and_today_can_be_asked_for() -> None:
    today = date(2026, 9, 21)
    assert [read_day(day, today) for day in ("2026-09-14", "2026-09-21", None)] == ["2026-09-14", DAY, DAY]


async def test_without_the_store_there_is_an_error(server: EmbeddedRedis) -> None:
    gone = UsageStore("redis://127.0.0.1:1", timeout_s=60.0, clock=ManualClock())
    with pytest.raises(HttpError) as caught:
        await usage_of_day(gone, None, lambda: NOON)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    await gone.close()


def test_names_with_separators_stay_one_cell() -> None:
    text = as_csv(DAY, {("a", "m", 'x,"y"\nz'): ProgramUsage("a", 'x,"y"\nz')})
    assert '"x,""y""\nz"' in text
