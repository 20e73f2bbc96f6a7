"""Small turns of one tenant beside the worst bodies of another: the p99 of the small turns, alone and beside the flood.

    python -m benchmarks.flood [--rounds 6] [--turns 150] [--senders 2]

One cluster with the built-in model and two tenants. The quiet tenant sends turns of one token, one after another. Each
round has three phases, whose order changes from round to round, so that they share what else the machine does:

- ``alone``: nothing else is sent;
- ``beside a flood``: the other tenant sends the worst bodies (`tests/security`): duplicate keys, many keys, deep
  nesting, long lists of messages, tools and stop strings, and schemas of many optional properties. It is sent by a
  process with the lowest priority: clients and cluster share the cores, and a client's work is not the cluster's;
- ``beside other work``: an unrelated process uses as much CPU as the cluster used for the flood of the round before,
  and sends nothing. What this costs, no server on these cores can avoid.
"""

import argparse
import asyncio
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.front_end import CONFIG
from benchmarks.results import save
from benchmarks.served import serve, serving
from cluster.config.schema import CaesuraConfig
from tests.security.corpus import GROWING, chat, schema, tools

TARGET = 1.2
QUIET, FLOOD, BURN = "quiet", "flood", "burn"
LABELS = {QUIET: "alone", FLOOD: "beside a flood", BURN: "beside other work"}
ORDERS = ((FLOOD, QUIET, BURN), (QUIET, BURN, FLOOD), (BURN, FLOOD, QUIET))
"""Of the phases of a round, in turn."""
SLICE_S = 0.01
"""The unrelated process computes and sleeps once in so long."""
KEYS = {name: f"csk-{name}-{'0' * 20}" for name in (QUIET, FLOOD)}
"""The API key of each tenant."""
ANSWER_S = 120.0
SETTLE_S = 2.0
"""Seconds after a flood in which what it has left behind ends."""


def worst_bodies() -> list[bytes]:
    """Return the bodies of the flood. Most are rejected."""
    optional = {f"p{number}": {"type": "string"} for number in range(3000)}
    return [
        GROWING["a key twice among many"](30_000),
        chat(metadata={f"k{number}": "v" for number in range(39_000)}),
        b'{"a":' + b"[" * 39_000 + b"]" * 39_000 + b"}",
        chat(messages=[{"role": "user", "content": "x"}] * 19_000),
        chat(stop=["x"] * 500_000, echo=True),
        chat(tools=tools(6000)),
        schema({"type": "object", "properties": optional}),
        schema({"type": "object", "properties": dict(list(optional.items())[:2000])}),
        schema({"type": "string", "pattern": "^[ -~\u00a0-\uffff]{0,200}$"}),
    ]


def headers(tenant: str) -> dict[str, str]:
    """Return the headers of a tenant's request."""
    return {"authorization": f"Bearer {KEYS[tenant]}", "content-type": "application/json"}


async def flood(url: str, senders: int) -> None:
    """Send the worst bodies until this process is ended."""
    bodies = worst_bodies()

    async def send(http: aiohttp.ClientSession, first: int) -> None:
        number = first
        while True:
            try:
                async with http.post(
                    f"{url}/v1/chat/completions",
                    data=bodies[number % len(bodies)],
                    headers=headers(FLOOD),
                    timeout=aiohttp.ClientTimeout(5),
                ) as answer:
                    await answer.read()
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.05)
            number += 1

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(send(http, sender * 3) for sender in range(senders)))


async def small_turns(url: str, number: int) -> list[float]:
    """Send turns one after another. Return the seconds of each."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 1}
    found = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_S)) as http:
        for _ in range(number):
            begun_s = time.perf_counter()
            async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers(QUIET)) as answer:
                answer.raise_for_status()
                await answer.read()
            found.append(time.perf_counter() - begun_s)
    return found


def burn(share: float) -> None:
    """Compute for a share of each `SLICE_S`, until this process is ended."""
    while True:
        begun_s = time.perf_counter()
        while time.perf_counter() - begun_s < SLICE_S * min(1.0, share):
            pass
        time.sleep(SLICE_S * max(0.0, 1 - share))


def cpu_s(server: int) -> float:
    """Return the CPU seconds of a server's processes, in all."""
    total = 0.0
    for process in (main := psutil.Process(server), *main.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextmanager
def beside(nice: int, *options: str) -> Iterator[None]:
    """Run this file in a process of its own with these options."""
    command = [sys.executable, "-m", "benchmarks.flood", *options]
    with subprocess.Popen(command, preexec_fn=lambda: os.nice(nice)) as process:
        try:
            time.sleep(SETTLE_S)
            yield
        finally:
            process.kill()
            process.wait()
            time.sleep(SETTLE_S)


class Phases:
    """Measures the small turns in each phase.

    Args:
        url: where the cluster listens.
        server: the id of its first process.
        turns: number of small turns of a phase.
        senders: number of connections of the flood.
    """

    def __init__(self, url: str, server: int, turns: int, senders: int) -> None:
        self._url, self._server, self._turns, self._senders = url, server, turns, senders
        self._used = {QUIET: (0.0, 1.0), FLOOD: (0.0, 1.0)}
        """CPU seconds of the cluster in the last phase of each kind, and the seconds that the phase took."""
        self.found: dict[str, list[float]] = {name: [] for name in LABELS}
        """The seconds of each small turn."""

    @property
    def burnt(self) -> float:
        """CPU seconds a second that the flood made the cluster use, beside those of as many small turns."""
        (flooded_s, took_s), (quiet_s, _) = self._used[FLOOD], self._used[QUIET]
        return max(0.0, flooded_s - quiet_s) / took_s

    def run(self, name: str) -> None:
        """Measure one phase."""
        around: AbstractContextManager[None] = nullcontext()
        if name == FLOOD:
            around = beside(19, "--flood", self._url, "--senders", str(self._senders))
        elif name == BURN:
            around = beside(0, "--burn", f"{self.burnt}")
        with around:
            begun_s, used_s = time.perf_counter(), cpu_s(self._server)
            self.found[name] += asyncio.run(small_turns(self._url, self._turns))
            if name in self._used:
                self._used[name] = (cpu_s(self._server) - used_s, time.perf_counter() - begun_s)


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def main() -> int:
    """Measure, print, save; 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--flood", default="", help=argparse.SUPPRESS)
    parser.add_argument("--burn", type=float, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.flood:
        asyncio.run(flood(given.flood, given.senders))
    if given.burn is not None:
        burn(given.burn)
    if given.serve:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "keys.yaml"
            file.write_text(yaml.safe_dump({"keys": [{"tenant": name, "key": key} for name, key in KEYS.items()]}))
            serve(CaesuraConfig.model_validate({**CONFIG, "http": {"port": 0}, "auth": {"file": str(file)}}))
        return 0
    with serving("flood") as (url, server):
        phases = Phases(url, server, given.turns, given.senders)
        for name in (QUIET, FLOOD, QUIET):  # what is slow for the first time, and the CPU that a flood uses
            phases.run(name)
        for times in phases.found.values():
            times.clear()
        for number in range(given.rounds):
            for name in ORDERS[number % len(ORDERS)]:
                phases.run(name)
    rows = rows_of(phases.found, given.senders, phases.burnt)
    print_rows(rows)
    save("flood", rows)
    return 0 if rows[1]["ratio"] <= TARGET else 1


def rows_of(found: Mapping[str, Sequence[float]], senders: int, burnt: float) -> list[dict[str, Any]]:
    """Return a row for each kind of phase, with the ratio of its p99 to that of the turns alone."""
    alone_s = p99(found[QUIET])
    return [
        {
            "turns_are": LABELS[name],
            "p50_s": statistics.median(times),
            "p99_s": p99(times),
            "longest_s": max(times),
            "ratio": p99(times) / alone_s,
            "turns": len(times),
            "senders": senders if name == FLOOD else 0,
            "cpu_s_per_s": burnt if name == BURN else None,
        }
        for name, times in found.items()
    ]


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table."""
    table = Table("small turns", "p50 ms", "p99 ms", "longest ms", "p99, ratio")
    for row in rows:
        times = (f"{row[name] * 1e3:.1f}" for name in ("p50_s", "p99_s", "longest_s"))
        table.add_row(row["turns_are"], *times, f"{row['ratio']:.2f} x")
    Console(width=80).print(table)
    print(f"target: {TARGET} x beside a flood; the other work uses {rows[-1]['cpu_s_per_s']:.2f} CPU seconds a second")


if __name__ == "__main__":
    sys.exit(main())
