"""What was recorded with Ray."""

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
