"""The chart renders, whatever is turned on, into objects that Kubernetes and the operators take."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.config.schema import CaesuraConfig
from tests.deploy.api_server import refusals
from tests.deploy.chart import CHART, PRESETS, helm, needs_helm, of_kind, pods, serve_config, template
from tests.deploy.chart import Refused as Refusal
from tests.deploy.definitions import definition_problems
from tests.deploy.shapes import problems
from tests.deploy.value_sets import ACCEPTED, EXTERNAL_REDIS, REFUSED, SCALED, Accepted, scaled_group

pytestmark = needs_helm


def rendered(accepted: Accepted) -> list[dict[str, Any]]:
    return template(
        accepted.values,
        preset=accepted.preset,
        release=accepted.release,
        api_versions=accepted.api_versions,
        kubernetes=accepted.kubernetes,
    )


def checked(documents: list[dict[str, Any]], kubernetes: str) -> None:
    assert [problem for one in documents for problem in (*problems(one, kubernetes), *refusals(one))] == []
    named = [(one["kind"], one["metadata"]["name"]) for one in documents]
    assert len(named) == len(set(named))
    serve = serve_config(documents)
    ServeDeploySchema.model_validate(serve)
    CaesuraConfig.model_validate(serve["applications"][0]["args"])


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_set_of_values_is_what_kubernetes_takes(name: str) -> None:
    checked(rendered(ACCEPTED[name]), ACCEPTED[name].kubernetes)


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_every_preset_is_what_kubernetes_takes(preset: str | None) -> None:
    checked(template(preset=preset), "1.29")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_words(name: str) -> None:
    refused = REFUSED[name]
    with pytest.raises(Refusal) as caught:
        template(refused.values, preset=refused.preset, release=refused.release)
    assert refused.message in str(caught.value)


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


def test_the_checks_see_what_an_api_server_refuses() -> None:
    service = of_kind(template(preset="cpu"), "RayService")
    assert refusals(service) == []
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]
    (container,) = worker["spec"]["containers"]
    container["env"].append({"name": "HOME", "value": "/"})
    container["volumeMounts"].append({"name": "nowhere", "mountPath": "/tmp"})
    worker["spec"]["volumes"].append({"name": "keys", "secret": {"secretName": 123}})
    worker["metadata"]["labels"]["team"] = "a b"
    service["metadata"] |= {"name": "1st." + "a" * 50, "namespace": None}
    found = "\n".join(refusals(service))
    for part in (
        "HOME stands",
        "no volume nowhere",
        "/tmp stands",
        "keys stands",
        "123",
        "'a b'",
        ": name",
        "47",
        "None",
    ):
        assert part in found, found


def test_a_definition_of_a_project_is_closed(tmp_path: Path) -> None:
    spec = {"type": "object", "properties": {"port": {"x-kubernetes-int-or-string": True, "type": "string"}}}
    schema = {
        "type": "object",
        "properties": {"apiVersion": {}, "kind": {}, "metadata": {"type": "object"}, "spec": spec},
    }
    version = {"name": "v1", "schema": {"openAPIV3Schema": schema}}
    names = {"group": "x.io", "names": {"kind": "Thing"}, "versions": [version]}
    (tmp_path / "thing.yaml").write_text(yaml.safe_dump({"kind": "CustomResourceDefinition", "spec": names}))
    thing = {"apiVersion": "x.io/v1", "kind": "Thing", "metadata": {"name": "a", "labels": {}}, "spec": {"port": 1}}
    assert definition_problems(thing, tmp_path) == []
    assert len(definition_problems({**thing, "spec": {"surprise": 1}}, tmp_path)) == 1
    assert definition_problems({**thing, "kind": "Other"}, tmp_path) == []


def test_helm_lints_it_and_warns_of_nothing() -> None:
    done = subprocess.run([helm(), "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "symbolic link" not in done.stderr + done.stdout
    assert not [path for path in CHART.rglob("*") if path.is_symlink()]


# --- what single values do --------------------------------------------------------------------------------------------


def cluster(documents: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = of_kind(documents, "RayService")["spec"]["rayClusterConfig"]
    return found


def test_no_replicas_are_none_and_not_the_default() -> None:
    (group,) = cluster(rendered(ACCEPTED["autoscaling from no worker on"]))["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (0, 0, 4)


def test_elastic_replicas_are_scaled_by_ray_alone() -> None:
    """Ray Serve decides the number, and Ray's autoscaler the workers: neither KEDA nor its placeholder pods."""
    for case, least in (("elastic replicas", 0), ("elastic replicas of a further model", None)):
        documents = rendered(ACCEPTED[case])
        ray = cluster(documents)
        assert ray["enableInTreeAutoscaling"] is True and ray["autoscalerOptions"]["version"] == "v2"
        (group,) = ray["workerGroupSpecs"]
        assert (group["minReplicas"], group["maxReplicas"]) == (1, 4)
        assert ray["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"] is True
        (application,) = serve_config(documents)["applications"]
        assert "external_scaler_enabled" not in application
        replicas = application["args"].get("replicas", {})
        assert (replicas.get("min"), "count" in replicas) == (least, case != "elastic replicas")
        assert not [one for one in documents if one["kind"] in ("ScaledObject", "Deployment")]


def test_an_external_redis_with_a_user_and_an_authority() -> None:
    documents = rendered(ACCEPTED["external Redis, user and authority"])
    url = serve_config(documents)["applications"][0]["args"]["redis"]["url"]
    query = "password_file=/etc/caesura/redis/password&ssl_ca_certs=/etc/caesura/redis-ca/ca.crt"
    assert url == f"rediss://caesura%40agents@redis.db:6379/3?{query}"
    ray = cluster(documents)
    assert ray["gcsFaultToleranceOptions"]["redisUsername"] == {"value": "caesura@agents"}
    for template_ in (ray["headGroupSpec"]["template"], ray["workerGroupSpecs"][0]["template"]):
        (container,) = template_["spec"]["containers"]
        assert {"name": "RAY_REDIS_CA_CERT", "value": "/etc/caesura/redis-ca/ca.crt"} in container["env"]
        assert "/etc/caesura/redis-ca" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_every_object_is_in_the_namespace_and_has_the_labels() -> None:
    everything = {"monitoring": {"scrape": "pods", "rules": True, "dashboards": True}, **SCALED}
    values = {**everything, "namespaceOverride": "gpu-1", "commonLabels": {"team": "a"}}
    documents = template(values, preset="gpu")
    assert {one["metadata"]["namespace"] for one in documents} == {"gpu-1"}
    assert {one["metadata"]["labels"]["team"] for one in documents} == {"a"}
    assert {pod["metadata"]["labels"]["team"] for _, pod in pods(documents)} == {"a"}
    text = yaml.safe_dump(documents)
    assert "t-caesura-redis.gpu-1.svc" in text and "t-caesura-head-svc.gpu-1.svc" in text and ".agents.svc" not in text
    for one in documents:
        for selector in (one.get("spec", {}).get("selector"), one.get("spec", {}).get("podSelector")):
            assert "team" not in yaml.safe_dump(selector), "a selector cannot be changed later"


def test_monitors_elsewhere_watch_the_namespace_of_the_release() -> None:
    documents = rendered(ACCEPTED["monitors elsewhere"])
    elsewhere = {one["kind"] for one in documents if one["metadata"]["namespace"] == "monitoring"}
    assert elsewhere == {"ServiceMonitor", "PrometheusRule", "ConfigMap"}
    monitor = of_kind(documents, "ServiceMonitor")["spec"]
    assert monitor["namespaceSelector"] == {"matchNames": ["agents"]}
    assert monitor["endpoints"][0]["authorization"]["credentials"] == {"name": "caesura-metrics", "key": "key"}
    assert of_kind(documents, "ConfigMap", "t-caesura-scripts")["metadata"]["namespace"] == "agents"


def test_two_releases_in_a_namespace_share_no_name_and_select_no_pod_of_each_other() -> None:
    values = {**SCALED, "monitoring": {"scrape": "ingress", "dashboards": True}}
    both = [template(values, preset="gpu", release=release) for release in ("team-a", "team-b")]
    first, second = ({(one["kind"], one["metadata"]["name"]) for one in documents} for documents in both)
    assert first.isdisjoint(second)
    for documents, other in (both, reversed(both)):
        labels = [pod["metadata"]["labels"] for _, pod in pods(other)]
        for one in documents:
            for key in ("selector", "podSelector"):
                selector = one.get("spec", {}).get(key) or {}
                wanted = selector.get("matchLabels", selector)
                if isinstance(wanted, dict) and wanted:
                    assert not [pod for pod in labels if wanted.items() <= pod.items()], one["metadata"]["name"]


def test_a_download_goes_where_its_values_say() -> None:
    documents = rendered(ACCEPTED["download from a mirror in the cluster"])
    rule = of_kind(documents, "NetworkPolicy", "t-caesura-download")["spec"]["egress"][0]
    assert rule["to"] == ACCEPTED["download from a mirror in the cluster"].values["modelCache"]["download"]["peers"]
    assert rule["ports"] == [{"port": 8080, "protocol": "TCP"}]
    job = next(one for one in documents if one["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {"name": "HF_ENDPOINT", "value": "http://hub.mirror.svc:8080"} in container["env"]
    assert "/etc/company" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_pods_are_placed_as_their_values_say() -> None:
    ray = cluster(rendered(ACCEPTED["places"]))
    head, worker = ray["headGroupSpec"]["template"]["spec"], ray["workerGroupSpecs"][0]["template"]["spec"]
    assert (head["schedulerName"], head["priorityClassName"]) == ("volcano", "high")
    assert (worker["schedulerName"], worker["runtimeClassName"]) == ("kueue", "nvidia")
    assert next(one for one in head["volumes"] if one["name"] == "shm")["emptyDir"]["sizeLimit"] == "4Gi"
    documents = rendered(ACCEPTED["places of all pods"])
    others = {name: pod["spec"] for name, pod in pods(documents) if name.split()[0] in ("Pod", "Deployment", "Job")}
    assert len(others) == 3  # the test, the seats, the download
    toleration = {"key": "agents", "operator": "Exists"}
    for name, pod in others.items():
        assert (pod["schedulerName"], pod["priorityClassName"]) == ("volcano", "high"), name
        assert pod["nodeSelector"] == {"pool": "cpu"} and toleration in pod["tolerations"], name
    redis = of_kind(rendered(ACCEPTED["Redis placed"]), "StatefulSet")["spec"]["template"]["spec"]
    assert (redis["schedulerName"], redis["priorityClassName"]) == ("volcano", "high")
    load_balancer = of_kind(rendered(ACCEPTED["load balancer"]), "RayService")["spec"]["serveService"]["spec"]
    assert load_balancer["loadBalancerClass"] == "service.k8s.aws/nlb"
    profile = {"type": "Localhost", "localhostProfile": "profiles/user-namespaces.json"}
    for _, pod in pods(rendered(ACCEPTED["own seccomp profile"])):
        assert pod["spec"]["securityContext"]["seccompProfile"] == profile


def test_a_download_to_a_volume_of_one_node_is_where_its_workers_are() -> None:
    head = {"head": {"nodeSelector": {"pool": "cpu"}, "affinity": {"nodeAffinity": {}}}}
    worker = {"workerGroups": {"workers": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}}
    rendered = template(head, worker, {"modelCache": {"accessMode": "ReadWriteOnce"}}, preset="gpu")
    pod = of_kind(rendered, "Job")["spec"]["template"]["spec"]
    assert "nodeSelector" not in pod and pod["affinity"].keys() == {"podAffinity"}
    assert {"key": "gpu", "operator": "Exists"} in pod["tolerations"]


def test_a_redis_that_reads_its_data_is_not_killed() -> None:
    (container,) = of_kind(template(preset="cpu"), "StatefulSet")["spec"]["template"]["spec"]["containers"]
    start, alive = container["startupProbe"], container["livenessProbe"]
    assert start["exec"] == alive["exec"], "it answers with LOADING until it has read its data"
    assert start["periodSeconds"] * start["failureThreshold"] >= 3600 and "failureThreshold" not in alive


def test_a_route_uses_the_inference_pool() -> None:
    documents = rendered(ACCEPTED["route to an inference pool"])
    pool = of_kind(documents, "InferencePool")
    (backend,) = of_kind(documents, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    worker = cluster(documents)["workerGroupSpecs"][0]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= {**worker, "ray.io/serve": "true"}.items()


@pytest.mark.parametrize(
    ("config", "largest"),
    [
        ({}, (64 << 20) + 65536),
        ({"batches": {"max_file_bytes": 1 << 30}}, (1 << 30) + 65536),
        ({"http": {"max_body_bytes": 1 << 28}}, 1 << 28),
    ],
)
def test_nginx_passes_the_largest_body(config: dict[str, Any], largest: int) -> None:
    values = {
        "ingress": {"enabled": True, "className": "nginx", "host": "a.example", "tlsSecret": "tls"},
        "config": config,
    }
    annotations = of_kind(template(values, preset="cpu"), "Ingress")["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-body-size"] == str(largest)


@pytest.mark.parametrize(
    ("limit", "bytes_"),
    [
        ("1Gi", 1 << 30),
        ("512Mi", 512 << 20),
        ("1048576Ki", 1 << 30),
        ("1.5Gi", 3 << 29),
        ("2G", 2 * 10**9),
        ("1073741824", 1 << 30),
        (1073741824, 1 << 30),
    ],
)
def test_redis_knows_its_limit_and_leaves_room_for_its_file(limit: str | int, bytes_: int) -> None:
    """Without maxmemory, Caesura cannot see that Redis is nearly full."""
    documents = template({"redis": {"resources": {"limits": {"memory": limit}}}}, preset="cpu")
    lines = of_kind(documents, "ConfigMap", "t-caesura-redis")["data"]["redis.conf"].splitlines()
    assert f"maxmemory {bytes_ * 65 // 100}" in lines and "maxmemory-policy noeviction" in lines


def test_a_redis_without_a_user_has_the_default_one() -> None:
    documents = template({"redis": EXTERNAL_REDIS}, preset="cpu")
    assert "redisUsername" not in cluster(documents)["gcsFaultToleranceOptions"]
    url = serve_config(documents)["applications"][0]["args"]["redis"]["url"]
    assert url == "rediss://redis.db:6379/0?password_file=/etc/caesura/redis/password"


@pytest.mark.parametrize(
    ("preset", "values", "number"),
    [
        ("gpu", {}, 2),
        ("cpu", {}, 1),
        (None, {}, None),
        (None, {"workerGroups": {"workers": {"replicas": 4}}}, 2),
        (None, {"workerGroups": {"workers": {"replicas": 3, "resources": {"requests": {"cpu": "2500m"}}}}}, None),
        (None, {"workerGroups": {"workers": {"replicas": 4, "resources": {"requests": {"cpu": "2500m"}}}}}, 2),
        ("gpu", scaled_group(replicas=0, minReplicas=0), None),
        ("gpu", {"config": {"http": {"ingress_replicas": 1}}}, 1),
        ("gpu", {"config": {"http": {"max_concurrent_requests": 9}}}, 2),
    ],
)
def test_two_ingresses_serve_where_the_workers_have_cpus(
    preset: str | None, values: dict[str, Any], number: int | None
) -> None:
    service = of_kind(template(values, preset=preset), "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["args"]["http"].get("ingress_replicas") == number
