"""The goodput that Prometheus reports beside the one that a client measured of the same programs."""

import time
from dataclasses import dataclass

from cluster import metrics as m
from cluster.clock import Clock
from cluster.dashboards.promql import select
from cluster.goodput import Goodput
from cluster.proof.prometheus import Prometheus

TOLERANCE = 0.01
SETTLE_TIMEOUT_S = 60.0
POLL_S = 1.0
STILL = 18
"""Looks in a row at which nothing has changed: Ray tells metrics every ten seconds, and then they are scraped."""

LAST_SEEN = "1m"
"""How old a count may be: a scrape that failed takes a series away until the next one."""


def _count(metric: m.Metric, *matchers: str) -> str:
    return f"last_over_time({select(metric, *matchers, over=LAST_SEEN)})"


EXPRESSIONS = {
    "programs offered": _count(m.PROGRAMS),
    "programs good": _count(m.PROGRAM_ENDS, 'verdict="good"'),
    "turns offered": _count(m.REQUESTS),
    "turns good": _count(m.GOOD_REQUESTS),
}

Counts = dict[str, float]
"""By the keys of `EXPRESSIONS`."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One count, by both."""

    what: str
    client: float
    prometheus: float
    window_s: float = 1.0
    """The client's, in which all of them were meant to arrive."""
    exact: bool = False
    """Whether something came is beyond dispute; whether it was in time is not, where it was just so."""

    @property
    def error(self) -> float:
        """Of what the client measured; infinite where that is 0 and Prometheus has something."""
        if self.client == self.prometheus:
            return 0.0
        return abs(self.prometheus - self.client) / self.client if self.client else float("inf")

    @property
    def agrees(self) -> bool:
        """Within `TOLERANCE`, or by one: fewer than a hundred cannot tell one percent."""
        apart = abs(self.prometheus - self.client)
        return apart == 0 if self.exact else apart <= max(1.0, TOLERANCE * self.client)


def counted(prometheus: Prometheus) -> Counts:
    """The counters as they are now."""
    return {what: prometheus.total(expression) for what, expression in EXPRESSIONS.items()}


def settled(prometheus: Prometheus, clock: Clock) -> Counts:
    """The counters when they have stopped to change, or when patience ends."""
    deadline_s = clock.now_s() + SETTLE_TIMEOUT_S
    counts, still = counted(prometheus), 0
    while still < STILL and clock.now_s() < deadline_s:
        time.sleep(POLL_S)
        now = counted(prometheus)
        counts, still = now, still + 1 if now == counts else 0
    return counts


def compared(before: Counts, after: Counts, client: Goodput) -> list[Comparison]:
    """What Prometheus counted between two moments beside what the client measured of the programs between them."""
    measured = {
        "programs offered": client.offered_programs,
        "programs good": client.good_programs,
        "turns offered": client.offered_requests,
        "turns good": client.good_requests,
    }
    return [
        Comparison(what, own, after[what] - before[what], client.window_s, exact=what.endswith("offered"))
        for what, own in measured.items()
    ]
