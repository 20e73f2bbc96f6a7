"""Redis that is gone, frozen, unwilling or strange: the local copy goes on, a counter says so, nothing hangs."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import redis
import redis.asyncio

from cluster.core.clock import ManualClock
from cluster.durations.table import OVERALL
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.client import StoreFailure, failure_of
from cluster.store.durations import DurationStore
from tests.store.conftest import MakePeer
from tests.store.outages import FAR_MORE, SHORT_S, commands_in, eventually, frozen, kill


async def test_data_that_redis_lost_are_written_again(peer: MakePeer, direct: redis.asyncio.Redis) -> None:
    a, b = peer("a").observe("python", 1.0).observe("search", 1.0), peer("b").observe("shell", 1.0)
    for lose in (direct.flushall, lambda: direct.delete("caesura:v1:{tiny}:durations:a")):
        await a.exchange()
        await b.exchange()
        await lose()
        await a.exchange()
        assert await b.exchange() == {OVERALL: 2, "python": 1, "search": 1}
        assert await a.exchange() == {OVERALL: 1, "shell": 1}
    assert not a.store.failures and not b.store.failures


async def test_a_redis_that_comes_back_empty_gets_everything_again(server: EmbeddedRedis, peer: MakePeer) -> None:
    a, b = peer("a").observe("python", 1.0), peer("b")
    await a.exchange()
    await b.exchange()
    server.stop()
    server.start()
    await eventually(a.exchange)
    assert await eventually(b.exchange) == {OVERALL: 1, "python": 1}


async def test_a_killed_redis_is_gone_and_back(server: EmbeddedRedis, peer: MakePeer) -> None:
    a, b = peer("a").observe("python", 1.0), peer("b").observe("python", 3.0)
    await b.exchange()
    assert await a.exchange() == {OVERALL: 1, "python": 1}
    kill(server)
    for _ in range(3):
        a.observe("python", 2.0)
        assert await a.exchange() is None
    assert not a.store.healthy
    assert a.store.failures == {StoreFailure.UNREACHABLE: 3}
    assert a.table.tool("python").count == 5
    server.start()
    await eventually(b.exchange)
    assert await eventually(a.exchange) == {OVERALL: 1, "python": 1}
    assert await b.exchange() == {OVERALL: 4, "python": 4}
    assert a.store.healthy


async def test_after_a_failure_the_next_redis_may_be_an_older_copy(peer: MakePeer, direct: redis.asyncio.Redis) -> None:
    a, b = peer("a").observe("python", 1.0), peer("b")
    await a.exchange()
    part = "caesura:v1:{tiny}:durations:a"
    older = await direct.dump(part)
    a.observe("python", 2.0).observe("search", 1.0)
    await a.exchange()
    await direct.execute_command("REPLICAOF", "127.0.0.1", "1")
    assert await a.exchange() is None
    await direct.execute_command("REPLICAOF", "NO", "ONE")
    await direct.restore(part, 3_600_000, older, replace=True)
    await a.exchange()
    assert await b.exchange() == {OVERALL: 3, "python": 2, "search": 1}


@pytest.mark.parametrize("connected", [True, False])
async def test_a_frozen_redis_costs_the_time_limit_and_nothing_else(
    server: EmbeddedRedis, peer: MakePeer, connected: bool
) -> None:
    a, b = peer("a", timeout_s=SHORT_S).observe("python", 1.0), peer("b")
    if connected:
        await eventually(a.exchange)
    async with frozen(server.pid), asyncio.timeout(FAR_MORE * SHORT_S):
        a.observe("python", 2.0)
        steps = 0
        exchange = asyncio.create_task(a.exchange())
        while not exchange.done():
            await asyncio.sleep(SHORT_S / 50)
            steps += 1
        assert await exchange is None
        assert steps > 1, "the event loop stood still"
        assert a.table.tool("python").count == 2
    assert a.store.failures[StoreFailure.TIMEOUT] >= 1
    a.observe("search", 3.0)
    await eventually(a.exchange)
    assert await b.exchange() == {OVERALL: 3, "python": 2, "search": 1}


async def test_a_frozen_redis_answers_nobody_else_late(server: EmbeddedRedis, peer: MakePeer) -> None:
    """An answer to an exchange that was given up must not be taken for that to the next."""
    a, b = peer("a", timeout_s=SHORT_S).observe("python", 1.0), peer("b").observe("b", 1.0)
    await eventually(a.exchange)
    for i in range(3):
        async with frozen(server.pid):
            assert await a.exchange() is None
        b.observe("b", 1.0)
        await b.exchange()
        assert await eventually(a.exchange) == {OVERALL: i + 2, "b": i + 2}


async def test_a_wrong_password_is_refused(server: EmbeddedRedis, peer: MakePeer) -> None:
    a = peer("a", url=server.url.replace("redis://:", "redis://:not-"))
    assert await a.exchange() is None
    assert a.store.failures == {StoreFailure.REFUSED: 1}


@pytest.mark.parametrize(
    ("spoil", "mend"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        (("CONFIG", "SET", "min-replicas-to-write", "1"), ("CONFIG", "SET", "min-replicas-to-write", "0")),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        (("ACL", "SETUSER", "default", "-evalsha"), ("ACL", "SETUSER", "default", "+evalsha")),
    ],
    ids=["out of memory", "too few replicas", "read-only", "no right"],
)
async def test_a_redis_that_will_not_write_is_counted_until_it_does(
    peer: MakePeer, direct: redis.asyncio.Redis, spoil: tuple[str, ...], mend: tuple[str, ...]
) -> None:
    a, b = peer("a").observe("python", 1.0), peer("b")
    await a.exchange()
    await direct.execute_command(*spoil)
    a.observe("python", 2.0)
    assert await a.exchange() is None
    assert a.store.failures == {StoreFailure.REFUSED: 1}
    await direct.execute_command(*mend)
    assert await a.exchange() == {}
    assert await b.exchange() == {OVERALL: 2, "python": 2}


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"", StoreFailure.UNREACHABLE),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", StoreFailure.UNREACHABLE),
        (b"-LOADING Redis is loading the dataset in memory\r\n", StoreFailure.REFUSED),
        (b"+OK\r\n", StoreFailure.CORRUPT),
        (b"*4\r\n:1\r\n:0\r\n*0\r\n*1\r\n*3\r\n$1\r\na\r\n$1\r\n1\r\n:7\r\n", StoreFailure.CORRUPT),
        (b"*4\r\n:1\r\n:0\r\n", StoreFailure.TIMEOUT),
        (None, StoreFailure.TIMEOUT),
    ],
)
async def test_whatever_answers_there_is_survived(answer: bytes | None, failure: StoreFailure) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while sent := await reader.read(1 << 20):
            if answer is None:
                continue
            writer.write(answer * commands_in(sent))
            if not answer or answer.startswith(b"HTTP"):
                break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as stranger:
        port = stranger.sockets[0].getsockname()[1]
        url = f"redis://127.0.0.1:{port}"
        store = DurationStore(url, model="m", writer="a", timeout_s=SHORT_S, expiry_s=9.0, clock=ManualClock())
        async with asyncio.timeout(FAR_MORE * SHORT_S):
            assert await store.exchange({}) is None
        assert store.failures == {failure: 1}
        await store.close()


async def test_several_slow_answers_share_one_time_limit() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 20):
            await asyncio.sleep(SHORT_S * 0.7)
            writer.write(b"*4\r\n:0\r\n:0\r\n*0\r\n*0\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as slow:
        url = f"redis://127.0.0.1:{slow.sockets[0].getsockname()[1]}"
        store = DurationStore(url, model="m", writer="a", timeout_s=SHORT_S, expiry_s=9.0, clock=ManualClock())
        assert await store.exchange({}) is None
        assert store.failures == {StoreFailure.TIMEOUT: 1}
        await store.close()


async def test_health_is_logged_once_a_change(
    server: EmbeddedRedis, peer: MakePeer, caplog: pytest.LogCaptureFixture
) -> None:
    a = peer("a").observe("python", 1.0)
    with caplog.at_level(logging.WARNING, "cluster.store"):
        await a.exchange()
        assert not caplog.records
        server.stop()
        for _ in range(3):
            assert await a.exchange() is None
        assert [record.getMessage().split(":")[0] for record in caplog.records] == [
            "tool statistics go on without the store (unreachable)"
        ]
        server.start()
        await eventually(a.exchange)
        await a.exchange()
    assert [record.getMessage() for record in caplog.records][1:] == [
        "the tool statistics store answers again after 0.0 s"
    ]
    assert server.url.split("@")[0].removeprefix("redis://:") not in caplog.text


def test_every_exception_of_an_exchange_has_a_meaning() -> None:
    def all_below(kind: type[Exception]) -> set[type[Exception]]:
        return {kind}.union(*(all_below(below) for below in kind.__subclasses__()))

    meanings = {kind.__name__: failure_of(kind.__new__(kind)) for kind in all_below(redis.RedisError)}
    assert meanings["TimeoutError"] is StoreFailure.TIMEOUT
    assert meanings["ConnectionError"] is StoreFailure.UNREACHABLE
    for refusal in (
        "AuthenticationError",
        "NoPermissionError",
        "ReadOnlyError",
        "OutOfMemoryError",
        "BusyLoadingError",
    ):
        assert meanings[refusal] is StoreFailure.REFUSED
    assert failure_of(TimeoutError()) is StoreFailure.TIMEOUT
    assert failure_of(ConnectionResetError()) is StoreFailure.UNREACHABLE
    assert failure_of(msgspec.ValidationError()) is StoreFailure.CORRUPT


ORPHAN_MAKER = """
import sys, time
from cluster.local.embedded_redis import EmbeddedRedis
with EmbeddedRedis() as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_redis_does_not_outlive_its_parent(ending: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", ORPHAN_MAKER], stdout=subprocess.PIPE, env=environment) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.name() == "redis-server" and child.ppid() == parent.pid
        parent.send_signal(ending)
        parent.wait(60)
        try:
            # Where nobody collects orphans, a dead one stays as a zombie.
            child.wait(60)
        except psutil.TimeoutExpired:
            assert child.status() == psutil.STATUS_ZOMBIE


def test_redis_is_spared_ctrl_c_without_a_session_of_its_own(server: EmbeddedRedis) -> None:
    assert os.getpgid(server.pid) != os.getpgid(0)
    assert os.getsid(server.pid) == os.getsid(0)
