"""What Ray is told, summed up."""

import pytest
from ray.util import metrics as ray_metrics
from recorded import Recorded


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    seen = Recorded()

    def record(self: ray_metrics.Metric, value: float, tags: dict[str, str] | None = None) -> None:
        final = self._get_final_tags(tags)
        self._validate_tags(final)
        seen[self._name, tuple(sorted(final.items()))] += value

    monkeypatch.setattr(ray_metrics.Metric, "_record", record)
    return seen
