"""What was recorded with Ray."""

import pytest
from ray.util import metrics as ray_metrics

from cluster.observing.catalogue import Metric

Series = tuple[str, tuple[tuple[str, str], ...]]


class Recorded(dict[Series, float]):
    """By series: the sum of a counter's and a histogram's values, the last value of a gauge."""

    def series(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """A metric's series, by the values of their labels in alphabetical order of these."""
        name = metric.exported.removesuffix("_total")
        return {tuple(value for _, value in tags): n for (recorded, tags), n in self.items() if recorded == name}

    def of(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """The series that are not 0."""
        return {labels: value for labels, value in self.series(metric).items() if value}


def recording(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """What this project records with Ray from now on. Ray's own series of this process are left out: threads that an
    earlier test started may still record them."""
    seen = Recorded()

    def record(self: ray_metrics.Metric, value: float, tags: dict[str, str] | None = None) -> None:
        final = self._get_final_tags(tags)
        self._validate_tags(final)
        if not self._name.startswith("caesura_"):
            return
        series = self._name, tuple(sorted(final.items()))
        seen[series] = value if isinstance(self, ray_metrics.Gauge) else seen.get(series, 0.0) + value

    monkeypatch.setattr(ray_metrics.Metric, "_record", record)
    return seen
