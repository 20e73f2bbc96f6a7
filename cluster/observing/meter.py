"""The only module that records with `ray.util.metrics`. It makes Ray's metrics from entries of the catalogue.

A gauge goes stale in Ray unless it is set about once a second. Two meters of one process may record the same metric.
"""

from collections.abc import Mapping
from typing import Any

from ray.util import metrics

from cluster.observing.catalogue import PREFIX, Kind, Metric

Values = float | Mapping[Any, Any]
"""A number, or a mapping from the values of a label to `Values`."""


class Meter:
    """Records metrics of one part of a process. A metric is made when it is first recorded.

    Args:
        tags: labels with the same value in all records. Metrics that do not have such a label omit it.
        enabled: False records nothing.
    """

    def __init__(self, tags: Mapping[str, str] | None = None, *, enabled: bool = True) -> None:
        self._tags = dict(tags or {})
        self._enabled = enabled
        self._made: dict[str, Any] = {}
        self._totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def begin(self, metric: Metric, /, **labels: str) -> None:
        """Export a counter's series with the value 0, so that a rate includes its first increment."""
        if self._enabled:
            # `inc` rejects 0.
            self._of(metric)._record(0.0, labels)

    def add(self, metric: Metric, amount: float, /, **labels: str) -> None:
        """Add ``amount`` to the series of a counter with these labels. An amount of 0 or less is ignored."""
        if self._enabled and amount > 0:
            self._of(metric).inc(amount, labels)

    def record(self, metric: Metric, values: Values, /, **labels: str) -> None:
        """Set a gauge, or raise a counter to a total that is kept elsewhere.

        Args:
            metric: a gauge or a counter.
            values: the value of one series. For several series it is a mapping from the values of a label to `Values`,
                for each label that is in neither `tags` nor ``labels``.
            labels: labels that all of these series have.
        """
        if isinstance(values, Mapping):
            label = next(name for name in metric.labels if name not in self._tags and name not in labels)
            for value, part in values.items():
                self.record(metric, part, **labels, **{label: str(value)})
        elif metric.kind is Kind.GAUGE:
            self.set(metric, values, **labels)
        else:
            self._count_to(metric, values, labels)

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Set the series of a gauge with these labels to ``value``."""
        if self._enabled:
            self._of(metric).set(value, labels)

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Add one value to a histogram."""
        if self._enabled:
            self._of(metric).observe(value, labels)

    def _count_to(self, metric: Metric, total: float, labels: dict[str, str]) -> None:
        """Raise a counter to ``total``. The first call exports the series, even with 0. A lower total has restarted at
        0.
        """
        key = metric.name, tuple(labels.items())
        if key not in self._totals:
            self.begin(metric, **labels)
        before = self._totals.get(key, 0.0)
        self._totals[key] = total
        self.add(metric, total - before if total >= before else total, **labels)

    def _of(self, metric: Metric) -> Any:
        if (made := self._made.get(metric.name)) is None:
            made = self._made[metric.name] = _make(metric)
            made.set_default_tags({name: value for name, value in self._tags.items() if name in metric.labels})
        return made


def _make(metric: Metric) -> Any:
    name = PREFIX + metric.name
    match metric.kind:
        case Kind.COUNTER:
            return metrics.Counter(name, description=metric.help, tag_keys=metric.labels)
        case Kind.GAUGE:
            return metrics.Gauge(name, description=metric.help, tag_keys=metric.labels)
        case Kind.HISTOGRAM:
            boundaries = list(metric.buckets)
            return metrics.Histogram(name, description=metric.help, boundaries=boundaries, tag_keys=metric.labels)
