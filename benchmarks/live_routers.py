"""Routers side by side on a real cluster: two replicas behind two ingresses, the same programs at the same times.

    python -m benchmarks.live_routers [--routers consistent_hash,power_of_two] [--rate 2.5] [--duration-s 60]
        [--trace FILE]

One row a router: ours and Ray's, all before the scheduler `caesura`, and Ray's consistent hashing once more before
vLLM's own. Each has a cluster of its own, one after the other, with the larger model of
`benchmarks.live_against_simulated`, whose programs compete for memory. Replicas share the machine's processors, so that
an uneven load costs less than on devices of their own: what is seen is whether programs find what they have computed.

Hits are of an infinite cache's: of the tokens that a program's turn before had, those that needed no computation. Split
are programs that more than one replica has seen, less those that were moved; completion is without tools.

Exit status 1 where our router split a program.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from benchmarks.live_against_simulated import SHAPE, SLO_TTFT_S, Replica, StreamChunk, config_of, write_model
from benchmarks.results import save
from benchmarks.served import serve, served
from cluster.config.schema import CaesuraConfig
from cluster.core.slo import Outcome, Slo
from cluster.offline.bench.client import open_session
from cluster.offline.bench.results import BenchResult, by_policy
from cluster.offline.bench.runner import run_bench
from cluster.offline.bench.server import Server
from cluster.offline.bench.settings import BenchSettings
from cluster.offline.bench.workload import Shaping

OURS, STOCK = "caesura", "vllm"
PEERS = ("consistent_hash", "power_of_two", "prefix_affinity")
REPLICAS = INGRESSES = 2
ASKED_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A router before a scheduler."""

    router: str
    policy: str = OURS

    def config(self, model: Path) -> CaesuraConfig:
        """Of its cluster."""
        one = config_of(Replica.on_cpu(model), SHAPE.num_blocks).model_dump(mode="json")
        one["replicas"]["count"], one["http"]["ingress_replicas"] = REPLICAS, INGRESSES
        one["router"]["name"], one["policy"] = self.router, {"name": self.policy}
        return CaesuraConfig.model_validate(one)


def compared(routers: Sequence[str]) -> list[Subject]:
    """Ours first; hashing, where it is among them, also before vLLM's own scheduler."""
    stock = [Subject(router, STOCK) for router in routers if router == "consistent_hash"]
    return [Subject(OURS), *map(Subject, routers), *stock]


@dataclass(frozen=True, slots=True)
class Ran:
    """The replay, what each replica says of itself after it, and how many programs were moved."""

    result: BenchResult
    replicas: Sequence[Mapping[str, Any]]
    moves: int


async def run(subject: Subject, url: str, settings: BenchSettings) -> Ran:
    """Replay, and ask."""
    result = await run_bench(settings, StreamChunk())
    async with open_session() as session:
        moves = await moved(session, url) if subject.router == OURS else 0
        return Ran(result, await Server(session, url).statistics(), moves)


async def moved(session: aiohttp.ClientSession, url: str) -> int:
    """Programs that our router has moved, by both ingresses: each answers for itself, and either may."""
    told: dict[str, int] = {}
    async with asyncio.timeout(ASKED_WITHIN_S):
        while len(told) < INGRESSES:
            async with session.get(f"{url}/admin/router") as answer:
                said = await answer.json()
            [router] = said["models"].values()
            told[said["ingress"]] = sum(n for why, n in router["placements"].items() if why.startswith("moved"))
    return sum(told.values())


def row_of(subject: Subject, ran: Ran) -> dict[str, Any]:
    """The interface's columns of `benchmarks.router`, as far as a live cluster reports them."""
    [summary] = by_policy(ran.result)
    programs = [program for block in ran.result.blocks for program in (*block.warmup, *block.measured)]
    turns = [turn for program in programs for turn in program.turns if turn.outcome is Outcome.OK and turn.index]
    known = sum(turn.previous_context_tokens for turn in turns)
    found = sum(min(turn.cached_tokens or 0, turn.previous_context_tokens) for turn in turns)
    seen = sum(replica["programs"] + replica["programs_completed"] for replica in ran.replicas)
    return {
        "router": subject.router,
        "replicas": len(ran.replicas),
        "policy": subject.policy,
        "goodput_programs": summary.goodput.programs_per_s,
        "jct_mean_s": summary.distributions["jct_s"].mean,
        "ttft_p99_s": summary.distributions["ttft_s"].p99,
        "hit_rate": found / known if known else None,
        "offered": summary.goodput.offered_programs,
        "completed": summary.goodput.completed_programs,
        "moves": ran.moves,
        "split": seen - len(programs) - ran.moves,
    }


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    for number, row in enumerate(rows):
        cells = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()]
        if not number:
            print(" ".join(f"{name:>16}" for name in row))
        print(" ".join(f"{cell:>16}" for cell in cells))


def settings_of(arguments: argparse.Namespace, url: str) -> BenchSettings:
    """What each cluster is asked."""
    return BenchSettings(
        url=url,
        trace=arguments.trace,
        shaping=Shaping(scale_tools=0.1, max_context=SHAPE.max_model_len - 8, max_turns=6),
        rate_per_s=arguments.rate,
        duration_s=arguments.duration_s,
        warmup_s=arguments.warmup_s,
        seed=arguments.seed,
        slo=Slo(SLO_TTFT_S),
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 where ours splits a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", default=",".join(PEERS), help="Ray's, by comma; ours is always there")
    parser.add_argument("--trace", type=Path, default=None, help="programs; else the built-in workload")
    parser.add_argument("--rate", type=float, default=2.5, help="programs per second, of the cluster")
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--warmup-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--serve", nargs=3, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve is not None:
        router, policy, model = arguments.serve
        serve(Subject(router, policy).config(Path(model)))
        return 0
    routers = arguments.routers.split(",")
    if unknown := set(routers) - set(PEERS):
        parser.error(f"--routers: no {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    rows = []
    with TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_model(model)
        for subject in compared(routers):
            print(f"{subject.router}, {subject.policy}", flush=True)
            with served("live_routers", subject.router, subject.policy, str(model)) as url:
                rows.append(row_of(subject, asyncio.run(run(subject, url, settings_of(arguments, url)))))
    print_rows(rows)
    save("live_routers", rows, arguments.json)
    return 0 if rows[0]["split"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
