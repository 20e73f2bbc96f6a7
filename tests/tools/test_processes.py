"""Processes of tools end with whoever started them, however that ends."""

import asyncio
import io
import signal
import subprocess
import sys
import time

import psutil
import pytest

from cluster.core.errors import ToolRefused
from tests.waiting import until
from tools_runtime.processes import read_bounded, spawn

STARTER = """
import asyncio
from tools_runtime.processes import spawn

async def main():
    child = await spawn(["sleep", "577215"], {"PATH": "/usr/bin:/bin"}, feed=True)
    print(child.process.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_a_process_dies_with_the_one_that_started_it() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    child = psutil.Process(int(starter.stdout.readline()))
    while child.name() != "sleep":  # what ties it to its starter is done by the program before
        time.sleep(0.01)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert alive == []


async def test_what_cannot_be_started_is_refused() -> None:
    for argv in (["/no/such/file"], ["no-such-command"], ["ls", "a\0b"]):
        with pytest.raises(ToolRefused, match="cannot be started"):
            await spawn(argv, {"PATH": "/usr/bin:/bin"})


async def test_a_process_whose_starter_is_cancelled_is_killed_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, known = asyncio.Event(), set(psutil.Process().children(recursive=True))

    async def connect(_: object, pipe: io.FileIO) -> None:
        with pipe:
            begun.set()
            await asyncio.Event().wait()

    def started() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - known

    def alive(process: psutil.Process) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", connect)
    command = ["bash", "-c", "sleep 577217 & wait"]
    starting = asyncio.create_task(spawn(command, {"PATH": "/usr/bin:/bin"}, feed=True))
    await begun.wait()
    await until(lambda: len(started()) == 2, "bash and sleep did not start")
    processes = started()
    try:
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
        await until(lambda: not any(map(alive, processes)), "what was started goes on")
    finally:
        for process in filter(alive, processes):
            process.kill()


async def test_output_is_read_up_to_its_bound() -> None:
    child = await spawn(["printf", "12345"], {"PATH": "/usr/bin:/bin"})
    assert await read_bounded(child.output, 5) == (b"12345", False)
    assert await child.wait(leave_none=False) == 0
    child.end()
    child = await spawn(["yes"], {"PATH": "/usr/bin:/bin"})
    assert await read_bounded(child.output, 3) == (b"y\ny", True)
    child.end()
    await child.reaped()
    assert not child.alive


RAW = "é€😀".encode() + b"\xff\xc3z" + "ü".encode() + b"\xe2\x82"


@pytest.mark.parametrize("split", range(1, len(RAW)))
async def test_text_that_is_reported_in_pieces_begins_the_text_of_the_whole(split: int) -> None:
    """A piece may end within a character, and bytes may be invalid."""
    reader, pieces = asyncio.StreamReader(), list[str]()
    reading = asyncio.create_task(read_bounded(reader, 100, pieces.append))
    for chunk in (RAW[:split], RAW[split:]):
        reader.feed_data(chunk)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    reader.feed_eof()
    answer, more = await reading
    assert (bytes(answer), more) == (RAW, False)
    assert len(pieces) == 2
    assert answer.decode(errors="replace") == "".join(pieces) + "\ufffd"  # the last character is not whole
