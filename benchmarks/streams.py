"""A client that streams completions, for benchmarks that compare servers: tokens a second, and the first token.

A stream is two completions, one after the other. The servers take turns, the order swapped each round, and the others
are idle meanwhile. The results are medians over the rounds.
"""

import asyncio
import json
import statistics
import time
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

REQUESTS_EACH = 2


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
