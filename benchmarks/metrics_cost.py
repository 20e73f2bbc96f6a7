"""What metrics cost: tokens a second at 64 streams with and without them, and a scrape with 1,000 live programs.

    python -m benchmarks.metrics_cost [--rounds 8] [--streams 64] [--tokens 64] [--programs 1000]

Two applications in one local cluster, each with one replica and one ingress, that differ in `metrics.enabled` alone.
They take turns, the order swapped each round; the other one is idle. What vLLM and Ray record by themselves is in both.
Two applications that do not differ at all are 10% apart, the one that is deployed second and has a prefix to its paths
being faster: so a second cluster has them in each other's place, and the ratio is the geometric mean of both. Medians
over the rounds. The scrape is `GET /metrics` of the ingress of a cluster of its own, from its request to its
last byte.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.results import save
from benchmarks.streams import compare, show
from cluster.config.schema import CaesuraConfig
from cluster.local.cluster import LocalCluster

WITH, WITHOUT = "with metrics", "without"
SECOND_PREFIX = "/second"
MOST_COST = 0.02
MOST_SCRAPE_S = 0.1
SCRAPES = 20
AT_ONCE = 32
SETTLE_S = 15.0
"""After the programs: Ray's processes report every ten seconds."""

CONFIG: dict[str, Any] = {
    "http": {"port": 0},
    "replicas": {"count": 1, "cpus": 0.2, "kv_cache_bytes": 64 << 20},
    "engine": {"max_model_len": 2048, "max_num_seqs": 64},
}


def deploy_second(config: CaesuraConfig, *, metrics: bool) -> None:
    """The same application once more, with metrics or without."""
    from ray import serve

    from cluster.app import build

    second = config.model_copy(update={"metrics": config.metrics.model_copy(update={"enabled": metrics})})
    serve.run(build(second), name="second", route_prefix=SECOND_PREFIX)


def side_by_side(streams: int, rounds: int, tokens: int, *, first: str) -> list[dict[str, Any]]:
    """A row of each in one cluster; ``first`` is deployed first."""
    config = CaesuraConfig.model_validate(CONFIG | {"metrics": {"enabled": first == WITH}})
    second = WITHOUT if first == WITH else WITH
    with LocalCluster(config) as cluster:
        deploy_second(cluster.config, metrics=second == WITH)
        urls = {first: cluster.url, second: cluster.url + SECOND_PREFIX}
        rows = compare(urls, streams, rounds, tokens, base=WITHOUT)
    show(rows)
    return [{**row, "deployed_first": row["application"] == first} for row in rows]


async def begin_programs(url: str, count: int) -> None:
    """One turn of each; none is the last."""
    room = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def turn(number: int) -> None:
            body = {"model": "tiny", "prompt": [number % 200 + 32] * 8, "max_tokens": 2}
            async with (
                room,
                http.post(f"{url}/v1/completions", json=body, headers={"x-session-id": f"live-{number}"}) as answer,
            ):
                answer.raise_for_status()
                await answer.read()

        await asyncio.gather(*(turn(number) for number in range(count)))


async def scrape(url: str) -> dict[str, float]:
    """Seconds of each of some scrapes, and what they bring."""
    took_s, size, lines = [], 0, 0
    async with aiohttp.ClientSession() as http:
        for _ in range(SCRAPES):
            begun_s = time.perf_counter()
            async with http.get(f"{url}/metrics") as answer:
                answer.raise_for_status()
                text = await answer.read()
            took_s.append(time.perf_counter() - begun_s)
            size, lines = len(text), text.count(b"\n")
            await asyncio.sleep(0.2)
    return {"scrape_p50_s": statistics.median(took_s), "scrape_max_s": max(took_s), "bytes": size, "lines": lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    load = arguments.streams, arguments.rounds, arguments.tokens
    rows = [row for first in (WITH, WITHOUT) for row in side_by_side(*load, first=first)]
    ratio = statistics.geometric_mean(row["ratio"] for row in rows if row["application"] == WITH)
    with LocalCluster(CaesuraConfig.model_validate(CONFIG)) as cluster:
        asyncio.run(begin_programs(cluster.url, arguments.programs))
        time.sleep(SETTLE_S)
        found = asyncio.run(scrape(cluster.url))
    print(f"with metrics over without: {ratio:.3f}")
    print(f"scrape with {arguments.programs} live programs: {found}")
    told = [*rows, {"with_over_without": ratio}, {"programs": arguments.programs, **found}]
    save("metrics_cost", told, arguments.out)
    missed = []
    if ratio < 1 - MOST_COST:
        missed.append(f"{ratio:.3f} x the tokens of the same without metrics")
    if found["scrape_p50_s"] > MOST_SCRAPE_S:
        missed.append(f"a scrape of {found['scrape_p50_s']:.3f} s")
    for what in missed:
        print(f"missed: {what}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
