"""Tools that run together: the pause is as long as the slowest, so its distribution is that of the maximum.

For independent calls, P(max <= t) is the product of the P(T_i <= t). What one turn's calls have in common - a busy
machine, the same server - makes their maximum shorter than this estimate, never longer in the mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.durations.statistics import Durations, empirical_bernstein_s


@dataclass(frozen=True, slots=True)
class Slowest:
    """The duration of several calls together. It answers as `DurationStatistics` does.

    Raises:
        ValueError: there is no call.
    """

    calls: Sequence[Durations]
    """One for each call; two calls of one tool are two. Each has observed something."""

    def __post_init__(self) -> None:
        if not self.calls:
            raise ValueError("the slowest of no calls")

    @property
    def count(self) -> int:
        """Observations of the call that is known least."""
        return min(call.count for call in self.calls)

    @property
    def min_s(self) -> float:
        """No maximum is shorter."""
        return max(call.min_s for call in self.calls)

    @property
    def max_s(self) -> float:
        """None is longer."""
        return max(call.max_s for call in self.calls)

    @property
    def mean_s(self) -> float:
        """The mean, as exact as the calls' survival is."""
        return self._moments()[0]

    @property
    def steps_s(self) -> Sequence[float]:
        """All of the calls'."""
        return sorted({step_s for call in self.calls for step_s in call.steps_s})

    def survival(self, t: float) -> float:
        """P(some call takes longer than ``t`` seconds).

        Raises:
            ValueError: ``t`` is not a number.
        """
        return 1.0 - math.prod(1.0 - call.survival(t) for call in self.calls)

    def quantile(self, q: float) -> float:
        """The seconds within which all calls have ended with probability ``q``.

        All lie between the longest of the calls' own ``q``-quantiles and that of their ``q ** (1 / n)``-quantiles: at
        the first, one call alone keeps the product at most ``q``; at the second, each of n is at least its n-th root.

        Raises:
            ValueError: ``q`` is not in [0, 1].
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile's rank is between 0 and 1, not {q}")
        low = max(call.quantile(q) for call in self.calls)
        if 1.0 - self.survival(low) >= q:
            return low
        high = max(call.quantile(q ** (1 / len(self.calls))) for call in self.calls)
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if 1.0 - self.survival(middle) >= q else (middle, high)
        return high

    def hazard(self, t: float, window_s: float) -> float:
        """P(all end within ``window_s`` | not all have at ``t``) / ``window_s``, per second; 0 where none is known to.

        Raises:
            ValueError: ``window_s`` is not positive, or ``t`` is not a number.
        """
        if not window_s > 0:
            raise ValueError(f"a window must be positive, not {window_s} s")
        running = self.survival(t)
        return (running - self.survival(t + window_s)) / running / window_s if running > 0 else 0.0

    def bernstein_bound_s(self, delta: float) -> float:
        """The empirical Bernstein bound on the mean, as if the maximum had been observed ``count`` times.

        Raises:
            ValueError: ``delta`` is not in (0, 1).
        """
        mean_s, variance = self._moments()
        return empirical_bernstein_s(self.count, mean_s, variance, self.max_s - self.min_s, delta)

    def _moments(self) -> tuple[float, float]:
        """Mean, and variance in seconds squared, by integration of the survival: E[T^n] = ∫ n t^(n-1) P(T > t) dt."""
        mean_s = square = before_s = 0.0
        survives = 1.0
        for at_s in self.steps_s:
            mean_s += (at_s - before_s) * survives
            square += (at_s**2 - before_s**2) * survives
            before_s, survives = at_s, self.survival(at_s)
        # The longest of the means is a bound from below, their sum one from above.
        longest_s, sum_s = max(call.mean_s for call in self.calls), sum(call.mean_s for call in self.calls)
        return min(max(mean_s, longest_s), sum_s), max(0.0, square - mean_s**2)
