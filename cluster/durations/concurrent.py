"""The duration of calls that run concurrently. It is the maximum of their durations.

For independent calls, P(max <= t) is the product of the P(T_i <= t). Calls of one turn are correlated, for example by a
busy machine or a common server. The mean of their maximum is then shorter than this estimate, never longer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.durations.statistics import Durations, empirical_bernstein_s


@dataclass(frozen=True, slots=True)
class Slowest:
    """The distribution of the duration of several concurrent calls, with the methods of `DurationStatistics`.

    Raises:
        ValueError: there is no call.
    """

    calls: Sequence[Durations]
    """The distribution of each call, with at least one observation. Two calls of one tool are two entries."""

    def __post_init__(self) -> None:
        if not self.calls:
            raise ValueError("the slowest of no calls")

    @property
    def count(self) -> int:
        """Number of observations of the call that has the fewest."""
        return min(call.count for call in self.calls)

    @property
    def min_s(self) -> float:
        """Shortest possible maximum in seconds."""
        return max(call.min_s for call in self.calls)

    @property
    def max_s(self) -> float:
        """Longest possible maximum in seconds."""
        return max(call.max_s for call in self.calls)

    @property
    def mean_s(self) -> float:
        """Mean in seconds, as exact as the calls' survival is."""
        return self._moments()[0]

    @property
    def steps_s(self) -> Sequence[float]:
        """The durations at which the survival of a call falls, in ascending order."""
        return sorted({step_s for call in self.calls for step_s in call.steps_s})

    def survival(self, t: float) -> float:
        """Return P(some call takes longer than ``t`` seconds).

        Raises:
            ValueError: ``t`` is not a number.
        """
        return 1.0 - math.prod(1.0 - call.survival(t) for call in self.calls)

    def quantile(self, q: float) -> float:
        """Return the seconds within which all calls have ended with probability ``q``.

        The result lies between the longest of the calls' ``q``-quantiles and the longest of their ``q ** (1 /
        n)``-quantiles. At the first, one call alone keeps the product at ``q`` or below. At the second, each of the n
        factors is at least the n-th root of ``q``. It is found by bisection.

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
        """Return P(all end within ``window_s`` | some run at ``t``) / ``window_s``, per second.

        It is 0 if no call is known to take longer than ``t``.

        Raises:
            ValueError: ``window_s`` is not positive, or ``t`` is not a number.
        """
        if not window_s > 0:
            raise ValueError(f"a window must be positive, not {window_s} s")
        running = self.survival(t)
        return (running - self.survival(t + window_s)) / running / window_s if running > 0 else 0.0

    def bernstein_bound_s(self, delta: float) -> float:
        """Return the empirical Bernstein bound on the mean in seconds, as if the maximum had been observed ``count``
        times.

        Raises:
            ValueError: ``delta`` is not in (0, 1).
        """
        mean_s, variance = self._moments()
        return empirical_bernstein_s(self.count, mean_s, variance, self.max_s - self.min_s, delta)

    def _moments(self) -> tuple[float, float]:
        """Return the mean, and the variance in seconds squared, from E[T^n] = ∫ n t^(n-1) P(T > t) dt."""
        mean_s = square = before_s = 0.0
        survives = 1.0
        for at_s in self.steps_s:
            mean_s += (at_s - before_s) * survives
            square += (at_s**2 - before_s**2) * survives
            before_s, survives = at_s, self.survival(at_s)
        # The longest of the calls' means is a lower bound, and the sum of the means is an upper bound.
        longest_s, sum_s = max(call.mean_s for call in self.calls), sum(call.mean_s for call in self.calls)
        return min(max(mean_s, longest_s), sum_s), max(0.0, square - mean_s**2)
