"""Plans the load of a run: its programs, their intended arrivals and a burst. Measures the recovery from the burst."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.core.errors import ConfigError
from cluster.core.slo import ProgramRecord, Slo
from cluster.offline.bench.arrivals import Arrivals
from cluster.offline.bench.runner import Job
from cluster.offline.bench.workload import PlannedProgram, draw

BURST_STREAM = 1
"""Seed of a burst's random numbers, which makes the arrivals outside the burst independent of it."""


@dataclass(frozen=True, slots=True)
class Burst:
    """A period with another arrival rate. ``start_s`` counts from the start of the run, including the warm-up."""

    rate_per_s: float
    start_s: float
    length_s: float

    @classmethod
    def parse(cls, text: str) -> "Burst":
        """Parse ``RATE:START_S:LENGTH_S``.

        Raises:
            ConfigError: the text has another form.
        """
        try:
            rate_per_s, start_s, length_s = (float(part) for part in text.split(":"))
        except ValueError:
            raise ConfigError(f"--burst: {text!r} is not RATE:START_S:LENGTH_S") from None
        if not (0 < rate_per_s < float("inf") and 0 <= start_s < float("inf") and 0 < length_s < float("inf")):
            raise ConfigError(f"--burst: {text!r}: rate and length must be more than 0, the start 0 or more")
        return cls(rate_per_s, start_s, length_s)

    @property
    def end_s(self) -> float:
        """Seconds from the start of the run to the end of the burst."""
        return self.start_s + self.length_s


def plan(
    pool: Sequence[PlannedProgram],
    process: Arrivals,
    duration_s: float,
    seed: int,
    burst: Burst | None = None,
    count: int | None = None,
) -> list[Job]:
    """Return the jobs of a run by arrival. Without a burst, they are those of the first block of `caesura bench`.

    Args:
        pool: the programs that are drawn.
        process: the arrivals.
        duration_s: seconds of arrivals.
        seed: the run's seed.
        burst: a time with another rate.
        count: number of jobs, in place of ``duration_s``.
    """
    stream = (seed, 0)
    rng = np.random.default_rng(stream)
    times_s = process.times_s(rng, count=count, duration_s=duration_s if count is None else None)
    if burst is not None:
        extra = replace(process, rate_per_s=burst.rate_per_s).times_s(
            np.random.default_rng((*stream, BURST_STREAM)), duration_s=burst.length_s
        )
        around = [time_s for time_s in times_s if not burst.start_s <= time_s < burst.end_s]
        times_s = sorted([*around, *(burst.start_s + time_s for time_s in extra)])
    programs = draw(pool, len(times_s), rng)
    return [
        _job(number, program, time_s, stream)
        for number, (program, time_s) in enumerate(zip(programs, times_s, strict=True))
    ]


def closed_loop(
    pool: Sequence[PlannedProgram], under_way: int, ramp_s: float, seed: int
) -> tuple[list[Job], Iterator[Job]]:
    """Return ``under_way`` jobs that arrive within ``ramp_s`` seconds, and an endless iterator of their successors."""
    stream = (seed, 0)

    def jobs() -> Iterator[Job]:
        rng = np.random.default_rng(stream)
        for number in itertools.count():
            if number % len(pool) == 0:
                programs = draw(pool, len(pool), rng)
            first_s = ramp_s * number / under_way if number < under_way else 0.0
            yield _job(number, programs[number % len(pool)], first_s, stream)

    every = jobs()
    return list(itertools.islice(every, under_way)), every


def _job(number: int, program: PlannedProgram, arrival_s: float, stream: tuple[int, int]) -> Job:
    return Job(program_id=f"{number:05d}", program=program, arrival_s=arrival_s, seed=(*stream, number))


WINDOW_S = 30.0
RECOVERED = 0.95
"""SLO attainment from which on a window counts as recovered."""


@dataclass(frozen=True, slots=True)
class Window:
    """The programs with an intended arrival within `WINDOW_S` seconds from ``start_s``."""

    start_s: float
    offered: int
    good: int

    @property
    def attainment(self) -> float | None:
        """Good programs divided by offered programs; None if none arrived."""
        return self.good / self.offered if self.offered else None


@dataclass(frozen=True, slots=True)
class Recovery:
    """The windows around a burst. They cover all arrivals, and one of them begins at the end of the burst."""

    windows: tuple[Window, ...]
    recovered_s: float | None
    """Seconds from the burst's end to the first window with an attainment of `RECOVERED`; None if there is none."""

    @classmethod
    def of(cls, programs: Sequence[ProgramRecord], slo: Slo, burst: Burst, until_s: float) -> "Recovery":
        """Measure a recovery. ``programs``: all of a run, with the warm-up; ``until_s``: the end of the arrivals."""
        first_s = burst.end_s - WINDOW_S * (burst.end_s // WINDOW_S)
        windows = []
        for number in range(int((until_s - first_s) // WINDOW_S)):
            start_s = first_s + number * WINDOW_S
            inside = [p for p in programs if start_s <= p.arrival_s < start_s + WINDOW_S]
            windows.append(Window(start_s, len(inside), sum(slo.program_is_good(p) for p in inside)))
        after = (w for w in windows if w.start_s >= burst.end_s and w.attainment is not None)
        recovered = next((w.start_s for w in after if (w.attainment or 0.0) >= RECOVERED), None)
        return cls(tuple(windows), None if recovered is None else recovered - burst.end_s)
