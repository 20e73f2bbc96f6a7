"""Runs the simulations of a paper's figures, in several processes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster.core.errors import ConfigError
from cluster.offline.bench.workload import Shaping
from cluster.offline.reproduce.code_state import code_state
from cluster.offline.reproduce.kept import KeptRuns, all_specs, named
from cluster.offline.reproduce.measures import OF_RUN, measure_of
from cluster.offline.reproduce.plan import Figure, Job
from cluster.offline.simulator.run import runs_of, simulate
from cluster.offline.simulator.settings import SimulationSettings
from replicas.cost_model import CostModel
from replicas.presets import preset

ADDED_STEP_S = "added_step_s"
"""Setting of a figure: seconds of host time that each step takes in addition to the preset's."""
SLOWER = "slower"
"""Setting of a factor: how many times as long each step takes."""
STEPS = "steps"
"""Setting: fields of the cost model that the paper's authors measured, in place of the preset's."""
CAPACITY = "kv_share"
"""Setting of a factor: share of the preset's KV memory."""
ITERATION_S = "iteration_s"
"""Setting: seconds of the iteration to which bounds refer. Missing: a decode of one sequence without a context."""
OWN = (ADDED_STEP_S, SLOWER, STEPS, CAPACITY, ITERATION_S, "policy", "parameters", "rate", "trace", "preset")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measures of one run, by their names."""

    job: Job
    values: Mapping[str, float | None]
    offered: int
    completed: int


def run_all(
    jobs: Sequence[Job], figures: Mapping[str, Figure], traces: Path, processes: int, resume: Path | None = None
) -> Iterator[Measured]:
    """Run all jobs, and yield their measures in order.

    Args:
        jobs: what is simulated.
        figures: the figures of the paper, by id.
        traces: the folder of the traces.
        processes: runs at a time.
        resume: the folder in which runs are kept and found; None: nothing is kept.

    Raises:
        ConfigError, TraceError: a trace or a setting cannot be used.
    """
    kept = None if resume is None else KeptRuns(resume, traces, code_state())
    one = partial(measured, figures=figures, traces=traces, kept=kept)
    if processes == 1:
        yield from map(one, jobs)
        return
    with get_context("spawn").Pool(min(processes, len(jobs))) as pool:
        yield from pool.imap(one, jobs)


def measured(job: Job, figures: Mapping[str, Figure], traces: Path, kept: KeptRuns | None = None) -> Measured:
    """Simulate the policy, the load and the seed of a job, and take the values of the figures from the result.

    Args:
        job: what is simulated.
        figures: the figures of the paper, by id.
        traces: the folder of the traces.
        kept: the runs that are kept, of which this may be one.
    """
    specs = figures[job.figure].measures
    content = None if kept is None else kept.find(job, specs)
    if content is None:
        own = {named(spec): spec for spec in specs.values()}
        content = _simulated(job, traces, own if kept is None else all_specs() | own)
        if kept is not None:
            kept.keep(job, content)
    values = {name: content["values"][named(spec)] for name, spec in specs.items()}
    return Measured(job, values, content["offered"], content["completed"])


def _simulated(job: Job, traces: Path, specs: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate a job. Return the values of ``specs`` by their names, and the programs offered and completed."""
    with TemporaryDirectory() as folder:
        settings, cost = settings_of(job, traces, Path(folder))
        [run] = runs_of(settings)
        result = simulate(settings, run)
        assert result.recorded is not None
        iteration_s = job.settings.get(ITERATION_S, cost.decode_step_s())
        window = settings.warmup_s, result.arrivals_s
        programs = result.recorded.programs
        values = {
            name: OF_RUN[spec](result, settings)
            if isinstance(spec, str) and spec in OF_RUN
            else measure_of(spec)(programs, window, iteration_s)
            for name, spec in specs.items()
        }
    goodput = result.summary.goodput
    return {"values": values, "offered": goodput.offered_programs, "completed": goodput.completed_programs}


def settings_of(job: Job, traces: Path, folder: Path) -> tuple[SimulationSettings, CostModel]:
    """Return the simulator's settings of a job, and its cost model, which is saved in ``folder``.

    Raises:
        ConfigError: a setting does not exist, or has no valid value.
    """
    chosen = dict(job.settings)
    cost = cost_of(chosen)
    path = folder / "cost.json"
    cost.save(path)
    shaping = {field.name for field in fields(Shaping)}
    known = {field.name for field in fields(SimulationSettings)}
    if unknown := chosen.keys() - known - shaping - {*OWN}:
        raise ConfigError(f"{job.figure}: there is no setting {', '.join(sorted(unknown))}")
    chosen = {key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()}
    own = {key: value for key, value in chosen.items() if key in known and key not in OWN}
    policy = chosen["policy"]
    settings = SimulationSettings(
        policies=(policy,),
        rates_per_s=(chosen["rate"],),
        preset=str(path),
        trace=_trace(traces, chosen["trace"]),
        shaping=Shaping(**{key: value for key, value in chosen.items() if key in shaping}),
        seeds=(job.seed,),
        parameters={policy: chosen["parameters"]} if chosen["parameters"] else {},
        record=True,
        **own,
    )
    return settings, cost


def cost_of(chosen: Mapping[str, Any]) -> CostModel:
    """Return the cost model of merged settings.

    Raises:
        ConfigError: there is no such preset.
        TypeError: the cost model has no such field.
    """
    cost = replace(preset(chosen["preset"]), **chosen.get(STEPS, {})).slowed(chosen.get(SLOWER, 1.0))
    return replace(
        cost,
        overhead_s=cost.overhead_s + chosen.get(ADDED_STEP_S, 0.0),
        kv_capacity_tokens=int(cost.kv_capacity_tokens * chosen.get(CAPACITY, 1.0)),
    )


def _trace(traces: Path, name: str) -> Path:
    path = traces / f"{name}.jsonl.gz"
    if not path.is_file():
        raise ConfigError(f"--traces: {traces} has no {path.name}")
    return path
