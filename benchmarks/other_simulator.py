"""Our simulator and another one side by side: stock vLLM in ours, and in Dynamo's mocker.

    python -m benchmarks.other_simulator [--peers FOLDER] [--trace FILE] [--preset llama-3.1-8b/h100]
        [--loads 0.3,0.6,0.9,1.5] [--programs 60]

Both replay the same agent programs with the same arrivals, on one replica with the same memory and limits. Loads are
multiples of the capacity of our fluid bound. The comparison is made three times, to separate the causes of differences:

- ``same steps``: both take the mocker's built-in step times, so that only scheduling and caching differ;
- ``our costs``: ours has the preset's cost model, and the mocker has tables of it (`benchmarks.mocker_timing`), which
  it adds for steps with prompts and decodes;
- ``own costs``: ours has the preset's cost model, the mocker its built-in step times, which name no device.

A ratio is ours divided by the mocker's. Throughput is of generated tokens, from the first arrival to the last token.
Exit status 1 where throughput or TPOT of the first two differ by more than 15 percent at a load below 1; 77 if the
mocker is absent.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("DYN_LOG", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import mocker, peer_packages
from benchmarks.mocker_timing import Polynomial, Tables, TimedReplica, Timing
from benchmarks.results import save
from cluster.config.schema import SloConfig
from cluster.core.clock import ManualClock
from cluster.core.slo import Outcome, TurnRecord
from cluster.offline.bench.arrivals import Arrivals
from cluster.offline.bench.runner import Job
from cluster.offline.bench.settings import load_pool
from cluster.offline.bench.workload import PlannedProgram, Shaping
from cluster.offline.simulator.bounds import FluidBound
from cluster.offline.simulator.foresight import Foresight
from cluster.offline.simulator.load import plan
from cluster.offline.simulator.routing import LeastPrograms
from cluster.offline.simulator.simulation import Simulation
from replicas.cost_model import CostModel
from replicas.presets import cost_model
from replicas.virtual_engine import Shape, write_config_only_model
from replicas.virtual_replica import VirtualReplica

TRACE = Path(__file__).parents[1] / "../shared/data/programs/iso_bench_trae.jsonl.gz"
TARGET = 0.15
SATURATED = 1.0
"""Load from which on the two need not agree."""
LONGEST_S = 1e6
SAME, OURS, OWN = "same steps", "our costs", "own costs"
JUDGED = (SAME, OURS)


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of one side."""

    turns: int
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    cached: float
    """Share of prompt tokens that were in the cache."""
    makespan_s: float

    @classmethod
    def of(cls, turns: Sequence[TurnRecord]) -> "Measured":
        """Summarize turns.

        Raises:
            ValueError: a turn did not end well, so that both sides did not do the same work.
        """
        bad = [turn for turn in turns if turn.outcome is not Outcome.OK]
        if bad or not turns:
            raise ValueError(f"{len(bad)} of {len(turns)} turns did not end well")
        ttft = np.array([turn.ttft_s for turn in turns])
        tpot = np.array([turn.tpot_s for turn in turns if turn.tpot_s is not None])
        first_s = min(turn.intended_start_s for turn in turns)
        makespan_s = max(turn.last_token_s or 0.0 for turn in turns) - first_s
        return cls(
            turns=len(turns),
            tokens_per_s=sum(turn.output_tokens for turn in turns) / makespan_s,
            ttft_p50_s=float(np.percentile(ttft, 50)),
            ttft_p99_s=float(np.percentile(ttft, 99)),
            tpot_mean_s=float(tpot.mean()),
            tpot_p99_s=float(np.percentile(tpot, 99)),
            cached=sum(turn.cached_tokens or 0 for turn in turns) / sum(turn.prompt_tokens for turn in turns),
            makespan_s=makespan_s,
        )


COMPARED = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "cached")
BOUND = ("tokens_per_s", "tpot_mean_s")
"""What has to agree."""


def row_of(comparison: str, load: float, rate_per_s: float, ours: Measured, other: Measured) -> dict[str, Any]:
    """Return the row of one comparison at one load: both sides, and the ratios of ours to the other's."""
    row: dict[str, Any] = {"comparison": comparison, "load": load, "rate_per_s": rate_per_s, "turns": ours.turns}
    for name in COMPARED:
        mine, theirs = getattr(ours, name), getattr(other, name)
        row |= {f"ours_{name}": mine, f"other_{name}": theirs, f"ratio_{name}": mine / theirs if theirs else None}
    return row


def misses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each figure below saturation that differs by more than `TARGET`."""
    return [
        f"{row['comparison']} at load {row['load']:g}: {name} is {row[f'ratio_{name}']:.3f} of the other's"
        for row in rows
        if row["comparison"] in JUDGED and row["load"] < SATURATED
        for name in BOUND
        if abs(row[f"ratio_{name}"] - 1) > TARGET
    ]


def simulate(
    jobs: Sequence[Job], limits: mocker.Limits, cost: CostModel, timing: Timing | None, longest: int
) -> list[TurnRecord]:
    """Replay jobs in our simulator on one replica with vLLM's own scheduler, and return their turns.

    Args:
        jobs: the programs with their arrivals.
        limits: memory and limits of the replica.
        cost: the cost model.
        timing: step times to use in place of the cost model's.
        longest: tokens of the longest context.
    """
    clock = ManualClock()
    shape = Shape(
        num_blocks=limits.blocks + 1,  # vLLM's null block
        block_size=mocker.BLOCK_SIZE,
        max_num_seqs=limits.step_sequences,
        max_num_batched_tokens=limits.step_tokens,
        max_model_len=max(longest + 1, limits.step_tokens),
    )
    made = VirtualReplica if timing is None else TimedReplica
    with tempfile.TemporaryDirectory() as directory:
        model = write_config_only_model(Path(directory), shape.max_model_len)
        replica = made.build(None, cost, SloConfig(), shape, model, clock)
    if isinstance(replica, TimedReplica) and timing is not None:
        replica.timing = timing
    records = Simulation(jobs, [replica], clock, Foresight(), LeastPrograms(1)).run(LONGEST_S)
    return [turn for record in records for turn in record.turns]


@dataclass(frozen=True, slots=True)
class Scene:
    """What is replayed, and on what."""

    programs: Sequence[PlannedProgram]
    cost: CostModel
    limits: mocker.Limits
    seed: int

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return max(program.peak_tokens for program in self.programs)

    def compare(self, load: float, count: int, directory: Path, *, alone: bool) -> list[dict[str, Any]]:
        """Run all comparisons at one load, and return their rows."""
        bound = FluidBound.of(self.programs, self.cost, self.limits.step_tokens, self.limits.step_sequences, 1)
        rate_per_s = load * bound.capacity_per_s
        jobs = plan(self.programs, Arrivals.parse("poisson", rate_per_s), 0.0, self.seed, count=count)
        trace, tables = directory / "trace.jsonl", directory / "tables.npz"
        mocker.write_trace(jobs, trace)
        Tables.of(self.cost, self.longest, alone=alone).save(tables)
        read = {"type": "external", "provider": "dynamo_profile", "config": {"path": str(tables)}}
        built_in = {"type": "polynomial"}
        theirs = {name: Measured.of(mocker.replay(trace, self.limits, timing)) for name, timing in
                  (("tables", read), ("built in", built_in))}  # fmt: skip
        timed = Measured.of(simulate(jobs, self.limits, self.cost, Polynomial(), self.longest))
        costed = Measured.of(simulate(jobs, self.limits, self.cost, None, self.longest))
        sides = [(SAME, timed, "built in"), (OURS, costed, "tables"), (OWN, costed, "built in")]
        return [row_of(name, load, rate_per_s, ours, theirs[other]) for name, ours, other in sides]


def loads_of(text: str) -> list[float]:
    """Read multiples of the capacity, with commas between them.

    Raises:
        argparse.ArgumentTypeError: there is none, or one is no number above 0.
    """
    try:
        loads = [float(load) for load in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < load < math.inf for load in loads):
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers above 0, with commas")
    return loads


def print_row(row: Mapping[str, Any]) -> None:
    """Print a row: of each figure ours, the other's, and the ratio."""
    print(f"{row['comparison']}, load {row['load']:g} ({row['rate_per_s']:.4g} programs/s, {row['turns']} turns)")
    for name in COMPARED:
        ratio = row[f"ratio_{name}"]
        shown = "-" if ratio is None else f"{ratio:.3f}"
        print(f"  {name:<14}{row[f'ours_{name}']:>12.4g}{row[f'other_{name}']:>12.4g}{shown:>9}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Compare at all loads; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer_packages.add_option(parser)
    parser.add_argument("--trace", type=Path, default=TRACE, help="agent programs")
    parser.add_argument("--preset", default="llama-3.1-8b/h100", help="model/device, or a cost model's .json file")
    parser.add_argument(
        "--loads", type=loads_of, default="0.3,0.6,0.9,1.5", help="multiples of the capacity, with commas"
    )
    parser.add_argument("--programs", type=int, default=60, help="programs of each run")
    parser.add_argument("--max-context", type=int, default=65_536, help="drop programs that need more tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="the mocker's prompts take the time of a prompt alone")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    peer_packages.use(arguments.peers)
    if (why := peer_packages.why_absent("dynamo.replay.api")) is not None:
        print(why)
        return peer_packages.SKIPPED
    cost = cost_model(arguments.preset)
    blocks = cost.kv_capacity_tokens // mocker.BLOCK_SIZE
    shaping = Shaping(max_context=min(arguments.max_context, blocks * mocker.BLOCK_SIZE))
    pool = load_pool(arguments.trace, 1.0, False, None, shaping, arguments.seed, "--max-context").programs
    programs = [program for program in pool if mocker.is_expressible(program)]
    print(f"{len(programs)} of {len(pool)} programs can be expressed in the mocker's trace")
    scene = Scene(programs, cost, mocker.Limits(blocks, cost.step_tokens, cost.step_sequences), arguments.seed)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for load in arguments.loads:
            began = time.perf_counter()
            found = scene.compare(load, arguments.programs, Path(directory), alone=arguments.alone)
            for row in found:
                print_row(row)
            rows += found
            print(f"  {time.perf_counter() - began:.0f} s", flush=True)
    save("other_simulator", rows, arguments.json)
    for miss in misses(rows):
        print(miss)
    return 1 if misses(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
