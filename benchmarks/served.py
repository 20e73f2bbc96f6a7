"""Servers that benchmarks compare, each in a process of its own: a process has one Ray, and one data plane."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
import psutil

from cluster.config.schema import CaesuraConfig
from cluster.local.cluster import LocalCluster

START_WITHIN_S, STOP_WITHIN_S = 300.0, 60.0


def serve(config: CaesuraConfig, prepare: Callable[[CaesuraConfig], str] | None = None) -> None:
    """Be a cluster until the input ends; the only line of output is its URL.

    Args:
        config: the cluster's configuration.
        prepare: called with the cluster's configuration when it serves; the path of what is measured.
    """
    with LocalCluster(config) as cluster:
        path = prepare(cluster.config) if prepare is not None else ""
        print(cluster.url + path, flush=True)
        sys.stdin.read()


@contextmanager
def served(benchmark: str, *which: str) -> Iterator[str]:
    """The URL of the cluster that a benchmark is when it is called with ``--serve`` and ``which``.

    Raises:
        RuntimeError: it did not start.
    """
    with serving(benchmark, *which) as (url, _):
        yield url


@contextmanager
def serving(benchmark: str, *which: str) -> Iterator[tuple[str, int]]:
    """The URL of such a cluster, and the id of its first process.

    Raises:
        RuntimeError: it did not start.
    """
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--serve", *which]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"the cluster of {', '.join(which)} did not start")
        yield url, process.pid
        process.stdin.close()
        process.wait(STOP_WITHIN_S)


@contextmanager
def foreign_server(command: Sequence[str], url: str, environment: Mapping[str, str]) -> Iterator[int]:
    """The id of a process that runs ``command`` until the end of the context, once ``url``/health answers.

    Args:
        command: the command of the server.
        url: where it listens.
        environment: what its environment has beside that of this process at its start.

    Raises:
        RuntimeError: it has ended, or does not answer within `START_WITHIN_S`.
    """
    process = subprocess.Popen(command, env={**psutil.Process().environ(), **environment}, stdout=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + START_WITHIN_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError(f"{' '.join(command[:3])} did not start")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False
