"""What the papers measure, computed from the records of a run's programs. A paper's request is a whole program.

Each measure is a function of all programs of a run, the times at which a window began and ended, in seconds, and a
decode iteration's seconds. It is of the programs that arrived in the window, and `throughput` is of those that ended in
it. Programs that had not completed, or had no first token, when the run ended are left out, as by a client that reports
what it got. The drain of a run decides how many these are. `OF_RUN` has those of a whole run.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from cluster.core.errors import ConfigError
from cluster.core.slo import Outcome, ProgramRecord
from cluster.offline.simulator.run import RunResult
from cluster.offline.simulator.settings import BLOCK_SIZE, GIB, SimulationSettings

Window = tuple[float, float]
Measure = Callable[[Sequence[ProgramRecord], Window, float], float | None]
"""Of programs, the measured window, and seconds of an iteration. None: there is no program of which to measure it."""


def _arrived(programs: Sequence[ProgramRecord], window: Window) -> list[ProgramRecord]:
    begin_s, end_s = window
    return [program for program in programs if begin_s <= program.arrival_s < end_s]


def _completed(programs: Sequence[ProgramRecord]) -> list[ProgramRecord]:
    return [program for program in programs if program.outcome is Outcome.OK]


def seconds_per_token(program: ProgramRecord, *, tools: bool) -> float | None:
    """Return the normalised latency: seconds from arrival to the last token, divided by the output tokens.

    Args:
        program: the program.
        tools: whether the time of the tools counts. InferCept subtracts it.
    """
    seconds = program.jct_wall_s if tools else program.jct_s
    return None if seconds is None or program.output_tokens < 1 else seconds / program.output_tokens


def seconds_per_token_so_far(program: ProgramRecord) -> float | None:
    """Return the normalised latency as InferCept's published benchmark computes it, also of programs under way.

    These count up to the end of the run. The divisor has the tokens that tools returned, too. None: it has no output.
    """
    returned = sum(turn.prompt_tokens - turn.previous_context_tokens for turn in program.turns[1:])
    if program.spent_s is None or program.output_tokens < 1:
        return None
    return program.spent_s / (program.output_tokens + returned)


def first_token_s(program: ProgramRecord) -> float | None:
    """Return the TTFT of a request: seconds from its arrival to its first token."""
    return program.turns[0].ttft_s if program.turns else None


def _in_time(program: ProgramRecord, ttft_s: float, per_token_s: float, tools: bool) -> bool:
    ttft, pace = first_token_s(program), seconds_per_token(program, tools=tools)
    return ttft is not None and pace is not None and ttft < ttft_s and pace < per_token_s


def goodput(
    programs: Sequence[ProgramRecord],
    window: Window,
    iteration_s: float,
    *,
    ttft_s: float,
    iterations: float,
    tools: bool,
    per_s: float,
) -> float | None:
    """Return AugServe's effective throughput (section 5.1): requests in time per second of ``per_s``."""
    done = _completed(_arrived(programs, window))
    good = sum(_in_time(program, ttft_s, iterations * iteration_s, tools) for program in done)
    return good / per_s


def attainment(
    programs: Sequence[ProgramRecord],
    window: Window,
    iteration_s: float,
    *,
    ttft_s: float,
    iterations: float,
    tools: bool,
) -> float | None:
    """Return AugServe's SLO attainment (section 5.1): the share of completed requests that were in time, in percent."""
    done = _completed(_arrived(programs, window))
    good = sum(_in_time(program, ttft_s, iterations * iteration_s, tools) for program in done)
    return 100 * good / len(done) if done else None


def throughput(programs: Sequence[ProgramRecord], window: Window, iteration_s: float) -> float | None:
    """Return the requests per second that completed in the window, whenever they arrived."""
    begin_s, end_s = window
    ends = (p.arrival_s + p.jct_wall_s for p in _completed(programs) if p.jct_wall_s is not None)
    return sum(begin_s <= ended_s <= end_s for ended_s in ends) / (end_s - begin_s)


def queueing(programs: Sequence[ProgramRecord], window: Window, iteration_s: float) -> float | None:
    """Return the part of the time of completed requests, tools included, in which their turns waited, in percent."""
    done = _completed(_arrived(programs, window))
    total_s = sum(program.jct_wall_s or 0.0 for program in done)
    queued_s = sum(turn.queue_s or 0.0 for program in done for turn in program.turns)
    return 100 * queued_s / total_s if total_s else None


def wasted_memory(result: RunResult, settings: SimulationSettings) -> float | None:
    """Return the part of the KV memory that did no work in the measured window, in percent of memory times time.

    See `replicas.stats.Waste`. InferCept gives its waste in GB times minutes (section 3.2).
    """
    memory_gib = settings.blocks * BLOCK_SIZE * settings.cost_model().kv_bytes_per_token / GIB
    return 100 * result.wasted_gib_s.total / (memory_gib * result.replicas * (result.arrivals_s - settings.warmup_s))


def recomputing(result: RunResult, settings: SimulationSettings) -> float | None:
    """Return the part of the time of the steps in which tokens were computed again, in percent."""
    return None if result.recomputing_share is None else 100 * result.recomputing_share


def _over(
    programs: Sequence[ProgramRecord],
    window: Window,
    iteration_s: float,
    *,
    of: Callable[[ProgramRecord], float | None],
    how: str,
) -> float | None:
    values = [value for program in _arrived(programs, window) if (value := of(program)) is not None]
    if not values:
        return None
    return float(np.mean(values)) if how == "mean" else float(np.percentile(values, PERCENTILES[how]))


PERCENTILES = {"p50": 50, "p95": 95, "p99": 99}
VALUES: dict[str, Callable[[ProgramRecord], float | None]] = {
    "ttft_s": first_token_s,
    "ttft_completed_s": lambda program: first_token_s(program) if program.outcome is Outcome.OK else None,
    "latency_s": lambda program: program.jct_wall_s,
    "latency_without_tools_s": lambda program: program.jct_s,
    "per_token_s": partial(seconds_per_token, tools=False),
    "per_token_so_far_s": seconds_per_token_so_far,
    "per_token_with_tools_s": partial(seconds_per_token, tools=True),
}
"""Values of one program, of which a measure takes the mean or a percentile: ``ttft_s.p99``."""
OF_RUN: dict[str, Callable[[RunResult, SimulationSettings], float | None]] = {
    "wasted_memory": wasted_memory,
    "recomputing": recomputing,
}
"""Measures that need what a run records beside its programs: its memory and its steps."""
IN_TIME: dict[str, tuple[Callable[..., float | None], set[str]]] = {
    "goodput": (goodput, {"ttft_s", "iterations", "tools", "per_s"}),
    "attainment": (attainment, {"ttft_s", "iterations", "tools"}),
}
"""Measures with bounds, and their parameters."""


OF_PROGRAMS: dict[str, Measure] = {"throughput": throughput, "queueing": queueing}
"""Measures of the programs of a run that a plan names by text alone, since they have no bounds and no percentile."""


def measure_of(spec: dict[str, Any] | str) -> Measure:
    """Return the measure of a plan: a name of `OF_PROGRAMS`, ``VALUE.mean``, ``VALUE.p50``, or a name with parameters.

    Raises:
        ConfigError: there is no such measure.
    """
    if isinstance(spec, dict):
        name, parameters = spec["name"], {key: value for key, value in spec.items() if key != "name"}
        if name in IN_TIME and parameters.keys() == IN_TIME[name][1]:
            return partial(IN_TIME[name][0], **parameters)
    elif spec in OF_PROGRAMS:
        return OF_PROGRAMS[spec]
    else:
        value, _, how = spec.rpartition(".")
        if value in VALUES and (how == "mean" or how in PERCENTILES):
            return partial(_over, of=VALUES[value], how=how)
    raise ConfigError(f"measure {spec!r}: there is none of that name and these parameters")
