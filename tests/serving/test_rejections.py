"""The proxy counts the requests that it rejects itself."""

from typing import Any

import pytest

from cluster.observing.catalogue import HTTP_REFUSALS, REQUESTS, REQUESTS_REJECTED, Metric
from cluster.proxy import middleware as proxy_middleware
from cluster.proxy.middleware import Rejections
from tests.waiting import until


class RecordedMeter:
    def __init__(self) -> None:
        self.counts: list[tuple[str, float, str]] = []

    def add(self, metric: Metric, amount: float, /, **labels: str) -> None:
        self.counts.append(
            (
                metric.name,
                amount,
                labels.get("reason") or labels.get("outcome") or f"{labels['status']} {labels['code']}",
            )
        )


async def test_rejections_are_recorded_together_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_middleware, "RECORD_DELAY_S", 0.01)
    meter: Any = RecordedMeter()
    rejections = Rejections(meter)
    for reason in ("overload", "overload", "tenant_rate"):
        rejections.count(reason)
    assert meter.counts == []
    await until(lambda: meter.counts)
    first = [
        (REQUESTS_REJECTED.name, 2, "overload"),
        (HTTP_REFUSALS.name, 2, "503 overload"),
        (REQUESTS_REJECTED.name, 1, "tenant_rate"),
        (HTTP_REFUSALS.name, 1, "429 tenant_rate"),
        (REQUESTS.name, 3, "rejected"),
    ]
    assert meter.counts == first
    rejections.count("overload")
    await until(lambda: len(meter.counts) > len(first))
    assert meter.counts == [
        *first,
        (REQUESTS_REJECTED.name, 1, "overload"),
        (HTTP_REFUSALS.name, 1, "503 overload"),
        (REQUESTS.name, 1, "rejected"),
    ]
