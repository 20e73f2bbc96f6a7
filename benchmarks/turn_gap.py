"""From a turn's last token to the next turn's arrival: programs that the cluster runs, and the same from a client.

    python -m benchmarks.turn_gap [--rounds 10] [--turns 12] [--words 600]

One replica, `continuum`, which holds the KV through the pauses. A program calls a tool that does nothing in each of its
turns. Either the cluster runs the whole program in one request (`/v1/responses`: the tool is a coroutine in a tool
actor, every step is logged in Redis first), or a client does over HTTP (`/v1/chat/completions`, the same named tool
choice, the whole conversation each time, a kept connection; its tool takes no time at all). They take turns, the order
swapped each round. Both gaps are read from the scheduler's own clock (`/v1/programs`): a turn's arrival less the end
of the turn before.
"""

import argparse
import asyncio
import json
import statistics
import sys
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.results import save
from cluster.config.schema import CaesuraConfig
from cluster.local.cluster import LocalCluster

TARGET = 0.5
"""At most so many times the client's gap."""

MAX_TOKENS = 100
"""Of a turn; a call takes about forty."""

NAME = "nothing"
PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
CONFIG = {
    "http": {"port": 0},
    "replicas": {"count": 1, "kv_cache_bytes": 64 << 20},
    "engine": {"max_model_len": 8192, "max_num_seqs": 16},
    "policy": {"name": "continuum"},
    "tools": {
        "defined": {
            NAME: {
                "kind": "python",
                "entry": "benchmarks.turn_gap:nothing",
                "parameters": PARAMETERS,
                "description": "Wait.",
            }
        }
    },
}


async def nothing() -> str:
    """The tool."""
    return "done"


def prompt(program: str, words: int) -> str:
    """Its own from the first word on, so that programs share no prefix."""
    return f"{program} " + "Look at the next part of the plan and say what you see. " * (words // 12)


async def on_the_server(http: aiohttp.ClientSession, url: str, program: str, turns: int, words: int) -> None:
    """The whole program in one request."""
    body = {
        "model": "tiny",
        "input": prompt(program, words),
        "tools": [{"type": "function", "name": NAME, "server_side": True}],
        "tool_choices": [{"type": "function", "name": NAME}] * turns,
        "max_output_tokens": MAX_TOKENS * turns,
        "max_turns": turns + 1,
    }
    async with http.post(f"{url}/v1/responses", json=body, headers={"x-session-id": program}) as response:
        told = await response.json()
    calls = sum(item["type"] == "mcp_call" and item["status"] == "completed" for item in told.get("output", ()))
    if calls < turns:
        raise RuntimeError(f"{calls} of {turns} tools were called: {json.dumps(told)[:1000]}")


async def from_a_client(http: aiohttp.ClientSession, url: str, program: str, turns: int, words: int) -> None:
    """The same, turn by turn."""
    tool = {"type": "function", "function": {"name": NAME, "description": "Wait.", "parameters": PARAMETERS}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt(program, words)}]
    choice = {"type": "function", "function": {"name": NAME}}
    for _ in range(turns):
        body = {"model": "tiny", "messages": messages, "tools": [tool], "tool_choice": choice, "max_tokens": MAX_TOKENS}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers={"x-session-id": program}) as response:
            told = await response.json()
        if "choices" not in told:
            raise RuntimeError(json.dumps(told)[:1000])
        message = told["choices"][0]["message"]
        messages.append({key: message[key] for key in ("role", "content", "tool_calls")})
        messages.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "done"})


async def gaps_of(http: aiohttp.ClientSession, url: str, program: str, turns: int) -> list[float]:
    """Seconds between the end of each of the program's first turns and the arrival of the next."""
    async with http.get(f"{url}/v1/programs/{program}") as response:
        told = (await response.json())["turns"][:turns]
    ends = [turn["arrived_s"] + turn["queue_s"] + turn["run_s"] for turn in told]
    return [after["arrived_s"] - end for end, after in zip(ends, told[1:], strict=False)]


async def measure(url: str, rounds: int, turns: int, words: int) -> dict[str, list[float]]:
    """All gaps, by side; one round before them is not counted."""
    sides = {"server": on_the_server, "client": from_a_client}
    found: dict[str, list[float]] = {name: [] for name in sides}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        for number in range(rounds + 1):
            for name in sorted(sides, reverse=bool(number % 2)):
                program = f"{name}-{number}"
                await sides[name](http, url, program, turns, words)
                if number:
                    found[name] += await gaps_of(http, url, program, turns)
    return found


def main() -> int:
    """Run it; exit status 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--words", type=int, default=600)
    given = parser.parse_args()
    with LocalCluster(CaesuraConfig.model_validate(CONFIG)) as cluster:
        found = asyncio.run(measure(cluster.url, given.rounds, given.turns, given.words))
    table = Table("side", "gaps", "median", "p90", "mean", title="From a turn's end to the next turn's arrival")
    rows: list[dict[str, Any]] = []
    for name, gaps in found.items():
        median, p90, mean = statistics.median(gaps), statistics.quantiles(gaps, n=10)[-1], statistics.fmean(gaps)
        table.add_row(name, str(len(gaps)), *(f"{1000 * value:.1f} ms" for value in (median, p90, mean)))
        rows.append({"side": name, "gaps": len(gaps), "median_s": median, "p90_s": p90, "mean_s": mean})
    ratio = rows[0]["median_s"] / rows[1]["median_s"]
    console = Console(highlight=False)
    console.print(table)
    console.print(f"server / client, medians: {ratio:.2f} (target: at most {TARGET})")
    save("turn_gap", [*rows, {"ratio_of_medians": ratio, "target": TARGET}])
    return 0 if ratio <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
