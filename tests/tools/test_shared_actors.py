"""Actors that belong to no pool: shared by several, there after each, and what becomes of a call that is resumed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import ray

from cluster.config.tools import ToolsConfig
from cluster.core.errors import ToolRefused
from cluster.core.tools import Outcome, ToolCall, ToolId
from tests.waiting import until
from tools_runtime.actor import ToolActors

pytestmark = pytest.mark.cluster

Pools = Callable[..., Awaitable[ToolActors]]

NOTE = {"kind": "python", "entry": "tests.tools.actor_tools:note"}
DEFINED = {
    "note": NOTE,
    "again": {**NOTE, "idempotent": True},
    "later": {**NOTE, "asynchronous": True},
    "kept_pid": {"kind": "python", "entry": "tests.tools.actor_tools:pid", "sticky": True},
}


def config(unattended_s: float, actors: int = 2) -> ToolsConfig:
    return ToolsConfig.model_validate({"actors": actors, "unattended_s": unattended_s, "defined": DEFINED})


def noting(file: Path, tool: str = "note", seconds: float = 0.0) -> ToolCall:
    return ToolCall("c", tool, {"seconds": seconds, "file": str(file)}, program="p", idempotency_key="k")


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def living_actors() -> list[str]:
    return [actor["ActorID"] for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"]


def lost_caller(*arguments: str) -> subprocess.Popen[bytes]:
    script = str(Path(__file__).parent / "lost_caller.py")
    return subprocess.Popen([sys.executable, script, *arguments], env={**os.environ, "PYTHONPATH": str(Path.cwd())})


@pytest.fixture
async def pools(cluster: None) -> AsyncIterator[Pools]:
    """Makes pools that are ready."""
    made: list[ToolActors] = []

    async def make(unattended_s: float = 60.0, actors: int = 2) -> ToolActors:
        made.append(ToolActors(config(unattended_s, actors)))
        await made[-1].ready()
        return made[-1]

    yield make
    for pool in made:
        pool.check_integrity()
        await pool.aclose(kill=True)


async def test_pools_of_one_configuration_share_their_actors(pools: Pools, tmp_path: Path) -> None:
    one, other, of_another = await pools(), await pools(), await pools(61.0)
    assert await one.ready() == await other.ready()
    assert not set(await one.ready()) & set(await of_another.ready())
    both = [
        await pool.run(ToolCall("c", "kept_pid", program="p", idempotency_key=pool_key))
        for pool, pool_key in ((one, "1"), (other, "2"))
    ]
    assert both[0].text == both[1].text, "a program's home is the same, whatever the key"
    handle = await one.run(noting(tmp_path / "file", "later", 0.3))
    assert handle.outcome is Outcome.STARTED
    assert (await other.completion("p", "c")).text == "noted"
    waiting = asyncio.create_task(one.run(ToolCall("w", "note", {"seconds": 1000, "file": str(tmp_path / "w")})))
    await until((tmp_path / "w").exists)
    assert await other.cancel("", "w")
    assert (await waiting).outcome is Outcome.CANCELLED
    await one.aclose()
    assert (await other.run(noting(tmp_path / "file"))).outcome is Outcome.OK


async def test_a_pool_gets_over_the_end_that_another_makes(pools: Pools, tmp_path: Path) -> None:
    one, other = await pools(), await pools()
    pids = await one.ready()
    await one.aclose(kill=True)
    await until(lambda: not any(map(alive, pids)) and not other._actors.living)
    for i in range(4):
        result = await other.run(ToolCall(str(i), "again", {"seconds": 0, "file": str(tmp_path / "file")}))
        assert result.outcome is Outcome.OK
    assert not set(await other.ready()) & set(pids)


async def test_actors_that_nobody_attends_to_end_and_are_made_again(pools: Pools, tmp_path: Path) -> None:
    one, attending = await pools(1.0), await pools(1.1)
    pids, attended = await one.ready(), await attending.ready()
    running = asyncio.create_task(one.run(noting(tmp_path / "file", seconds=1000)))
    await until((tmp_path / "file").exists)
    await one.aclose()
    await until(lambda: sum(map(alive, pids)) == 1)
    assert await one.cancel("p", "c")
    await running
    await until(lambda: not any(map(alive, pids)))
    assert all(map(alive, attended)), "they are attended to"
    assert await attending.ready() == attended
    again = await pools(1.0)
    assert not set(await again.ready()) & set(pids)
    os.kill((await again.ready())[0], signal.SIGKILL)
    await again.aclose()
    # What Ray starts again ends, too, though nobody ever called it.
    await attending.aclose(kill=True)
    await until(lambda: not living_actors())


async def test_the_call_of_a_caller_that_was_killed_goes_on_and_is_resumed(pools: Pools, tmp_path: Path) -> None:
    pool = await pools()
    context = ray.get_runtime_context()
    for name, seconds in (("under way", 3.0), ("over", 0.2)):
        call = replace(noting(tmp_path / name, seconds=seconds), idempotency_key=name)
        arguments = [context.gcs_address, context.namespace, config(60.0).model_dump_json()]
        caller = lost_caller(*arguments, msgspec.json.encode(call).decode())
        await until((tmp_path / name).exists)
        caller.kill()
        caller.wait()
        if name == "over":
            await asyncio.sleep(1.0)
        results = await asyncio.gather(pool.run(call, resumed=True), (await pools()).run(call, resumed=True))
        assert [(result.outcome, result.text) for result in results] == [(Outcome.OK, "noted")] * 2
        assert (tmp_path / name).read_text() == "x", "it took effect once"


@pytest.mark.parametrize(("tool", "effects", "outcome"), [("note", 1, Outcome.UNKNOWN), ("again", 2, Outcome.OK)])
async def test_a_call_whose_home_died_too(
    pools: Pools, tmp_path: Path, tool: str, effects: int, outcome: Outcome
) -> None:
    pool, call = await pools(), noting(tmp_path / "file", tool, 1.0)
    lost = asyncio.create_task((await pools()).run(call))
    await until((tmp_path / "file").exists)
    lost.cancel()  # as if its process had died; the actors are killed before they hear of it
    for pid in await pool.ready():
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not pool._actors.living)
    results = [await pool.run(call, resumed=True) for _ in range(2)]
    assert {result.outcome for result in results} == {outcome}
    assert len((tmp_path / "file").read_text()) == effects
    if outcome is Outcome.UNKNOWN:
        assert "was not run again" in results[0].text


async def test_a_call_that_was_sent_elsewhere_is_found(pools: Pools, tmp_path: Path) -> None:
    pool, successor = await pools(), await pools()
    call = noting(tmp_path / "file", seconds=4.0)
    home = pool._actors.living[pool._home(call, pool._settings(call, {})) or 0]
    os.kill((await pool.ready())[home], signal.SIGKILL)
    await until(lambda: home not in pool._actors.living)
    first = asyncio.create_task(pool.run(call))
    await until((tmp_path / "file").exists)
    resumed = await successor.run(call, resumed=True)
    assert (resumed.outcome, (await first).outcome) == (Outcome.OK, Outcome.OK)
    assert (tmp_path / "file").read_text() == "x"


async def test_the_tools_of_a_request_are_refused_or_judged_by_what_they_say(pools: Pools) -> None:
    pool = await pools()
    theirs = {"s": {"kind": "mcp", "url": "http://127.0.0.1:9/"}, "t": {"kind": "http", "idempotent": True}, "u": "?"}
    with pytest.raises(ToolRefused, match="of the kinds: none"):
        await pool.offers(theirs)
    assert (await pool.run(ToolCall("c", "t", tool=ToolId.of_request("t")), theirs)).outcome is Outcome.REFUSED

    def again(*tools: ToolId) -> list[bool]:
        return [pool._settings(ToolCall("c", "", tool=tool), theirs).idempotent for tool in tools]

    assert again(*map(ToolId.of_request, ("s", "t", "u", "nobody", "again"))) == [False, True, False, False, False]
    assert again(*map(ToolId.of_operator, ("note", "again", "t"))) == [False, True, False]
    assert {offer.label for offer in await pool.offers()} == set(DEFINED)
