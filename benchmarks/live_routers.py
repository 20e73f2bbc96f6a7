"""Routers side by side on a real cluster: two replicas behind two ingresses, the same programs at the same times.

    python -m benchmarks.live_routers [--routers consistent_hash,power_of_two] [--rate 2.5] [--duration-s 60]
        [--drain-s 120] [--trace FILE]

One row a router: ours and Ray's, all before the policy `caesura`, and Ray's consistent hashing once more before the
policy `vllm` of the same scheduler. Each has a cluster of its own, one after the other, with the larger model of
`benchmarks.live_against_simulated`, whose programs compete for memory. Replicas share the machine's processors, so that
an uneven load costs less than on devices of their own: what is seen is whether programs find what they have computed.

Hits are of an infinite cache's: of the tokens that a program's turn before had, those that needed no computation. Split
are programs that more than one replica has seen, less those that were moved. Completion is without tools. It and the
first tokens include what had not ended, with its time so far, but not programs that were refused at once.

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

from benchmarks.live_against_simulated import SHAPE, SLO_TTFT_S, Replica, StreamChunk, config_of
from benchmarks.random_model import write_model
from benchmarks.results import save
from benchmarks.router_rows import cell
from benchmarks.served import serve, served
from cluster.config.schema import CaesuraConfig
from cluster.core.slo import Outcome, ProgramRecord, Slo
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
        """Return the configuration of its cluster, for a model in this folder."""
        one = config_of(Replica.on_cpu(model), SHAPE.num_blocks).model_dump(mode="json")
        one["replicas"]["count"], one["http"]["ingress_replicas"] = REPLICAS, INGRESSES
        one["router"]["name"], one["policy"] = self.router, {"name": self.policy}
        return CaesuraConfig.model_validate(one)


def compared(routers: Sequence[str]) -> list[Subject]:
    """Return the subjects: ours first. Hashing, if it is among them, is also before the policy `vllm`."""
    stock = [Subject(router, STOCK) for router in routers if router == "consistent_hash"]
    return [Subject(OURS), *map(Subject, routers), *stock]


@dataclass(frozen=True, slots=True)
class Ran:
    """The replay, the statistics of each replica after it, and how many programs were moved."""

    result: BenchResult
    replicas: Sequence[Mapping[str, Any]]
    moves: int


async def run(subject: Subject, url: str, settings: BenchSettings) -> Ran:
    """Replay the programs, and read the replicas' statistics."""
    result = await run_bench(settings, StreamChunk())
    async with open_session() as session:
        moves = await moved(session, url) if subject.router == OURS else 0
        return Ran(result, await Server(session, url).statistics(), moves)


async def moved(session: aiohttp.ClientSession, url: str) -> int:
    """Return how many programs our router has moved, over all ingresses.

    Each ingress answers for itself, and any of them may get a request.

    Raises:
        TimeoutError: an ingress did not answer within `ASKED_WITHIN_S`.
    """
    by_ingress: dict[str, int] = {}
    async with asyncio.timeout(ASKED_WITHIN_S):
        while len(by_ingress) < INGRESSES:
            async with session.get(f"{url}/admin/router") as answer:
                view = await answer.json()
            [router] = view["models"].values()
            moves = sum(count for reason, count in router["placements"].items() if reason.startswith("moved"))
            by_ingress[view["ingress"]] = moves
    return sum(by_ingress.values())


def programs_of(result: BenchResult) -> list[ProgramRecord]:
    """Return the programs of a replay, those of the warm-up included."""
    return [program for block in result.blocks for program in (*block.warmup, *block.measured)]


def measures_of(result: BenchResult) -> dict[str, Any]:
    """Return what a client can measure of any server in a replay of one policy.

    ``hit_rate`` is the share of the tokens of a program's turn before that needed no computation; None if no program
    had a second turn. It and counts of turns include the warm-up.
    """
    [summary] = by_policy(result)
    turns = [turn for program in programs_of(result) for turn in program.turns]
    later = [turn for turn in turns if turn.outcome is Outcome.OK and turn.index]
    known = sum(turn.previous_context_tokens for turn in later)
    found = sum(turn.reused_tokens or 0 for turn in later)
    return {
        "goodput_programs": summary.goodput.programs_per_s,
        "jct_mean_s": summary.distributions["completion_all_s"].mean,
        "completion_offered_s": summary.distributions["completion_offered_s"].mean,
        "ttft_p50_s": summary.distributions["ttft_all_s"].p50,
        "ttft_p99_s": summary.distributions["ttft_all_s"].p99,
        "hit_rate": found / known if known else None,
        "offered": summary.goodput.offered_programs,
        "completed": summary.goodput.completed_programs,
        "failed_turns": sum(turn.outcome is Outcome.FAILED for turn in turns),
        "rejected_turns": sum(turn.outcome is Outcome.REJECTED for turn in turns),
    }


def row_of(subject: Subject, ran: Ran) -> dict[str, Any]:
    """Return the row of a subject: what a client measures, and what its cluster reports."""
    seen = sum(replica["programs"] + replica["programs_completed"] for replica in ran.replicas)
    return {
        "router": subject.router,
        "replicas": len(ran.replicas),
        "policy": subject.policy,
        **measures_of(ran.result),
        "moves": ran.moves,
        "split": seen - len(programs_of(ran.result)) - ran.moves,
    }


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table."""
    print(" ".join(f"{name:>18}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{cell(value):>18}" for value in row.values()))


def add_options(parser: argparse.ArgumentParser, *, rate_per_s: float, drain_s: float) -> None:
    """Add the options of a replay, with these defaults, and of the file of the results."""
    parser.add_argument("--trace", type=Path, default=None, help="programs; else the built-in workload")
    parser.add_argument("--rate", type=float, default=rate_per_s, help="programs per second, of all replicas")
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--warmup-s", type=float, default=10.0)
    parser.add_argument("--drain-s", type=float, default=drain_s, help="seconds after the last arrival to wait")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)


def settings_of(arguments: argparse.Namespace, url: str) -> BenchSettings:
    """Return the replay that the options of `add_options` describe, of a server at ``url``."""
    return BenchSettings(
        url=url,
        trace=arguments.trace,
        shaping=Shaping(scale_tools=0.1, max_context=SHAPE.max_model_len - 8, max_turns=6),
        rate_per_s=arguments.rate,
        duration_s=arguments.duration_s,
        warmup_s=arguments.warmup_s,
        seed=arguments.seed,
        slo=Slo(SLO_TTFT_S),
        drain_s=arguments.drain_s,
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 if our router splits a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", default=",".join(PEERS), help="Ray's, by comma; ours is always there")
    add_options(parser, rate_per_s=2.5, drain_s=120.0)
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
