"""What a run replays: its programs and when they are meant to arrive, a burst included."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.bench.arrivals import Arrivals
from cluster.bench.replay import Job
from cluster.bench.workload import PlannedProgram, draw
from cluster.errors import ConfigError

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
