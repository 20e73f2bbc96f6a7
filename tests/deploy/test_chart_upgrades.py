"""What an upgrade changes in place, what makes a new Ray cluster, and what is another object each time."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config.loader import config_schema
from tests.deploy.chart import CHART, ROOT, needs_helm, of_kind, rendered_text, template
from tests.deploy.value_sets import EXTERNAL_REDIS, OWN_SECRETS, SCALED

pytestmark = needs_helm

DOWNLOAD = {"modelCache": {"enabled": True, "download": {"enabled": True}}}
NEW_CLUSTER_KEYS = {
    "http.request_timeout_s": 60,
    "programs.max_wall_s": 7200,
    "http.max_concurrent_requests": 7,
    "http.max_header_bytes": 9999,
    "logs.format": "json",
}
"""The keys of the configuration that a pod has in its specification, each with a value that is not its default."""


def hashed(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """What KubeRay hashes: the specification of the Ray cluster without the numbers of its workers."""
    cluster: dict[str, Any] = of_kind(documents, "RayService")["spec"]["rayClusterConfig"]
    # It takes new groups at the end of the list into the running cluster.
    cluster["workerGroupSpecs"] = cluster["workerGroupSpecs"][:1]
    for group in cluster["workerGroupSpecs"]:
        for number in ("replicas", "minReplicas", "maxReplicas"):
            del group[number]
    return cluster


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def other_values(schema: dict[str, Any], definitions: dict[str, Any], path: str = "") -> dict[str, Any]:
    """A configuration in which every flag, number and choice is not its default, but those of NEW_CLUSTER_KEYS."""
    found: dict[str, Any] = {}
    for key, part in schema["properties"].items():
        here = f"{path}.{key}".lstrip(".")
        if "$ref" in part:
            below = definitions[part["$ref"].rsplit("/", 1)[1]]
            if "properties" in below and (inner := other_values(below, definitions, here)):
                found[key] = inner
            continue
        value = part.get("default")
        if here in NEW_CLUSTER_KEYS or here in ("http.port", "http.host", "redis.url"):
            continue
        if isinstance(value, bool):
            found[key] = not value
        elif isinstance(value, int | float):
            more = value + 1
            is_less = more > part.get("maximum", more) or more >= part.get("exclusiveMaximum", more + 1)
            found[key] = value / 2 if is_less else more
        elif choices := [one for one in part.get("enum", ()) if one != value]:
            found[key] = choices[-1]
    return found


def test_configuration_is_changed_in_place_but_for_the_keys_that_the_documentation_lists() -> None:
    schema = config_schema()
    others = other_values(schema, schema["$defs"])
    assert {"http", "replicas", "programs", "limits", "redis", "predictor"} <= others.keys()
    others["replicas"] |= {"accelerator": "cpu"}
    before = hashed(template(preset="cpu"))
    others |= {"model": {"id": "b"}, "policy": {"name": "mars"}}
    assert hashed(template({"config": others}, preset="cpu")) == before
    for path, value in NEW_CLUSTER_KEYS.items():
        assert hashed(template({"config": nested(path, value)}, preset="cpu")) != before, path
    text = (ROOT / "docs" / "deployment.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `config`: ")]
    assert set(re.findall(r"`([a-z_]+\.[a-z_]+)`", rows[0].split("|")[1])) == NEW_CLUSTER_KEYS.keys()
    assert [re.findall(r"`([a-z_]+\.[a-z_]+)`", row.split("|")[1]) for row in rows[1:]] == [["replicas.max"]]


IN_PLACE: dict[str, dict[str, Any]] = {
    "workers": {"workerGroups": {"workers": {"replicas": 5}}},
    "bounds of workers": {"workerGroups": {"workers": {"maxReplicas": 9}}},
    "service": {"service": {"type": "NodePort"}},
    "networking": {"ingress": {"enabled": True, "insecure": True}, "networkPolicy": {"enabled": False}},
    "monitoring": {"monitoring": {"scrape": "pods", "rules": True, "dashboards": True}},
    "budgets": {"podDisruptionBudgets": {"enabled": False}},
    "Redis": {"redis": {"resources": {"limits": {"memory": "2Gi"}}}},
    "keys": {"keys": {"entries": [{"tenant": "a", "sha256": "0" * 64, "roles": ["serve"]}]}},
    "upgrades": {"upgrade": {"strategy": "None"}},
    "another group, sorted last": {"workerGroups": {"z": {"replicas": 1, "resources": {"requests": {}, "limits": {}}}}},
}
NEW_CLUSTER: dict[str, dict[str, Any]] = {
    "image": {"image": {"tag": "2"}},
    "drain": {"drain": {"marginSeconds": 1}},
    "environment": {"env": [{"name": "A", "value": "1"}]},
    "head": {"head": {"nodeSelector": {"a": "b"}}},
    "labels": {"commonLabels": {"team": "a"}},
    "keys off": {"keys": {"enabled": False}},
    "Ray's token": {"rayAuth": {"existingSecret": "r"}},
    "fault tolerance": {"gcsFaultTolerance": {"enabled": False}},
    "Redis elsewhere": {"redis": EXTERNAL_REDIS},
    "volumes": {"extraVolumes": [{"name": "x", "emptyDir": {}}]},
    "security": {"podSecurity": {"fsGroup": 5}},
    "models": {"modelCache": {"enabled": True}},
    "autoscaling": SCALED,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_changed_in_place(name: str) -> None:
    assert hashed(template(IN_PLACE[name], preset="cpu")) == hashed(template(preset="cpu"))


@pytest.mark.parametrize("name", NEW_CLUSTER)
def test_what_makes_a_new_ray_cluster(name: str) -> None:
    assert hashed(template(NEW_CLUSTER[name], preset="cpu")) != hashed(template(preset="cpu"))


def test_limits_of_autoscaling_are_changed_in_place() -> None:
    bounds = {"maxReplicas": 9, "turnsPerReplica": 3, "fallback": {"replicas": 1}}
    assert hashed(template(SCALED, {"autoscaling": bounds}, preset="cpu")) == hashed(template(SCALED, preset="cpu"))
    idle = {"autoscaling": {"idleTimeoutSeconds": 5}}
    assert hashed(template(SCALED, idle, preset="cpu")) != hashed(template(SCALED, preset="cpu"))


def test_a_new_version_of_the_chart_alone_restarts_nothing(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "caesura")
    about = tmp_path / "caesura" / "Chart.yaml"
    about.write_text(re.sub(r"^version: .*$", "version: 9.9.9", about.read_text(), flags=re.MULTILINE))
    values = {**SCALED, **DOWNLOAD}
    before, after = template(values, preset="gpu"), template(values, preset="gpu", chart=tmp_path / "caesura")
    assert before[0]["metadata"]["labels"] != after[0]["metadata"]["labels"]
    assert hashed(before) == hashed(after)
    for kind in ("StatefulSet", "Deployment", "Job"):
        assert of_kind(before, kind)["spec"] == of_kind(after, kind)["spec"]
    assert of_kind(before, "Job")["metadata"]["name"] == of_kind(after, "Job")["metadata"]["name"]


@pytest.mark.parametrize(
    "change",
    [
        {"image": {"tag": "2"}},
        {"workerGroups": {"workers": {"tolerations": [{"key": "x", "operator": "Exists"}]}}},
        {"modelCache": {"download": {"env": [{"name": "HF_ENDPOINT", "value": "https://m.example"}]}}},
        {"modelCache": {"download": {"resources": {"limits": {"memory": "9Gi"}}}}},
        {"podSecurity": {"runAsUser": 5}},
        {"imagePullSecrets": [{"name": "p"}]},
        {"commonLabels": {"team": "a"}},
        {"config": {"model": {"source": "Qwen/Qwen3-4B"}}},
    ],
    ids=str,
)
def test_a_download_that_differs_has_another_name_since_a_job_cannot_be_changed(change: dict[str, Any]) -> None:
    before, after = (of_kind(template(*values, preset="gpu"), "Job") for values in ((), (change,)))
    assert before["spec"] != after["spec"] and before["metadata"]["name"] != after["metadata"]["name"]
    assert of_kind(template({"keys": {"enabled": False}}, preset="gpu"), "Job") == before


def test_a_gitops_tool_renders_the_same_each_time_and_no_secret() -> None:
    values = {**SCALED, **DOWNLOAD, **OWN_SECRETS, "monitoring": {"scrape": "pods", "rules": True, "dashboards": True}}
    first, second = (rendered_text(values, preset="gpu") for _ in range(2))
    assert first == second
    assert not [one for one in yaml.safe_load_all(first) if one and one["kind"] == "Secret"]


def test_the_packaged_files_are_those_of_deploy() -> None:
    deploy = ROOT / "deploy"
    sources = [*deploy.glob("grafana/*.json"), deploy / "prometheus/prometheus.yml", deploy / "prometheus/rules.yml"]
    copies = {path.relative_to(CHART / "files"): path.read_bytes() for path in (CHART / "files").glob("*/*")}
    assert copies == {path.relative_to(deploy): path.read_bytes() for path in sources}, "python helm/packaged_files.py"
