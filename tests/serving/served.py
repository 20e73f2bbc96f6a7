"""`caesura serve` in a process of its own: a process can have one Ray."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
START_WITHIN_S = 480.0
"""Alone on two cores it takes one; among others, as long as they let it."""
STOP_WITHIN_S = 60.0
KILL_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster in a process of its own."""

    url: str
    pid: int


@contextmanager
def served(config: Path) -> Iterator[str]:
    """The URL of a cluster of this configuration, which says ``http.port: 0``; afterwards nothing of it is left."""
    with serving(config) as cluster:
        yield cluster.url


@contextmanager
def serving(config: Path, *, log: Path | None = None, **environment: str) -> Iterator[Served]:
    """The same, with more in the environment of its processes, and everything that it prints in the file ``log``."""
    command = [sys.executable, "-c", "from cluster.cli import main; main()", "serve", "--config", str(config)]
    ours = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with tempfile.NamedTemporaryFile() if log is None else log.open("wb") as output:
        printed = Path(output.name)
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**ours, "PYTHONPATH": str(ROOT), **environment},
            stdout=output,
            stderr=output,
            process_group=0,  # not a session: Linux may share out processors among these, and would starve the clients
        )
        yield from _serving(process, printed)


def _serving(process: "subprocess.Popen[bytes]", printed: Path) -> Iterator[Served]:
    family: list[psutil.Process] = []
    try:
        url = _url(process, printed)
        family = psutil.Process(process.pid).children(recursive=True)
        yield Served(url, process.pid)
    finally:
        with suppress(ProcessLookupError):  # it may not have started
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=KILL_WITHIN_S)
        for one in alive:
            one.kill()


def _url(process: "subprocess.Popen[bytes]", printed: Path) -> str:
    give_up_s = time.monotonic() + START_WITHIN_S
    while time.monotonic() < give_up_s and process.poll() is None:
        if (found := re.search(r"(http://127\.0\.0\.1:\d+)\s", printed.read_text(errors="replace"))) is not None:
            return found.group(1)
        time.sleep(0.1)
    raise AssertionError(f"the cluster did not start:\n{printed.read_text(errors='replace')}")
