"""A bounded multiset of durations: exact while it is small, then counted in bins of nearly equal ratio. Pure.

Every power of two is divided into BINS_PER_OCTAVE bins of equal width, so that no bin is wider than its lower end /
BINS_PER_OCTAVE. A bin stands for the longest duration that it has seen: a tool that always takes the same time keeps it
exactly, and a quantile is never too short, and too long by a 32nd at most. What it answers depends on what it has seen
only, not on the order, nor on how it was merged, nor on chance: that is why it is no sampling sketch.
"""

import struct
from bisect import bisect_left, bisect_right, insort
from itertools import accumulate, groupby
from math import ceil, frexp

BINS_PER_OCTAVE = 32
EXACT = 128
"""Up to so many durations are kept as they are."""
SHORTEST_S = 2.0**-20
"""All shorter durations share one bin."""
MAX_LONGEST_S = 2.0**30
"""Nothing longer can be added."""

_LOWEST = frexp(SHORTEST_S)[1] * BINS_PER_OCTAVE - 1
_RECORD = struct.Struct("<Qd")
"""How many durations, and the longest of them."""
_ROUNDING = 1e-9
"""Of q · count, in ranks."""


def _bin_of(seconds: float) -> int:
    if seconds < SHORTEST_S:
        return _LOWEST
    mantissa, exponent = frexp(seconds)
    return exponent * BINS_PER_OCTAVE + int((mantissa - 0.5) * 2 * BINS_PER_OCTAVE)


class LogHistogram:
    """Durations in seconds, each between 0 and MAX_LONGEST_S; the caller sees to that."""

    __slots__ = ("_bins", "_exact", "_ranked", "count")

    def __init__(self) -> None:
        self.count = 0
        self._exact: list[float] = []
        """In ascending order; empty once there are bins."""
        self._bins: dict[int, tuple[int, float]] = {}
        """By number: durations, the longest of them."""
        self._ranked: tuple[list[float], list[int]] | None = None

    def add(self, seconds: float) -> None:
        """One duration."""
        self.count += 1
        self._ranked = None
        if self._bins:
            self._put(seconds, 1)
            return
        insort(self._exact, seconds)
        self._divide()

    def merge(self, other: "LogHistogram") -> None:
        """All that ``other`` has, which stays as it is."""
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
        """The share of durations that are not longer; of a bin whose longest is, all count as longer."""
        longest_s, ranks = self._by_rank()
        known = bisect_right(longest_s, seconds)
        return ranks[known - 1] / self.count if known else 0.0

    def quantile(self, q: float) -> float:
        """The duration that a share ``q`` does not exceed."""
        longest_s, ranks = self._by_rank()
        return longest_s[bisect_left(ranks, max(1, ceil(q * self.count - _ROUNDING)))]

    def steps(self) -> list[float]:
        """The distinct durations, in ascending order; to be read only."""
        return self._by_rank()[0]

    def to_bytes(self) -> bytes:
        """Each distinct duration, or the longest of each bin, in ascending order, with how many there are."""
        if self._bins:
            return b"".join(_RECORD.pack(*self._bins[number]) for number in sorted(self._bins))
        return b"".join(_RECORD.pack(len(list(same)), seconds) for seconds, same in groupby(self._exact))

    @classmethod
    def from_bytes(cls, data: bytes, count: int) -> "LogHistogram":
        """The inverse of :meth:`to_bytes`, of ``count`` durations.

        Raises:
            ValueError: these bytes stand for no durations, or for another number of them.
        """
        if len(data) % _RECORD.size:
            raise ValueError(f"durations of {len(data)} bytes")
        records = list(_RECORD.iter_unpack(data))
        times, total = [longest_s for _, longest_s in records], sum(number for number, _ in records)
        # A NaN is in no order.
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
        """Ascending durations, and how many are not longer than each."""
        if self._ranked is None:
            if self._bins:
                bins = [self._bins[number] for number in sorted(self._bins)]
                self._ranked = [longest_s for _, longest_s in bins], list(accumulate(count for count, _ in bins))
            else:
                self._ranked = self._exact, list(range(1, self.count + 1))
        return self._ranked
