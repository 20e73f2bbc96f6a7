"""What a run replays: its programs and when they are meant to arrive, a burst and the recovery from it included."""

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
"""Sets a burst's random numbers apart, so that what is around it is the same as without it."""


@dataclass(frozen=True, slots=True)
class Burst:
    """A time of another rate. ``start_s`` counts from the first second, warm-up included."""

    rate_per_s: float
    start_s: float
    length_s: float

    @classmethod
    def parse(cls, text: str) -> "Burst":
        """``RATE:START_S:LENGTH_S``.

        Raises:
            ConfigError: anything else.
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
        """When the usual rate is back."""
        return self.start_s + self.length_s


def plan(
    pool: Sequence[PlannedProgram], process: Arrivals, duration_s: float, seed: int, burst: Burst | None = None
) -> list[Job]:
    """The jobs of a run, in the order of their arrivals; without a burst those of `caesura bench`'s first block."""
    stream = (seed, 0)
    rng = np.random.default_rng(stream)
    times_s = process.times_s(rng, duration_s=duration_s)
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
    """So many jobs whose arrivals are spread over ``ramp_s`` seconds, and without end those that follow them."""
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
"""Attainment of a window that counts as recovered."""


@dataclass(frozen=True, slots=True)
class Window:
    """Programs meant to arrive within ``WINDOW_S`` seconds from ``start_s``."""

    start_s: float
    offered: int
    good: int

    @property
    def attainment(self) -> float | None:
        """Good over offered; None: nothing arrived."""
        return self.good / self.offered if self.offered else None


@dataclass(frozen=True, slots=True)
class Recovery:
    """One burst and what followed. ``windows`` from the first arrival on, the one after the burst starts at its end."""

    windows: tuple[Window, ...]
    recovered_s: float | None
    """From the burst's end to the start of the first window that is good enough; None: there is none."""

    @classmethod
    def of(cls, programs: Sequence[ProgramRecord], slo: Slo, burst: Burst, until_s: float) -> "Recovery":
        """``programs``: all of a run, warm-up included; ``until_s``: where arrivals end."""
        first_s = burst.end_s - WINDOW_S * (burst.end_s // WINDOW_S)
        windows = []
        for number in range(int((until_s - first_s) // WINDOW_S)):
            start_s = first_s + number * WINDOW_S
            inside = [p for p in programs if start_s <= p.arrival_s < start_s + WINDOW_S]
            windows.append(Window(start_s, len(inside), sum(slo.program_is_good(p) for p in inside)))
        after = (w for w in windows if w.start_s >= burst.end_s and w.attainment is not None)
        recovered = next((w.start_s for w in after if (w.attainment or 0.0) >= RECOVERED), None)
        return cls(tuple(windows), None if recovered is None else recovered - burst.end_s)
