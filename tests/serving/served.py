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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
START_WITHIN_S = 1200.0
"""Alone on two cores it takes one; among others, as long as they let it."""
STOP_WITHIN_S = 60.0
KILL_WITHIN_S = 30.0

REPORTED_OFTEN = {"RAY_metrics_report_interval_ms": "2000"}
"""Environment of a cluster whose counters are awaited. Ray's default is 10 s.

Gauges that Serve sets less often come and go.
"""

EXACT: dict[str, Any] = {
    "max_model_len": 4096,
    "max_num_seqs": 32,
    # In half the digits two tokens may be equally likely, and the batch decides: one prompt would have two answers.
    "dtype": "float32",
    # For requests that name no temperature: no test depends on which token is drawn.
    "override_generation_config": {"temperature": 0.0},
}
"""Engine arguments of clusters that answer the same prompt with the same text."""


@dataclass(slots=True)
class Served:
    """A cluster in a process of its own."""

    url: str
    pid: int
    status: int | None = None
    """With which it ended after Ctrl-C; None before."""
    left: list[psutil.Process] = field(default_factory=list)
    """Its processes that outlived it."""


@contextmanager
def served(config: Path, **environment: str) -> Iterator[str]:
    """The URL of a cluster of this configuration, which says ``http.port: 0``, with more in the processes' environment.

    Raises:
        AssertionError: after Ctrl-C it did not end in order, or something of it was left.
    """
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "serve.log"
        with serving(config, log=log, **environment) as cluster:
            yield cluster.url
        printed = log.read_text(errors="replace")
    assert (cluster.status, cluster.left) == (0, []), printed
    assert all(step in printed for step in ("Ray", "application", "first answer", "Logs: /", "stopped")), printed


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
    cluster, family = Served("", process.pid), list[psutil.Process]()
    try:
        cluster.url = _url(process, printed)
        family = psutil.Process(process.pid).children(recursive=True)
        yield cluster
    finally:
        with suppress(ProcessLookupError):  # it may not have started
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        try:
            cluster.status = process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        _, cluster.left = psutil.wait_procs(family, timeout=KILL_WITHIN_S)
        for one in cluster.left:
            one.kill()


def _url(process: "subprocess.Popen[bytes]", printed: Path) -> str:
    give_up_s = time.monotonic() + START_WITHIN_S
    while time.monotonic() < give_up_s and process.poll() is None:
        if (found := re.search(r"(http://127\.0\.0\.1:\d+)\s", printed.read_text(errors="replace"))) is not None:
            return found.group(1)
        time.sleep(0.1)
    raise AssertionError(f"the cluster did not start:\n{printed.read_text(errors='replace')}")
