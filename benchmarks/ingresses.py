"""The forwarding capacity of two ingresses against that of one: tokens for a CPU second of an ingress process.

    python -m benchmarks.ingresses [--rounds 4] [--streams 64] [--tokens 64]

Two clusters of one replica each, one with one ingress and one with two. They take turns, the order swapped each round.
An ingress has one event loop, so its capacity is the number of tokens that it forwards while its process uses one CPU
second. That of several ingresses is the sum, less what the most loaded one has above its share: the kernel distributes
the connections. CPU seconds are counted, not tokens a second, because here the engine, the clients and both ingresses
share two cores, and the engine would be the limit.
"""

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.front_end import CONFIG, Subject
from benchmarks.results import save
from benchmarks.served import serve, serving
from benchmarks.streams import REQUESTS_EACH, measure
from cluster.config.schema import CaesuraConfig

TARGET = 1.8
NUMBERS = (1, 2)
INGRESS = "ingress"


def cpu_s(subject: Subject) -> dict[int, float]:
    """CPU seconds so far of each ingress, by process id."""
    found: dict[int, float] = {}
    for role, process in subject.processes():
        if role == INGRESS:
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


def capacity(tokens: int, spent_s: Mapping[int, float]) -> float:
    """Tokens a second that these ingresses forward together when the most loaded one is busy all the time."""
    return tokens / max(spent_s.values())


def main() -> int:
    """Measure, print, save; 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--serve", type=int, choices=NUMBERS, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(CaesuraConfig.model_validate({**CONFIG, "http": {"port": 0, "ingress_replicas": given.serve}}))
        return 0
    spent: dict[int, dict[int, float]] = {number: defaultdict(float) for number in NUMBERS}
    with ExitStack() as stack:
        subjects = {one: Subject(*stack.enter_context(serving("ingresses", str(one)))) for one in NUMBERS}
        for number in range(-1, given.rounds):  # the first one warms up
            for ingresses in NUMBERS if number % 2 else reversed(NUMBERS):
                before = cpu_s(subjects[ingresses])
                asyncio.run(measure(subjects[ingresses].url, given.streams, given.tokens))
                for pid, seconds in cpu_s(subjects[ingresses]).items():
                    if number >= 0:
                        spent[ingresses][pid] += seconds - before[pid]
    tokens = given.rounds * given.streams * REQUESTS_EACH * given.tokens
    capacities = {number: capacity(tokens, spent[number]) for number in NUMBERS}
    table = Table("ingresses", "CPU s of each", "tokens/s that they forward", "ratio")
    rows: list[dict[str, Any]] = []
    for number in NUMBERS:
        each, ratio = sorted(spent[number].values()), capacities[number] / capacities[1]
        rows.append({"ingresses": number, "cpu_s": each, "tokens_per_s": capacities[number], "ratio": ratio})
        table.add_row(str(number), ", ".join(f"{one:.2f}" for one in each), f"{capacities[number]:.0f}", f"{ratio:.2f}")
    Console(width=80).print(table)
    save("ingresses", rows)
    return 0 if rows[-1]["ratio"] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
