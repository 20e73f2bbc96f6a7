"""What Ray was told."""

from collections import Counter

from cluster.metrics import Metric

Series = tuple[str, tuple[tuple[str, str], ...]]


class Recorded(Counter[Series]):
    """By series: the sum of counters, and of what histograms observed."""

    def of(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """A metric's series that are not 0, by the values of their labels in alphabetical order of these."""
        name = metric.exported.removesuffix("_total")
        return {tuple(value for _, value in tags): n for (said, tags), n in self.items() if said == name and n}
