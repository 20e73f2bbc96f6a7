"""Tokens a second through Caesura's HTTP path and through plain ray.serve.llm's, same engine, in one run.

    python -m benchmarks.ingress_throughput [--rounds 5] [--streams 1 16 64] [--tokens 64]

Both applications run in one local cluster, each with one replica: the same engine class, scheduler and arguments, so
that what differs is what lies between the client and vLLM. They take turns, the order swapped each round; the other one
is idle. A stream is two completions of 64 tokens, one after the other. Medians over the rounds.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.results import save
from cluster.config.schema import CaesuraConfig
from cluster.local.cluster import LocalCluster

PLAIN_PREFIX = "/plain"
TARGETS = {16: 1.0, 64: 1.0}
"""Streams, and how many times plain's throughput ours has to reach."""
REQUESTS_EACH = 2

CONFIG = {
    "http": {"port": 0},
    "replicas": {"count": 1, "kv_cache_bytes": 64 << 20},
    "engine": {"max_model_len": 2048, "max_num_seqs": 64},
    "policy": {"name": "vllm"},
}


def deploy_plain(config: CaesuraConfig) -> None:
    """Ray's own application beside ours, with our engine class and all of its arguments."""
    from ray import serve
    from ray.serve.llm import build_openai_app

    from cluster.app import llm_config_of

    llm_config = llm_config_of(config)
    llm_config.deployment_config["ray_actor_options"] = {"num_cpus": 0}
    llm_config.placement_group_config = {"bundles": [{"CPU": 0.01}]}
    environment = llm_config.runtime_env["env_vars"]
    llm_config.runtime_env = {"env_vars": {**environment, "RAYLLM_VLLM_ENGINE_CLS": "replicas.engine.ReplicaEngine"}}
    ingress = {"ray_actor_options": {"num_cpus": 0}}
    app = build_openai_app({"llm_configs": [llm_config], "ingress_deployment_config": ingress})
    serve.run(app, name="plain", route_prefix=PLAIN_PREFIX)


async def one_stream(http: aiohttp.ClientSession, url: str, tokens: int, first_s: list[float]) -> int:
    """Run a stream's requests; the tokens received."""
    body = {
        "model": "tiny",
        "prompt": "Once upon a time",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    received = 0
    for _ in range(REQUESTS_EACH):
        begun_s = time.perf_counter()
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            text = b""
            async for chunk in answer.content.iter_any():
                if not text:
                    first_s.append(time.perf_counter() - begun_s)
                text += chunk
        *_, usage, _, _ = text.split(b"\n\n")
        received += int(json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"])
    return received


async def measure(url: str, streams: int, tokens: int) -> dict[str, float]:
    """Tokens a second of all streams together, and the median seconds to the first token."""
    first_s: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        begun_s = time.perf_counter()
        received = await asyncio.gather(*(one_stream(http, url, tokens, first_s) for _ in range(streams)))
        took_s = time.perf_counter() - begun_s
    if sum(received) != streams * REQUESTS_EACH * tokens:
        raise RuntimeError(f"{sum(received)} tokens came instead of {streams * REQUESTS_EACH * tokens}")
    return {"tokens_per_s": sum(received) / took_s, "ttft_s": statistics.median(first_s)}


def compare(urls: dict[str, str], streams: int, rounds: int, tokens: int, base: str = "plain") -> list[dict[str, Any]]:
    """The rounds of one number of streams; one row an application, each with its ratio to ``base``."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
    for number in range(-1, rounds):  # the first one warms up
        for name in list(urls) if number % 2 else list(reversed(urls)):
            result = asyncio.run(measure(urls[name], streams, tokens))
            if number >= 0:
                found[name].append(result)
    rows: list[dict[str, Any]] = []
    for name, results in found.items():
        medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
        rows.append({"application": name, "streams": streams, **medians})
    reference = next(row for row in rows if row["application"] == base)
    for row in rows:
        row["ratio"] = row["tokens_per_s"] / reference["tokens_per_s"]
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a table."""
    table = Table("application", "streams", "tokens/s", "TTFT p50 ms", "ratio")
    for row in rows:
        cells = (row["tokens_per_s"], row["ttft_s"] * 1e3)
        table.add_row(
            row["application"], str(row["streams"]), *(f"{cell:.0f}" for cell in cells), f"{row['ratio']:.2f}"
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with LocalCluster(CaesuraConfig.model_validate(CONFIG)) as cluster:
        deploy_plain(cluster.config)
        urls = {"caesura": cluster.url, "plain": cluster.url + PLAIN_PREFIX}
        for streams in arguments.streams:
            rows += compare(urls, streams, arguments.rounds, arguments.tokens)
    show(rows)
    save("ingress_throughput", rows, arguments.out)
    ours = {row["streams"]: row["ratio"] for row in rows if row["application"] == "caesura"}
    missed = {streams: ratio for streams, ratio in ours.items() if ratio < TARGETS.get(streams, 0.0)}
    for streams, ratio in missed.items():
        print(f"missed: {ratio:.2f} x plain at {streams} streams, the target is {TARGETS[streams]:.2f} x")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
