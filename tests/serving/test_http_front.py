"""What the proxy's process counts of those that it refuses itself."""

import asyncio
from typing import Any

import pytest

from cluster import http_front
from cluster.http_front import Refusals
from cluster.metrics import REFUSALS, REQUESTS, Metric


class Told:
    def __init__(self) -> None:
        self.counts: list[tuple[str, float, str]] = []

    def add(self, metric: Metric, amount: float, /, **labels: str) -> None:
        self.counts.append((metric.name, amount, labels.get("reason", labels.get("outcome", ""))))


async def test_refusals_are_told_together_and_none_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_front, "TOLD_AFTER_S", 0.01)
    told: Any = Told()
    refusals = Refusals(told)
    for reason in ("rush", "rush", "tenant_rate"):
        refusals.count(reason)
    assert told.counts == []
    await asyncio.sleep(0.05)
    first = [(REFUSALS.name, 2, "rush"), (REFUSALS.name, 1, "tenant_rate"), (REQUESTS.name, 3, "rejected")]
    assert told.counts == first
    refusals.count("rush")
    await asyncio.sleep(0.05)
    assert told.counts == [*first, (REFUSALS.name, 1, "rush"), (REQUESTS.name, 1, "rejected")]
