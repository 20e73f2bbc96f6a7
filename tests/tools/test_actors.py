"""The pool of real actors: where calls go, and what becomes of them when an actor dies."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.config.tools import ToolsConfig
from cluster.core.tools import Outcome, ToolCall
from tests.waiting import until
from tools_runtime.actor import ToolActors

pytestmark = pytest.mark.cluster


def python(entry: str, **said: Any) -> dict[str, Any]:
    return {"kind": "python", "entry": f"tests.tools.actor_tools:{entry}", **said}


DEFINED = {
    "pid": python("pid"),
    "kept_pid": python("pid", sticky=True),
    "wait": python("wait", concurrency=1000),
    "again": python("wait", concurrency=1000, idempotent=True),
    "later": python("wait", asynchronous=True),
    "block": python("block", deadline_s=1.0),
    "bash": {"kind": "command", "shell": True, "allow_unsandboxed": True},
}


@pytest.fixture
async def pool(cluster: None) -> AsyncIterator[ToolActors]:
    """Two actors."""
    pool = ToolActors(ToolsConfig.model_validate({"actors": 2, "defined": DEFINED}))
    await pool.ready()
    yield pool
    pool.check_integrity()
    await pool.aclose(kill=True)


async def test_calls_spread_over_the_actors_and_stay_where_they_must(pool: ToolActors) -> None:
    waiting = [asyncio.create_task(pool.run(ToolCall(f"w{i}", "wait", {"seconds": 1.0}))) for i in range(10)]
    await until(lambda: sum(pool._outstanding) == 10)
    assert pool._outstanding == [5, 5]
    assert {(await task).outcome for task in waiting} == {Outcome.OK}
    for program in "abcdef":
        pids = {(await pool.run(ToolCall(f"c{i}", "kept_pid", program=program))).text for i in range(4)}
        assert len(pids) == 1, "a sticky tool stays with its program"
    homes = Counter([(await pool.run(ToolCall("c", "kept_pid", program=f"p{i}"))).text for i in range(20)])
    assert len(homes) == 2, "and programs are spread"
    by_key = {(await pool.run(ToolCall(f"k{i}", "pid", idempotency_key="k"))).text for i in range(6)}
    assert len(by_key) == 1
    assert {offer.name for offer in await pool.offers()} == set(DEFINED)
    assert (await pool.run(ToolCall("b", "bash", {"command": "echo hello"}))).text == "hello\n"


async def test_an_actor_that_dies_takes_only_its_calls_and_comes_back(pool: ToolActors, tmp_path: Path) -> None:
    pids = await pool.ready()
    calls = [("wait", "w"), ("again", "a")]
    marks = {(id, i): tmp_path / f"{id}{i}" for _, id in calls for i in range(4)}
    tasks = {
        (name, i): asyncio.create_task(
            pool.run(ToolCall(f"{id}{i}", name, {"seconds": 6.0, "mark": str(marks[id, i])}))
        )
        for name, id in calls
        for i in range(4)
    }
    await until(lambda: all(mark.exists() for mark in marks.values()))
    os.kill(pids[0], signal.SIGKILL)
    outcomes = {key: (await task).outcome for key, task in tasks.items()}
    assert Counter(outcomes["wait", i] for i in range(4)) == {Outcome.OK: 2, Outcome.UNKNOWN: 2}
    assert {outcomes["again", i] for i in range(4)} == {Outcome.OK}, "an idempotent call is run once more elsewhere"
    await until(lambda: not pool._actors._reviving)
    now = await pool.ready()
    assert (now[1], now[0] != pids[0]) == (pids[1], True)


async def test_calls_are_cancelled_through_the_pool(pool: ToolActors, tmp_path: Path) -> None:
    marks = [tmp_path / "by id", tmp_path / "by task"]
    by_id, by_task = (
        asyncio.create_task(pool.run(ToolCall(f"c{i}", "wait", {"seconds": 1000, "mark": str(mark)})))
        for i, mark in enumerate(marks)
    )
    await until(lambda: all(mark.exists() for mark in marks))
    assert await pool.cancel("", "c0")
    assert not await pool.cancel("", "nobody")
    by_task.cancel()
    assert (await by_id).outcome is Outcome.CANCELLED
    await until(lambda: all(mark.read_text() == "cancelled" for mark in marks))


async def test_an_asynchronous_call_is_told_later_through_the_pool(pool: ToolActors) -> None:
    handle = await pool.run(ToolCall("a", "later", {"seconds": 0.5}, program="p"))
    assert handle.outcome is Outcome.STARTED
    assert (await pool.completion("p", "a")).text == "waited"
    assert (await pool.completion("p", "a")).outcome is Outcome.OK
    assert (await pool.completion("p", "nobody")).outcome is Outcome.UNKNOWN
    await pool.run(ToolCall("b", "later", {"seconds": 1000}, program="p"))
    for pid in await pool.ready():
        os.kill(pid, signal.SIGKILL)
    assert (await pool.completion("p", "b")).outcome is Outcome.UNKNOWN


async def test_an_actor_whose_loop_is_blocked_does_not_delay_its_callers(pool: ToolActors) -> None:
    result = await pool.run(ToolCall("b", "block", {"seconds": 5.0}))
    assert result.outcome is Outcome.TIMEOUT


async def test_a_tool_that_cannot_work_is_told_at_the_start(cluster: None) -> None:
    pool = ToolActors(ToolsConfig.model_validate({"defined": {"t": {"kind": "python", "entry": "no_such:f"}}}))
    with pytest.raises(ray.exceptions.RayError, match=r"tools\.defined\.t\.entry: ModuleNotFoundError"):
        await pool.ready()
    await pool.aclose(kill=True)


async def test_five_hundred_calls_run_at_a_time(cluster: None) -> None:
    defined = {"wait": python("wait", concurrency=500)}
    pool = ToolActors(ToolsConfig.model_validate({"actors": 2, "defined": defined}))
    await pool.ready()
    results = await asyncio.gather(*(pool.run(ToolCall(f"w{i}", "wait", {"seconds": 1.0})) for i in range(500)))
    assert Counter((result.outcome, result.text) for result in results) == {(Outcome.OK, "waited"): 500}
    assert [result.call_id for result in results] == [f"w{i}" for i in range(500)]
    pool.check_integrity()
    await pool.aclose(kill=True)
