"""The catalogue: names and labels that Prometheus accepts; each metric is recorded, documented and shown."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from cluster.observing import catalogue as metrics
from cluster.observing.catalogue import CATALOGUE, Kind, Metric
from tests.sources import parsed

ROOT = Path(__file__).parents[2]
IDS = {"program", "program_id", "request", "request_id", "turn_id", "session", "user", "call"}
CONSTANTS = {name: value for name, value in vars(metrics).items() if isinstance(value, Metric)}
PACKAGES = ("cluster", "replicas", "router", "tools_runtime", "predictor_service")
READERS = {"dashboards", "live_view"}
"""Packages that read metrics."""


@pytest.fixture(scope="module")
def recorded() -> set[str]:
    """The constants of the catalogue that code outside it and outside `READERS` uses."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    trees = (parsed(path) for path in files if not READERS & set(path.parts))
    return {name for tree in trees for name in used_constants(tree)} & set(CONSTANTS)


def used_constants(tree: ast.Module) -> set[str]:
    """What a file imports from the catalogue, or takes from the imported catalogue."""
    imports = [(node.module, one) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names]
    modules = {one.asname or one.name for module, one in imports if f"{module}.{one.name}" == metrics.__name__}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {one.name for module, one in imports if module == metrics.__name__} | {
        node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id in modules
    }


def test_each_name_is_there_once() -> None:
    assert [name for name, times in Counter(metric.name for metric in CATALOGUE).items() if times > 1] == []
    assert list(CONSTANTS.values()) == list(CATALOGUE)
    assert len(CATALOGUE) > 50


@pytest.mark.parametrize("constant", CONSTANTS)
def test_each_metric_is_recorded(constant: str, recorded: set[str]) -> None:
    """A metric with a snapshot key is exported by `ReplicaMetrics`: see `test_recorders`."""
    assert (constant in recorded) != bool(CONSTANTS[constant].snapshot)


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

    def test_has_a_help_text(self, metric: Metric) -> None:
        assert metric.help[0].isupper() or metric.help[0].isdigit()
        assert not metric.help.endswith(".")

    def test_a_histogram_has_buckets_that_rise(self, metric: Metric) -> None:
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        if metric.kind is Kind.HISTOGRAM and metric.name != "program_turns":
            assert metric.unit == "seconds"

    def test_is_on_its_dashboard_and_in_the_reference(self, metric: Metric) -> None:
        assert metric.exported in (ROOT / "deploy" / "grafana" / f"{metric.dashboard}.json").read_text()
        assert f"| `{metric.exported}` |" in (ROOT / "docs" / "reference" / "metrics.md").read_text()
