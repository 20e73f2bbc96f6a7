"""How long tool calls take: distributions that are fed one duration at a time and merged across processes. Pure.

Moments are Welford's, merged as Chan, Golub and LeVeque (1983) describe; the distribution's shape is counted in bins
(`cluster.durations.histogram`), exact for few durations. Only what was observed decides the answers, never chance.
Durations are seconds.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Protocol

from cluster.durations.histogram import LogHistogram

LONGEST_S = 1e9
"""No duration is longer (31 years)."""
MAX_STATISTICS_BYTES = 64 << 10
"""Of one serialized DurationStatistics; it never needs half of it, whatever was observed."""

_VERSION = 3
_MAX_COUNT = 1 << 53
_ENVELOPE = struct.Struct("<BI")
"""Version; CRC-32 of all that follows."""
_MOMENTS = struct.Struct("<Qdddd")
"""Count; mean, M2, shortest and longest in seconds (M2: squared). The histogram's own format follows."""


class Durations(Protocol):
    """How long will this take?"""

    @property
    def count(self) -> int:
        """Observations that it rests on; at least 1."""
        ...

    @property
    def mean_s(self) -> float:
        """The mean."""
        ...

    @property
    def min_s(self) -> float:
        """The shortest."""
        ...

    @property
    def max_s(self) -> float:
        """The longest."""
        ...

    @property
    def steps_s(self) -> Sequence[float]:
        """The durations at which the survival falls, in ascending order."""
        ...

    def survival(self, t: float) -> float:
        """The share of durations longer than ``t`` seconds; never rises with ``t``."""
        ...

    def quantile(self, q: float) -> float:
        """The duration, seconds, that a share ``q`` does not exceed."""
        ...

    def hazard(self, t: float, window_s: float) -> float:
        """P(ends within ``window_s`` | still running at ``t``) / ``window_s``, per second."""
        ...

    def bernstein_bound_s(self, delta: float) -> float:
        """The empirical Bernstein bound on the mean, that holds with probability 1 - ``delta``; Continuum's u."""
        ...


class DurationStatistics:
    """What is known of some durations: count, mean, variance, range and the distribution's shape."""

    __slots__ = ("_bytes", "_histogram", "count", "m2", "max_s", "mean_s", "min_s")

    def __init__(self) -> None:
        self.count = 0
        self.mean_s = 0.0
        self.m2 = 0.0
        """Sum of the squared distances from the mean."""
        self.min_s = math.inf
        self.max_s = 0.0
        self._histogram = LogHistogram()
        self._bytes: bytes | None = None

    def __repr__(self) -> str:
        return f"DurationStatistics(count={self.count}, mean_s={self.mean_s:.6g}, range_s={self.range_s:.6g})"

    def observe(self, seconds: float) -> None:
        """Add one duration.

        Raises:
            ValueError: it is negative, not a number, or longer than LONGEST_S; nothing was changed.
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
        """A new object that has seen what both have; neither is changed."""
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
        """Population variance, seconds squared; 0 below two durations."""
        return self.m2 / self.count if self.count > 1 else 0.0

    @property
    def range_s(self) -> float:
        """Longest minus shortest; 0 when nothing was observed."""
        return self.max_s - self.min_s if self.count else 0.0

    @property
    def steps_s(self) -> Sequence[float]:
        """The durations at which the survival falls, in ascending order; to be read only."""
        return self._histogram.steps()

    def quantile(self, q: float) -> float:
        """The duration, seconds, that a share ``q`` of all does not exceed.

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
        """The share of durations longer than ``t`` seconds; never rises with ``t``.

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
        """P(ends within ``window_s`` | still running at ``t``) / ``window_s``, per second.

        0 where no observed duration was longer than ``t``: nothing is known of when such a call ends.

        Raises:
            ValueError: ``window_s`` is not positive, ``t`` is not a number, or nothing was observed.
        """
        if not window_s > 0:
            raise ValueError(f"a window must be positive, not {window_s} s")
        running = self.survival(t)
        return (running - self.survival(t + window_s)) / running / window_s if running > 0 else 0.0

    def bernstein_bound_s(self, delta: float) -> float:
        """The empirical Bernstein bound on the mean, that holds with probability 1 - ``delta``; Continuum's u.

        Raises:
            ValueError: ``delta`` is not in (0, 1), or nothing was observed.
        """
        self._need_observations()
        return empirical_bernstein_s(self.count, self.mean_s, self.variance, self.range_s, delta)

    def to_bytes(self) -> bytes:
        """Versioned and checksummed; 45 bytes, and 16 for each distinct duration of few or each bin of many."""
        if self._bytes is None:
            moments = _MOMENTS.pack(self.count, self.mean_s, self.m2, self.min_s, self.max_s)
            body = moments + self._histogram.to_bytes()
            self._bytes = _ENVELOPE.pack(_VERSION, zlib.crc32(body)) + body
        return self._bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> "DurationStatistics":
        """The inverse of ``to_bytes``.

        Raises:
            ValueError: these are not bytes of ``to_bytes`` of this version, or they were damaged.
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
    """The empirical Bernstein bound on a mean.

    Args:
        count: observations.
        mean_s: their mean.
        variance: theirs, of the population, seconds squared.
        range_s: longest minus shortest.
        delta: the bound holds with probability 1 - ``delta``.

    Raises:
        ValueError: ``delta`` is not in (0, 1).
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, not {delta}")
    doubt = math.log(3 / delta) / count
    return mean_s + math.sqrt(2 * variance * doubt) + 3 * range_s * doubt
