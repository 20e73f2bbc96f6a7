"""The same programs at the same times, live on a real cluster of one CPU replica and in the simulator, side by side.

    python -m benchmarks.live_against_simulated [--blocks 2] [--rate 3] [--trace FILE] [--profile FILE]

The simulator takes three things from the live side: the cost model that `caesura profile` measures on the same engine,
the way of a turn through HTTP and Ray (``turn_s``, measured on the idle cluster) and the memory and bounds of the
engine. Both sides run every policy in alternating blocks on one replica that keeps what it has learnt. The model has
random weights and is larger than the built-in one, so that the engine's steps are the load, as on a GPU, and not the
processes around it.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # as a replica; before vLLM is imported
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.results import save
from cluster.app import engine_kwargs, model_source
from cluster.config.schema import CaesuraConfig, PolicyConfig
from cluster.core.clock import ManualClock, MonotonicClock
from cluster.core.slo import Outcome, ProgramRecord, Slo
from cluster.local.cluster import LocalCluster
from cluster.offline.bench.client import Turn, TurnClient, open_session
from cluster.offline.bench.results import BenchResult, BlockResult, Summary, by_block, by_policy
from cluster.offline.bench.runner import Job, plan_block, policy_order, run_bench
from cluster.offline.bench.settings import BenchSettings
from cluster.offline.bench.workload import Shaping
from cluster.offline.simulator.foresight import Foresight
from cluster.offline.simulator.routing import LeastPrograms
from cluster.offline.simulator.simulation import Simulation
from replicas.cost_model import CostModel
from replicas.profile import ProfilePlan, profile_engine
from replicas.scheduler import AgentScheduler
from replicas.tiny.model import tiny_model_directory
from replicas.virtual_engine import Shape
from replicas.virtual_replica import VirtualReplica

POLICIES = ("vllm", "continuum", "augserve", "caesura")
LARGER = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8}
"""What is larger than in the built-in model."""
SHAPE = Shape(num_blocks=201, block_size=32, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=4096)
"""Memory for 6,400 tokens: programs compete for it."""
SLO_TTFT_S = 1.0
PROFILE_BLOCKS = 1025
"""KV blocks of the engine that is profiled: room for the contexts of the plan."""
PLAN = ProfilePlan(
    prompts=(1, 16, 64, 128, 256, 512),
    cached=(0, 512, 2048),
    batches=(1, 2, 4, 8, 16, 32),
    contexts=(32, 512, 1024),
    decode_steps=24,
)
IDLE_TURNS, IDLE_PROMPT = 60, 400
"""Turns that the way through HTTP is measured with, and the tokens of their prompts: as many as the programs' have."""
TARGET = 0.15
TIE = 0.05
"""Policies that are closer than this have no order."""

KEYS = ("jct_s", "ttft_s", "tpot_s", "norm_latency_s", "bubble_s", "recomputed_tokens")
"""Means that are shown beside goodput."""


@dataclass(frozen=True, slots=True)
class Side:
    """One policy, live or simulated."""

    goodput: float
    attainment: float
    completed: int
    means: dict[str, float | None]
    blocks: list[tuple[float, float | None]]
    """(goodput, mean completion time without tools) of each block: the noise."""

    @classmethod
    def of(cls, summary: Summary, result: BenchResult) -> "Side":
        """From the records of a run."""
        return cls(
            summary.goodput.programs_per_s,
            summary.goodput.attainment or 0.0,
            summary.goodput.completed_programs,
            {key: summary.distributions[key].mean for key in KEYS},
            [(s.goodput.programs_per_s, s.distributions["jct_s"].mean) for s in by_block(result, summary.policy)],
        )


def write_model(directory: Path) -> None:
    """The built-in model's tokenizer with a larger configuration; vLLM makes up the weights (`load_format: dummy`)."""
    shutil.copytree(tiny_model_directory(), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | LARGER))


def config_of(model: Path, blocks: int, cost_model: Path | None = None) -> CaesuraConfig:
    """One replica."""
    return CaesuraConfig.model_validate(
        {
            "model": {"id": "random", "source": str(model)},
            "engine": {
                "load_format": "dummy",
                "block_size": SHAPE.block_size,
                "num_gpu_blocks_override": blocks,
                "max_num_seqs": SHAPE.max_num_seqs,
                "max_num_batched_tokens": SHAPE.max_num_batched_tokens,
                "max_model_len": SHAPE.max_model_len,
                "stream_interval": 32,  # the first token at once, then in pieces: less work beside the engine
            },
            "replicas": {"count": 1, "stream_interval_ms": 0, "kv_cache_bytes": 1 << 29, "cpu_offload_bytes": 0},
            "policy": {"name": "vllm"},
            "slo": {"ttft_s": SLO_TTFT_S},
            "cost_model": None if cost_model is None else str(cost_model),
            "http": {"port": 0},
        }
    )


async def profiled(model: Path) -> CostModel:
    """What `caesura profile` measures on this engine."""
    config = config_of(model, PROFILE_BLOCKS)
    arguments = {"model": model_source(config), **engine_kwargs(config)}
    found = await profile_engine("random, measured", arguments, PLAN)
    print(f"Profile: error of the fit {found.steps.mean_error:.1%} in the mean, {found.steps.max_error:.1%} at most")
    return found.model


async def idle_turn_s(url: str, cost: CostModel) -> float:
    """Seconds of a turn through HTTP and Ray beyond its one step, on an idle cluster: the mean."""
    clock, seconds = MonotonicClock(), []
    async with open_session() as session:
        client = TurnClient(session, url, "random", clock, 60.0)
        for number in range(IDLE_TURNS + 5):  # the first ones warm up
            turn = Turn(f"idle-{number}", 0, clock.now_s(), [40 + number] * IDLE_PROMPT, 1, 0, None, None, True)
            record = await client.run(turn)
            assert record.outcome is Outcome.OK, record.error
            seconds.append(record.ttft_s or 0.0)
            await asyncio.sleep(0.02)
    return max(0.0, statistics.fmean(seconds[5:]) - cost.prefill_s(IDLE_PROMPT))


def simulated(settings: BenchSettings, cost: CostModel, model: Path) -> BenchResult:
    """The blocks of `run_bench` on one virtual replica, in the same order."""
    workload, clock = settings.load(), ManualClock()
    slo = config_of(model, SHAPE.num_blocks).slo
    replica = VirtualReplica.build(PolicyConfig(name="vllm"), cost, slo, SHAPE, model, clock)
    scheduler = replica.engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    blocks = []
    for block in range(settings.blocks):
        planned = plan_block(workload.programs, settings, block)
        for policy in policy_order(settings.policy_names, block):
            scheduler.use_policy(PolicyConfig(name=policy))
            scheduler.reset_prefix_cache()
            jobs = [replace(job, program_id=f"{policy}-{block}-{job.program_id}") for job in planned]
            blocks.append(_block(policy, block, jobs, replica, clock, settings))
    return BenchResult(settings=settings, model=cost.name, workload=workload, blocks=tuple(blocks))


def _block(
    policy: str,
    block: int,
    jobs: Sequence[Job],
    replica: VirtualReplica,
    clock: ManualClock,
    settings: BenchSettings,
) -> BlockResult:
    until_s = clock.now_s() + jobs[-1].arrival_s + settings.drain_s
    records = Simulation(jobs, [replica], clock, Foresight(), LeastPrograms(1)).run(until_s)
    early = [job.arrival_s < settings.warmup_s for job in jobs]
    warmup = tuple(record for record, is_early in zip(records, early, strict=True) if is_early)
    return BlockResult(
        policy, block, warmup, tuple(r for r, is_early in zip(records, early, strict=True) if not is_early)
    )


def set_niceness(pids: Sequence[int], niceness: int) -> None:
    """Of the processes' sessions: where Linux groups processes by session, their own niceness counts only within."""
    for pid in pids if niceness else ():
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


class StreamChunk:
    """A line a block, with the machine's load."""

    def __init__(self) -> None:
        self.loads: list[float] = []

    def block(self, policy: str, block: int, programs: int) -> None:
        """A block begins."""
        self.loads.append(round(os.getloadavg()[0], 2))
        print(f"  live: block {block + 1}, {policy}: {programs} programs, load average {self.loads[-1]}", flush=True)

    def ended(self, program: ProgramRecord) -> None:
        """Say nothing."""


def compared(live: BenchResult, virtual: BenchResult) -> list[dict[str, Any]]:
    """A row a policy; ratios are simulated / live."""
    rows = []
    for real, made in zip(by_policy(live), by_policy(virtual), strict=True):
        a, b = Side.of(real, live), Side.of(made, virtual)
        ratios = {"goodput": _ratio(b.goodput, a.goodput)}
        ratios |= {key: _ratio(b.means[key], a.means[key]) for key in KEYS}
        rows.append({"policy": real.policy, "live": asdict(a), "simulated": asdict(b), "ratio": ratios})
    return rows


def _ratio(value: float | None, to: float | None) -> float | None:
    return None if value is None or not to else value / to


def order(rows: Sequence[dict[str, Any]], side: str) -> dict[str, list[str]]:
    """The policies from the best, by goodput and by mean completion time."""
    by_goodput = sorted(rows, key=lambda row: -_value(row, side, "goodput"))
    by_jct = sorted(rows, key=lambda row: _value(row, side, "jct_s"))
    return {"goodput": [r["policy"] for r in by_goodput], "jct_s": [r["policy"] for r in by_jct]}


def inverted(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(measure, a, b) where a is clearly more than b live and clearly less simulated; within TIE nothing is clear."""

    def clearly_more(side: str, key: str, a: dict[str, Any], b: dict[str, Any]) -> bool:
        return _value(a, side, key) > (1 + TIE) * _value(b, side, key)

    return [
        (key, a["policy"], b["policy"])
        for key in ("goodput", "jct_s")
        for a in rows
        for b in rows
        if clearly_more("live", key, a, b) and clearly_more("simulated", key, b, a)
    ]


def _value(row: dict[str, Any], side: str, key: str) -> float:
    return float(row[side]["goodput"] if key == "goodput" else row[side]["means"][key])


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'policy':10} {'':10} {'goodput/s':>10} {'JCT, s':>8} {'TTFT, s':>8} {'bubble, s':>9} {'recomputed':>10}")
    for row in rows:
        for side in ("live", "simulated"):
            means = [row[side]["means"][key] for key in ("jct_s", "ttft_s", "bubble_s", "recomputed_tokens")]
            shown = [f"{value:.3g}" if value is not None else "-" for value in (row[side]["goodput"], *means)]
            print(
                f"{row['policy']:10} {side:10} {shown[0]:>10} {shown[1]:>8} {shown[2]:>8} {shown[3]:>9} {shown[4]:>10}"
            )
        ratio = row["ratio"]
        said = ", ".join(f"{key} {ratio[key]:.2f}" for key in ("goodput", "jct_s") if ratio[key] is not None)
        print(f"{'':10} simulated / live: {said}")


def settings_of(arguments: argparse.Namespace, url: str) -> BenchSettings:
    """What both sides replay."""
    return BenchSettings(
        url=url,
        trace=arguments.trace,
        shaping=Shaping(
            scale_tools=arguments.scale_tools, max_context=SHAPE.max_model_len - 8, max_turns=arguments.max_turns
        ),
        policies=POLICIES,
        rate_per_s=arguments.rate,
        duration_s=arguments.duration_s,
        warmup_s=arguments.warmup_s,
        blocks=arguments.blocks,
        seed=arguments.seed,
        slo=Slo(SLO_TTFT_S),
    )


def run(arguments: argparse.Namespace, model: Path, scratch: Path) -> int:
    """Profile, replay live, simulate, print, save; exit status 1 where a target is missed."""
    cost = asyncio.run(profiled(model)) if arguments.profile is None else CostModel.load(arguments.profile)
    told = StreamChunk()
    saved = scratch / "cost.json"
    cost.save(saved)
    if arguments.simulate_only:
        live = None
    else:
        with LocalCluster(config_of(model, SHAPE.num_blocks, saved)) as cluster:
            set_niceness([process.pid for process in cluster.processes], arguments.niceness)
            cost = replace(cost, turn_s=asyncio.run(idle_turn_s(cluster.url, cost)))
            live = asyncio.run(run_bench(settings_of(arguments, cluster.url), told))
    print(f"Cost model: {json.dumps(asdict(cost))}")
    virtual = simulated(settings_of(arguments, "http://simulated"), cost, model)
    rows = compared(live or virtual, virtual)
    print_rows(rows)
    orders, swapped = {side: order(rows, side) for side in ("live", "simulated")}, inverted(rows)
    print(f"Order, live: {orders['live']}\nOrder, simulated: {orders['simulated']}\nInverted: {swapped or 'none'}")
    far = [
        (row["policy"], key)
        for row in rows
        for key in ("goodput", "jct_s")
        if abs((row["ratio"][key] or 0) - 1) > TARGET
    ]
    said = {"cost_model": asdict(cost), "order": orders, "inverted": swapped, "beyond_15_percent": far}
    if live is not None:
        print(f"Beyond {TARGET:.0%}: {far or 'none'}; load average {told.loads}")
        save("live_against_simulated", [*rows, said | {"load_average": told.loads}], arguments.json)
    return 1 if far or swapped else 0


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, default=None, help="a cost model of this engine, else it is measured")
    parser.add_argument("--trace", type=Path, default=None, help="programs; else the built-in workload")
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--duration-s", type=float, default=40.0)
    parser.add_argument("--warmup-s", type=float, default=5.0)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--scale-tools", type=float, default=0.1)
    parser.add_argument("--max-turns", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulate-only", action="store_true", help="no cluster: to choose a rate")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--niceness", type=int, default=0, help="on a machine that does other work; below 0 needs root")
    arguments = parser.parse_args(argv)
    os.environ |= {"RAY_worker_niceness": "0"}  # Ray's own default, 15, would yield to everybody
    set_niceness([os.getpid()], arguments.niceness)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "random"
        write_model(model)
        return run(arguments, model, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
