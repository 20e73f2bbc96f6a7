"""Statistics of the durations of tool calls, which learn one duration at a time and can be merged across processes.

Moments are computed by Welford's method, and merged by that of Chan, Golub and LeVeque (1983). The shape of the
distribution is counted in bins (`cluster.durations.histogram`), and is exact for few durations. The answers depend only
on the observed durations, not on chance. Durations are in seconds. The module has no I/O and no clock.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Protocol

from cluster.durations.histogram import LogHistogram

LONGEST_S = 1e9
"""Longest valid duration in seconds (31 years)."""
MAX_STATISTICS_BYTES = 64 << 10
"""Maximum size of a serialized DurationStatistics. Any statistics need less than half of it."""

_VERSION = 3
_MAX_COUNT = 1 << 53
_ENVELOPE = struct.Struct("<BI")
"""The version, and the CRC-32 of all bytes that follow."""
_MOMENTS = struct.Struct("<Qdddd")
"""The count, then mean, M2, shortest and longest in seconds (M2 in seconds squared). The histogram follows."""


class Durations(Protocol):
    """The distribution of a duration."""

    @property
    def count(self) -> int:
        """Number of observations behind the distribution, at least 1."""
        ...

    @property
    def mean_s(self) -> float:
        """Mean duration in seconds."""
        ...

    @property
    def min_s(self) -> float:
        """Shortest duration in seconds."""
        ...

    @property
    def max_s(self) -> float:
        """Longest duration in seconds."""
        ...

    @property
    def steps_s(self) -> Sequence[float]:
        """The durations at which the survival falls, in ascending order."""
        ...

    def survival(self, t: float) -> float:
        """Return the fraction of durations longer than ``t`` seconds. It never increases with ``t``."""
        ...

    def quantile(self, q: float) -> float:
        """Return the ``q``-quantile in seconds."""
        ...

    def hazard(self, t: float, window_s: float) -> float:
        """Return P(ends within ``window_s`` | still running at ``t``) / ``window_s``, per second."""
        ...

    def bernstein_bound_s(self, delta: float) -> float:
        """Return the empirical Bernstein bound on the mean in seconds. It holds with probability 1 - ``delta``.

        It is u in the Continuum paper.
        """
        ...


class DurationStatistics:
    """The statistics of observed durations: count, mean, variance, range and the shape of the distribution."""

    __slots__ = ("_bytes", "_histogram", "count", "m2", "max_s", "mean_s", "min_s")

    def __init__(self) -> None:
        self.count = 0
        self.mean_s = 0.0
        self.m2 = 0.0
        """Sum of the squared distances from the mean, in seconds squared."""
        self.min_s = math.inf
        self.max_s = 0.0
        self._histogram = LogHistogram()
        self._bytes: bytes | None = None

    def __repr__(self) -> str:
        return f"DurationStatistics(count={self.count}, mean_s={self.mean_s:.6g}, range_s={self.range_s:.6g})"

    def observe(self, seconds: float) -> None:
        """Add one duration.

        Raises:
            ValueError: it is negative, not a number, or longer than LONGEST_S. Nothing was changed.
        """
        if not 0 <= seconds <= LONGEST_S:
            raise ValueError(f"not a duration: {seconds} s")
        self.count += 1
        distance = seconds - self.mean_s
        self.mean_s += distance / self.count
        self.m2 += distance * (seconds - self.mean_s)
        if seconds < self.min_s:
            self.min_s = seconds
        if seconds > self.max_s:
            self.max_s = seconds
        self._histogram.add(seconds)
        self._bytes = None

    def merge(self, other: "DurationStatistics") -> "DurationStatistics":
        """Return new statistics of the durations of both. Neither of the two is changed."""
        merged = DurationStatistics()
        merged.count = count = self.count + other.count
        if count == 0:
            return merged
        merged.min_s = min(self.min_s, other.min_s)
        merged.max_s = max(self.max_s, other.max_s)
        distance = other.mean_s - self.mean_s
        mean_s = self.mean_s + distance * (other.count / count)
        merged.mean_s = min(max(mean_s, merged.min_s), merged.max_s)
        merged.m2 = self.m2 + other.m2 + distance * distance * (self.count * (other.count / count))
        merged._histogram.merge(self._histogram)
        merged._histogram.merge(other._histogram)
        return merged

    @property
    def variance(self) -> float:
        """Population variance in seconds squared; 0 with fewer than two durations."""
        return self.m2 / self.count if self.count > 1 else 0.0

    @property
    def range_s(self) -> float:
        """Longest minus shortest duration in seconds; 0 when nothing was observed."""
        return self.max_s - self.min_s if self.count else 0.0

    @property
    def steps_s(self) -> Sequence[float]:
        """The durations at which the survival falls, in ascending order. The caller must not change the list."""
        return self._histogram.steps()

    def quantile(self, q: float) -> float:
        """Return the ``q``-quantile in seconds, which is the duration that a fraction ``q`` of all does not exceed.

        Raises:
            ValueError: ``q`` is not in [0, 1], or nothing was observed.
        """
        self._need_observations()
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile's rank is between 0 and 1, not {q}")
        if q in (0, 1):
            return self.min_s if q == 0 else self.max_s
        return self._histogram.quantile(q)

    def survival(self, t: float) -> float:
        """Return the fraction of durations longer than ``t`` seconds. It never increases with ``t``.

        Raises:
            ValueError: ``t`` is not a number, or nothing was observed.
        """
        self._need_observations()
        if math.isnan(t):
            raise ValueError("survival needs a time")
        if t < self.min_s:
            return 1.0
        return 0.0 if t >= self.max_s else 1.0 - self._histogram.share_up_to(t)

    def hazard(self, t: float, window_s: float) -> float:
        """Return P(ends within ``window_s`` | still running at ``t``) / ``window_s``, per second.

        It is 0 if no observed duration was longer than ``t``, since nothing is known about the end of such a call.

        Raises:
            ValueError: ``window_s`` is not positive, ``t`` is not a number, or nothing was observed.
        """
        if not window_s > 0:
            raise ValueError(f"a window must be positive, not {window_s} s")
        running = self.survival(t)
        return (running - self.survival(t + window_s)) / running / window_s if running > 0 else 0.0

    def bernstein_bound_s(self, delta: float) -> float:
        """Return the empirical Bernstein bound on the mean in seconds. It holds with probability 1 - ``delta``.

        It is u in the Continuum paper.

        Raises:
            ValueError: ``delta`` is not in (0, 1), or nothing was observed.
        """
        self._need_observations()
        return empirical_bernstein_s(self.count, self.mean_s, self.variance, self.range_s, delta)

    def to_bytes(self) -> bytes:
        """Serialize the statistics, with a version and a checksum.

        The size is 45 bytes plus 16 for each distinct duration if there are few, or for each bin if there are many.
        """
        if self._bytes is None:
            moments = _MOMENTS.pack(self.count, self.mean_s, self.m2, self.min_s, self.max_s)
            body = moments + self._histogram.to_bytes()
            self._bytes = _ENVELOPE.pack(_VERSION, zlib.crc32(body)) + body
        return self._bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> "DurationStatistics":
        """Read statistics that ``to_bytes`` wrote.

        Raises:
            ValueError: the bytes were not written by ``to_bytes`` of this version, or are damaged.
        """
        if not _ENVELOPE.size + _MOMENTS.size <= len(data) <= MAX_STATISTICS_BYTES:
            raise ValueError(f"not duration statistics: {len(data)} bytes")
        version, checksum = _ENVELOPE.unpack_from(data)
        if version != _VERSION:
            raise ValueError(f"not duration statistics of version {_VERSION}: {version}")
        if checksum != zlib.crc32(memoryview(data)[_ENVELOPE.size :]):
            raise ValueError("damaged duration statistics: the checksum differs")
        statistics = cls()
        count, mean_s, m2, min_s, max_s = _MOMENTS.unpack_from(data, _ENVELOPE.size)
        shape = data[_ENVELOPE.size + _MOMENTS.size :]
        if count == 0:
            if shape:
                raise ValueError("damaged duration statistics: of nothing, but with a shape")
            return statistics
        in_order = 0 <= min_s <= mean_s <= max_s <= LONGEST_S
        if count > _MAX_COUNT or not in_order or not 0 <= m2 <= count * LONGEST_S**2:
            raise ValueError(f"nonsensical duration statistics: {count}, {mean_s} s in [{min_s} s, {max_s} s], M2 {m2}")
        try:
            statistics._histogram = LogHistogram.from_bytes(shape, count)
        except ValueError as error:
            raise ValueError(f"damaged duration statistics: {error}") from error
        statistics.count, statistics.mean_s, statistics.m2 = count, mean_s, m2
        statistics.min_s, statistics.max_s = min_s, max_s
        statistics._bytes = bytes(data)
        return statistics

    def _need_observations(self) -> None:
        if self.count == 0:
            raise ValueError("nothing was observed")


def empirical_bernstein_s(count: int, mean_s: float, variance: float, range_s: float, delta: float) -> float:
    """Return the empirical Bernstein bound on a mean in seconds (Maurer and Pontil, 2009, theorem 4).

    It is mean + sqrt(2 V ln(2 / delta) / n) + 7 R ln(2 / delta) / (3 (n - 1)), with the sample variance V and the
    observed range R. The bound of one observation is the observation.

    Args:
        count: number of observations.
        mean_s: mean of the observations in seconds.
        variance: population variance of the observations in seconds squared.
        range_s: longest minus shortest observation in seconds.
        delta: the bound holds with probability 1 - ``delta``.

    Raises:
        ValueError: ``delta`` is not in (0, 1).
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, not {delta}")
    if count < 2:
        return mean_s
    doubt = math.log(2 / delta) / (count - 1)
    return mean_s + math.sqrt(2 * variance * doubt) + 7 / 3 * range_s * doubt
