"""What an ingress records of its forecasts."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster import metrics
from cluster.observing.meter import Meter


class ForecastMetrics:
    """The metrics of one ingress's forecasts.

    Args:
        meter: records.
        by: who is asked: `predictor.mode`.
    """

    def __init__(self, meter: Meter, by: str) -> None:
        self._meter = meter
        self._by = by

    def asked(self, seconds: float) -> None:
        """A turn has its forecast, or none."""
        self._meter.observe(metrics.FORECAST_SECONDS, seconds, by=self._by)

    def record(self, answered: Mapping[Any, int], errors: Mapping[str, Sequence[float]]) -> None:
        """Add to the counters what came since the last time.

        Args:
            answered: forecasts, by who made them.
            errors: by what was forecast: how many could be compared, the sum of their errors, and of what came.
        """
        for kind, total in answered.items():
            self._meter.count_to(metrics.FORECASTS, total, answered=str(kind))
        for what, (count, total_error, total_actual) in errors.items():
            self._meter.count_to(metrics.FORECASTS_COMPARED, count, of=what)
            self._meter.count_to(metrics.FORECAST_ERROR, total_error, of=what)
            self._meter.count_to(metrics.FORECAST_ACTUAL, total_actual, of=what)
