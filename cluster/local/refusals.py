"""Reports the requests that a local cluster refuses, by route and error code, from the metrics of its nodes.

The metrics are read from Ray, because `/metrics` of the server may need an API key.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import httpx

from cluster.core.clock import Clock
from cluster.observing.catalogue import HTTP_REFUSALS
from cluster.observing.scrape import merged

PERIOD_S = 10.0
"""Time between two reads of the metrics (seconds). Ray's processes report their metrics every ten seconds."""
NODE_TIMEOUT_S = 5.0
"""Timeout of a node's page (seconds). The refusals of a slower node are reported later."""

_LABEL = re.compile(r'(\w+)="([^"]*)"')


class RefusalReport:
    """Finds the refusals that were not reported before.

    Args:
        clock: measures the time between two reads.
        nodes: returns the addresses (`host:port`) at which nodes export their metrics.
    """

    def __init__(self, clock: Clock, nodes: Callable[[], Sequence[str]]) -> None:
        self._clock = clock
        self._nodes = nodes
        self._read_s = clock.now_s()
        self._seen: dict[str, float] = {}
        """The last value of each series."""

    def lines(self) -> list[str]:
        """Return a line for each route and error with new refusals. It reads the metrics every `PERIOD_S` at most."""
        if self._clock.now_s() - self._read_s < PERIOD_S:
            return []
        pages = [page for node in self._nodes() if (page := _page(node)) is not None]
        self._read_s = self._clock.now_s()
        return self.new(merged(pages).decode())

    def new(self, text: str) -> list[str]:
        """Return the lines for refusals in a page of metrics that were in no page before."""
        found: Counter[tuple[str, str, str]] = Counter()
        for line in text.splitlines():
            if line.startswith(HTTP_REFUSALS.exported + "{"):
                series, _, value = line.rpartition(" ")
                added = float(value) - self._seen.get(series, 0.0)
                self._seen[series] = float(value)
                labels = dict(_LABEL.findall(series))
                found[labels["route"], labels["status"], labels["code"]] += round(max(0.0, added))
        return [_line(*key, number) for key, number in sorted(found.items()) if number]


def _line(route: str, status: str, code: str, number: int) -> str:
    requests = "1 request" if number == 1 else f"{number} requests"
    where = "before the routing" if route == "none" else f"to {route}"
    return f"refused {requests} {where}: {status} {code}"


def _page(node: str) -> bytes | None:
    try:
        answer = httpx.get(f"http://{node}/metrics", timeout=NODE_TIMEOUT_S)
    except httpx.HTTPError:
        return None
    return answer.content if answer.is_success else None
