"""What the papers measure, computed from the records of a run's programs. A paper's request is a whole program.

Each measure is a function of all programs of a run, the times at which a window began and ended, in seconds, and a
decode iteration's seconds. It is of the programs that arrived in the window, and `throughput` is of those that ended in
it. Programs that had not completed, or had no first token, when the run ended are left out, as by a client that reports
what it got. The drain of a run decides how many these are.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from cluster.core.errors import ConfigError
from cluster.core.slo import Outcome, ProgramRecord

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
    "latency_s": lambda program: program.jct_wall_s,
    "latency_without_tools_s": lambda program: program.jct_s,
    "per_token_s": partial(seconds_per_token, tools=False),
    "per_token_with_tools_s": partial(seconds_per_token, tools=True),
}
"""Values of one program, of which a measure takes the mean or a percentile: ``ttft_s.p99``."""
IN_TIME: dict[str, tuple[Callable[..., float | None], set[str]]] = {
    "goodput": (goodput, {"ttft_s", "iterations", "tools", "per_s"}),
    "attainment": (attainment, {"ttft_s", "iterations", "tools"}),
}
"""Measures with bounds, and their parameters."""


def measure_of(spec: dict[str, Any] | str) -> Measure:
    """Return the measure of a plan: ``throughput``, ``VALUE.mean``, ``VALUE.p50``, or a name with parameters.

    Raises:
        ConfigError: there is no such measure.
    """
    if isinstance(spec, dict):
        name, parameters = spec["name"], {key: value for key, value in spec.items() if key != "name"}
        if name in IN_TIME and parameters.keys() == IN_TIME[name][1]:
            return partial(IN_TIME[name][0], **parameters)
    elif spec == "throughput":
        return throughput
    else:
        value, _, how = spec.rpartition(".")
        if value in VALUES and (how == "mean" or how in PERCENTILES):
            return partial(_over, of=VALUES[value], how=how)
    raise ConfigError(f"measure {spec!r}: there is none of that name and these parameters")
