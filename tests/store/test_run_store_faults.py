"""Redis that is frozen, killed, emptied, full or spoilt: calls end in time, and the log goes on exactly."""

import asyncio
from typing import Any

import pytest
import redis.asyncio

from cluster.core.errors import RunLeaseLost, RunStoreUnavailable, RunUnknown
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.client import StoreFailure
from cluster.store.runs.records import AlreadyThere, Created, Idempotency, NewRun
from cluster.store.runs.store import MAX_CONNECTIONS, RunStore
from tests.store.conftest import MakeRunStore
from tests.store.outages import FAR_MORE, SHORT_S, commands_in, eventually, frozen

RUN = NewRun("run", "tenant", "program", idempotency=Idempotency("key", b"body"), secret=b"token")
SPACE = "caesura:v1:{runs}:"


def items(first: int, end: int) -> list[bytes]:
    return [b"item %d" % number for number in range(first, end)]


async def persist(call: Any) -> bool:
    """Repeat a write until its outcome is known."""

    async def attempt() -> bool | None:
        try:
            await call()
        except RunStoreUnavailable:
            return None
        return True

    return await eventually(attempt)


CALLS = {
    "create": lambda store: store.create(RUN, items(0, 1)),
    "append": lambda store: store.append("run", 0, items(0, 1)),
    "read": lambda store: store.read("run"),
    "follow": lambda store: anext(store.follow("run")),
    "renew": lambda store: store.renew(["run"]),
    "claim": lambda store: store.claim(1),
    "release": lambda store: store.release(["run"]),
    "ask_cancel": lambda store: store.ask_cancel("run"),
    "secret": lambda store: store.secret("run"),
    "runs": lambda store: store.runs("tenant"),
    "delete": lambda store: store.delete("run"),
}


@pytest.mark.parametrize("connected", [True, False])
async def test_every_call_to_a_frozen_redis_ends_in_time(
    server: EmbeddedRedis, ingress: MakeRunStore, connected: bool
) -> None:
    a = ingress("a", timeout_s=SHORT_S)
    if connected:
        await persist(lambda: a.create(RUN, items(0, 1)))
    a.failures.clear()

    async def reason(call: Any) -> str:
        with pytest.raises(RunStoreUnavailable) as refused:
            await call(a)
        return refused.value.reason

    async with frozen(server.pid), asyncio.timeout(FAR_MORE * SHORT_S):
        # Many more than there are connections: who waits for one does not wait longer.
        reasons = await asyncio.gather(*(reason(call) for call in [*CALLS.values()] * 20))
    assert len(reasons) > 10 * MAX_CONNECTIONS and set(reasons) == {StoreFailure.TIMEOUT}
    assert a.failures == {StoreFailure.TIMEOUT: len(reasons)} and not a.healthy
    await persist(lambda: a.claim(1))
    assert a.healthy


async def test_an_append_that_may_have_been_done_is_done_once(server: EmbeddedRedis, ingress: MakeRunStore) -> None:
    a, b = ingress("a", timeout_s=SHORT_S), ingress("b")
    await persist(lambda: a.create(RUN, items(0, 1)))
    for number in range(1, 4):
        async with frozen(server.pid):
            with pytest.raises(RunStoreUnavailable):
                await a.append("run", number, items(number, number + 1))
        # What was sent may be carried out now, before or after it is sent again.
        await persist(lambda number=number: a.append("run", number, items(number, number + 1)))
        await persist(lambda number=number: a.append("run", number, items(number, number + 1)))
    async with frozen(server.pid):
        with pytest.raises(RunStoreUnavailable):
            await a.append("run", 4, items(4, 5), final=True)
    await persist(lambda: a.append("run", 4, items(4, 5), final=True))
    log = await b.read("run")
    assert (list(log.items), log.closed) == (items(0, 5), True)


async def test_a_creation_that_was_given_up_is_claimed_by_somebody(
    server: EmbeddedRedis, ingress: MakeRunStore, direct: redis.asyncio.Redis
) -> None:
    a = ingress("a", timeout_s=SHORT_S)
    await persist(lambda: a.claim(1))
    async with frozen(server.pid):
        with pytest.raises(RunStoreUnavailable):
            await a.create(RUN, items(0, 1))
    # As if it had arrived: it may not have.
    await ingress("a").create(RUN, items(0, 1))
    await direct.zadd(SPACE + "open", {"run": 1})
    assert await a.claim(10) == ["run"]


async def test_a_redis_that_lost_everything_gets_everything_again(server: EmbeddedRedis, ingress: MakeRunStore) -> None:
    a, b = ingress("a"), ingress("b")
    await a.create(RUN, items(0, 1))
    await a.append("run", 1, items(1, 4))
    server.stop()
    with pytest.raises(RunStoreUnavailable) as refused:
        await a.append("run", 4, items(4, 5))
    assert refused.value.reason == StoreFailure.UNREACHABLE
    server.start()
    with pytest.raises(RunUnknown):
        await a.append("run", 4, items(4, 5))
    assert (await a.renew(["run"])).unknown == {"run"}
    assert await b.read("run") is None
    assert await a.create(RUN, items(0, 4)) == Created("run")
    await a.append("run", 4, items(4, 5))
    assert list((await b.read("run")).items) == items(0, 5)
    assert await b.secret("run") == b"token"
    assert await b.create(NewRun("2", "tenant", "p", idempotency=RUN.idempotency), [b""]) == AlreadyThere("run", True)


async def test_what_was_lost_may_have_been_asked_for_again_meanwhile(
    ingress: MakeRunStore, direct: redis.asyncio.Redis
) -> None:
    a, b = ingress("a"), ingress("b")
    await a.create(RUN, items(0, 2))
    await direct.flushall()
    await b.create(NewRun("2", "tenant", "program", idempotency=RUN.idempotency), items(0, 1))
    assert await a.create(RUN, items(0, 2)) == AlreadyThere("2", same_body=True)
    assert await a.create(NewRun("run", "tenant", "program"), items(0, 2)) == Created("run")
    assert [head.id for head in await b.runs("tenant")] == ["run", "2"]


async def test_a_key_whose_run_is_lost_is_free(ingress: MakeRunStore, direct: redis.asyncio.Redis) -> None:
    a = ingress("a")
    await a.create(RUN, items(0, 1))
    await a.append("run", 1, [], final=True)
    await direct.delete(SPACE + "run:run")
    second = NewRun("2", "tenant", "program", idempotency=RUN.idempotency)
    assert await a.create(second, items(0, 1)) == Created("2")
    # The first one is back; its end and its deletion leave alone what is the second one's now.
    assert await a.create(NewRun("run", "tenant", "program"), items(0, 1)) == Created("run")
    assert await direct.zrange(SPACE + "ended", 0, -1) == []
    await direct.hset(SPACE + "run:run", "idempotency", SPACE + "idempotency:tenant/key")
    await a.append("run", 1, [], final=True)
    assert await direct.pttl(SPACE + "idempotency:tenant/key") == -1
    assert await a.delete("run") is True
    assert await a.create(NewRun("3", "tenant", "p", idempotency=RUN.idempotency), [b""]) == AlreadyThere("2", True)


async def test_an_older_copy_is_brought_up_to_date(ingress: MakeRunStore, direct: redis.asyncio.Redis) -> None:
    a = ingress("a")
    await a.create(RUN, items(0, 2))
    older = await direct.dump(SPACE + "log:run")
    await a.append("run", 2, items(2, 5))
    await direct.restore(SPACE + "log:run", 0, older, replace=True)
    assert await a.create(RUN, items(0, 5)) == Created("run")
    assert list((await a.read("run")).items) == items(0, 5)


@pytest.mark.parametrize("key", ["run:run", "log:run"])
@pytest.mark.parametrize("spoil", ["kill", "string", "hash", "stream"])
async def test_a_spoilt_run_is_unknown_until_it_is_written_again(
    ingress: MakeRunStore, direct: redis.asyncio.Redis, key: str, spoil: tuple[str, ...]
) -> None:
    a, b = ingress("a"), ingress("b")
    await a.create(RUN, items(0, 3))
    await direct.delete(SPACE + key)
    match spoil:
        case "string":
            await direct.set(SPACE + key, "?")
        case "hash" if key == "run:run":
            await direct.hset(SPACE + key, mapping={"owner": "a", "tenant": "tenant"})
        case "hash":
            await direct.hset(SPACE + key, "i", "?")
        case "stream" if key == "run:run":
            await direct.xadd(SPACE + key, {"i": "?"})
    assert await b.read("run") is None and await b.secret("run") is None
    assert await b.runs("tenant") == []
    assert await b.ask_cancel("run") is False and await b.delete("run") is False
    assert (await a.renew(["run"])).unknown == {"run"}
    for final in (False, True):
        with pytest.raises(RunUnknown):
            await a.append("run", 3, items(3, 4), final=final)
    await direct.zadd(SPACE + "open", {"run": 1})
    assert await b.claim(10) == []
    assert await a.create(RUN, items(0, 4)) == Created("run")
    await a.append("run", 4, items(4, 5), final=True)
    assert list((await b.read("run")).items) == items(0, 5)
    assert [head.id for head in await b.runs("tenant")] == ["run"]
    assert not a.failures and not b.failures


async def test_keys_of_another_kind_do_no_harm(ingress: MakeRunStore, direct: redis.asyncio.Redis) -> None:
    a, b = ingress("a"), ingress("b")
    shared = ["open", "ended", "tenant:tenant", "program:tenant/program", "idempotency:tenant/key", "bell:a"]

    async def spoil() -> None:
        for key in shared:
            await direct.delete(SPACE + key)
            await direct.set(SPACE + key, "?")

    await spoil()
    assert await a.runs("tenant") == [] and await a.claim(10) == []
    await spoil()
    assert await a.create(RUN, items(0, 1)) == Created("run")
    assert [head.id for head in await a.runs("tenant", program="program")] == ["run"]
    assert isinstance(await b.create(NewRun("2", "tenant", "p", idempotency=RUN.idempotency), [b""]), AlreadyThere)
    await spoil()
    assert (await a.renew(["run"])).lost == set()
    await a.release(["run"])
    assert await b.claim(10) == ["run"]
    await spoil()
    await b.append("run", 1, items(1, 2), final=True)
    await spoil()
    assert await b.delete("run") is True
    assert not a.failures and not b.failures


@pytest.mark.parametrize(
    ("field", "value"),
    [("created_us", "soon"), ("labels", "{"), ("labels", "[1]"), ("status", b"\xff"), ("tenant", b"%ff")],
)
async def test_a_damaged_head_is_left_out_and_counted(
    ingress: MakeRunStore, direct: redis.asyncio.Redis, field: str, value: Any
) -> None:
    a = ingress("a")
    await a.create(RUN, items(0, 1))
    await a.create(NewRun("sound", "tenant", "program"), items(0, 1))
    await direct.hset(SPACE + "run:run", field, value)
    assert [head.id for head in await a.runs("tenant")] == ["sound"]
    assert a.failures == {StoreFailure.CORRUPT: 1}
    with pytest.raises(RunStoreUnavailable) as refused:
        await a.read("run")
    assert refused.value.reason == StoreFailure.CORRUPT


async def test_where_memory_is_short_runs_go_on_to_their_end_and_none_begins(
    ingress: MakeRunStore, direct: redis.asyncio.Redis
) -> None:
    a, b = ingress("a"), ingress("b")
    for name in ("run", "other"):
        await a.create(NewRun(name, "tenant", "program", idempotency=Idempotency(name, b"")), items(0, 1))
    await direct.config_set("maxmemory", 1)
    for refused_call in (
        lambda: a.create(NewRun("new", "tenant", "program", idempotency=Idempotency("new", b"")), items(0, 1)),
        lambda: a.append("run", 1, items(1, 2)),
    ):
        with pytest.raises(RunStoreUnavailable) as refused:
            await refused_call()
        assert refused.value.reason == StoreFailure.REFUSED
    assert await b.read("new") is None
    assert (await a.renew(["run", "other"])).lost == set()
    assert await b.ask_cancel("run") is True
    await a.release(["other"])
    assert await b.claim(10) == ["other"]
    await a.append("run", 1, items(1, 3), final=True)
    assert await b.delete("run") is True
    await direct.config_set("maxmemory", 0)
    assert [head.id for head in await b.runs("tenant")] == ["other"]


@pytest.mark.parametrize(
    ("spoil", "mend"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        (("ACL", "SETUSER", "default", "-evalsha"), ("ACL", "SETUSER", "default", "+evalsha")),
    ],
    ids=["read-only", "no right"],
)
async def test_a_redis_that_will_not_write_refuses_until_it_does(
    ingress: MakeRunStore, direct: redis.asyncio.Redis, spoil: tuple[str, ...], mend: tuple[str, ...]
) -> None:
    a = ingress("a")
    await a.create(RUN, items(0, 1))
    await direct.execute_command(*spoil)
    for final in (False, True):
        with pytest.raises(RunStoreUnavailable) as refused:
            await a.append("run", 1, items(1, 2), final=final)
        assert refused.value.reason == StoreFailure.REFUSED
    await direct.execute_command(*mend)
    log = await a.read("run")
    assert (list(log.items), log.closed) == (items(0, 1), False)
    assert await a.secret("run") == b"token"
    await a.append("run", 1, items(1, 2))


async def test_scripts_that_redis_forgot_are_sent_again(ingress: MakeRunStore, direct: redis.asyncio.Redis) -> None:
    a = ingress("a")
    await a.create(RUN, items(0, 1))
    await direct.script_flush()
    await a.append("run", 1, items(1, 2))
    assert not a.failures


@pytest.mark.parametrize(
    "answer", [b"+OK\r\n", b"*1\r\n:7\r\n", b"*1\r\n*1\r\n$1\r\na\r\n", b"HTTP/1.1 400 Bad\r\n\r\n"]
)
async def test_whatever_answers_there_is_survived(answer: bytes | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while sent := await reader.read(1 << 20):
            writer.write(answer * commands_in(sent))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as stranger:
        url = f"redis://127.0.0.1:{stranger.sockets[0].getsockname()[1]}"
        store = RunStore(url, owner="a", timeout_s=SHORT_S, lease_s=1.0, retention_s=1.0)
        async with asyncio.timeout(FAR_MORE * SHORT_S):
            for name, call in CALLS.items():
                try:
                    await call(store)
                except (RunStoreUnavailable, RunUnknown, RunLeaseLost):
                    continue
                assert name in ("release", "delete", "claim", "runs", "secret", "ask_cancel"), name
        await store.close()
