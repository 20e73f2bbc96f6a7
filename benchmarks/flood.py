"""Small turns of one tenant beside the worst bodies of another: the p99 of the small turns, with and without the flood.

    python -m benchmarks.flood [--rounds 6] [--turns 150] [--senders 2]

One cluster with the built-in model and two tenants. The quiet tenant sends turns of one token, one after another. In
every second phase the other tenant sends the worst bodies beside them (`tests/security`): duplicate keys, many keys,
deep nesting, long lists of messages, tools and stop strings, and schemas of many optional properties. Phases alternate
and their order is swapped each round, so that both share what else the machine does. The flood comes from a process
with the lowest priority: here clients and cluster share the cores, and a client's own work is not the cluster's.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.front_end import CONFIG
from benchmarks.results import save
from benchmarks.served import serve, served
from cluster.config.schema import CaesuraConfig
from tests.security.corpus import GROWING, chat, schema, tools

TARGET = 1.2
QUIET, FLOOD = "quiet", "flood"
KEYS = {name: f"csk-{name}-{'0' * 20}" for name in (QUIET, FLOOD)}
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


def phase(url: str, turns: int, senders: int, is_flooded: bool) -> list[float]:
    """Measure the small turns, beside a flood or alone."""
    if not is_flooded:
        return asyncio.run(small_turns(url, turns))
    command = [sys.executable, "-m", "benchmarks.flood", "--flood", url, "--senders", str(senders)]
    with subprocess.Popen(command, preexec_fn=lambda: os.nice(19)) as process:
        try:
            time.sleep(SETTLE_S)
            return asyncio.run(small_turns(url, turns))
        finally:
            process.kill()
            process.wait()
            time.sleep(SETTLE_S)


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
    given = parser.parse_args()
    if given.flood:
        asyncio.run(flood(given.flood, given.senders))
    if given.serve:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "keys.yaml"
            file.write_text(yaml.safe_dump({"keys": [{"tenant": name, "key": key} for name, key in KEYS.items()]}))
            serve(CaesuraConfig.model_validate({**CONFIG, "http": {"port": 0}, "auth": {"file": str(file)}}))
        return 0
    found: dict[str, list[float]] = {QUIET: [], FLOOD: []}
    with served("flood") as url:
        phase(url, given.turns, given.senders, is_flooded=False)
        for number in range(given.rounds):
            for name in (QUIET, FLOOD) if number % 2 else (FLOOD, QUIET):
                found[name] += phase(url, given.turns, given.senders, is_flooded=name == FLOOD)
    quiet_s = p99(found[QUIET])
    ratio = p99(found[FLOOD]) / quiet_s
    table = Table("small turns", "p50 ms", "p99 ms", "longest ms")
    rows: list[dict[str, Any]] = []
    for name, times in found.items():
        seconds = {"p50_s": statistics.median(times), "p99_s": p99(times), "longest_s": max(times)}
        rows.append({"beside": name, **seconds, "ratio": p99(times) / quiet_s, "turns": len(times)})
        label = "beside a flood" if name == FLOOD else "alone"
        table.add_row(label, *(f"{value * 1e3:.1f}" for value in seconds.values()))
    Console(width=80).print(table)
    print(f"p99 beside a flood: {ratio:.2f} x that without (target {TARGET})")
    save("flood", rows)
    return 0 if ratio <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
