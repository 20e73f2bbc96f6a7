"""What an upgrade changes in place, what makes a new Ray cluster, and what is another object each time."""

import json
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

COUNTS = ("replicas", "minReplicas", "maxReplicas")
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
    """What KubeRay 1.7 hashes. With an equal hash it does nothing, so that what is left out here is not applied."""
    cluster = ray_cluster(documents)
    # It takes new groups at the end of the list into the running cluster.
    cluster["workerGroupSpecs"] = cluster["workerGroupSpecs"][:1]
    for group in cluster["workerGroupSpecs"]:
        for number in COUNTS:
            del group[number]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        group["template"]["spec"].pop("tolerations", None)
    return cluster


def ray_cluster(documents: list[dict[str, Any]]) -> dict[str, Any]:
    found = of_kind(documents, "RayService")["spec"]["rayClusterConfig"]
    assert isinstance(found, dict)
    return found


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


TOLERATIONS = [{"key": "gpu", "operator": "Exists"}]
IN_PLACE: dict[str, dict[str, Any]] = {
    "networking": {"ingress": {"enabled": True, "insecure": True}, "networkPolicy": {"enabled": False}},
    "monitoring": {"monitoring": {"scrape": "pods", "rules": True, "dashboards": True}},
    "budgets": {"podDisruptionBudgets": {"enabled": False}},
    "Redis": {"redis": {"resources": {"limits": {"memory": "2Gi"}}}},
    "image of Redis": {"redis": {"image": {"tag": "7.4.3-bookworm"}}},
    "keys": {"keys": {"entries": [{"tenant": "a", "sha256": "0" * 64, "roles": ["serve"]}]}},
    "upgrades": {"upgrade": {"strategy": "None"}},
    "another group, sorted last": {"workerGroups": {"z": {"replicas": 1, "resources": {"requests": {}, "limits": {}}}}},
}
NEW_CLUSTER: dict[str, dict[str, Any]] = {
    "image": {"image": {"tag": "2"}},
    "drain": {"drain": {"marginSeconds": 1}},
    "environment": {"env": [{"name": "A", "value": "1"}]},
    "head": {"head": {"nodeSelector": {"a": "b"}}},
    "tolerations of the head": {"head": {"tolerations": TOLERATIONS}},
    "tolerations of workers": {"workerGroups": {"workers": {"tolerations": TOLERATIONS}}},
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


def test_pods_that_tolerate_nothing_have_no_digest_and_annotations_of_the_user_stay() -> None:
    assert "annotations" not in ray_cluster(template(preset="cpu"))["headGroupSpec"]["template"]["metadata"]
    head = {"head": {"tolerations": TOLERATIONS, "podAnnotations": {"a": "1"}}}
    annotations = ray_cluster(template(head, preset="cpu"))["headGroupSpec"]["template"]["metadata"]["annotations"]
    assert annotations.keys() == {"a", "checksum/tolerations"} and annotations["a"] == "1"


@pytest.mark.parametrize("values", [{}, SCALED], ids=["fixed", "scaled"])
def test_kuberay_ignores_numbers_of_workers_and_the_documented_command_changes_them(values: dict[str, Any]) -> None:
    counts = {"workerGroups": {"workers": {"replicas": 3, "minReplicas": 2, "maxReplicas": 9}}}
    before, after = (ray_cluster(template(values, *more, preset="cpu")) for more in ((), (counts,)))
    differ = {key for key, value in after["workerGroupSpecs"][0].items() if before["workerGroupSpecs"][0][key] != value}
    assert differ == set(COUNTS)
    assert hashed(template(values, counts, preset="cpu")) == hashed(template(values, preset="cpu"))
    (command,) = re.findall(r"--patch '(\[.+?\])'", (ROOT / "docs" / "deployment.md").read_text(), re.DOTALL)
    for step in json.loads(command):
        assert step["op"] == "replace"
        place, found = step["path"].strip("/").split("/"), before
        assert place[0] == "spec"
        for part in place[1:]:
            found = found[int(part) if part.isdigit() else part]  # type: ignore[call-overload]
        assert isinstance(found, int)
    assert {step["path"].rsplit("/", 1)[1] for step in json.loads(command)} == set(COUNTS)


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
