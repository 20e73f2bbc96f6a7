"""Who reaches whom: what the values open in the network policies, and what an Ingress lets through."""

from typing import Any

import pytest

from tests.deploy.chart import needs_helm, of_kind, template
from tests.deploy.value_sets import ACCEPTED

pytestmark = needs_helm


def policy(documents: list[dict[str, Any]], name: str) -> dict[str, Any]:
    spec = of_kind(documents, "NetworkPolicy", f"t-caesura-{name}")["spec"]
    assert isinstance(spec, dict)
    return spec


def test_peers_inside_the_cluster_are_reached_by_those_that_ask_them() -> None:
    values = ACCEPTED["peers inside the cluster"].values
    documents = template(values, preset="cpu")
    rules = policy(documents, "ray")["egress"]
    assert rules[-1:] == values["networkPolicy"]["extraEgress"]
    assert {"to": values["redis"]["external"]["peers"], "ports": [{"port": 6379, "protocol": "TCP"}]} in rules
    (api,) = policy(documents, "head")["egress"]
    assert api["to"] == values["networkPolicy"]["kubernetesApi"]["peers"]
    (dns,) = policy(documents, "dns")["egress"]
    assert dns["to"] == values["networkPolicy"]["dns"]
    assert dns["ports"] == [{"port": 5353, "protocol": "UDP"}, {"port": 5353, "protocol": "TCP"}]


def test_names_are_resolved_at_port_53_by_default() -> None:
    (dns,) = policy(template(preset="cpu"), "dns")["egress"]
    assert dns["ports"] == [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]


@pytest.mark.parametrize(
    ("scrape", "ports"),
    [("none", [8080]), ("pods", [8080]), ("ingress", [8080, 8000])],
    ids=["none", "pods", "ingress"],
)
def test_who_scrapes_reaches_the_api_only_if_it_has_the_metrics(scrape: str, ports: list[int]) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "prometheus"}}}]
    values = {"monitoring": {"scrape": scrape}, "networkPolicy": {"metricsFrom": peers}}
    (rule,) = (one for one in policy(template(values, preset="cpu"), "ray")["ingress"] if one["from"] == peers)
    assert [one["port"] for one in rule["ports"]] == ports


@pytest.mark.parametrize(
    ("ingress", "seconds"),
    [
        ({"className": "nginx"}, "3660"),
        ({"className": "nginx-internal"}, "3660"),
        ({"controller": "nginx"}, "3660"),
        ({"className": "internal", "controller": "nginx"}, "3660"),
        ({"className": "nginx", "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "9"}}, "9"),
        ({"className": "traefik"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_an_ingress_of_nginx_waits_for_the_longest_turn(ingress: dict[str, Any], seconds: str | None) -> None:
    rendered = template({"ingress": {"enabled": True, "insecure": True, **ingress}}, preset="cpu")
    annotations = of_kind(rendered, "Ingress")["metadata"].get("annotations", {})
    assert annotations.get("nginx.ingress.kubernetes.io/proxy-read-timeout") == seconds
    assert ("nginx.ingress.kubernetes.io/proxy-buffering" in annotations) == (seconds is not None)
