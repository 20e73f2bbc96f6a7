"""Intended arrival times of programs, in an open loop.

AugServe's workloads: W1 is ``poisson`` for a duration, W2 a fixed count, W3 ``gamma:CV`` for a duration.
``recorded:PATH`` reads recorded arrival times, such as Mooncake's, and scales them to the requested rate. With
``recorded:PATH,PATH`` several services that were recorded at the same time arrive together.
"""

import gzip
import json
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from cluster.core.errors import ConfigError

POISSON = "poisson"
GAMMA = "gamma"
RECORDED = "recorded"
MAX_CV = 100.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A renewal process with Gamma-distributed gaps. CV 1 is the Poisson process; a higher CV is burstier.

    With ``recorded``, the gaps are recorded ones. They begin at a random position and continue cyclically.
    """

    rate_per_s: float
    cv: float = 1.0
    recorded: tuple[float, ...] = ()
    """Recorded gaps with a mean of 1; empty for a Gamma process."""

    @classmethod
    def parse(cls, text: str, rate_per_s: float) -> "Arrivals":
        """Parse ``poisson``, ``gamma:CV`` or ``recorded:PATH[,PATH]``.

        Raises:
            ConfigError: the text has another form, or the file cannot be used.
        """
        name, _, parameter = text.partition(":")
        if name == POISSON and not parameter:
            return cls(rate_per_s)
        if name == GAMMA:
            try:
                cv = float(parameter)
            except ValueError:
                cv = 0.0
            if 0 < cv <= MAX_CV:
                return cls(rate_per_s, cv)
        if name == RECORDED and parameter:
            return cls(rate_per_s, recorded=_recorded_gaps(tuple(map(Path, parameter.split(",")))))
        raise ConfigError(
            f"--arrivals: {text!r} is none of {POISSON}, {RECORDED}:PATH[,PATH], {GAMMA}:CV with a CV above 0, up to "
            f"{MAX_CV:g}"
        )

    def times_s(
        self, rng: np.random.Generator, *, count: int | None = None, duration_s: float | None = None
    ) -> list[float]:
        """Return arrivals in seconds from the start, ascending: the first ``count``, or all before ``duration_s``.

        Raises:
            ValueError: not exactly one of the two is given.
        """
        if (count is None) == (duration_s is None):
            raise ValueError("give either count or duration_s")
        if self.recorded:
            return self._recorded_times_s(rng, count, duration_s)
        if count is not None:
            return [float(time) for time in np.cumsum(self._gaps(rng, count))]
        times: list[float] = []
        now_s = float(self._gaps(rng, 1)[0])
        while duration_s is not None and now_s < duration_s:
            times.append(now_s)
            now_s += float(self._gaps(rng, 1)[0])
        return times

    def _gaps(self, rng: np.random.Generator, count: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
        return rng.gamma(1 / self.cv**2, self.cv**2 / self.rate_per_s, size=count)

    def _recorded_times_s(self, rng: np.random.Generator, count: int | None, duration_s: float | None) -> list[float]:
        first = int(rng.integers(len(self.recorded)))
        gaps = np.roll(np.array(self.recorded), -first) / self.rate_per_s
        rounds_s = float(gaps.sum())
        rounds = -(-count // len(gaps)) if count is not None else int((duration_s or 0.0) // rounds_s) + 1
        times = np.cumsum(np.tile(gaps, rounds))
        kept = times[:count] if count is not None else times[times < (duration_s or 0.0)]
        return [float(time) for time in kept]


@lru_cache(maxsize=4)
def _recorded_gaps(paths: tuple[Path, ...]) -> tuple[float, ...]:
    """Return the gaps between the arrivals of traces of requests that begin at the same time, with a mean of 1.

    Raises:
        ConfigError: a file is unreadable, or has fewer than two different times.
    """
    times = np.sort(np.concatenate([_recorded_times(path) for path in paths]))
    mean_s = (times[-1] - times[0]) / (len(times) - 1)
    return tuple(float(gap) for gap in np.diff(times) / mean_s)


def _recorded_times(path: Path) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """Return the arrivals of a trace of requests in seconds, ascending.

    The file has JSON lines, gzipped or not, with ``arrival_s``. A line whose ``turn_inferred`` is not 0 continues a
    conversation and counts as no arrival.

    Raises:
        ConfigError: the file is unreadable, or has fewer than two different times.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = [json.loads(line) for line in file if line.strip()]
        times = sorted(float(line["arrival_s"]) for line in lines if not line.get("turn_inferred"))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--arrivals: {path}: cannot be read as a trace of requests: {error!r}") from error
    if len(times) < 2 or not 0 <= times[0] < times[-1] < float("inf"):
        raise ConfigError(f"--arrivals: {path}: no two moments of arrival in it")
    return np.array(times)
