"""The catalogue: names, labels and buckets that Prometheus and its conventions accept."""

import re
from collections import Counter

import pytest

from cluster.metrics import CATALOGUE, Kind, Metric

IDS = {"program", "program_id", "request", "request_id", "turn_id", "session", "user", "call"}


def test_each_name_is_there_once() -> None:
    assert [name for name, times in Counter(metric.name for metric in CATALOGUE).items() if times > 1] == []
    assert len(CATALOGUE) > 50


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
class TestEach:
    def test_is_named_as_prometheus_wants_it(self, metric: Metric) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info"))
        assert not re.search(r"(_ms|_milliseconds|_minutes|_kb|_mb|_gb)$", metric.name)
        assert metric.exported == f"caesura_{metric.name}" + ("_total" if metric.kind is Kind.COUNTER else "")

    def test_has_no_label_that_grows_with_use(self, metric: Metric) -> None:
        assert not IDS & set(metric.labels)
        assert len(set(metric.labels)) == len(metric.labels) <= 3

    def test_says_what_it_is(self, metric: Metric) -> None:
        assert metric.text[0].isupper() or metric.text[0].isdigit()
        assert not metric.text.endswith(".")

    def test_a_histogram_has_buckets_that_rise(self, metric: Metric) -> None:
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        if metric.kind is Kind.HISTOGRAM and metric.name != "program_turns":
            assert metric.name.endswith("_seconds")
