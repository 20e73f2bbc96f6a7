"""`caesura serve` in a process of its own: a process can have one Ray."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
START_WITHIN_S = 240.0
STOP_WITHIN_S = 60.0
KILL_WITHIN_S = 10.0


@contextmanager
def served(config: Path) -> Iterator[str]:
    """The URL of a cluster of this configuration, which says ``http.port: 0``; afterwards nothing of it is left."""
    command = [sys.executable, "-c", "from cluster.cli import main; main()", "serve", "--config", str(config)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    family: list[psutil.Process] = []
    try:
        url = _url(process)
        family = psutil.Process(process.pid).children(recursive=True)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=KILL_WITHIN_S)
        for one in alive:
            one.kill()


def _url(process: subprocess.Popen[str]) -> str:
    told: list[str] = []
    assert process.stdout is not None
    timer = threading.Timer(START_WITHIN_S, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            told.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found is not None:
                threading.Thread(target=process.stdout.read, daemon=True).start()
                return found.group()
    finally:
        timer.cancel()
    raise AssertionError("the cluster did not start:\n" + "".join(told))
