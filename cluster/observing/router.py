"""What an ingress records of its placement of turns."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster import metrics
from cluster.observing.meter import Meter

STORE_USER = "placements"


class RouterMetrics:
    """The metrics of one ingress's router, for one model.

    Args:
        meter: records, with the label ``model``.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._meter.begin(metrics.MOVES)

    def record(
        self,
        *,
        waiting: int,
        waits_s: Sequence[float],
        ages_s: Sequence[float],
        states: Mapping[Any, int],
        moves: int,
        placements: Mapping[Any, int],
        refusals: Mapping[Any, int],
        fallbacks: Mapping[Any, int],
    ) -> None:
        """Set the gauges, and add to the counters what came since the last time. To be called once a second.

        Args:
            waiting: turns.
            waits_s: of each turn that was admitted since the last time.
            ages_s: of the replicas' snapshots.
            states: replicas in each.
            moves: programs that were moved, since the beginning; so are the others.
            placements: by reason.
            refusals: by reason.
            fallbacks: by kind.
        """
        self._meter.set(metrics.WAITING_TURNS, waiting)
        for wait_s in waits_s:
            self._meter.observe(metrics.ADMISSION_S, wait_s)
        for state, number in states.items():
            self._meter.set(metrics.REPLICAS, number, state=str(state))
        self._meter.count_to(metrics.MOVES, moves)
        self._meter.set(metrics.SNAPSHOT_AGE, max(ages_s, default=0.0))
        for reason, total in placements.items():
            self._meter.count_to(metrics.PLACEMENTS, total, reason=str(reason))
        for reason, total in refusals.items():
            self._meter.count_to(metrics.REFUSALS, total, reason=str(reason))
        for kind, total in fallbacks.items():
            self._meter.count_to(metrics.PLACEMENT_FALLBACKS, total, kind=str(kind))

    def record_store(self, failures: Mapping[Any, int], *, up: bool) -> None:
        """What became of the calls of the store of placements, since the start; ``up``: the last one went well."""
        self._meter.set(metrics.STORE_UP, float(up), by=STORE_USER)
        for kind, total in failures.items():
            self._meter.count_to(metrics.STORE_FAILURES, total, by=STORE_USER, kind=str(kind))
