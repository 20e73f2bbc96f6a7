"""Simulates one run (a policy, a rate, a seed and a router), or all runs in several processes."""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import ceil, inf, nextafter
from multiprocessing import get_context
from pathlib import Path

from cluster.config.schema import PolicyConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import ConfigError
from cluster.core.program import ProgramIdentity
from cluster.core.slo import ProgramRecord
from cluster.offline.bench.arrivals import Arrivals
from cluster.offline.bench.history import MemorySample, MemoryUse, ProgramHistory
from cluster.offline.bench.record import Recorded
from cluster.offline.bench.results import Distribution, Summary, summarize, tokens_between
from cluster.offline.bench.settings import load_pool
from cluster.offline.bench.workload import Workload
from cluster.offline.simulator.bounds import FluidBound, HoldingBound
from cluster.offline.simulator.disaggregated import PrefillPool
from cluster.offline.simulator.elastic import ScaledRouter, replica_seconds
from cluster.offline.simulator.fairness import jain, slowdown
from cluster.offline.simulator.foresight import Foresight, forecasts_of
from cluster.offline.simulator.load import Recovery, closed_loop, plan
from cluster.offline.simulator.routed import Routed, RoutingSummary, turns_on
from cluster.offline.simulator.routers import OURS, ROUTERS, Replicas
from cluster.offline.simulator.routing import TurnRouter
from cluster.offline.simulator.settings import BLOCK_SIZE, GIB, STOCK_NO_CACHE, SimulationSettings
from cluster.offline.simulator.shedding import SheddingRouter
from cluster.offline.simulator.simulation import Simulation
from predictor_service.forecast_files import Forecasts
from replicas.presets import drive_of
from replicas.scheduler import AgentScheduler
from replicas.stats import KvUse
from replicas.virtual_disk import VirtualDisk, VirtualVolume
from replicas.virtual_engine import Shape, write_config_only_model
from replicas.virtual_replica import VirtualReplica

MACHINE_REPLICAS = 8
"""Replicas of a machine, which see one volume."""
FILE_S = 25e-6
"""Seconds that each file takes beside its bytes: 100 us, while four threads read or write. It is assumed."""
SAMPLES = 600
"""Memory samples of one run. A plot has fewer points."""


@dataclass(slots=True)
class MemoryWatch:
    """Samples the memory of all replicas. It schedules no events, so that it does not change the simulation."""

    replicas: Sequence[VirtualReplica]
    clock: ManualClock
    every_s: float
    seen: list[MemorySample] = field(default_factory=list)
    _next_s: float = 0.0

    def __call__(self) -> None:
        """Take a sample if the next one is due."""
        now_s = self.clock.now_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self.every_s
        self.seen.append((now_s, memory_of(self.replicas)))


def memory_of(replicas: Sequence[VirtualReplica]) -> MemoryUse:
    """Return the memory use of all replicas together."""
    total = MemoryUse(0, 0, 0, 0)
    for replica in replicas:
        scheduler, size = replica.engine.scheduler, replica.engine.shape.block_size
        ours = isinstance(scheduler, AgentScheduler)
        use = KvUse.of(scheduler.kv_cache_manager.block_pool, scheduler.holds.num_blocks if ours else 0)
        host = scheduler.swapping.used_tokens if ours else 0
        total += MemoryUse(use.running * size, use.held * size, use.cached * size, use.empty * size, host)
    return total


def histories_of(replicas: Sequence[VirtualReplica], programs: Sequence[ProgramRecord]) -> list[ProgramHistory]:
    """Return the history of each program from the replicas that had it. Stock vLLM records no history."""
    return [_history(replicas, program) for program in programs]


def _history(replicas: Sequence[VirtualReplica], program: ProgramRecord) -> ProgramHistory:
    key = str(ProgramIdentity(program.program_id).key)
    schedulers = [r.engine.scheduler for r in replicas if isinstance(r.engine.scheduler, AgentScheduler)]
    reports = [found for scheduler in schedulers if (found := scheduler.programs.to_public_dict(key)) is not None]
    if len(reports) == 1:
        return ProgramHistory.of(reports[0])
    turns = sorted(chain.from_iterable(each["turns"] for each in reports), key=lambda turn: turn["arrived_s"])
    # Pauses are computed from each replica's events separately, as a release on one replica ends no hold on another.
    pauses = chain.from_iterable(ProgramHistory.of(each).pauses for each in reports)
    merged = ProgramHistory.of({"turns": turns})
    return ProgramHistory(
        merged.arrivals_s, merged.waits_s, merged.decisions, tuple(sorted(pauses, key=lambda p: p.from_s))
    )


MILLISECONDS = 1e3
SECONDS_PER_HOUR = 3600.0
SHARE = "x"
"""Suffix of a rate that is a multiple of the capacity."""


@dataclass(frozen=True, slots=True)
class Run:
    """What differs between the runs of one command. All else is in the settings."""

    policy: str
    rate_per_s: float
    seed: int
    router: str
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Wasted:
    """KV memory that did no work, integrated over time, by its cause. See `replicas.stats.Waste`."""

    held: float
    """Held KV of paused programs and of turns that wait."""
    recomputed: float
    """KV of each step's batch, times the step's share of recomputed tokens."""

    @property
    def total(self) -> float:
        """Sum over all causes."""
        return self.held + self.recomputed

    def since(self, start: "Wasted", scale: float) -> "Wasted":
        """Return what was added after ``start``, times ``scale``."""
        return Wasted((self.held - start.held) * scale, (self.recomputed - start.recomputed) * scale)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The results of one run."""

    run: Run
    summary: Summary
    """Summary of the programs with an intended arrival in the measured window."""
    jain: float | None
    """Jain's index of the programs' slowdowns, see `cluster.offline.simulator.fairness`."""
    routing: RoutingSummary
    wasted_gib_s: Wasted
    """Wasted KV in the measured window by its cause, in GiB seconds."""
    recomputing_share: float | None
    """Share of the time of the measured window's steps in which tokens were computed again; None: there was no step."""
    schedule_ms: Distribution
    """Real time of one call of ``schedule()``, in milliseconds."""
    preemptions: int
    stored_tokens: int
    """Tokens whose KV was offloaded to the host tier, over the whole run."""
    loaded_tokens: int
    """Tokens whose KV was loaded from the host tier, over the whole run."""
    steps: int
    replicas: int
    replica_hours: float
    """Hours of all replicas together in the measured window, with their starts and the ends of their last turns."""
    most_replicas: int
    """Largest number of replicas at a time."""
    arrivals_s: float
    """Virtual seconds of arrivals."""
    simulated_s: float
    """Virtual seconds until the end of the run."""
    wall_s: float
    capacity_per_s: float
    """Programs per second up to which the fluid bound can serve all programs."""
    bound_per_s: float
    """Upper bound of the goodput at this rate, in programs per second."""
    recovery: Recovery | None
    """Recovery from the burst; None without a burst."""
    recorded: Recorded | None = None
    """Data of the record; None if the run is not recorded."""


def runs_of(settings: SimulationSettings) -> list[Run]:
    """Return all runs of the settings, ordered by rate, noise, seed, policy and router."""
    return [
        Run(policy, rate, seed, router, noise)
        for rate in settings.rates_per_s
        for noise in settings.noises
        for seed in settings.seeds
        for policy in settings.policies
        for router in settings.routers
    ]


def load_workload(settings: SimulationSettings, seed: int) -> Workload:
    """Load the pool of programs that fit into the memory of a replica and, if it is set, into ``--max-context``.

    Raises:
        TraceError: the trace file cannot be used.
        ConfigError: no program fits, or forecasts are those of other programs.
    """
    traced = (settings.trace, settings.missing_tool_s, settings.only_recorded, settings.missing_tools_from)
    forecasts = _forecasts(settings)
    names = None if settings.forecasts is None else forecasts
    workload = load_pool(*traced, settings.fitting(), seed, "--preset, --max-context", names)
    for program in workload.programs if forecasts else ():
        turns, foreseen = len(program.turns), len(forecasts[program.program_id])
        if turns != foreseen:
            raise ConfigError(f"--forecasts: {program.program_id} has {turns} turns in the trace, not {foreseen}")
    return workload


def bound_of(settings: SimulationSettings, seed: int) -> FluidBound | HoldingBound:
    """Return the fluid bound of the workload of a seed on all replicas. Raises: see :func:`load_workload`."""
    pool = load_workload(settings, seed).programs
    limits = (settings.cost_model(), settings.step_tokens, settings.step_sequences, settings.replicas)
    return FluidBound.of(pool, *limits) if settings.host_gib else HoldingBound(pool, *limits)


def rates_of(settings: SimulationSettings, text: str) -> tuple[float, ...]:
    """Return the rates in programs per second that ``text`` lists with commas.

    ``0.9x`` is 0.9 times the capacity of the fluid bound for the first seed's workload, with five significant digits.

    Raises:
        ConfigError: a value is no number.
        TraceError, ConfigError: see :func:`load_workload`.
    """
    parts = [part.strip() for part in text.split(",")]
    shares = any(part.endswith(SHARE) for part in parts)
    capacity_per_s = bound_of(settings, settings.seeds[0]).capacity_per_s if shares else 0.0
    try:
        return tuple(
            float(f"{float(part.removesuffix(SHARE)) * capacity_per_s:.5g}") if part.endswith(SHARE) else float(part)
            for part in parts
        )
    except ValueError as error:
        raise ConfigError(f"--rates: {error}") from None


def _forecasts(settings: SimulationSettings) -> Forecasts:
    if settings.forecasts is None or settings.trace is None:
        return {}
    return forecasts_of(settings.trace, settings.forecasts)


def simulate(
    settings: SimulationSettings, run: Run, make_router: Callable[[Replicas], TurnRouter] | None = None
) -> RunResult:
    """Simulate one run. The result is deterministic, except for measurements of real time.

    Args:
        settings: the settings of all runs.
        run: the run.
        make_router: makes a router to use in place of the run's.

    Raises:
        TraceError, ConfigError: see :func:`load_workload`.
        IntegrityError: the block counts of a replica are inconsistent, which is a bug.
    """
    pool = load_workload(settings, run.seed).programs
    process = Arrivals.parse(settings.arrivals, run.rate_per_s)
    jobs, successors = plan(pool, process, settings.arrivals_s, run.seed, settings.other_rate, settings.count), None
    # The last of a fixed count of programs is in the window, whose end is not.
    arrivals_s = settings.arrivals_s if settings.count is None else nextafter(jobs[-1].arrival_s, inf)
    if arrivals_s <= settings.warmup_s:
        raise ConfigError(f"--warmup: all {len(jobs)} programs arrive in its {settings.warmup_s:g} s")
    if settings.under_way is not None:
        jobs, successors = closed_loop(pool, settings.under_way, settings.warmup_s / 2, run.seed)
    clock = ManualClock()
    peak_tokens = max(program.peak_tokens for program in pool)
    replicas = _replicas(settings, run, clock, peak_tokens)
    oracle, reports = settings.sees_the_future(run.policy), settings.reports_of(run.policy)
    foresight = Foresight(oracle, run.noise, _forecasts(settings), reports)
    made_for = Replicas(
        replicas,
        run.seed,
        settings.max_ongoing,
        settings.imbalanced_threshold,
        settings.slo(),
        settings.front,
        settings.scaling,
        settings.restart_every_s,
        settings.disaggregation,
    )
    router = (make_router or ROUTERS[run.router])(made_for)
    if run.router != OURS:
        router = SheddingRouter(router, replicas)
    watch = MemoryWatch(replicas, clock, (arrivals_s + settings.drain_s) / SAMPLES)
    pool_of_prefill = PrefillPool(replicas, settings.disaggregation) if settings.disaggregation.replicas else None
    watched = watch if settings.record else None
    simulation = Simulation(jobs, replicas, clock, foresight, router, successors, watched, pool_of_prefill)
    marks: list[Mark] = []
    for mark_s in (settings.warmup_s, arrivals_s):
        simulation.timeline.at(mark_s, lambda: marks.append(_mark(replicas)))
    began = time.perf_counter()
    gc.freeze()  # vLLM's modules have 100,000 objects, which each garbage collection would traverse
    try:
        records = simulation.run(arrivals_s + settings.drain_s)
    finally:
        gc.unfreeze()
    sizes = router.sizes if isinstance(router, ScaledRouter) else [(0.0, settings.replicas)]
    ended = Ended(records, simulation.routed, arrivals_s, clock.now_s(), time.perf_counter() - began, sizes)
    result = _result(settings, run, ended, replicas, marks)
    if not settings.record:
        return result
    return replace(result, recorded=Recorded(records, histories_of(replicas, records), watch.seen, start_s=0.0))


def simulate_all(settings: SimulationSettings, jobs: int) -> Iterator[RunResult]:
    """Simulate all runs, and yield the results in order. If ``jobs`` is above 1, use that many processes."""
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
        max_num_seqs=settings.step_sequences,
        max_num_batched_tokens=settings.step_tokens,
        max_model_len=max(peak_tokens + 1, settings.step_tokens),
        prefix_caching=run.policy != STOCK_NO_CACHE,
        forgetful=not settings.prefix_cache and run.policy != STOCK_NO_CACHE,
        host_blocks=settings.host_blocks(run.policy),
    )
    policy = settings.scheduler(run.policy)
    disks = _disks(settings, clock) if isinstance(policy, PolicyConfig) else [None] * settings.replicas
    with tempfile.TemporaryDirectory() as directory:
        model = write_config_only_model(Path(directory), shape.max_model_len)
        return [VirtualReplica.build(policy, cost, settings.slo(), shape, model, clock, disk) for disk in disks]


def _disks(settings: SimulationSettings, clock: ManualClock) -> list[VirtualDisk | None]:
    """Return the drive of each replica. The replicas of a machine see one volume."""
    if not settings.disk_gib:
        return [None] * settings.replicas
    read, written = drive_of(settings.preset)
    chunk_bytes = int(settings.cost_model().kv_bytes_per_token * BLOCK_SIZE)
    machines = range(ceil(settings.replicas / MACHINE_REPLICAS))
    volumes = [VirtualVolume(f"machine-{number}") for number in machines]
    return [
        VirtualDisk(
            volume=volumes[index // MACHINE_REPLICAS],
            slot=index,
            clock=clock,
            chunks=settings.disk_blocks,
            chunk_bytes=chunk_bytes,
            read_chunk_s=FILE_S + chunk_bytes / read,
            write_chunk_s=FILE_S + chunk_bytes / written,
        )
        for index in range(settings.replicas)
    ]


@dataclass(frozen=True, slots=True)
class Mark:
    """Totals up to some time."""

    wasted: Wasted
    recomputing_s: float
    busy_s: list[float]
    """Seconds in which each replica computed."""


def _mark(replicas: Sequence[VirtualReplica]) -> Mark:
    wastes = [replica.settled_waste() for replica in replicas]
    wasted = Wasted(sum(waste.held for waste in wastes), sum(waste.recomputed for waste in wastes))
    recomputing_s = sum(waste.recomputing_s for waste in wastes)
    return Mark(wasted, recomputing_s, [replica.busy_s for replica in replicas])


@dataclass(frozen=True, slots=True)
class Ended:
    """A simulation that has ended."""

    records: Sequence[ProgramRecord]
    routed: Routed
    arrivals_s: float
    simulated_s: float
    wall_s: float
    sizes: Sequence[tuple[float, int]]
    """Times, and the number of replicas from then on."""


def _result(
    settings: SimulationSettings, run: Run, ended: Ended, replicas: Sequence[VirtualReplica], marks: Sequence[Mark]
) -> RunResult:
    records, arrivals_s, simulated_s = ended.records, ended.arrivals_s, ended.simulated_s
    measured = [r for r in records if settings.warmup_s <= r.arrival_s < arrivals_s]
    slo = settings.goodput_slo()
    cost = settings.cost_model()
    bound = bound_of(settings, run.seed)
    start, end = marks
    busy_s = [after - before for before, after in zip(start.busy_s, end.busy_s, strict=True)]
    turns = turns_on(records, ended.routed, len(replicas), settings.warmup_s, arrivals_s)
    tokens = tokens_between(records, settings.warmup_s, arrivals_s)
    burst = settings.other_rate
    return RunResult(
        run=run,
        summary=summarize(run.policy, measured, slo, arrivals_s - settings.warmup_s, tokens),
        jain=jain([slowdown(record, cost, settings.step_tokens) for record in measured if not record.is_refused]),
        routing=RoutingSummary.of(measured, ended.routed, turns, busy_s, simulated_s),
        wasted_gib_s=end.wasted.since(start.wasted, cost.kv_bytes_per_token / GIB),
        recomputing_share=(end.recomputing_s - start.recomputing_s) / sum(busy_s) if sum(busy_s) else None,
        schedule_ms=Distribution.of(s * MILLISECONDS for replica in replicas for s in replica.schedule_s),
        preemptions=sum(replica.preemptions for replica in replicas),
        stored_tokens=sum(replica.link.stored_tokens for replica in replicas if replica.link),
        loaded_tokens=sum(replica.link.loaded_tokens for replica in replicas if replica.link),
        steps=sum(len(replica.schedule_s) for replica in replicas),
        replicas=len(replicas),
        replica_hours=replica_seconds(ended.sizes, settings.warmup_s, arrivals_s) / SECONDS_PER_HOUR,
        most_replicas=max(number for _, number in ended.sizes),
        arrivals_s=arrivals_s,
        simulated_s=simulated_s,
        wall_s=ended.wall_s,
        capacity_per_s=bound.capacity_per_s,
        bound_per_s=bound.goodput_per_s(run.rate_per_s),
        recovery=Recovery.of(records, slo, burst, arrivals_s) if burst else None,
    )
