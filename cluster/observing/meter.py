"""Ray's metrics, made from the catalogue: the one module that records with `ray.util.metrics`.

Gauges go stale in Ray unless they are set about once a second. Two meters of one process may record the same metric.
"""

from collections.abc import Mapping
from typing import Any

from ray.util import metrics

from cluster.metrics import PREFIX, Kind, Metric


class Meter:
    """Records metrics of one part of a process. A metric is made when it is first recorded.

    Args:
        tags: values of labels that are the same for all that is recorded; a metric without such a label goes without.
        enabled: False records nothing.
    """

    def __init__(self, tags: Mapping[str, str] | None = None, *, enabled: bool = True) -> None:
        self._tags = dict(tags or {})
        self._enabled = enabled
        self._made: dict[str, Any] = {}
        self._totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def begin(self, metric: Metric, /, **labels: str) -> None:
        """Let a counter's series be there at 0, so that its first count is seen as an increase."""
        if self._enabled:
            # `inc` refuses 0.
            self._of(metric)._record(0.0, labels)

    def add(self, metric: Metric, amount: float, /, **labels: str) -> None:
        """Count; 0 is nothing."""
        if self._enabled and amount > 0:
            self._of(metric).inc(amount, labels)

    def count_to(self, metric: Metric, total: float, /, **labels: str) -> None:
        """Count what came since the last time to a total that others keep. One that has shrunk began anew.

        The first time makes the series, also of a total that is 0.
        """
        key = metric.name, tuple(labels.items())
        if key not in self._totals:
            self.begin(metric, **labels)
        before = self._totals.get(key, 0.0)
        self._totals[key] = total
        self.add(metric, total - before if total >= before else total, **labels)

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        if self._enabled:
            self._of(metric).set(value, labels)

    def observe(self, metric: Metric, value: float, /, **labels: str) -> None:
        """Add one value to a histogram."""
        if self._enabled:
            self._of(metric).observe(value, labels)

    def _of(self, metric: Metric) -> Any:
        if (made := self._made.get(metric.name)) is None:
            made = self._made[metric.name] = _make(metric)
            made.set_default_tags({name: value for name, value in self._tags.items() if name in metric.labels})
        return made


def _make(metric: Metric) -> Any:
    name = PREFIX + metric.name
    match metric.kind:
        case Kind.COUNTER:
            return metrics.Counter(name, description=metric.text, tag_keys=metric.labels)
        case Kind.GAUGE:
            return metrics.Gauge(name, description=metric.text, tag_keys=metric.labels)
        case Kind.HISTOGRAM:
            boundaries = list(metric.buckets)
            return metrics.Histogram(name, description=metric.text, boundaries=boundaries, tag_keys=metric.labels)
