"""What writers share while Redis is well."""

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import redis.asyncio

from cluster.core.clock import MonotonicClock
from cluster.core.errors import ConfigError
from cluster.durations.statistics import MAX_STATISTICS_BYTES, DurationStatistics
from cluster.durations.table import MAX_TOOLS, OVERALL, DurationTable
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.client import StoreFailure
from cluster.store.durations import LIMITS, DurationStore
from cluster.store.parts import WRITERS_A_PERIOD
from tests.store.conftest import MakePeer

WRITERS = "caesura:v1:{tiny}:writers"
PART = "caesura:v1:{tiny}:durations:"


def statistics_of(*durations: float) -> DurationStatistics:
    statistics = DurationStatistics()
    for seconds in durations:
        statistics.observe(seconds)
    return statistics


async def test_everybody_reads_what_all_others_observed(peer: MakePeer) -> None:
    a, b, c = (peer(name) for name in "abc")
    a.observe("python", 1.0, 2.0).observe("search", 5.0)
    b.observe("python", 6.0)
    assert await a.exchange() == {}
    assert await b.exchange() == {OVERALL: 3, "python": 2, "search": 1}
    assert await c.exchange() == {OVERALL: 4, "python": 3, "search": 1}
    assert await a.exchange() == {OVERALL: 1, "python": 1}
    for one in (a, b, c):
        python = one.table.tool("python")
        assert (python.count, python.mean_s, python.min_s, python.max_s) == (3, 3.0, 1.0, 6.0)
        assert python.variance == pytest.approx(14 / 3)
        assert python.quantile(0.5) == 2.0
        assert one.table.overall.count == 4
        assert one.store.healthy and not one.store.failures


async def _observe_and_exchange(url: str, writer: str, times: int) -> dict[StoreFailure, int]:
    store = DurationStore(url, model="tiny", writer=writer, timeout_s=30.0, expiry_s=3600.0, clock=MonotonicClock())
    table = DurationTable()
    for i in range(times):
        table.observe("shared", float(i))
        others = await store.exchange(table.own())
        table.replace_others(others or {})
    await store.close()
    return dict(store.failures)


def observe_and_exchange(url: str, writer: str, times: int) -> dict[StoreFailure, int]:
    """In a process of its own."""
    return asyncio.run(_observe_and_exchange(url, writer, times))


async def test_two_processes_that_write_at_once_lose_nothing(server: EmbeddedRedis, peer: MakePeer) -> None:
    loop, times = asyncio.get_running_loop(), 200
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        work = [loop.run_in_executor(processes, observe_and_exchange, server.url, name, times) for name in "ab"]
        assert await asyncio.gather(*work) == [{}, {}]
    reader = peer("reader")
    assert await reader.exchange() == {OVERALL: 2 * times, "shared": 2 * times}
    assert reader.table.tool("shared").mean_s == pytest.approx((times - 1) / 2)


async def test_only_what_changed_is_written(peer: MakePeer, direct: redis.asyncio.Redis) -> None:
    a, b = peer("a").observe("python", 1.0).observe("search", 1.0), peer("b")
    await a.exchange()
    await direct.hdel(PART + "a", "search")
    a.observe("python", 2.0)
    await a.exchange()
    assert await b.exchange() == {OVERALL: 3, "python": 2}


async def test_a_tool_that_its_writer_forgot_is_gone_for_all(peer: MakePeer) -> None:
    a, b = peer("a").observe("python", 1.0).observe("search", 1.0), peer("b")
    await a.exchange()
    rest = {name: part for name, part in a.table.own().items() if name != "search"}
    await a.store.exchange(rest)
    assert await b.exchange() == {OVERALL: 2, "python": 1}


async def test_what_has_not_changed_is_not_merged_again(peer: MakePeer) -> None:
    a, b, c = peer("a").observe("python", 1.0).observe("search", 1.0), peer("b").observe("python", 1.0), peer("c")
    await a.exchange()
    await b.exchange()
    first = await c.store.exchange({})
    b.observe("shell", 3.0)
    await b.exchange()
    second = await c.store.exchange({})
    assert second["python"] is first["python"] and second["search"] is first["search"]
    assert (second[OVERALL].count, second["shell"].count) == (4, 1)


async def sent_by(direct: redis.asyncio.Redis) -> int:
    """Bytes that Redis has sent to all clients."""
    return int((await direct.info("stats"))["total_net_output_bytes"])


async def test_a_part_that_has_not_changed_is_not_sent_again(peer: MakePeer, direct: redis.asyncio.Redis) -> None:
    a, b = peer("a"), peer("b")
    for number in range(1000):
        a.observe(f"tool-{number}", 1.0)
    await a.exchange()
    first = await b.exchange()
    before = await sent_by(direct)
    for _ in range(5):
        assert await b.exchange() == first
    assert await sent_by(direct) - before < 10_000
    a.observe("tool-0", 1.0)
    await a.exchange()
    assert (await b.exchange())["tool-0"] == 2


async def test_a_reader_keeps_no_more_than_its_bound(peer: MakePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, reader = peer("a").observe("python", 1.0), peer("b").observe("search", 1.0), peer("reader")
    await a.exchange()
    await b.exchange()
    monkeypatch.setattr("cluster.store.parts.MAX_HELD_BYTES", 200)
    for _ in range(2):
        assert await reader.exchange() == {OVERALL: 1, "search": 1}, "the part that was written last"


async def test_models_do_not_see_each_other(peer: MakePeer) -> None:
    names = ["tiny", "tiny}", "{tiny}:durations", "tiny:writers"]
    tools = {name: f"tool {number}" for number, name in enumerate(names)}
    await asyncio.gather(*(peer("a", model=name).observe(tool, 1.0).exchange() for name, tool in tools.items()))
    for name, tool in tools.items():
        assert await peer("b", model=name).exchange() == {OVERALL: 1, tool: 1}


async def test_every_name_that_a_model_can_write_arrives(peer: MakePeer) -> None:
    names = ["ls -la", "ü" * 100, "\ud800", "a\0b", "\n"]
    a = peer("a")
    for name in names:
        a.observe(name, 1.0)
    await a.exchange()
    assert await peer("b").exchange() == {OVERALL: len(names)} | dict.fromkeys(names, 1)


# --- expiry -------------------------------------------------------------------------------------------------------


async def test_every_key_expires_and_every_exchange_puts_it_off(peer: MakePeer, direct: redis.asyncio.Redis) -> None:
    a = peer("a", expiry_s=1000.0).observe("python", 1.0)
    for _ in range(2):
        await a.exchange()
        keys = await direct.keys("*")
        assert sorted(keys) == [PART.encode() + b"a", WRITERS.encode()]
        for key in keys:
            assert 500_000 < await direct.pttl(key) <= 1_000_000
            await direct.pexpire(key, 100_000)


async def test_a_writer_that_was_silent_for_too_long_is_ignored_and_removed(
    peer: MakePeer, direct: redis.asyncio.Redis
) -> None:
    a, b = peer("a").observe("python", 1.0), peer("b")
    await a.exchange()
    await direct.zincrby(WRITERS, -3_600_001, "a")
    assert await b.exchange() == {}
    assert await direct.zrange(WRITERS, 0, -1) == [b"b"]
    assert await a.exchange() == {}
    assert await b.exchange() == {OVERALL: 1, "python": 1}


async def test_a_silent_writers_part_disappears_by_itself(peer: MakePeer, direct: redis.asyncio.Redis) -> None:
    await peer("a", expiry_s=0.2).observe("python", 1.0).exchange()
    b = peer("b", expiry_s=0.2)
    async with asyncio.timeout(60):
        while await b.exchange() or await direct.exists(PART + "a"):
            pass


# --- what others may have written ---------------------------------------------------------------------------------


async def test_damaged_values_are_skipped_and_counted(peer: MakePeer, direct: redis.asyncio.Redis) -> None:
    a, b, c = peer("a").observe("python", 1.0), peer("b").observe("python", 2.0).observe("search", 1.0), peer("c")
    await a.exchange()
    await b.exchange()
    whole = statistics_of(3.0).to_bytes()
    bad = {
        "search": whole[:-1] + b"?",
        "empty": b"",
        "version": b"\x09" + whole[1:],
        b"\xff\xfe": whole,
        "x" * 300: whole,
    }
    await direct.hset(PART + "b", mapping=bad)
    assert await c.exchange() == {OVERALL: 3, "python": 2}
    assert c.store.failures == {StoreFailure.CORRUPT: len(bad)}
    assert c.store.healthy


async def test_keys_of_another_kind_do_no_harm(peer: MakePeer, direct: redis.asyncio.Redis) -> None:
    await direct.set(WRITERS, "not a sorted set")
    await direct.set(PART + "a", "not a hash")
    a, b = peer("a").observe("python", 1.0), peer("b")
    await a.exchange()
    assert await b.exchange() == {OVERALL: 1, "python": 1}
    await direct.delete(PART + "a")
    await direct.rpush(PART + "a", "not a hash")
    assert await b.exchange() == {}
    assert b.store.failures == {StoreFailure.CORRUPT: 1}


async def test_parts_and_values_that_are_too_large_are_left_out(peer: MakePeer, direct: redis.asyncio.Redis) -> None:
    a, b, c = peer("a").observe("python", 1.0), peer("b").observe("python", 1.0), peer("c")
    await a.exchange()
    await b.exchange()
    small = statistics_of(1.0).to_bytes()
    await direct.hset(PART + "a", mapping={f"tool-{i}": small for i in range(MAX_TOOLS + 1)})
    await direct.hset(PART + "b", "python", bytes(MAX_STATISTICS_BYTES + 1))
    assert await c.exchange() == {OVERALL: 1}
    assert c.store.failures == {StoreFailure.CORRUPT: 2}


async def test_no_exchange_reads_more_than_its_bound(peer: MakePeer, direct: redis.asyncio.Redis) -> None:
    reader, latest = peer("reader"), peer("latest").observe("python", 1.0)
    garbage = {f"tool-{i}": bytes(MAX_STATISTICS_BYTES) for i in range(MAX_TOOLS // 4)}
    await direct.hset(PART + "greedy", mapping=garbage)
    await direct.zadd(WRITERS, {"greedy": 2e12})
    await latest.exchange()
    await direct.zincrby(WRITERS, 1e12, "latest")
    before = (await direct.info("stats"))["total_net_output_bytes"]
    assert await reader.exchange() == {OVERALL: 1, "python": 1}
    read = (await direct.info("stats"))["total_net_output_bytes"] - before
    assert read < LIMITS.read_bytes * 1.1 < len(garbage) * MAX_STATISTICS_BYTES


async def test_the_number_of_writers_is_bounded(peer: MakePeer, direct: redis.asyncio.Redis) -> None:
    a = peer("a").observe("python", 1.0)
    await direct.zadd(WRITERS, {f"ghost-{i}": 2e12 + i for i in range(2 * LIMITS.writers)})
    assert await a.exchange() == {}
    assert await direct.zcard(WRITERS) == LIMITS.writers + 1


@pytest.mark.parametrize(
    "url", ["", "http://localhost", "redis://localhost:1/0?no_such_option=1", "redis://localhost:x"]
)
def test_a_url_that_cannot_be_used_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        DurationStore(url, model="tiny", writer="a", timeout_s=1.0, expiry_s=1.0, clock=MonotonicClock())


# --- the embedded server ------------------------------------------------------------------------------------------


def test_the_embedded_redis_asks_for_a_password_that_nobody_can_see(server: EmbeddedRedis) -> None:
    address = server.url.split("@")[1]
    with redis.Redis.from_url(f"redis://{address}") as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    password = server.url.split("@")[0].removeprefix("redis://:")
    visible = Path(f"/proc/{server.pid}/cmdline").read_text() + Path(f"/proc/{server.pid}/environ").read_text()
    assert len(password) >= 32 and password not in visible


async def test_the_embedded_redis_keeps_its_data_where_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "with a space" / "store"
    for start in (1, 2):
        with EmbeddedRedis(path) as server:
            async with redis.asyncio.Redis.from_url(server.url) as client:
                assert await client.incr("starts") == start
            with pytest.raises(ConfigError, match=r"redis\.path.*another Redis"), EmbeddedRedis(path):
                pass


def files_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def test_stop_ends_the_server_and_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = EmbeddedRedis()
    with pytest.raises(RuntimeError, match="never started"):
        _ = server.url
    server.start()
    server.start()
    pid = server.pid
    assert files_in(tmp_path)
    server.stop()
    server.stop()
    assert server.pid is None and not files_in(tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_path_or_data_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigError, match=r"redis\.path"):
        EmbeddedRedis(tmp_path / "file").start()
    (tmp_path / "appendonly.aof").write_text("not what Redis writes\n" * 10)
    with pytest.raises(ConfigError, match="Bad file format"):
        EmbeddedRedis(tmp_path).start()


async def test_many_writers_exchange_more_rarely(peer: MakePeer) -> None:
    """Each reads what all others have written, so that the work would grow with the square of their number."""
    a = peer("a").observe("python", 1.0)
    await a.exchange()
    assert a.store.pause_s(2.0) == 2.0
    for number in range(3 * WRITERS_A_PERIOD):
        await peer(f"other-{number}").observe("python", 1.0).exchange()
    await a.exchange()
    assert a.store.pause_s(2.0) == 6.0
