"""What an ingress records of the programs that it runs."""

from collections.abc import Mapping

from cluster import metrics
from cluster.observing.meter import Meter


class ProgramMetrics:
    """The metrics of one program runner.

    Args:
        meter: records, with the label ``model``.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def record(self, open_programs: int, totals: Mapping[str, int]) -> None:
        """Set the gauge, and add to the counters what came since the last time. To be called once a second."""
        self._meter.set(metrics.OPEN_PROGRAMS, open_programs)
        for kind, total in totals.items():
            self._meter.count_to(metrics.PROGRAM_EVENTS, total, kind=kind)
