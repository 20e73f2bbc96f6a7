"""What Helm prints after an install: the access that is open, and what is dangerous about it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import CHART, needs_helm, of_kind, template
from tests.deploy.value_sets import ACCEPTED

pytestmark = needs_helm


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with its notes in a ConfigMap, because `helm template` does not print them."""
    copy = tmp_path_factory.mktemp("notes") / "caesura"
    shutil.copytree(CHART, copy)
    notes = (copy / "templates" / "NOTES.txt").read_text()
    (copy / "templates" / "_notes.tpl").write_text(f'{{{{ define "notes" }}}}{notes}{{{{ end }}}}')
    (copy / "templates" / "notes.yaml").write_text(
        'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\ndata: {text: {{ include "notes" . | toJson }}}\n'
    )
    return copy


def notes(chart: Path, values: dict[str, Any]) -> str:
    text = of_kind(template(values, preset="cpu", chart=chart), "ConfigMap", "notes")["data"]["text"]
    assert isinstance(text, str)
    return text


def test_they_show_the_access_that_is_open(chart: Path) -> None:
    text = notes(chart, {})
    for peer in ("ingress-nginx", '"monitoring"', "kuberay-operator"):
        assert peer in text
    assert "has the type ClusterIP" in text and "nothing outside the cluster" in text
    assert "WARNING" not in text and "extraEgress" not in text
    opened = notes(chart, ACCEPTED["peers inside the cluster"].values)
    assert '"port":4317' in opened and "All Ray pods, and so tools, reach" in opened
    tools = notes(chart, ACCEPTED["tool egress"].values)
    assert "203.0.113.0/24" in tools


def test_they_say_how_long_the_test_may_take(chart: Path) -> None:
    assert "helm -n agents test t --timeout 15m\n" in notes(chart, {})


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_they_warn_of_keys_that_travel_unencrypted(chart: Path, kind: str) -> None:
    text = notes(chart, {"service": {"type": kind}})
    assert (
        f"WARNING: port 8000 is plain HTTP, so that keys and prompts travel unencrypted to a Service of type {kind}"
        in text
    )
    insecure = notes(chart, {"ingress": {"enabled": True, "insecure": True, "className": "nginx"}})
    assert insecure.count("WARNING") == 1 and "ingress.insecure" in insecure


def test_they_warn_of_an_ingress_that_cuts_off_turns(chart: Path) -> None:
    ingress = {"enabled": True, "tlsSecret": "t"}
    assert "WARNING: the Ingress has no annotations" in notes(chart, {"ingress": ingress})
    for more in ({"className": "nginx-internal"}, {"controller": "nginx"}, {"annotations": {"timeout": "1200"}}):
        assert "WARNING" not in notes(chart, {"ingress": {**ingress, **more}})


def test_they_warn_of_models_that_nothing_can_load(chart: Path) -> None:
    hub = {"config": {"model": {"source": "org/model"}, "engine": {"revision": "v2"}}}
    warning = "WARNING: the NetworkPolicies let no pod reach a hub, and no volume has these models: org/model@v2.\n"
    assert warning in notes(chart, hub)
    for way in (
        {"modelCache": {"enabled": True, "existingClaim": "weights"}},
        {"networkPolicy": {"enabled": False}},
        {"extraVolumes": [{"name": "weights", "persistentVolumeClaim": {"claimName": "weights"}}]},
    ):
        assert warning not in notes(chart, {**hub, **way})
