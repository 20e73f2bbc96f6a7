"""Homes of programs in a real Redis: one home whoever races, moves with fencing, and outages that cost little."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio

from cluster.core.clock import ManualClock
from cluster.core.replica_snapshot import Home
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.client import StoreFailure
from cluster.store.placements import MAX_TOUCHED, QUARANTINED_KEPT, PlacementStore
from tests.store.outages import FAR_MORE, SHORT_S, eventually, frozen, kill
from tests.waiting import WITHIN_S

KEY = "default/program"
AT = "caesura:v1:{tiny}:home:default%2Fprogram"
PATIENT_S = 60.0


MakePlacements = Callable[..., PlacementStore]


@pytest.fixture
async def places(server: EmbeddedRedis) -> AsyncIterator[MakePlacements]:
    """Makes an ingress's store of placements."""
    stores = []

    def make(**changes: Any) -> PlacementStore:
        arguments = {"url": server.url, "model": "tiny", "timeout_s": PATIENT_S, "expiry_s": 3600.0} | changes
        stores.append(PlacementStore(clock=ManualClock(), **arguments))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


async def test_the_first_claim_wins_and_all_learn_it(places: MakePlacements) -> None:
    stores = [places() for _ in range(4)]
    claims = (store.claim(KEY, Home(f"r{n % 7}", 1)) for n, store in enumerate(stores * 25))
    answers = await asyncio.gather(*claims)
    assert len(set(answers)) == 1
    assert (await stores[1].get(KEY)) == (answers[0],)


async def test_programs_and_models_do_not_meet(places: MakePlacements) -> None:
    a, other = places(), places(model="other")
    for key in ("default/a", "default/a b", "default/a/b", "default/\ud800", "ten{ant}/x"):
        assert await a.claim(key, Home("mine", 1)) == Home("mine", 1)
        assert await other.get(key) == (None,)
        assert await other.claim(key, Home("theirs", 4)) == Home("theirs", 4)
        assert await a.get(key) == (Home("mine", 1),)


async def test_of_racing_moves_one_wins(places: MakePlacements) -> None:
    a, b = places(), places()
    await a.claim(KEY, Home("r0", 1))
    moves = await asyncio.gather(*(store.move(KEY, 1, f"r{n}") for n, store in enumerate([a, b] * 20, 1)))
    assert len(set(moves)) == 1
    (winner,) = set(moves)
    assert winner is not None and winner.epoch == 2
    assert await a.move(KEY, 2, "r0") == Home("r0", 3)
    assert await b.move(KEY, 1, "r9") == Home("r0", 3)


async def test_a_move_in_a_store_that_has_lost_the_home_keeps_epochs_growing(
    places: MakePlacements, direct: redis.asyncio.Redis
) -> None:
    a = places()
    await direct.flushall()
    assert await a.move(KEY, 6, "r1") == Home("r1", 7)
    await direct.set(AT, "2 r0")
    assert await a.move(KEY, 7, "r2") == Home("r2", 8)
    await direct.set(AT, "2 r0")
    assert await a.claim(KEY, Home("r2", 8)) == Home("r2", 8)


@pytest.mark.parametrize("value", ["", "junk", "0 r", "1  r", "-1 r", "1 a b", "1", "9" * 13 + " r", "1 " + "r" * 600])
async def test_damaged_homes_are_replaced_and_counted(
    places: MakePlacements, direct: redis.asyncio.Redis, value: Any
) -> None:
    a = places()
    await direct.set(AT, value)
    assert await a.get(KEY) == (None,)
    assert await a.claim(KEY, Home("r1", 3)) == Home("r1", 3)
    assert a.failures[StoreFailure.CORRUPT] == 2
    assert await a.get(KEY) == (Home("r1", 3),)


async def test_a_key_of_another_type_is_replaced(places: MakePlacements, direct: redis.asyncio.Redis) -> None:
    a = places()
    for call in (lambda: a.claim(KEY, Home("r", 1)), lambda: a.move(KEY, 4, "r")):
        await direct.delete(AT)
        await direct.hset(AT, "a", "b")
        assert (await call()).replica == "r"
    assert a.failures == {StoreFailure.CORRUPT: 2}
    assert a.healthy


async def test_touching_renews_and_tells_what_is_otherwise(places: MakePlacements, direct: redis.asyncio.Redis) -> None:
    a = places()
    keys = [f"default/{n}" for n in range(MAX_TOUCHED + 5)]
    await asyncio.gather(*(a.claim(key, Home("r", 1)) for key in keys))
    name = AT.replace("program", str(MAX_TOUCHED + 2))
    await direct.pexpire(name, 60_000)
    await direct.delete(AT.replace("program", str(MAX_TOUCHED + 1)))
    await a.move(keys[0], 1, "r2")
    assert await a.touch(dict.fromkeys(keys, Home("r", 1))) == {keys[MAX_TOUCHED + 1], keys[0]}
    assert await direct.pttl(name) > 3_000_000
    assert await a.touch({}) == frozenset()


async def test_what_has_expired_can_be_claimed_anew(places: MakePlacements, direct: redis.asyncio.Redis) -> None:
    a = places()
    await a.claim(KEY, Home("r1", 0))
    assert await a.get(KEY) == (Home("r1", 1),)
    assert 0 < await direct.pttl(AT) <= 3_600_000
    await direct.pexpire(AT, 0)
    assert await a.claim(KEY, Home("r2", 1)) == Home("r2", 1)


async def test_only_the_epoch_that_ended_is_forgotten(places: MakePlacements) -> None:
    a = places()
    await a.claim(KEY, Home("r1", 1))
    await a.move(KEY, 1, "r2")
    assert await a.forget(KEY, 1) is False
    assert await a.get(KEY) == (Home("r2", 2),)
    assert await a.forget(KEY, 2) is True
    assert await a.get(KEY) == (None,)


async def test_quarantine_is_remembered_for_its_time(places: MakePlacements, direct: redis.asyncio.Redis) -> None:
    a, b = places(), places()
    assert await b.is_quarantined("digest") is False
    assert await a.quarantine("digest", 100.0) is True
    assert await b.is_quarantined("digest") is True
    assert 0 < await direct.pttl("caesura:v1:{tiny}:quarantine:digest") <= 100_000


async def test_who_follows_the_quarantine_learns_of_the_next_request_at_once(
    places: MakePlacements, direct: redis.asyncio.Redis
) -> None:
    a, b = places(), places()
    assert await b.quarantined_after("0") == ("0-0", [])
    waiting = asyncio.create_task(b.quarantined_after("0-0"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await a.quarantine("first", 100.0)
    async with asyncio.timeout(WITHIN_S):
        last, digests = await waiting or ("", [])
    assert digests == ["first"]
    for number in range(QUARANTINED_KEPT + 10):
        await a.quarantine(str(number), 100.0)
    _, digests = await b.quarantined_after(last) or ("", [])
    assert digests == [str(number) for number in range(10, QUARANTINED_KEPT + 10)]
    assert 0 < await direct.pttl("caesura:v1:{tiny}:quarantine:") <= 100_000


CALLS: dict[str, Callable[[PlacementStore], Any]] = {
    "claim": lambda store: store.claim(KEY, Home("r", 1)),
    "move": lambda store: store.move(KEY, 1, "r"),
    "get": lambda store: store.get(KEY),
    "touch": lambda store: store.touch({KEY: Home("r", 1)}),
    "forget": lambda store: store.forget(KEY, 1),
    "quarantine": lambda store: store.quarantine("d", 9.0),
    "is_quarantined": lambda store: store.is_quarantined("d"),
    "quarantined_after": lambda store: store.quarantined_after("0"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_redis_that_is_gone_is_none_and_counted(
    server: EmbeddedRedis, places: MakePlacements, call: Any
) -> None:
    a = places()
    assert await call(a) is not None
    kill(server)
    assert await call(a) is None
    assert not a.healthy and a.failures[StoreFailure.UNREACHABLE] == 1
    server.start()
    assert await eventually(lambda: call(a)) is not None
    assert a.healthy


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_frozen_redis_costs_the_time_limit(server: EmbeddedRedis, places: MakePlacements, call: Any) -> None:
    a = places(timeout_s=SHORT_S)
    await eventually(lambda: call(a))
    async with frozen(server.pid), asyncio.timeout(FAR_MORE * SHORT_S):
        assert set(await asyncio.gather(*(call(a) for _ in range(40)))) == {None}
    assert a.failures[StoreFailure.TIMEOUT] >= 40
    await eventually(lambda: call(a))


async def test_a_frozen_redis_answers_nobody_else_late(server: EmbeddedRedis, places: MakePlacements) -> None:
    a = places(timeout_s=SHORT_S)
    await a.claim("default/a", Home("ra", 1))
    await a.claim("default/b", Home("rb", 1))
    for _ in range(3):
        async with frozen(server.pid):
            assert await a.get("default/a") is None
        assert await eventually(lambda: a.get("default/b")) == (Home("rb", 1),)


async def test_a_redis_that_will_not_write_is_counted(places: MakePlacements, direct: redis.asyncio.Redis) -> None:
    a = places()
    await a.touch({})
    await direct.execute_command("REPLICAOF", "127.0.0.1", "1")
    assert await a.claim(KEY, Home("r", 1)) is None
    assert a.failures == {StoreFailure.REFUSED: 1}
    await direct.execute_command("REPLICAOF", "NO", "ONE")
    assert await a.claim(KEY, Home("r", 1)) == Home("r", 1)


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad\r\n\r\n", b"+OK\r\n", b"*3\r\n$1\r\nx\r\n$1\r\nr\r\n:0\r\n", b":7\r\n", None]
)
async def test_whatever_answers_there_is_survived(answer: bytes | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 20):
            if answer is None:
                continue
            writer.write(answer)
            if not answer or answer.startswith(b"HTTP"):
                break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as stranger:
        url = f"redis://127.0.0.1:{stranger.sockets[0].getsockname()[1]}"
        a = PlacementStore(url, model="m", timeout_s=SHORT_S, expiry_s=9.0, clock=ManualClock())
        async with asyncio.timeout(FAR_MORE * SHORT_S):
            assert await a.claim(KEY, Home("r", 1)) is None
        assert sum(a.failures.values()) == 1
        await a.close()
