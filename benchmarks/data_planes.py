"""Tokens a second and time to the first token through both data planes, same engine, in one run.

    python -m benchmarks.data_planes [--rounds 5] [--streams 1 16 64] [--tokens 64]

Two local clusters at a time, each with one replica and in processes of its own, for a process has one data plane; they
take turns, the order swapped each round, and the other one is idle. Streams as in `benchmarks.ingress_throughput`.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.ingress_throughput import CONFIG, compare, show
from benchmarks.results import save
from cluster.config import CaesuraConfig
from cluster.serving import LocalCluster

PLANES = ("ingress", "direct")
STOP_WITHIN_S = 60.0


def serve(plane: str) -> None:
    """Be one of the clusters until the input ends; the only line of output is the URL."""
    config = CaesuraConfig.model_validate({**CONFIG, "http": {"port": 0, "data_plane": plane}})
    with LocalCluster(config) as cluster:
        print(cluster.url, flush=True)
        sys.stdin.read()


@contextmanager
def served(plane: str) -> Iterator[str]:
    """The URL of a cluster in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.data_planes", "--serve", plane]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"the cluster of {plane} did not start")
        yield url
        process.stdin.close()
        process.wait(STOP_WITHIN_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--serve", choices=PLANES, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return 0
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        urls = {plane: stack.enter_context(served(plane)) for plane in PLANES}
        for streams in arguments.streams:
            rows += compare(urls, streams, arguments.rounds, arguments.tokens, base="ingress")
    show(rows)
    save("data_planes", rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
