"""Fault: the wall clock of all processes, Redis included, jumps by an hour, to and fro, while programs run.

A small library (wall_clock.c, made with `cc`) stands between the processes and their wall clock. libfaketime 0.9.10
will not do: with the monotonic clock left alone, it refuses Python's `sleep`.
"""

import asyncio
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.promises import Promised
from tests.faults.stand import INGRESS, Stand, stand, until
from tests.faults.under_load import Outcome, ask, background, clients, completion, lost, run, stream
from tests.serving.tool_site import ToolSite

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

FAULT = "wall clock jumps ± 1 h"
SOURCE = Path(__file__).parent / "wall_clock.c"
RESUME_S = 60.0
"""When the paused programs say that they go on. Programs of earlier tests never did."""
NOTICED_S = 3.0
"""For expiries that would come at once; replicas and runners look several times a second."""


class WallClock:
    """The one that the processes see."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(8))
        self.file = file

    def jump(self, seconds: int) -> None:
        """Be so far from the real one."""
        with self.file.open("r+b") as shared:  # in place: the processes have it in their memory
            shared.write(struct.pack("q", seconds))


@pytest.fixture(scope="module")
def wall_clock(is_long: bool, tmp_path_factory: pytest.TempPathFactory) -> WallClock:
    if not is_long or shutil.which("cc") is None:
        pytest.skip("with --long, for a cluster of its own, and with a C compiler")
    return WallClock(tmp_path_factory.mktemp("clock") / "offset")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("library") / "wall_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", made, SOURCE, "-ldl"], check=True, timeout=60)
    return made


@pytest.fixture(scope="module")
def jumpy(
    library: Path, wall_clock: WallClock, tmp_path_factory: pytest.TempPathFactory, site: ToolSite
) -> Iterator[Stand]:
    """A cluster whose wall clock can be moved."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(library))
        environment.setenv("TEST_WALL_CLOCK", str(wall_clock.file))
        with stand(tmp_path_factory.mktemp("jumpy"), site) as cluster:
            yield cluster


def held_programs(cluster: Stand) -> int:
    """In the memory of all replicas."""
    return sum(one["held_programs"] for one in cluster.replicas())


def negative(told: Any, name: str = "") -> list[str]:
    """Durations below zero in an answer: its fields that end in `_s`."""
    match told:
        case dict():
            return [one for key, value in told.items() for one in negative(value, key)]
        case list():
            return [one for value in told for one in negative(value, name)]
        case int() | float() if name.endswith("_s") and told < 0:
            return [f"{name}={told}"]
    return []


def negative_metrics(page: str) -> list[str]:
    """Sums of durations below zero; vLLM's own are not ours."""
    return re.findall(
        r"^(?:ray_)?caesura\w*_seconds\w* -\d.*$|^(?:ray_)?caesura\w*_seconds\w*\{[^}]*\} -\d.*$", page, re.M
    )


@pytest.mark.parametrize("seconds", [3600, -3600])
async def test_nothing_ends_early(
    jumpy: Stand, wall_clock: WallClock, site: ToolSite, promised: Promised, seconds: int
) -> None:
    wall_clock.jump(0)
    await asyncio.to_thread(jumpy.await_whole)
    site.gate.clear()
    before = len(site.bookings)
    async with clients(jumpy.url) as client:
        # What the other jump's programs have left.
        while (reset := await client.post("/admin/reset")).status_code == 409:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        assert reset.status_code == 200, reset.text
        comes_back = {"stream": False, "agentic_context": {"expected_resume": RESUME_S}}
        held = [
            await ask(
                client,
                "/v1/completions",
                completion(f"Held {n}:", 20, **comes_back),
                **{"x-session-id": f"h{seconds}-{n}"},
            )
            for n in range(4)
        ]
        runs = [asyncio.create_task(background(client, run("book", "look", input=f"Go {n}."))) for n in range(3)]
        await asyncio.to_thread(until, lambda: len(site.bookings) == before + 3, "the tools are not called")
        holding = len(held) + len(runs)
        await asyncio.to_thread(until, lambda: held_programs(jumpy) == holding, "not every paused program is held")
        ends = {"agentic_context": {"expected_resume": False}}  # or it could be held as well, before they are counted
        going = asyncio.create_task(stream(client, completion("Over the jump:", 1500, **ends)))
        wall_clock.jump(seconds)
        await asyncio.sleep(NOTICED_S)
        still = held_programs(jumpy)
        (ingress,) = jumpy.named(INGRESS)
        streamed = await going
        ingress.kill()
        await asyncio.sleep(1)
        site.gate.set()
        ended = await asyncio.gather(*runs)
        told = [(await client.get("/v1/programs")).json(), (await client.get("/admin/statistics")).json()]
        told += [(await client.get(f"/v1/programs/{one['id']}")).json() for one in told[0]["data"][:20]]
        page = (await client.get("/metrics")).text
    promised(FAULT, f"{seconds:+d} s: programs lost", lost([*held, streamed, *ended]), exactly=0)
    promised(FAULT, f"{seconds:+d} s: holds that ended early, of {holding}", holding - still, exactly=0)
    early = sum(one.outcome is not Outcome.DONE for one in ended)
    promised(FAULT, f"{seconds:+d} s: programs that ended early, or twice", early, exactly=0)
    answers = [json.loads(one.text) for one in ended if one.outcome is Outcome.DONE]
    backwards = [one["id"] for one in answers if one.get("completed_at") and one["completed_at"] < one["created_at"]]
    wrong = [*backwards, *negative(told), *negative_metrics(page)]
    assert len(site.bookings) - before == 6
    promised(FAULT, f"{seconds:+d} s: negative durations {wrong[:3] or ''}".strip(), len(wrong), exactly=0)


def test_the_wall_clock_alone_can_be_moved(library: Path, tmp_path: Path) -> None:
    clock = WallClock(tmp_path / "offset")
    look = "import time; time.sleep(0.01); print(time.time(), time.monotonic())"
    environment = {**os.environ, "LD_PRELOAD": str(library), "TEST_WALL_CLOCK": str(clock.file)}
    for seconds in (3600, -3600):
        clock.jump(seconds)
        told = subprocess.run(
            [sys.executable, "-c", look], env=environment, check=True, capture_output=True, timeout=60
        )
        wall_s, steady_s = map(float, told.stdout.split())
        assert round((wall_s - time.time() - seconds) / 3600) == 0
        assert round((steady_s - time.monotonic()) / 3600) == 0


WAITS = """
import ctypes, time

class TimeSpec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]

libc = ctypes.CDLL(None)
semaphore, condition, mutex, word = *((ctypes.c_char * 64)() for _ in range(3)), ctypes.c_int(0)
libc.pthread_mutex_lock(mutex)
FUTEX, WAIT_BITSET_BY_THE_WALL_CLOCK, ANY = 202, 9 | 256, -1
for wait in (
    lambda until: libc.sem_timedwait(semaphore, until),
    lambda until: libc.pthread_cond_timedwait(condition, mutex, until),
    lambda until: libc.syscall(FUTEX, ctypes.byref(word), WAIT_BITSET_BY_THE_WALL_CLOCK, 0, until, None, ANY),
):
    began_s, until_s = time.monotonic(), time.time() + 0.2
    wait(ctypes.byref(TimeSpec(int(until_s), int(until_s % 1 * 1e9))))
    print(time.monotonic() - began_s)
"""
"""What the processes' libraries wait by: a semaphore, a condition, a futex."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of a system call")
def test_a_wait_until_a_time_of_the_wall_clock_is_as_long_as_it_seems(library: Path, tmp_path: Path) -> None:
    clock = WallClock(tmp_path / "offset")
    environment = {**os.environ, "LD_PRELOAD": str(library), "TEST_WALL_CLOCK": str(clock.file)}
    for seconds in (3600, -3600):
        clock.jump(seconds)
        told = subprocess.run(
            [sys.executable, "-c", WAITS], env=environment, check=True, capture_output=True, timeout=60
        )
        took_s = [float(line) for line in told.stdout.split()]
        assert len(took_s) == 3
        assert all(0.19 < one < 30 for one in took_s)


def test_what_counts_as_negative() -> None:
    assert negative({"a": [{"run_s": -1, "n": -2}], "queue_s": 0.5}) == ["run_s=-1"]
    page = 'caesura_turn_seconds_sum{a="-1"} 2\ncaesura_turn_seconds_sum{a="b"} -2.5\nother_seconds_sum -1\n'
    assert negative_metrics(page) == ['caesura_turn_seconds_sum{a="b"} -2.5']
