"""The rule file: Prometheus takes it, every alert fires when it has to and not else, and each has a runbook."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.observing import catalogue as metrics
from cluster.offline.dashboards.rules import Alert, alerts, alerts_on, burn_rates
from tests.dashboards.alert_stories import INTERVALS, STORIES, as_test_file

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = [rule for group in alerts() for rule in group.rules if isinstance(rule, Alert)]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def promtool(*arguments: str) -> str:
    told = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


@needs_promtool
def test_prometheus_takes_the_rules_and_the_scrape_configurations() -> None:
    promtool("check", "rules", str(PROMETHEUS / "rules.yml"))
    for name in ("prometheus.yml", "prometheus-ingress.yml"):
        promtool("check", "config", str(PROMETHEUS / name))


@needs_promtool
@pytest.mark.parametrize("interval", INTERVALS)
def test_each_alert_fires_when_it_has_to_and_not_else(tmp_path: Path, interval: str) -> None:
    path = tmp_path / "rules_test.yml"
    path.write_text(yaml.safe_dump(as_test_file(str(PROMETHEUS / "rules.yml"), interval)))
    promtool("test", "rules", str(path))


def test_each_alert_has_a_story() -> None:
    assert {story.alert for story in STORIES} == {alert.name for alert in ALERTS}


def test_each_alert_has_a_runbook() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert [heading.lower() for heading in headings] == [alert.heading for alert in ALERTS]


def test_a_stricter_objective_tightens_the_burn_rates() -> None:
    fast = burn_rates(0.99).rules[0]
    assert isinstance(fast, Alert)
    assert "> 0.144" in fast.expression


def test_the_alerts_on_a_metric_are_found_through_recorded_series() -> None:
    assert alerts_on(metrics.STORE_UP) == ["CaesuraStoreDown"]
    assert alerts_on(metrics.CONTEXT_TOKENS) == ["CaesuraKvThrashing"]
    assert alerts_on(metrics.REQUESTS) == ["CaesuraTurnSloBurnFast", "CaesuraTurnSloBurnSlow"]
    assert alerts_on(metrics.KV_OFFLOAD_BYTES) == []
