"""The embedded Redis is killed: it is back with its data, or the watch says why it is not."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from cluster.core.clock import ManualClock
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.local.redis_watch import MAX_RESTARTS, RESTARTS_WINDOW_S, RedisWatch
from tests.waiting import wait_until


def kill_again(server: EmbeddedRedis) -> None:
    """Kill the server, and wait until another one answers."""
    killed = server.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: server.pid not in (None, killed))
    wait_until(lambda: answers(server))


def answers(server: EmbeddedRedis) -> bool:
    with redis.Redis.from_url(server.url) as client:
        try:
            return bool(client.ping())
        except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
            return False


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["without a path", "with a path"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> EmbeddedRedis:
    return EmbeddedRedis(tmp_path / "redis" if request.param == "with a path" else None)


@pytest.fixture
def watch(server: EmbeddedRedis, clock: ManualClock) -> Iterator[RedisWatch]:
    with server, RedisWatch(server, clock) as watch:
        yield watch


def test_a_killed_redis_is_back_with_its_data_at_the_same_url(server: EmbeddedRedis, watch: RedisWatch) -> None:
    with redis.Redis.from_url(server.url) as client:
        for number in range(200):
            client.rpush("log", number)
    for _ in range(2):
        kill_again(server)
        with redis.Redis.from_url(server.url) as client:
            assert client.lrange("log", 0, -1) == [str(number).encode() for number in range(200)]
    assert watch.failure is None


def test_a_redis_that_is_killed_again_and_again_is_given_up(
    server: EmbeddedRedis, watch: RedisWatch, clock: ManualClock
) -> None:
    for _ in range(MAX_RESTARTS):
        kill_again(server)
    clock.advance(RESTARTS_WINDOW_S)
    kill_again(server)
    assert watch.failure is None
    for _ in range(MAX_RESTARTS - 1):
        kill_again(server)
    os.kill(server.pid or 0, signal.SIGKILL)
    wait_until(lambda: watch.failure is not None)
    assert "more than 5 times" in str(watch.failure)


def test_data_that_cannot_be_read_are_told(server: EmbeddedRedis, watch: RedisWatch) -> None:
    directory = Path(psutil.Process(server.pid).cwd())
    (directory / "appendonly.aof").write_text("not what Redis writes\n" * 10)
    os.kill(server.pid or 0, signal.SIGKILL)
    wait_until(lambda: watch.failure is not None)
    assert "Bad file format" in str(watch.failure)


def test_a_watch_that_ends_leaves_no_server(server: EmbeddedRedis) -> None:
    with server, RedisWatch(server):
        kill_again(server)
        pid = server.pid
        assert pid is not None
    assert server.pid is None and not psutil.pid_exists(pid)
