"""The same programs at the same times, live on a real cluster of one replica and in the simulator, side by side.

    python -m benchmarks.live_against_simulated [--blocks 2] [--rate 3] [--trace FILE] [--profile FILE]
                                                [--accelerator gpu --model FOLDER --find-rate]

The simulator takes three things from the live side: the cost model that `caesura profile` measures on the same engine,
the way of a turn through HTTP and Ray (``turn_s``, measured on the idle cluster) and the memory and bounds of the
engine. Both sides run every policy in alternating blocks on one replica that keeps what it has learnt. The model has
random weights and is larger than the built-in one, so that the engine's steps are the load, as on a GPU, and not the
processes around it. ``--accelerator gpu`` compares on a GPU; its model is a folder.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

if not {"gpu", "--accelerator=gpu"} & {*sys.argv}:  # as a replica on a CPU; before vLLM is imported
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from benchmarks.random_model import write_model
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
from replicas.virtual_engine import Shape
from replicas.virtual_replica import VirtualReplica

POLICIES = ("vllm", "continuum", "augserve", "caesura")
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
GPU_SHAPE = Shape(num_blocks=1501, block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
"""Memory for 24,000 tokens."""
GPU_PLAN = ProfilePlan(
    prompts=(1, 16, 64, 128, 256, 512, 1024, 2048),
    cached=(0, 512, 2048),
    batches=(1, 2, 4, 8, 16, 32, 64),
    contexts=(32, 512, 1024),
    decode_steps=24,
)
RATES = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
"""Programs per second that ``--find-rate`` tries in the simulator."""
LOADED = 0.9
"""Attainment of vLLM's own policy below which a rate loads the replica."""
TARGET = 0.15
TIE = 0.05
"""Policies that are closer than this have no order."""

COMPLETION = "completion_all_s"
"""Mean time without tools of the programs that were not refused at once. Those that had not ended count, too."""
KEYS = (COMPLETION, "ttft_all_s", "tpot_s", "norm_latency_s", "bubble_s", "recomputed_tokens")
"""Means that are shown beside goodput."""


@dataclass(frozen=True, slots=True)
class Replica:
    """The replica that is compared with its simulation."""

    accelerator: str
    model: Path
    shape: Shape
    plan: ProfilePlan
    profile_blocks: int
    """KV blocks of the engine that is profiled."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Further engine arguments."""

    @classmethod
    def on_cpu(cls, model: Path) -> "Replica":
        """The replica of the kept results."""
        return cls("cpu", model, SHAPE, PLAN, PROFILE_BLOCKS, {"load_format": "dummy"})

    @classmethod
    def on_gpu(cls, model: Path) -> "Replica":
        """A replica on a GPU, with as little memory for its size."""
        most = max(GPU_PLAN.batches) * (max(GPU_PLAN.contexts) + 4 * GPU_PLAN.decode_steps + max(GPU_PLAN.batches))
        return cls("gpu", model, GPU_SHAPE, GPU_PLAN, most // GPU_SHAPE.block_size + 1)


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
            [(s.goodput.programs_per_s, s.distributions[COMPLETION].mean) for s in by_block(result, summary.policy)],
        )


def config_of(replica: Replica, blocks: int, cost_model: Path | None = None) -> CaesuraConfig:
    """One replica."""
    shape, on_cpu = replica.shape, replica.accelerator == "cpu"
    return CaesuraConfig.model_validate(
        {
            "model": {"id": "random", "source": str(replica.model)},
            "engine": {
                **replica.engine,
                "block_size": shape.block_size,
                "num_gpu_blocks_override": blocks,
                "max_num_seqs": shape.max_num_seqs,
                "max_num_batched_tokens": shape.max_num_batched_tokens,
                "max_model_len": shape.max_model_len,
                "stream_interval": 32,  # the first token at once, then in pieces: less work beside the engine
            },
            "replicas": {
                "count": 1,
                "accelerator": replica.accelerator,
                "stream_interval_ms": 0,
                "cpu_offload_bytes": 0,
                **({"kv_cache_bytes": 1 << 29} if on_cpu else {}),
            },
            "policy": {"name": "vllm"},
            "slo": {"ttft_s": SLO_TTFT_S},
            "cost_model": None if cost_model is None else str(cost_model),
            "http": {"port": 0},
        }
    )


async def profiled(replica: Replica) -> CostModel:
    """What `caesura profile` measures on this engine."""
    config = config_of(replica, replica.profile_blocks)
    arguments = {"model": model_source(config), **engine_kwargs(config)}
    found = await profile_engine("random, measured", arguments, replica.plan)
    print(f"Profile: error of the fit {found.steps.mean_error:.1%} in the mean, {found.steps.max_error:.1%} at most")
    return found.model


async def idle_turn_s(url: str, cost: CostModel) -> float:
    """Seconds of a turn through HTTP and Ray beyond its one step, on an idle cluster: the mean."""
    clock, seconds = MonotonicClock(), []
    async with open_session() as session:
        client = TurnClient(session, url, "random", clock, 60.0)
        for number in range(IDLE_TURNS + 5):  # the first ones warm up
            turn = Turn(f"idle-{number}", 0, clock.now_s(), [40 + number] * IDLE_PROMPT, 1, 0, None, None)
            record = await client.run(turn)
            assert record.outcome is Outcome.OK, record.error
            seconds.append(record.ttft_s or 0.0)
            await asyncio.sleep(0.02)
    return max(0.0, statistics.fmean(seconds[5:]) - cost.prefill_s(IDLE_PROMPT))


def simulated(settings: BenchSettings, cost: CostModel, of: Replica) -> BenchResult:
    """The blocks of `run_bench` on one virtual replica, in the same order."""
    workload, clock = settings.load(), ManualClock()
    slo = config_of(of, of.shape.num_blocks).slo
    replica = VirtualReplica.build(PolicyConfig(name="vllm"), cost, slo, of.shape, of.model, clock)
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


def found_rate(settings: BenchSettings, cost: CostModel, of: Replica) -> float:
    """The first of `RATES` at which vLLM's own policy misses SLOs in the simulator; the last one if none is."""
    for rate in RATES:
        one = replace(settings, rate_per_s=rate, policies=("vllm",), blocks=1)
        [summary] = by_policy(simulated(one, cost, of))
        print(f"  {rate:g} programs/s: attainment {summary.goodput.attainment or 0.0:.0%} in the simulator", flush=True)
        if (summary.goodput.attainment or 0.0) < LOADED:
            return rate
    return RATES[-1]


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
    by_completion = sorted(rows, key=lambda row: _value(row, side, COMPLETION))
    return {"goodput": [r["policy"] for r in by_goodput], COMPLETION: [r["policy"] for r in by_completion]}


def inverted(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(measure, a, b) where a is clearly more than b live and clearly less simulated; within TIE nothing is clear."""

    def clearly_more(side: str, key: str, a: dict[str, Any], b: dict[str, Any]) -> bool:
        return _value(a, side, key) > (1 + TIE) * _value(b, side, key)

    return [
        (key, a["policy"], b["policy"])
        for key in ("goodput", COMPLETION)
        for a in rows
        for b in rows
        if clearly_more("live", key, a, b) and clearly_more("simulated", key, b, a)
    ]


def _value(row: dict[str, Any], side: str, key: str) -> float:
    return float(row[side]["goodput"] if key == "goodput" else row[side]["means"][key])


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    head = f"{'policy':10} {'':10} {'goodput/s':>10} {'compl., s':>9} {'TTFT, s':>8}"
    print(f"{head} {'bubble, s':>9} {'recomputed':>10}")
    for row in rows:
        for side in ("live", "simulated"):
            means = [row[side]["means"][key] for key in (COMPLETION, "ttft_all_s", "bubble_s", "recomputed_tokens")]
            shown = [f"{value:.3g}" if value is not None else "-" for value in (row[side]["goodput"], *means)]
            print(
                f"{row['policy']:10} {side:10} {shown[0]:>10} {shown[1]:>9} {shown[2]:>8} {shown[3]:>9} {shown[4]:>10}"
            )
        ratio = row["ratio"]
        said = ", ".join(f"{key} {ratio[key]:.2f}" for key in ("goodput", COMPLETION) if ratio[key] is not None)
        print(f"{'':10} simulated / live: {said}")


def settings_of(arguments: argparse.Namespace, url: str) -> BenchSettings:
    """What both sides replay."""
    return BenchSettings(
        url=url,
        trace=arguments.trace,
        shaping=Shaping(
            scale_tools=arguments.scale_tools, max_context=SHAPE.max_model_len - 8, max_turns=arguments.max_turns
        ),
        policies=tuple(arguments.policies.split(",")),
        rate_per_s=arguments.rate,
        duration_s=arguments.duration_s,
        warmup_s=arguments.warmup_s,
        blocks=arguments.blocks,
        seed=arguments.seed,
        slo=Slo(SLO_TTFT_S),
    )


def run(arguments: argparse.Namespace, replica: Replica, scratch: Path) -> int:
    """Profile, replay live, simulate, print, save; exit status 1 where a target is missed."""
    cost = asyncio.run(profiled(replica)) if arguments.profile is None else CostModel.load(arguments.profile)
    told = StreamChunk()
    saved = scratch / "cost.json"
    cost.save(saved)
    if arguments.find_rate:
        arguments.rate = found_rate(settings_of(arguments, "http://simulated"), cost, replica)
    if arguments.simulate_only:
        live = None
    else:
        with LocalCluster(config_of(replica, replica.shape.num_blocks, saved)) as cluster:
            set_niceness([process.pid for process in cluster.processes], arguments.niceness)
            cost = replace(cost, turn_s=asyncio.run(idle_turn_s(cluster.url, cost)))
            live = asyncio.run(run_bench(settings_of(arguments, cluster.url), told))
    print(f"Cost model: {json.dumps(asdict(cost))}")
    virtual = simulated(settings_of(arguments, "http://simulated"), cost, replica)
    rows = compared(live or virtual, virtual)
    print_rows(rows)
    orders, swapped = {side: order(rows, side) for side in ("live", "simulated")}, inverted(rows)
    print(f"Order, live: {orders['live']}\nOrder, simulated: {orders['simulated']}\nInverted: {swapped or 'none'}")
    far = [
        (row["policy"], key)
        for row in rows
        for key in ("goodput", COMPLETION)
        if abs((row["ratio"][key] or 0) - 1) > TARGET
    ]
    said = {"cost_model": asdict(cost), "order": orders, "inverted": swapped, "beyond_15_percent": far}
    said |= {"rate_per_s": arguments.rate}
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
    parser.add_argument("--find-rate", action="store_true", help="the rate that loads the replica in the simulator")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--model", type=Path, default=None, help="the model's folder, with --accelerator gpu")
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
    if (arguments.model is None) != (arguments.accelerator == "cpu"):
        parser.error("--model: a folder is needed with --accelerator gpu, and only there")
    set_niceness([os.getpid()], arguments.niceness)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model is not None:
            return run(arguments, Replica.on_gpu(arguments.model), Path(scratch))
        model = Path(scratch) / "random"
        write_model(model)
        return run(arguments, Replica.on_cpu(model), Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
