"""The rules that the chart renders: links to runbooks, and the alert of a release that has no metrics."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import needs_helm, of_kind, template

pytestmark = needs_helm

RUNBOOKS = "https://docs.example/caesura/runbooks.html"
ABSENT = "CaesuraMetricsAbsent"


def alerts(rule: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]


def release_alert(values: dict[str, Any], release: str) -> dict[str, Any]:
    rendered = template({"monitoring": values}, preset="cpu", release=release)
    (alert,) = alerts(of_kind(rendered, "PrometheusRule", f"{release}-caesura-release"))
    return alert


def test_alerts_link_to_the_runbooks_of_the_operator() -> None:
    values = {"monitoring": {"scrape": "pods", "rules": True, "runbooksUrl": RUNBOOKS}}
    rules = [one for one in template(values, preset="cpu") if one["kind"] == "PrometheusRule"]
    found = [alert for rule in rules for alert in alerts(rule)]
    assert len(rules) == 2 and len(found) > 10
    for alert in found:
        assert alert["annotations"]["runbook_url"] == f"{RUNBOOKS}#{alert['alert'].lower()}"


def test_a_release_that_is_not_scraped_has_no_alert_of_its_own() -> None:
    rules = [one for one in template({"monitoring": {"rules": True}}, preset="cpu") if one["kind"] == "PrometheusRule"]
    assert [rule["metadata"]["name"] for rule in rules] == ["t-caesura"]


@pytest.mark.parametrize(
    ("values", "job"),
    [
        ({"scrape": "pods"}, "agents/{}-caesura"),
        ({"scrape": "pods", "namespace": "monitoring"}, "monitoring/{}-caesura"),
        ({"scrape": "ingress"}, "{}-caesura-metrics"),
    ],
    ids=str,
)
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_a_dead_release_raises_an_alert_beside_one_that_lives(tmp_path: Path, values: dict[str, Any], job: str) -> None:
    """The labels are those that Prometheus' operator gives to the targets of a PodMonitor or a ServiceMonitor."""
    dead, lives = (release_alert(values, release) for release in ("a", "b"))
    assert dead["alert"] == lives["alert"] == ABSENT
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [dead, lives]}]}))
    labels = {release: f'namespace="agents",job="{job.format(release)}",model="m"' for release in ("a", "b")}
    series = [
        {"series": f"caesura_{metric}{{{labels['b']}{more}}}", "values": "1x60"}
        for metric, more in (("replicas_min", ""), ("replica_up", ',state="up"'))
    ]
    fired = {"severity": "page", "namespace": "agents", "job": job.format("a")}
    told = {**dead["annotations"]}
    assert told["summary"].startswith("Release a in agents: ")
    test = {
        "rule_files": ["rules.yml"],
        "tests": [
            {
                "interval": "15s",
                "input_series": series,
                "alert_rule_test": [
                    {
                        "eval_time": "10m",
                        "alertname": ABSENT,
                        "exp_alerts": [{"exp_labels": fired, "exp_annotations": told}],
                    }
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
