"""Dynamo's own KV router before our simulated replicas, beside the routers of the simulator.

    python -m benchmarks.dynamo_router [--peers FOLDER] [--replicas 4] [--rate 0.05] [--minutes 8]
        [--drain-s 1200] [--seeds 0,1,2]

The first run has Dynamo's selection service (`benchmarks.dynamo_service`) place all turns. Before each choice it is
asked for the loads from which it computes its costs, and so is `kv_aware`, our reimplementation of its cost, which gets
the same turns and the same choices. Their loads have to be equal on each replica. Then each router places the same
programs by itself, before stock vLLM's scheduler, and ours also before our scheduler.

Exit status 1 if, for more than a hundredth of the turns, a load differs or Dynamo's choice is not one of least cost to
`kv_aware`; 77 if Dynamo is absent.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("DYN_LOG", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import peer_packages
from benchmarks.dynamo_service import DynamoRouter, DynamoService
from benchmarks.results import save
from benchmarks.router_rows import DRAIN_S, print_rows, row_of
from benchmarks.router_subjects import RECORDED, Subject
from cluster.offline.bench.workload import Shaping
from cluster.offline.simulator.peers import KvAware
from cluster.offline.simulator.routers import OURS, Replicas, kv_aware
from cluster.offline.simulator.routing import Sent, SimulatedTurn, TurnRouter
from cluster.offline.simulator.run import Run, RunResult, simulate
from cluster.offline.simulator.settings import STOCK, SimulationSettings
from replicas.virtual_replica import VirtualReplica

DYNAMO = "dynamo"
AGREED = 0.99
"""Least share of turns on which both have to agree. The service may lack blocks that a replica has, because it knows
only of what it has received."""
BESIDE = (
    Subject("kv_aware", STOCK),
    Subject("consistent_hash", STOCK),
    Subject(OURS, STOCK),
    Subject(OURS, "caesura"),
)


@dataclass(slots=True)
class Agreement:
    """How far Dynamo and our reimplementation agree on the same turns."""

    turns: int = 0
    same_tokens: int = 0
    """Turns for which the tokens to compute are the same on all replicas."""
    same_blocks: int = 0
    """Turns for which the active blocks are the same on all replicas."""
    least_cost: int = 0
    """Turns that Dynamo sent to a replica whose cost is the least to our reimplementation."""
    ties: int = 0
    """Turns for which several replicas had the least cost."""
    examples: list[str] = field(default_factory=list)
    """The first differences."""

    def count(
        self, turn_id: str, block_size: int, theirs: Sequence[tuple[int, int]], ours: Sequence[tuple[int, int]], to: int
    ) -> None:
        """Count a turn with the loads (tokens, blocks) of each replica and Dynamo's choice."""
        costs = [tokens / block_size + blocks for tokens, blocks in ours]
        self.turns += 1
        self.same_tokens += [tokens for tokens, _ in theirs] == [tokens for tokens, _ in ours]
        self.same_blocks += [blocks for _, blocks in theirs] == [blocks for _, blocks in ours]
        self.least_cost += costs[to] == min(costs)
        self.ties += costs.count(min(costs)) > 1
        if list(theirs) != list(ours) and len(self.examples) < 3:
            self.examples.append(f"{turn_id}: Dynamo has {theirs}, kv_aware {ours}")

    @property
    def holds(self) -> bool:
        """Whether they agree on `AGREED` of all turns in each of the three."""
        return self.turns > 0 and min(self.same_tokens, self.same_blocks, self.least_cost) >= AGREED * self.turns


class ComparedRouter(DynamoRouter):
    """Dynamo's router with our reimplementation in its shadow, which is notified of the same turns."""

    def __init__(
        self, replicas: Sequence[VirtualReplica], service: DynamoService, shadow: KvAware, agreement: Agreement
    ) -> None:
        super().__init__(replicas, service)
        self._shadow = shadow
        self._agreement = agreement
        self._block_size = replicas[0].engine.shape.block_size

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Compare the loads, and let the service choose."""
        self.synchronize()
        theirs, ours = self.service.loads(turn.prompt), self._shadow.loads(turn)
        sent = super().choose(turn)
        assert sent is not None
        self._agreement.count(turn.turn_id, self._block_size, theirs, ours, sent.replica)
        return sent

    def sent(self, turn: SimulatedTurn, replica: int) -> None:
        """Count the turn in both."""
        super().sent(turn, replica)
        self._shadow.sent(turn, replica)

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """Count the end in both."""
        super().ended(turn, replica, context_tokens, now_s)
        self._shadow.ended(turn, replica, context_tokens, now_s)


def with_dynamo(settings: SimulationSettings, run: Run, agreement: Agreement) -> RunResult:
    """Simulate a run that Dynamo routes, and count its agreement with our reimplementation."""
    services: list[DynamoService] = []

    def make(made: Replicas) -> TurnRouter:
        services.append(DynamoService(len(made.replicas), made.replicas[0].engine.shape.block_size))
        return ComparedRouter(made.replicas, services[0], kv_aware(made), agreement)

    try:
        return simulate(settings, run, make)
    finally:
        for service in services:
            service.close()


def print_agreement(agreement: Agreement) -> None:
    """Print what was counted."""
    of = f"of {agreement.turns} turns"
    print(f"tokens to compute equal on all replicas: {agreement.same_tokens} {of}")
    print(f"active blocks equal on all replicas: {agreement.same_blocks} {of}")
    print(f"sent to a replica of least cost: {agreement.least_cost} {of} ({agreement.ties} with several)")
    for example in agreement.examples:
        print(f"  {example}")


def seeds_of(text: str) -> tuple[int, ...]:
    """Read seeds, with commas between them.

    Raises:
        argparse.ArgumentTypeError: there is none, or one is no whole number from 0 on.
    """
    if not all(seed.isdecimal() for seed in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers from 0 on, with commas")
    return tuple(dict.fromkeys(map(int, text.split(","))))


def main(argv: list[str] | None = None) -> int:
    """Compare; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer_packages.add_option(parser)
    parser.add_argument("--trace", type=Path, default=RECORDED.trace, help="agent programs")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rate", type=float, default=RECORDED.rate, help="programs per second and replica")
    parser.add_argument("--minutes", type=float, default=8.0, help="measured, of each run")
    parser.add_argument("--warmup", type=float, default=4.0, help="minutes before them")
    parser.add_argument("--drain-s", type=float, default=DRAIN_S, help="seconds after the last arrival")
    parser.add_argument("--seeds", type=seeds_of, default="0", help="of arrivals and order, with commas")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    peer_packages.use(arguments.peers)
    if (why := peer_packages.why_absent("dynamo._core")) is not None:
        print(why)
        return peer_packages.SKIPPED
    rate_per_s = arguments.rate * arguments.replicas
    settings = SimulationSettings(
        policies=(STOCK, "caesura"),
        rates_per_s=(rate_per_s,),
        preset=RECORDED.preset,
        trace=arguments.trace,
        only_recorded=True,
        shaping=Shaping(max_context=RECORDED.max_context),
        minutes=arguments.minutes,
        warmup_minutes=arguments.warmup,
        drain_s=arguments.drain_s,
        seeds=arguments.seeds,
        replicas=arguments.replicas,
        routers=tuple(dict.fromkeys(subject.router for subject in BESIDE)),
    )
    agreement, rows = Agreement(), list[dict[str, Any]]()
    for seed in arguments.seeds:
        dynamo = with_dynamo(settings, Run(STOCK, rate_per_s, seed, DYNAMO), agreement)
        found = [(Subject(DYNAMO, STOCK), dynamo)]
        found += [(one, simulate(settings, Run(one.policy, rate_per_s, seed, one.router))) for one in BESIDE]
        rows += (of_seed := [row_of(subject, result) | {"seed": seed} for subject, result in found])
        print(f"seed {seed}")
        print_rows(of_seed)
    print_agreement(agreement)
    counted = {name: getattr(agreement, name) for name in ("turns", "same_tokens", "same_blocks", "least_cost", "ties")}
    save("dynamo_router", [rows[0] | {"agreement": counted}, *rows[1:]], arguments.json)
    return 0 if agreement.holds else 1


if __name__ == "__main__":
    sys.exit(main())
