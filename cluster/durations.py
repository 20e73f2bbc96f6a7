"""What is asked of a distribution of durations, in seconds, whether it was observed or follows from others."""

import math
from collections.abc import Sequence
from typing import Protocol


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
