"""One run: one policy, one rate, one seed; and all of them, on as many processes as asked for."""

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path

from cluster.bench.arrivals import Arrivals
from cluster.bench.infercept import builtin_workload
from cluster.bench.settings import BUILTIN_PROGRAMS
from cluster.bench.summary import Distribution, Summary, summarize
from cluster.bench.trace import programs_from_trace
from cluster.bench.workload import Workload
from cluster.clock import ManualClock
from cluster.errors import ConfigError
from cluster.goodput import ProgramRecord
from cluster.simulator.bound import FluidBound
from cluster.simulator.foresight import Foresight
from cluster.simulator.holding_bound import HoldingBound
from cluster.simulator.load import plan
from cluster.simulator.recovery import Recovery
from cluster.simulator.settings import BLOCK_SIZE, GIB, STOCK_NO_CACHE, SimulationSettings
from cluster.simulator.simulation import Simulation
from replicas.virtual_engine import Shape, write_config_only_model
from replicas.virtual_replica import VirtualReplica, Waste

MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True)
class Run:
    """What is simulated."""

    policy: str
    rate_per_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of it."""

    run: Run
    summary: Summary
    """Of the programs meant to arrive in the measured window."""
    jct_all_s: float | None
    """Mean job completion time without tools, unfinished programs included with the time they have taken so far."""
    wasted_gib_s: float
    """During the measured window: KV on hold, and KV of each step's batch in proportion to what the step recomputes."""
    schedule_ms: Distribution
    """Real milliseconds of one ``schedule()``."""
    preemptions: int
    stored_tokens: int
    """Tokens whose KV went to the host tier, over the whole run."""
    loaded_tokens: int
    """Tokens whose KV came back from it."""
    steps: int
    replicas: int
    arrivals_s: float
    """Virtual seconds of arrivals."""
    simulated_s: float
    """Virtual seconds until all was over."""
    wall_s: float
    capacity_per_s: float
    """Programs per second that the fluid bound lets all be served."""
    bound_per_s: float
    """Goodput that the fluid bound allows at this rate."""
    recovery: Recovery | None
    """Where there is a burst."""


def runs_of(settings: SimulationSettings) -> list[Run]:
    """By rate, seed and policy."""
    return [
        Run(policy, rate, seed)
        for rate in settings.rates_per_s
        for seed in settings.seeds
        for policy in settings.policies
    ]


@lru_cache(maxsize=4)
def _recorded(trace: Path | None, missing_tool_s: float | None, only_recorded: bool, seed: int) -> Workload:
    if trace is None:
        return builtin_workload(seed, BUILTIN_PROGRAMS)
    return programs_from_trace(trace, missing_tool_s, only_recorded)


def load_workload(settings: SimulationSettings, seed: int) -> Workload:
    """The pool of programs: those that fit the memory of a replica, and ``--max-context`` where it is given.

    Raises:
        TraceError: the trace file cannot be used.
        ConfigError: no program fits.
    """
    recorded = _recorded(settings.trace, settings.missing_tool_s, settings.only_recorded, seed)
    shaped = recorded.shaped(settings.fitting(), seed)
    if not shaped.programs:
        limit = settings.fitting().max_context
        raise ConfigError(f"--preset, --max-context: none of {shaped.dropped} programs fits {limit} tokens")
    return shaped


def simulate(settings: SimulationSettings, run: Run) -> RunResult:
    """Simulate one run; the same result every time, but for what is measured in real time.

    Raises:
        TraceError, ConfigError: see :func:`load_workload`.
        IntegrityError: a replica's blocks do not add up: a bug.
    """
    pool = load_workload(settings, run.seed).programs
    jobs = plan(
        pool, Arrivals.parse(settings.arrivals, run.rate_per_s), settings.arrivals_s, run.seed, settings.other_rate
    )
    clock = ManualClock()
    peak_tokens = max(program.peak_tokens for program in pool)
    replicas = _replicas(settings, run, clock, peak_tokens)
    foresight = Foresight(settings.tells_the_future(run.policy), settings.noise)
    simulation = Simulation(jobs, replicas, clock, foresight)
    marks: list[list[Waste]] = []
    for mark_s in (settings.warmup_s, settings.arrivals_s):
        simulation.timeline.at(mark_s, lambda: marks.append([replica.settled_waste() for replica in replicas]))
    began = time.perf_counter()
    gc.freeze()  # vLLM's modules: a hundred thousand objects that each collection would walk through
    try:
        records = simulation.run(settings.arrivals_s + settings.drain_s)
    finally:
        gc.unfreeze()
    return _result(settings, run, records, replicas, marks, clock.now_s(), time.perf_counter() - began)


def simulate_all(settings: SimulationSettings, jobs: int) -> Iterator[RunResult]:
    """Every run, in order: in this process, or on as many as ``jobs`` if they are more than one."""
    runs = runs_of(settings)
    one = partial(simulate, settings)
    if jobs == 1:
        yield from map(one, runs)
        return
    with get_context("spawn").Pool(min(jobs, len(runs))) as pool:
        yield from pool.imap(one, runs)


def _replicas(settings: SimulationSettings, run: Run, clock: ManualClock, peak_tokens: int) -> list[VirtualReplica]:
    cost = settings.cost_model()
    shape = Shape(
        num_blocks=settings.blocks + 1,  # vLLM's null block
        block_size=BLOCK_SIZE,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_batched_tokens,
        max_model_len=max(peak_tokens + 1, settings.max_batched_tokens),
        prefix_caching=run.policy != STOCK_NO_CACHE,
        host_blocks=settings.host_blocks(run.policy),
    )
    policy = settings.policy_config(run.policy)
    with tempfile.TemporaryDirectory() as directory:
        model = write_config_only_model(Path(directory), shape.max_model_len)
        return [
            VirtualReplica.build(policy, cost, settings.slo(), shape, model, clock) for _ in range(settings.replicas)
        ]


def _result(
    settings: SimulationSettings,
    run: Run,
    records: Sequence[ProgramRecord],
    replicas: Sequence[VirtualReplica],
    marks: Sequence[Sequence[Waste]],
    simulated_s: float,
    wall_s: float,
) -> RunResult:
    measured = [record for record in records if record.arrival_s >= settings.warmup_s]
    slo = settings.goodput_slo()
    cost = settings.cost_model()
    pool = load_workload(settings, run.seed).programs
    limits = (cost, settings.max_batched_tokens, settings.max_num_seqs, settings.replicas)
    bound = FluidBound.of(pool, *limits) if settings.host_gib else HoldingBound(pool, *limits)
    start, end = ([waste.held + waste.recomputed for waste in mark] for mark in marks)
    spent = [_spent_s(record, simulated_s) for record in measured]
    burst = settings.other_rate
    return RunResult(
        run=run,
        summary=summarize(run.policy, measured, slo, settings.window_s),
        jct_all_s=sum(spent) / len(spent) if spent else None,
        wasted_gib_s=(sum(end) - sum(start)) * cost.kv_bytes_per_token / GIB,
        schedule_ms=Distribution.of(s * MILLISECONDS for replica in replicas for s in replica.schedule_s),
        preemptions=sum(replica.preemptions for replica in replicas),
        stored_tokens=sum(replica.link.stored_tokens for replica in replicas if replica.link),
        loaded_tokens=sum(replica.link.loaded_tokens for replica in replicas if replica.link),
        steps=sum(len(replica.schedule_s) for replica in replicas),
        replicas=len(replicas),
        arrivals_s=settings.arrivals_s,
        simulated_s=simulated_s,
        wall_s=wall_s,
        capacity_per_s=bound.capacity_per_s,
        bound_per_s=bound.goodput_per_s(run.rate_per_s),
        recovery=Recovery.of(records, slo, burst, settings.arrivals_s) if burst else None,
    )


def _spent_s(program: ProgramRecord, now_s: float) -> float:
    """Seconds without tools that a program has taken up to ``now_s``: its completion time if it has completed."""
    return sum((now_s if t.last_token_s is None else t.last_token_s) - t.intended_start_s for t in program.turns)
