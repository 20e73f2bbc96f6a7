"""Tokens a second and time to the first token through both data planes, same engine, in one run.

    python -m benchmarks.data_planes [--rounds 5] [--streams 1 16 64] [--tokens 64]

Two local clusters at a time, each with one replica and in processes of its own, for a process has one data plane; they
take turns, the order swapped each round, and the other one is idle. Streams as in `benchmarks.ingress_throughput`.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.ingress_throughput import CONFIG, compare, show
from benchmarks.results import save
from benchmarks.served import serve, served
from cluster.config.schema import CaesuraConfig

PLANES = ("ingress", "direct")


def config_of(plane: str) -> CaesuraConfig:
    """Of one of the clusters."""
    return CaesuraConfig.model_validate({**CONFIG, "http": {"port": 0, "data_plane": plane}})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--serve", choices=PLANES, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(config_of(arguments.serve))
        return 0
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        urls = {plane: stack.enter_context(served("data_planes", plane)) for plane in PLANES}
        for streams in arguments.streams:
            rows += compare(urls, streams, arguments.rounds, arguments.tokens, base="ingress")
    show(rows)
    save("data_planes", rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
