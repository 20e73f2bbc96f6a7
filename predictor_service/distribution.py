"""Distributions of lengths (tokens) and durations (seconds): shares of bins, each spread evenly over its bin.

The first length bins are those of the papers (LAMPS, MARS: 50 bins of 10 tokens); the later ones have equal ratios.
Duration bins have equal ratios from one millisecond on.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TEN_TOKEN_BINS = 50
MOST_TOKENS = 131_072
SHORTEST_S, MOST_S = 1e-3, 1e5
BINS_PER_DECADE = 20

_FEW = np.arange(TEN_TOKEN_BINS + 1) * 10.0
LENGTH_EDGES: Floats = np.concatenate([_FEW, np.geomspace(_FEW[-1], MOST_TOKENS, 41)[1:]])
"""Edges of length bins, in tokens. A bin includes its upper edge: (0, 10], (10, 20] ..."""
DURATION_EDGES: Floats = np.concatenate(
    [[0.0], np.geomspace(SHORTEST_S, MOST_S, round(BINS_PER_DECADE * np.log10(MOST_S / SHORTEST_S)) + 1)]
)
"""Edges of duration bins, in seconds."""


def bin_of(edges: Floats, values: Floats) -> NDArray[np.int64]:
    """Return the bin of each value. Values outside the edges belong to the first or the last bin."""
    return np.clip(np.searchsorted(edges, values, side="left") - 1, 0, len(edges) - 2)


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """The distribution of a value that is not negative."""

    edges: Floats
    """Ascending edges of the bins, shape [bins + 1]. Distributions share the array, so it is never written."""
    shares: Floats
    """Shares of the bins, shape [bins]. They are not negative and sum up to 1."""

    @classmethod
    def of_counts(cls, edges: Floats, counts: Floats) -> "Distribution":
        """Make the distribution that is proportional to ``counts``.

        Raises:
            ValueError: all counts are 0, or some are negative or not finite.
        """
        total = float(counts.sum())
        if not (np.isfinite(total) and total > 0 and counts.min() >= 0):
            raise ValueError(f"counts of a distribution are finite, not negative and not all 0, not {counts}")
        return cls(edges, counts / total)

    @classmethod
    def of_mean(cls, edges: Floats, mean: float) -> "Distribution":
        """Make a distribution in at most two neighbouring bins, whose expected value is ``mean``.

        A value outside of the middles of the first and the last bin becomes the nearer of them.
        """
        middles = (edges[:-1] + edges[1:]) / 2
        above = int(np.clip(np.searchsorted(middles, mean), 1, len(middles) - 1))
        part = float(np.clip((mean - middles[above - 1]) / (middles[above] - middles[above - 1]), 0.0, 1.0))
        shares = np.zeros(len(middles))
        shares[above - 1], shares[above] = 1.0 - part, part
        return cls(edges, shares)

    @property
    def mean(self) -> float:
        """Mean of the distribution, in the unit of its edges: each bin counts by its middle."""
        return float(self.shares @ (self.edges[:-1] + self.edges[1:])) / 2

    def share_up_to(self, value: float) -> float:
        """Return P(X <= value)."""
        cumulated = np.concatenate([[0.0], np.cumsum(self.shares)])
        return min(1.0, float(np.interp(value, self.edges, cumulated)))

    def quantile(self, q: float) -> float:
        """Return the value that X does not exceed with the probability ``q``.

        Raises:
            ValueError: ``q`` is not in [0, 1].
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile's rank is between 0 and 1, not {q}")
        cumulated = np.concatenate([[0.0], np.cumsum(self.shares)])
        target = q * cumulated[-1]
        index = min(int(np.searchsorted(cumulated, target, side="left")), len(self.shares))
        if index == 0:
            index = int(np.argmax(self.shares > 0)) + 1
            return float(self.edges[index - 1])
        share = self.shares[index - 1]
        part = (target - cumulated[index - 1]) / share if share > 0 else 1.0
        return float(self.edges[index - 1] + part * (self.edges[index] - self.edges[index - 1]))

    def survival(self, value: float) -> float:
        """Return P(X > value)."""
        return max(0.0, 1.0 - self.share_up_to(value))

    def crps(self, value: float) -> float:
        """Return the continuous ranked probability score: the exact integral of (F(x) - 1[x >= value])².

        The score has the unit of the value, and a lower score is better. For a point, it is the absolute error.
        """
        edges = np.unique(np.concatenate([self.edges, [value]]))
        cumulated = np.interp(edges, self.edges, np.concatenate([[0.0], np.cumsum(self.shares)]))
        middle = (edges[:-1] + edges[1:]) / 2
        step = (middle >= value).astype(float)
        a, b = cumulated[:-1] - step, cumulated[1:] - step
        return float(((a * a + a * b + b * b) / 3 * np.diff(edges)).sum())
