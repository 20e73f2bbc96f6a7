"""A histogram of durations of bounded size. It is exact for few durations, and then counts in bins.

Every range between two powers of two is divided into BINS_PER_OCTAVE bins of equal width, so that no bin is wider than
its lower end / BINS_PER_OCTAVE. A bin represents its durations by the longest of them. The duration of a tool that
always takes the same time therefore stays exact. A quantile is never too short, and at most 1/32 too long. The answers
depend only on the added durations. Unlike those of a sampling sketch, they do not depend on order, merges or chance.
The module has no I/O and no clock.
"""

import struct
from bisect import bisect_left, bisect_right, insort
from itertools import accumulate, groupby
from math import ceil, frexp

BINS_PER_OCTAVE = 32
EXACT = 128
"""Number of durations up to which each is stored exactly."""
SHORTEST_S = 2.0**-20
"""All durations shorter than this (seconds) share one bin."""
MAX_LONGEST_S = 2.0**30
"""Longest duration that can be added (seconds)."""

_LOWEST = frexp(SHORTEST_S)[1] * BINS_PER_OCTAVE - 1
_RECORD = struct.Struct("<Qd")
"""The number of durations, and the longest of them in seconds."""
_ROUNDING = 1e-9
"""Tolerance for the rounding error of q · count, in ranks."""


def _bin_of(seconds: float) -> int:
    if seconds < SHORTEST_S:
        return _LOWEST
    mantissa, exponent = frexp(seconds)
    return exponent * BINS_PER_OCTAVE + int((mantissa - 0.5) * 2 * BINS_PER_OCTAVE)


class LogHistogram:
    """A histogram of durations in seconds. The caller ensures that each is between 0 and MAX_LONGEST_S."""

    __slots__ = ("_bins", "_exact", "_ranked", "count")

    def __init__(self) -> None:
        self.count = 0
        self._exact: list[float] = []
        """The durations in ascending order; empty once there are bins."""
        self._bins: dict[int, tuple[int, float]] = {}
        """By the number of the bin: the number of its durations, and the longest of them."""
        self._ranked: tuple[list[float], list[int]] | None = None

    def add(self, seconds: float) -> None:
        """Count a duration, in seconds. Beyond the exact ones, only its bin is kept."""
        self.count += 1
        self._ranked = None
        if self._bins:
            self._put(seconds, 1)
            return
        insort(self._exact, seconds)
        self._divide()

    def merge(self, other: "LogHistogram") -> None:
        """Add all durations of ``other``, which is not changed."""
        self.count += other.count
        self._ranked = None
        if other._bins and not self._bins:
            mine, self._exact = self._exact, []
            self._bins = dict(other._bins)
            for seconds in mine:
                self._put(seconds, 1)
        elif self._bins:
            for seconds in other._exact:
                self._put(seconds, 1)
            for count, longest_s in other._bins.values():
                self._put(longest_s, count)
        else:
            self._exact = sorted(self._exact + other._exact)
            self._divide()

    def share_up_to(self, seconds: float) -> float:
        """Return the fraction of durations that are at most ``seconds``.

        If the longest duration of a bin is longer, all durations of this bin count as longer.
        """
        longest_s, ranks = self._by_rank()
        known = bisect_right(longest_s, seconds)
        return ranks[known - 1] / self.count if known else 0.0

    def quantile(self, q: float) -> float:
        """Return the ``q``-quantile in seconds."""
        longest_s, ranks = self._by_rank()
        return longest_s[bisect_left(ranks, max(1, ceil(q * self.count - _ROUNDING)))]

    def steps(self) -> list[float]:
        """Return the durations in ascending order: all that are stored exactly, equal ones too, or the longest of each
        bin. The caller must not change the list.
        """
        return self._by_rank()[0]

    def to_bytes(self) -> bytes:
        """Serialize the counts and durations in ascending order: of each distinct duration, or of the longest of each
        bin.
        """
        if self._bins:
            return b"".join(_RECORD.pack(*self._bins[number]) for number in sorted(self._bins))
        return b"".join(_RECORD.pack(len(list(same)), seconds) for seconds, same in groupby(self._exact))

    @classmethod
    def from_bytes(cls, data: bytes, count: int) -> "LogHistogram":
        """Read a histogram of ``count`` durations that :meth:`to_bytes` wrote.

        Raises:
            ValueError: the bytes are not a histogram, or one of another number of durations.
        """
        if len(data) % _RECORD.size:
            raise ValueError(f"durations of {len(data)} bytes")
        records = list(_RECORD.iter_unpack(data))
        times, total = [longest_s for _, longest_s in records], sum(number for number, _ in records)
        # This rejects NaN too, since all its comparisons are false.
        ordered = all(before <= after for before, after in zip([0.0, *times], [*times, MAX_LONGEST_S], strict=True))
        if not ordered or total != count or not all(number for number, _ in records):
            raise ValueError(f"{total} durations instead of {count}, or what are no durations")
        histogram = cls()
        histogram.count = count
        if count <= EXACT:
            histogram._exact = [seconds for number, seconds in records for _ in range(number)]
            return histogram
        histogram._bins = {_bin_of(longest_s): (number, longest_s) for number, longest_s in records}
        if len(histogram._bins) != len(records):
            raise ValueError("two bins of the same durations")
        return histogram

    def _divide(self) -> None:
        if len(self._exact) <= EXACT:
            return
        exact, self._exact = self._exact, []
        for seconds in exact:
            self._put(seconds, 1)

    def _put(self, seconds: float, count: int) -> None:
        number = _bin_of(seconds)
        before, longest_s = self._bins.get(number, (0, 0.0))
        self._bins[number] = (before + count, seconds if seconds > longest_s else longest_s)

    def _by_rank(self) -> tuple[list[float], list[int]]:
        """Return the durations in ascending order, and for each the number of durations that are not longer."""
        if self._ranked is None:
            if self._bins:
                bins = [self._bins[number] for number in sorted(self._bins)]
                self._ranked = [longest_s for _, longest_s in bins], list(accumulate(count for count, _ in bins))
            else:
                self._ranked = self._exact, list(range(1, self.count + 1))
        return self._ranked
