"""Fault: a replica, or its engine, is killed while turns run on it, under load."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable

import psutil
import pytest

from tests.faults.promises import Promised, percentile
from tests.faults.stand import Stand, until
from tests.faults.under_load import Ended, Outcome, clients, completion, in_the_background, lost, run, stream

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

FAULT = "replica or EngineCore killed mid-turn"
STREAMS, LONG_STREAMS = 6, 20
TOKENS, LONG_TOKENS = 500, 1000
BUSY = 3
"""Turns that run on a replica when it is killed, at least."""
RUNS = 4
"""Programs in the background, beside the streams."""

Kill = Callable[[psutil.Process], None]


def kill_engine(replica: psutil.Process) -> None:
    [engine] = [child for child in replica.children() if child.name().startswith("VLLM")]
    engine.kill()


KILLS: dict[str, Kill] = {"engine": kill_engine, "replica": psutil.Process.kill}


async def load(stand: Stand, streams: int, tokens: int) -> tuple[list[Ended], list[Ended]]:
    """Streams, and programs with tools, all at once."""
    async with clients(stand.url) as client:
        said = [stream(client, completion(f"Story {number}:", tokens)) for number in range(streams)]
        programs = [in_the_background(client, run("look", "book", "look", input=f"Go {n}.")) for n in range(RUNS)]
        ended = await asyncio.gather(*said, *programs)
    return ended[:streams], ended[streams:]


def at_work(stand: Stand) -> psutil.Process:
    """The replica on which most runs, once it is enough."""

    def busy() -> psutil.Process | None:
        told = max(stand.replicas(), key=lambda one: int(one["running"]), default={"running": 0})
        return psutil.Process(told["pid"]) if told["running"] >= BUSY else None

    found = until(busy, "the replicas have too little to do")
    assert isinstance(found, psutil.Process)
    return found


async def wounded(stand: Stand, kill: Kill, streams: int, tokens: int) -> tuple[list[Ended], list[Ended]]:
    """The same load, in the middle of which one is killed."""
    going = asyncio.create_task(load(stand, streams, tokens))
    victim = await asyncio.to_thread(at_work, stand)
    await asyncio.sleep(0.3)
    assert not going.done()
    kill(victim)
    return await going


def inexact(undisturbed: list[Ended], streams: list[Ended]) -> int:
    """Streams that ended well, but repeat or lack something."""
    pairs = zip(undisturbed, streams, strict=True)
    return sum(one.outcome is Outcome.DONE and one.text != whole.text for whole, one in pairs)


def effects(program: Ended) -> int:
    """Tool calls that say that they took effect."""
    return sum(item.get("output", "").startswith("booked") for item in json.loads(program.text)["output"])


@pytest.mark.parametrize("killed", KILLS)
async def test_a_replica_killed_mid_turn(whole: Stand, is_long: bool, promised: Promised, killed: str) -> None:
    if killed == "replica" and not is_long:
        pytest.skip("with --long: tests/serving/test_replica_failure.py kills one in the short form")
    streams, tokens = (LONG_STREAMS, LONG_TOKENS) if is_long else (STREAMS, TOKENS)
    undisturbed, _ = await load(whole, streams, tokens)
    assert lost(undisturbed) == 0
    for _ in range(3 if is_long else 1):
        ended, programs = await wounded(whole, KILLS[killed], streams, tokens)
        told = f"{killed}: "
        promised(FAULT, told + "programs lost", lost(itertools.chain(ended, programs)), exactly=0)
        promised(FAULT, told + "streams with a repeat or a gap", inexact(undisturbed, ended), exactly=0)
        went_on = sum(one.outcome is Outcome.DONE for one in ended)
        promised(FAULT, told + "streams that went on to their end", went_on, unit=f"of {streams}", at_least=streams)
        assert [effects(program) for program in programs] == [3] * RUNS
        stall_s = percentile((one.stall_s for one in ended), 0.99)
        promised(FAULT, told + "longest stall, p99", stall_s, unit="s", at_most=5)
        await asyncio.to_thread(whole.await_whole)


async def test_a_request_under_which_engines_are_killed(whole: Stand, is_long: bool, promised: Promised) -> None:
    if not is_long:
        pytest.skip("with --long: tests/serving/test_replica_failure.py has the short form")
    fault = "a request under which engines are killed from outside"
    body = completion("Poison", 1500)
    deaths: list[int] = []
    async with clients(whole.url) as client:
        asked = asyncio.create_task(stream(client, body))
        while not asked.done():
            deaths += await asyncio.to_thread(_kill_under_it, whole, deaths)
            await asyncio.sleep(0.1)
        ended = await asked
        again_began_s = time.monotonic()
        again = await stream(client, body)
        refused_s = time.monotonic() - again_began_s
        await asyncio.to_thread(whole.await_whole)
        others = [await stream(client, completion(f"Story {number}:", 20)) for number in range(4)]
    assert ended.outcome is Outcome.ERROR and "quarantined" in ended.text
    assert (again.outcome, again.status) == (Outcome.REFUSED, 422)
    assert [one.outcome for one in others] == [Outcome.DONE] * 4
    promised(fault, "attempts before it is quarantined", len(deaths), at_most=2)
    promised(fault, "time to refuse it again", refused_s, unit="s", at_most=1)


def _kill_under_it(stand: Stand, dead: list[int]) -> list[int]:
    """Where the poison works now, the engine dies; the pids of replicas to which that happened."""
    for one in stand.replicas():
        if one["running"] and one["pid"] not in dead:
            try:
                kill_engine(psutil.Process(one["pid"]))
            except (psutil.Error, ValueError):
                return []
            return [one["pid"]]
    return []
