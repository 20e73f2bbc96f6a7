"""Local clusters that benchmarks compare, each in a process of its own: a process has one Ray, and one data plane."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.config.schema import CaesuraConfig
from cluster.local.cluster import LocalCluster

STOP_WITHIN_S = 60.0


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
