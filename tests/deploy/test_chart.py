"""The chart renders, whatever is turned on, into objects that Kubernetes and the operators take."""

import subprocess
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from cluster.config.schema import CaesuraConfig
from tests.deploy.chart import CHART, PRESETS, Refused, helm, needs_helm, serve_config, template
from tests.deploy.shapes import problems

pytestmark = needs_helm

SCALED = {"autoscaling": {"enabled": True}, "networkPolicy": {"kubernetesApi": {"cidrs": ["10.96.0.1/32"]}}}
TOGGLES: dict[str, dict[str, Any]] = {
    "no keys": {"keys": {"enabled": False}},
    "own keys": {"keys": {"existingSecret": "k"}, "tests": {"keySecret": {"name": "t", "key": "k"}}},
    "more keys": {"keys": {"entries": [{"tenant": "acme", "sha256": "0" * 64, "roles": ["serve"]}]}},
    "no Ray token": {"rayAuth": {"enabled": False}},
    "own Ray token": {"rayAuth": {"existingSecret": "r"}},
    "external Redis": {
        "redis": {
            "bundled": False,
            "existingSecret": "s",
            "external": {"host": "redis.db", "cidrs": ["10.1.0.0/16"], "tls": True},
        }
    },
    "external Redis, open": {
        "redis": {"bundled": False, "external": {"host": "redis.db", "password": False, "cidrs": ["10.1.0.0/16"]}}
    },
    "Redis in memory": {"redis": {"persistence": {"enabled": False}}},
    "no GCS fault tolerance": {"gcsFaultTolerance": {"enabled": False}},
    "model claim": {
        "modelCache": {"enabled": True, "existingClaim": "c", "readOnly": True, "download": {"enabled": False}}
    },
    "ingress": {"ingress": {"enabled": True, "className": "nginx", "host": "a.example", "tlsSecret": "tls"}},
    "ingress, any host": {"ingress": {"enabled": True, "insecure": True}},
    "route": {
        "httpRoute": {"enabled": True, "hostnames": ["a.example"], "parentRefs": [{"name": "g", "namespace": "gw"}]}
    },
    "route, own gateway": {
        "httpRoute": {"enabled": True, "gateway": {"create": True, "className": "x", "tlsSecret": "tls"}}
    },
    "no network policy": {"networkPolicy": {"enabled": False}},
    "tool egress": {
        "networkPolicy": {"toolEgress": [{"cidr": "203.0.113.0/24", "ports": [443], "except": ["203.0.113.9/32"]}]}
    },
    "autoscaling": SCALED,
    "incremental": {
        **SCALED,
        "upgrade": {"strategy": "NewClusterWithIncrementalUpgrade", "incremental": {"gatewayClassName": "istio"}},
    },
    "never upgraded": {"upgrade": {"strategy": "None"}},
    "no budgets": {"podDisruptionBudgets": {"enabled": False}},
    "scraped pods": {
        "monitoring": {"scrape": "pods", "rules": True, "dashboards": True, "labels": {"release": "prom"}}
    },
    "scraped ingress": {"monitoring": {"scrape": "ingress"}},
    "digests": {"image": {"digest": "sha256:" + "a" * 64}, "redis": {"image": {"digest": "sha256:" + "b" * 64}}},
    "places": {
        "head": {
            "priorityClassName": "high",
            "nodeSelector": {"a": "b"},
            "podAnnotations": {"a": "1"},
            "podLabels": {"b": "2"},
        },
        "imagePullSecrets": [{"name": "p"}],
        "env": [{"name": "A", "value": "1"}],
        "envFrom": [{"secretRef": {"name": "tools"}}],
        "serviceAccount": {"annotations": {"a": "b"}},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    },
}


def checked(documents: list[dict[str, Any]]) -> None:
    assert [problem for document in documents for problem in problems(document)] == []
    named = [(one["kind"], one["metadata"]["name"]) for one in documents]
    assert len(named) == len(set(named))
    serve = serve_config(documents)
    ServeDeploySchema.model_validate(serve)
    CaesuraConfig.model_validate(serve["applications"][0]["args"])


@pytest.mark.parametrize("toggle", TOGGLES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_with_every_toggle_is_what_kubernetes_takes(preset: str, toggle: str) -> None:
    checked(template(TOGGLES[toggle], preset=preset))


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_every_preset_is_what_kubernetes_takes(preset: str | None) -> None:
    checked(template(preset=preset))


def test_the_checks_see_what_is_wrong() -> None:
    documents = template(SCALED | {"monitoring": {"scrape": "pods"}}, preset="cpu")
    spoilt = 0
    for document in documents:
        if "spec" in document:
            document["spec"]["surprise"] = 1
            assert problems(document), document["kind"]
            spoilt += 1
    assert spoilt > 10
    pod = next(one for one in template(preset="cpu") if one["kind"] == "RayService")
    pod["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["imagePolicy"] = "x"
    assert problems(pod)


def test_helm_lints_it() -> None:
    done = subprocess.run([helm(), "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


IMPOSSIBLE: dict[str, tuple[str | None, dict[str, Any]]] = {
    "a replica would be split": ("h100-tp4", {"workerGroups": {"h100": {"gpus": 6}}}),
    "wants 8 GPUs": ("gpu", {"config": {"replicas": {"count": 8}}}),
    "would travel unencrypted": (None, {"ingress": {"enabled": True}}),
    "kubernetesApi.cidrs": (None, {"autoscaling": {"enabled": True}}),
    "gatewayClassName": (None, {"upgrade": {"strategy": "NewClusterWithIncrementalUpgrade"}}),
    "incremental upgrades need autoscaling": (
        None,
        {"upgrade": {"strategy": "NewClusterWithIncrementalUpgrade", "incremental": {"gatewayClassName": "x"}}},
    ),
    "makes the Gateway": (
        None,
        {**TOGGLES["incremental"], "ingress": {"enabled": True, "tlsSecret": "t"}},
    ),
    "name a Gateway": (None, {"httpRoute": {"enabled": True}}),
    "the Gateway's listener is HTTPS": (
        None,
        {"httpRoute": {"enabled": True, "gateway": {"create": True, "className": "x"}}},
    ),
    "needs modelCache.enabled": (None, {"modelCache": {"download": {"enabled": True}}}),
    "cannot be written": (None, {"modelCache": {"enabled": True, "readOnly": True, "download": {"enabled": True}}}),
    "redis.external.cidrs": (None, {"redis": {"bundled": False, "external": {"host": "h", "password": False}}}),
    "redis.external.host": (
        None,
        {"redis": {"bundled": False, "external": {"cidrs": ["10.0.0.0/8"], "password": False}}},
    ),
    "redis.existingSecret": (None, {"redis": {"bundled": False, "external": {"host": "h", "cidrs": ["10.0.0.0/8"]}}}),
    "at least one group": (None, {"workerGroups": {"workers": None}}),
    "a key of role metrics": (None, {"keys": {"existingSecret": "k"}, "monitoring": {"scrape": "ingress"}}),
}


@pytest.mark.parametrize("complaint", IMPOSSIBLE)
def test_what_cannot_work_is_refused_in_words(complaint: str) -> None:
    preset, values = IMPOSSIBLE[complaint]
    with pytest.raises(Refused, match=complaint.replace(".", r"\.")):
        template(values, preset=preset)
