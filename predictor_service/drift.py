"""Corrects a model that was trained before for what has changed since: by how much have its forecasts been off?

Errors are ratios: the mean of log(actual) - E[log(forecast)], by source and tool, of recent observations mostly, drawn
to none while there are few. The distribution is stretched by that ratio.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from math import exp, isfinite, log, log1p

import numpy as np

from predictor_service.distribution import Distribution
from predictor_service.level_counts import decode_key, encode_key

RECENT = 400
"""Observations that a mean is mostly of."""
PRIOR = 30.0
"""Observations that the belief in no error counts for."""
MOST = log(8.0)
"""No distribution is stretched or squeezed by more."""
MAX_KEYS = 2048

Key = tuple[str, ...]
Told = tuple[list[bytes], float, float]
"""A key, its observations and their mean error."""


class Drift:
    """Means of errors by key; the least recently used key is forgotten first.

    Args:
        unit: values are told apart above it: log(unit + value) is what errors are taken of.
    """

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self._means: OrderedDict[Key, tuple[float, float]] = OrderedDict()
        """Observations, at most RECENT; their mean error."""

    def observe(self, key: Key, forecast: Distribution, actual: float) -> None:
        """What was forecast, uncorrected, and what came. What makes no sense is passed over."""
        if not (isfinite(actual) and actual >= 0):
            return
        error = log1p(actual / self._unit) - self._expected(forecast)
        if not isfinite(error):
            return
        count, mean = self._means.get(key, (0.0, 0.0))
        count = min(count + 1, RECENT)
        self._means[key] = (count, mean + (error - mean) / count)
        self._means.move_to_end(key)
        if len(self._means) > MAX_KEYS:
            self._means.popitem(last=False)

    def ratio(self, key: Key) -> float:
        """By which what is forecast is to be multiplied."""
        count, mean = self._means.get(key, (0.0, 0.0))
        return exp(min(max(mean * count / (count + PRIOR), -MOST), MOST))

    def corrected(self, key: Key, forecast: Distribution) -> Distribution:
        """On the same edges."""
        ratio = self.ratio(key)
        return forecast if abs(ratio - 1) < 0.01 else stretched(forecast, ratio)

    def told(self) -> list[Told]:
        """All that is known."""
        return [(encode_key(key), count, mean) for key, (count, mean) in self._means.items()]

    def fill(self, told: Iterable[Told]) -> None:
        """Take what another has told for keys of which nothing is known here.

        Raises:
            ValueError: a key is none.
        """
        for name, count, mean in told:
            if isfinite(count) and isfinite(mean) and count > 0 and (key := decode_key(name)) not in self._means:
                self._means[key] = (min(count, RECENT), mean)
        while len(self._means) > MAX_KEYS:
            self._means.popitem(last=False)

    def ratios(self) -> Mapping[str, float]:
        """For people."""
        return {" ".join(key): self.ratio(key) for key in self._means}

    def _expected(self, forecast: Distribution) -> float:
        middles = (forecast.edges[:-1] + forecast.edges[1:]) / 2
        return float(forecast.shares @ np.log1p(middles / self._unit))


def stretched(distribution: Distribution, ratio: float) -> Distribution:
    """The distribution of ``ratio`` times the value, on the same edges; what would lie beyond is in the last bin."""
    edges = distribution.edges
    cumulated = np.concatenate([[0.0], np.cumsum(distribution.shares)])
    at = np.interp(edges / ratio, edges, cumulated)
    at[-1] = cumulated[-1]
    return Distribution(edges, np.diff(at))
