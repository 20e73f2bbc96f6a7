"""A ten-fold load step and back on one to three CPU replicas, whose number follows the load.

    python -m benchmarks.elastic [--rate 0.12] [--step 10] [--low 30] [--high 200] [--after 200]

Programs arrive at a low rate, then at ``--step`` times that rate, then at the low rate again. Each has some turns with
pauses between them, and every turn is a stream. Arrivals do not wait for answers. A turn that is rejected with 503 and
Retry-After is sent again after that time, and its latency counts from its first sending.

It passes if no turn is lost, no error but 503 with Retry-After is seen, and turns meet their SLO again within the
start-up time of a replica and ten seconds after the step. They meet it from the first moment after which 95 % of the
turns that begin before the end of the high phase do: at once if no more turns than that are late.
"""

import argparse
import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.results import save
from cluster.config.schema import CaesuraConfig
from cluster.local.cluster import LocalCluster

TTFT_S = 3.0
GOOD_SHARE = 0.95
SLACK_S = 10.0
TURNS, TOKENS, PROMPT_WORDS = 4, 48, 120
PAUSE_S = (0.5, 1.5)
SEED = 7
MAX_TRIES = 60
POLL_S = 1.0
CONFIG: dict[str, Any] = {
    "http": {"port": 0},
    "replicas": {"min": 1, "max": 3, "kv_cache_bytes": 32 << 20},
    "engine": {"max_model_len": 4096, "max_num_seqs": 2},
    "slo": {"ttft_s": TTFT_S},
}


@dataclass
class Turn:
    """What a client saw of one turn. Times in seconds since the start of the run."""

    began_s: float
    ttft_s: float | None = None
    tokens: int = 0
    rejections: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether it met the SLO."""
        return self.ttft_s is not None and self.ttft_s <= TTFT_S and self.tokens == TOKENS


@dataclass
class Run:
    """All that was seen."""

    turns: list[Turn] = field(default_factory=list)
    replicas: list[tuple[float, int]] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    """Start-up times that replicas report."""


class Clients:
    """Programs of one cluster."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._began_s = monotonic()
        self.run = Run()

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return monotonic() - self._began_s

    async def program(self, number: int, turns: int = TURNS) -> None:
        """One program, to its end."""
        chance = random.Random(SEED + number)
        prompt = " ".join(f"{number}-{chance.randrange(1000)}" for _ in range(PROMPT_WORDS))
        for index in range(turns):
            if index:
                await asyncio.sleep(chance.uniform(*PAUSE_S))
            prompt += await self._turn(f"elastic-{number}", prompt) + f" result {index}"

    async def _turn(self, session: str, prompt: str) -> str:
        turn = Turn(self.now_s())
        self.run.turns.append(turn)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        headers = {"x-session-id": session}
        for _ in range(MAX_TRIES):
            async with self._http.post(f"{self._url}/v1/completions", json=body, headers=headers) as response:
                if response.status == 503 and (wait_s := response.headers.get("retry-after")):
                    turn.rejections += 1
                    await asyncio.sleep(float(wait_s))
                    continue
                if response.status != 200:
                    turn.errors.append(f"{response.status} {(await response.text())[:200]}")
                    return ""
                return await self._read(response, turn)
        turn.errors.append("rejected too often")
        return ""

    async def _read(self, response: aiohttp.ClientResponse, turn: Turn) -> str:
        text = ""
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                turn.errors.append(str(event["error"].get("message")))
                return text
            if turn.ttft_s is None:
                turn.ttft_s = self.now_s() - turn.began_s
            for choice in event.get("choices", ()):
                text += choice.get("text") or ""
                if choice.get("finish_reason") == "length":
                    turn.tokens = TOKENS
        return text

    async def watch(self) -> None:
        """Record the number of replicas until it is cancelled."""
        while True:
            async with self._http.get(f"{self._url}/admin/statistics") as response:
                if response.status == 200:
                    replicas = (await response.json())["replicas"]
                    self.run.replicas.append((self.now_s(), len(replicas)))
                    self.run.start_s = sorted({*self.run.start_s, *(one["start_s"] for one in replicas)})
            await asyncio.sleep(POLL_S)


def arrivals(chance: random.Random, rate: float, step: float, phases_s: Sequence[float]) -> Iterator[float]:
    """Yield the arrivals of programs: in each phase a Poisson process that begins with the phase."""
    begin_s = 0.0
    for seconds, factor in zip(phases_s, (1.0, step, 1.0), strict=True):
        due_s = begin_s
        while (due_s := due_s + chance.expovariate(rate * factor)) < begin_s + seconds:
            yield due_s
        begin_s += seconds


async def measure(url: str, rate: float, step: float, phases_s: Sequence[float]) -> Run:
    """All phases."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = Clients(http, url)
        watching = asyncio.create_task(clients.watch())
        programs: list[asyncio.Task[None]] = []
        for due_s in arrivals(random.Random(SEED), rate, step, phases_s):
            await asyncio.sleep(max(0.0, due_s - clients.now_s()))
            programs.append(asyncio.create_task(clients.program(len(programs))))
        await asyncio.sleep(max(0.0, sum(phases_s) - clients.now_s()))
        await asyncio.gather(*programs)
        watching.cancel()
        return clients.run


def back_s(turns: Sequence[Turn], from_s: float, until_s: float) -> float | None:
    """Seconds after ``from_s`` from which `GOOD_SHARE` of the turns that begin before ``until_s`` are good.

    0: that many of all the turns are good, so that the SLO was never left. None: there is no such moment, or fewer than
    twenty turns begin after it.
    """
    mine = sorted((turn for turn in turns if from_s <= turn.began_s < until_s), key=lambda turn: turn.began_s)
    if mine and sum(turn.good for turn in mine) >= GOOD_SHARE * len(mine):
        return 0.0
    good = 0
    best = None
    for number, turn in enumerate(reversed(mine), start=1):
        good += turn.good
        if number >= 20 and good / number >= GOOD_SHARE and turn.good:
            best = turn.began_s - from_s
    return best


def summary(run: Run, phases_s: Sequence[float]) -> dict[str, Any]:
    """The numbers of the result."""
    low_s, high_s = phases_s[0], phases_s[0] + phases_s[1]
    lost = [turn for turn in run.turns if turn.tokens != TOKENS]
    sizes = [(round(at_s, 1), number) for at_s, number in run.replicas]
    changes = [one for before, one in zip([(0.0, 0), *sizes], sizes, strict=False) if one[1] != before[1]]
    start_s = max(run.start_s[1:] or run.start_s or [0.0])
    return {
        "turns": len(run.turns),
        "lost": len(lost),
        "errors": sum(len(turn.errors) for turn in run.turns),
        "error_texts": dict(Counter(error for turn in run.turns for error in turn.errors)),
        "rejections": sum(turn.rejections for turn in run.turns),
        "good_low": share(run.turns, 0.0, low_s),
        "good_high": share(run.turns, low_s, high_s),
        "good_after": share(run.turns, high_s, float("inf")),
        "start_s": round(start_s, 1),
        "back_s": back_s(run.turns, low_s, high_s),
        "most_replicas": max(number for _, number in sizes),
        "replicas": changes,
        "load_average": round(os.getloadavg()[1], 1),
    }


def share(turns: Sequence[Turn], from_s: float, until_s: float) -> float | None:
    """The share of good turns among those that began in a time."""
    mine = [turn.good for turn in turns if from_s <= turn.began_s < until_s]
    return round(sum(mine) / len(mine), 3) if mine else None


def main() -> int:
    """Run it; exit status 1 if it does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.12, help="programs a second of the low phases")
    parser.add_argument("--step", type=float, default=10.0, help="factor of the high phase")
    parser.add_argument("--low", type=float, default=30.0, help="seconds of the first phase")
    parser.add_argument("--high", type=float, default=200.0, help="seconds of the high phase")
    parser.add_argument("--after", type=float, default=200.0, help="seconds of the last phase")
    options = parser.parse_args()
    phases_s = (options.low, options.high, options.after)
    with LocalCluster(CaesuraConfig.model_validate(CONFIG)) as cluster:
        run = asyncio.run(measure(cluster.url, options.rate, options.step, phases_s))
    found = summary(run, phases_s)
    table = Table("what", "measured")
    for name, value in found.items():
        table.add_row(name, str(value))
    Console().print(table)
    back = found["back_s"]
    passed = not found["lost"] and not found["errors"] and back is not None and back <= found["start_s"] + SLACK_S
    passed = passed and found["most_replicas"] > 1 and run.replicas[-1][1] == 1
    print(f"written to {save('elastic', [{**found, 'passed': passed}])}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
