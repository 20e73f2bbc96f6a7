"""What is recorded with Ray, per series."""

import pytest
from ray.util import metrics as ray_metrics

from tests.observing.recorded import Recorded


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    seen = Recorded()

    def record(self: ray_metrics.Metric, value: float, tags: dict[str, str] | None = None) -> None:
        final = self._get_final_tags(tags)
        self._validate_tags(final)
        series = self._name, tuple(sorted(final.items()))
        seen[series] = value if isinstance(self, ray_metrics.Gauge) else seen.get(series, 0.0) + value

    monkeypatch.setattr(ray_metrics.Metric, "_record", record)
    return seen
