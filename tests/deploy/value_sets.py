"""Sets of values: those that the chart must render into objects that Kubernetes takes, and those that it must refuse.

Each accepted set is rendered over every preset by `make helm`, and over one by `make test`.
"""

from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]


@dataclass(frozen=True)
class Accepted:
    """A set of values that is rendered."""

    values: Values
    preset: str = "cpu"
    """The preset over which `make test` renders it."""
    release: str = "t"
    api_versions: tuple[str, ...] = ()
    """Kinds that the cluster has beside Kubernetes' own."""
    kubernetes: str = "1.29.0"
    only_this_preset: bool = False
    """Whether the set fits no other preset."""


@dataclass(frozen=True)
class Refused:
    """A set of values that the schema or a template refuses."""

    values: Values
    message: str
    """A part of Helm's message."""
    preset: str | None = None
    release: str = "t"


SCALED: Values = {"autoscaling": {"enabled": True}, "networkPolicy": {"kubernetesApi": {"cidrs": ["10.96.0.1/32"]}}}
EXTERNAL_REDIS: Values = {
    "bundled": False,
    "existingSecret": "s",
    "external": {"host": "redis.db", "cidrs": ["10.1.0.0/16"], "tls": True},
}
OWN_SECRETS: Values = {
    "generateSecrets": "auto",
    "keys": {"existingSecret": "caesura-keys"},
    "redis": {"existingSecret": "caesura-redis"},
    "rayAuth": {"existingSecret": "caesura-ray"},
    "tests": {"keySecret": {"name": "caesura-api-keys", "key": "serve"}},
}


def gpu_group(replicas: int, gpus: int, **more: Any) -> Values:
    """A worker group in place of the default one."""
    size = {"cpu": "8", "memory": "64Gi"}
    group = {"replicas": replicas, "gpus": gpus, "resources": {"requests": size, "limits": size}, **more}
    return {"workers": None, "big": group}


def gpus(count: int, tensor: int, pipeline: int = 1) -> Values:
    """Replicas on GPUs."""
    return {
        "count": count,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "accelerator": "gpu",
    }


def scaled_group(**bounds: int) -> Values:
    """Autoscaling with these bounds of the preset's worker group."""
    return {**SCALED, "workerGroups": {"workers": bounds}}


KUBERNETES_API: Values = {"networkPolicy": {"kubernetesApi": {"cidrs": ["10.96.0.1/32"]}}}


def elastic(**bounds: int) -> Values:
    """Replicas of the first model between these bounds, decided by Ray Serve."""
    return {**KUBERNETES_API, "config": {"replicas": bounds}}


LARGE = {"model": {"id": "l", "source": "meta-llama/Llama-3.1-405B-Instruct"}}
TWO_MODELS = {
    "model": {"id": "a", "source": "/models/a"},
    "replicas": gpus(2, 2),
    "models": {"b": {"source": "/models/b", "replicas": gpus(1, 4)}},
}
INFERENCE_POOL = ("inference.networking.k8s.io/v1/InferencePool",)

ACCEPTED: dict[str, Accepted] = {
    "KV on the node's disk": Accepted(
        {
            "kvVolume": {"hostPath": {"path": "/var/lib/caesura-kv", "type": "Directory"}},
            "config": {"replicas": {"disk_tier": {"path": "/kv", "bytes": 1 << 30}}},
        },
        "gpu",
    ),
    # keys and tokens
    "no keys": Accepted({"keys": {"enabled": False}}),
    "own keys": Accepted({"keys": {"existingSecret": "k"}, "tests": {"keySecret": {"name": "t", "key": "k"}}}, "gpu"),
    "more keys": Accepted({"keys": {"entries": [{"tenant": "acme", "sha256": "0" * 64, "roles": ["serve"]}]}}),
    "no Ray token": Accepted({"rayAuth": {"enabled": False}}),
    "own Ray token": Accepted({"rayAuth": {"existingSecret": "r"}}),
    "GitOps: all secrets are there": Accepted(OWN_SECRETS, "gpu"),
    "numeric names of secrets": Accepted(
        {
            "keys": {"existingSecret": "123"},
            "redis": {"existingSecret": "1e3"},
            "rayAuth": {"existingSecret": "0123"},
            "tests": {"keySecret": {"name": "42", "key": "1"}},
            "ingress": {"enabled": True, "host": "a.example", "tlsSecret": "1"},
            "monitoring": {"scrape": "ingress", "keySecret": {"name": "9", "key": "8"}},
        }
    ),
    # names
    "a release of digits with a name": Accepted({"fullnameOverride": "agents"}, release="123"),
    "a release with dots and a name": Accepted({"fullnameOverride": "agents"}, "gpu", release="team-a.eu"),
    "a long release": Accepted({**SCALED, "monitoring": {"dashboards": True}}, "h100-tp4", release="a" + "-b" * 26),
    "another name": Accepted({"nameOverride": "serving"}),
    "a numeric name": Accepted({"nameOverride": "1", "fullnameOverride": "agents"}),
    "another namespace": Accepted({**SCALED, "namespaceOverride": "gpu-1"}),
    "a namespace of digits": Accepted({"namespaceOverride": "2026"}, "gpu"),
    "labels": Accepted({**SCALED, "commonLabels": {"team": "a", "example.com/cost": "1"}}, "gpu"),
    # Redis
    "external Redis": Accepted({"redis": EXTERNAL_REDIS}),
    "external Redis, user and authority": Accepted(
        {
            "redis": {
                **EXTERNAL_REDIS,
                "external": {
                    **EXTERNAL_REDIS["external"],
                    "username": "caesura@agents",
                    "database": 3,
                    "caSecret": {"name": "redis-ca"},
                },
            }
        },
        "gpu",
    ),
    "external Redis, open": Accepted(
        {"redis": {"bundled": False, "external": {"host": "redis.db", "password": False, "cidrs": ["10.1.0.0/16"]}}}
    ),
    "Redis in memory": Accepted({"redis": {"persistence": {"enabled": False}}}),
    "Redis placed": Accepted(
        {
            "redis": {
                "nodeSelector": {"a": "1"},
                "tolerations": [{"key": "k", "operator": "Exists"}],
                "priorityClassName": "high",
                "schedulerName": "volcano",
                "persistence": {"storageClassName": "1"},
            }
        }
    ),
    "no GCS fault tolerance": Accepted({"gcsFaultTolerance": {"enabled": False}}),
    # models
    "model claim": Accepted(
        {"modelCache": {"enabled": True, "existingClaim": "c", "readOnly": True, "download": {"enabled": False}}}
    ),
    "models in a claim and an image": Accepted(
        {
            "extraVolumes": [
                {"name": "weights", "persistentVolumeClaim": {"claimName": "llama", "readOnly": True}},
                {"name": "oci", "image": {"reference": "registry.example/models/qwen:1"}},
            ],
            "extraVolumeMounts": [
                {"name": "weights", "mountPath": "/models/llama", "readOnly": True},
                {"name": "oci", "mountPath": "/oci", "readOnly": True},
            ],
        },
        kubernetes="1.35.0",
    ),
    "download through a proxy": Accepted(
        {
            "modelCache": {
                "download": {
                    "env": [
                        {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"},
                        {"name": "NO_PROXY", "value": ".svc"},
                    ],
                    "cidrs": ["10.0.0.5/32"],
                    "ports": [3128],
                }
            }
        },
        "gpu",
        only_this_preset=True,
    ),
    "download from a mirror in the cluster": Accepted(
        {
            "modelCache": {
                "download": {
                    "env": [{"name": "HF_ENDPOINT", "value": "http://hub.mirror.svc:8080"}],
                    "cidrs": [],
                    "peers": [
                        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "mirror"}}},
                    ],
                    "ports": [8080],
                }
            },
            "extraVolumes": [{"name": "ca", "configMap": {"name": "company-ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/company", "readOnly": True}],
        },
        "gpu",
        only_this_preset=True,
    ),
    "download with a token": Accepted(
        {"modelCache": {"download": {"existingSecret": "7"}}}, "gpu", only_this_preset=True
    ),
    "a model claim of one node": Accepted(
        {"modelCache": {"accessMode": "ReadWriteOnce"}, "upgrade": {"strategy": "None"}}, "gpu"
    ),
    "numeric storage class": Accepted({"modelCache": {"enabled": True, "storageClassName": "1"}}),
    "tensor parallel over two nodes": Accepted(
        {"config": {**LARGE, "replicas": gpus(1, 8)}, "workerGroups": gpu_group(2, 4)}, "gpu", only_this_preset=True
    ),
    "data parallel over two nodes": Accepted(
        {"config": {**LARGE, "replicas": {**gpus(1, 2), "data_parallel_size": 4}}, "workerGroups": gpu_group(2, 4)},
        "gpu",
        only_this_preset=True,
    ),
    "pipeline parallel over two nodes": Accepted(
        {"config": {**LARGE, "replicas": gpus(1, 8, 2)}, "workerGroups": gpu_group(2, 8)}, "gpu", only_this_preset=True
    ),
    "two models": Accepted({"config": TWO_MODELS, "workerGroups": gpu_group(1, 8)}, "gpu", only_this_preset=True),
    "two models, a group each": Accepted(
        {
            "config": {**TWO_MODELS, "replicas": gpus(1, 3)},
            "workerGroups": {**gpu_group(1, 3), "other": gpu_group(1, 4)["big"]},
        },
        "gpu",
        only_this_preset=True,
    ),
    "several nodes with autoscaling": Accepted(
        {
            **SCALED,
            "autoscaling": {"enabled": True, "maxReplicas": 2},
            "config": {**LARGE, "replicas": gpus(1, 8)},
            "workerGroups": gpu_group(2, 4, minReplicas=2, maxReplicas=4),
        },
        "gpu",
        only_this_preset=True,
    ),
    # networking
    "ingress": Accepted({"ingress": {"enabled": True, "className": "nginx", "host": "a.example", "tlsSecret": "tls"}}),
    "ingress, any host": Accepted({"ingress": {"enabled": True, "insecure": True}}),
    "ingress, wildcard": Accepted({"ingress": {"enabled": True, "host": "*.a.example", "tlsSecret": "tls"}}),
    "route": Accepted(
        {"httpRoute": {"enabled": True, "hostnames": ["*.a.example"], "parentRefs": [{"name": "g", "namespace": "gw"}]}}
    ),
    "route, own gateway": Accepted(
        {"httpRoute": {"enabled": True, "gateway": {"create": True, "className": "x", "tlsSecret": "0"}}}
    ),
    "route to an inference pool": Accepted(
        {
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]},
            "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
        },
        api_versions=INFERENCE_POOL,
    ),
    "load balancer": Accepted(
        {"service": {"type": "LoadBalancer", "loadBalancerClass": "service.k8s.aws/nlb", "annotations": {"a": "1"}}}
    ),
    "no network policy": Accepted({"networkPolicy": {"enabled": False}}),
    "tool egress": Accepted(
        {"networkPolicy": {"toolEgress": [{"cidr": "203.0.113.0/24", "ports": [443], "except": ["203.0.113.9/32"]}]}}
    ),
    "IPv6": Accepted({"networkPolicy": {"toolEgress": [{"cidr": "::/0"}, {"cidr": "2001:db8::/32", "ports": [443]}]}}),
    "peers inside the cluster": Accepted(
        {
            "redis": {
                "bundled": False,
                "existingSecret": "s",
                "external": {"host": "redis.db", "peers": [{"namespaceSelector": {"matchLabels": {"a": "db"}}}]},
            },
            "autoscaling": {"enabled": True},
            "networkPolicy": {
                "dns": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}}],
                "dnsPorts": [5353],
                "kubernetesApi": {"peers": [{"podSelector": {"matchLabels": {"app": "vcluster"}}}]},
                "extraEgress": [
                    {
                        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "otel"}}}],
                        "ports": [{"port": 4317, "protocol": "TCP"}],
                    }
                ],
            },
        }
    ),
    "ingress of a class with another name": Accepted(
        {"ingress": {"enabled": True, "className": "internal", "controller": "nginx", "tlsSecret": "tls"}}
    ),
    # load
    "autoscaling": Accepted(SCALED, "gpu"),
    "autoscaling from no worker on": Accepted(scaled_group(replicas=0, minReplicas=0)),
    "elastic replicas": Accepted(elastic(min=0, max=4)),
    "elastic replicas of a further model": Accepted(
        {**KUBERNETES_API, "config": {"models": {"b": {"source": "/models/b", "replicas": {"max": 2}}}}}, "cpu"
    ),
    "incremental": Accepted(
        {
            **SCALED,
            "upgrade": {"strategy": "NewClusterWithIncrementalUpgrade", "incremental": {"gatewayClassName": "istio"}},
        }
    ),
    "never upgraded": Accepted({"upgrade": {"strategy": "None"}}),
    "no budgets": Accepted({"podDisruptionBudgets": {"enabled": False}}),
    "no worker may leave": Accepted({"podDisruptionBudgets": {"workersMaxUnavailable": 0}}),
    # monitoring
    "scraped pods": Accepted(
        {"monitoring": {"scrape": "pods", "rules": True, "dashboards": True, "labels": {"release": "prom"}}}
    ),
    "scraped ingress": Accepted({"monitoring": {"scrape": "ingress"}}),
    "monitors elsewhere": Accepted(
        {
            "monitoring": {
                "namespace": "monitoring",
                "scrape": "ingress",
                "keySecret": {"name": "caesura-metrics", "key": "key"},
                "rules": True,
                "runbooksUrl": "https://docs.example/runbooks.html",
                "dashboards": True,
            }
        }
    ),
    # pods
    "digests": Accepted(
        {"image": {"digest": "sha256:" + "a" * 64}, "redis": {"image": {"digest": "sha256:" + "b" * 64}}}
    ),
    "a numeric tag": Accepted({"image": {"repository": "caesura", "tag": "1"}}),
    "places": Accepted(
        {
            "head": {
                "priorityClassName": "high",
                "schedulerName": "volcano",
                "sharedMemory": "4Gi",
                "nodeSelector": {"a": "b"},
                "podAnnotations": {"a": "1"},
                "podLabels": {"b": "2"},
            },
            "workerGroups": {"workers": {"schedulerName": "kueue", "runtimeClassName": "nvidia"}},
            "imagePullSecrets": [{"name": "p"}],
            "env": [{"name": "A", "value": "1"}],
            "envFrom": [{"secretRef": {"name": "tools"}}],
            "serviceAccount": {"annotations": {"a": "b"}},
        }
    ),
    "places of all pods": Accepted(
        {
            **SCALED,
            "head": {
                "priorityClassName": "high",
                "schedulerName": "volcano",
                "nodeSelector": {"pool": "cpu"},
                "tolerations": [{"key": "agents", "operator": "Exists"}],
            },
            "modelCache": {"accessMode": "ReadWriteMany"},
        },
        "gpu",
    ),
    "variables": Accepted(
        {
            "env": [
                {"name": "HF_HUB_OFFLINE", "value": "1"},
                {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "1", "key": "token"}}},
            ]
        },
        only_this_preset=True,
    ),
    "own seccomp profile": Accepted(
        {
            **SCALED,
            "podSecurity": {
                "seccompProfile": {"type": "Localhost", "localhostProfile": "profiles/user-namespaces.json"}
            },
        }
    ),
    "a group with the name of a boolean": Accepted(
        {
            "workerGroups": {
                "workers": None,
                "on": {"replicas": 2, "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "4", "memory": "8Gi"}}},
            },
        },
        only_this_preset=True,
    ),
}
REFUSED: dict[str, Refused] = {
    # names
    "release with dots": Refused({}, 'begin with "my.release-caesura"', release="my.release"),
    "release with a leading digit": Refused({}, 'begin with "1st-caesura"', release="1st"),
    "release of digits": Refused({}, 'begin with "2026-caesura"', release="2026"),
    "upper case": Refused({"nameOverride": "Serving"}, "nameOverride"),
    "a name that is a boolean": Refused({"fullnameOverride": "yes"}, "fullnameOverride: yes is no name"),
    "numbers for names": Refused({"keys": {"existingSecret": 123}}, "keys.existingSecret"),
    "no name of a secret": Refused({"redis": {"existingSecret": "My_Secret"}}, "redis.existingSecret"),
    "a numeric storage class without quotes": Refused({"modelCache": {"storageClassName": 1}}, "storageClassName"),
    "a host with a scheme": Refused({"ingress": {"host": "https://a.example"}}, "ingress.host"),
    "labels of the chart": Refused({"commonLabels": {"app.kubernetes.io/name": "x"}}, "commonLabels"),
    "labels of a pod of the chart": Refused({"head": {"podLabels": {"ray.io/cluster": "x"}}}, "podLabels"),
    "labels with spaces": Refused({"commonLabels": {"team": "a b"}}, "commonLabels.team"),
    # variables
    "an integer as a variable": Refused({"env": [{"name": "A", "value": 1}]}, "env.0.value"),
    "a variable of the chart": Refused({"env": [{"name": "HOME", "value": "/"}]}, "env: HOME is set by the chart"),
    "offline twice": Refused(
        {"env": [{"name": "HF_HUB_OFFLINE", "value": "1"}]}, "env: HF_HUB_OFFLINE is set by the chart", "gpu"
    ),
    "a variable twice": Refused({"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "env: A is set"),
    "a variable of KubeRay": Refused({"env": [{"name": "REDIS_PASSWORD", "value": "x"}]}, "is set by KubeRay"),
    "a value and a source": Refused({"env": [{"name": "A", "value": "1", "valueFrom": {}}]}, "env.0"),
    "a variable of the download": Refused(
        {"modelCache": {"download": {"env": [{"name": "HF_HOME", "value": "/"}]}}},
        "modelCache.download.env: HF_HOME",
        "gpu",
    ),
    # volumes
    "KV on disk without a volume": Refused(
        {"config": {"replicas": {"disk_tier": {"path": "/kv/a", "bytes": 1 << 30}}}}, "needs kvVolume"
    ),
    "a path of the chart": Refused(
        {
            "extraVolumes": [{"name": "w", "persistentVolumeClaim": {"claimName": "w"}}],
            "extraVolumeMounts": [{"name": "w", "mountPath": "/models/"}],
        },
        "extraVolumeMounts: /models/ is a path of the chart",
        "gpu",
    ),
    "a path twice": Refused(
        {
            "extraVolumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "a", "mountPath": "/x"}, {"name": "b", "mountPath": "/x"}],
        },
        "extraVolumeMounts: /x is a path of the chart, or stands there twice",
    ),
    "a volume of the chart": Refused({"extraVolumes": [{"name": "keys", "emptyDir": {}}]}, "extraVolumes: keys"),
    "a mount without a volume": Refused(
        {"extraVolumeMounts": [{"name": "x", "mountPath": "/x"}]}, "extraVolumes has no volume x"
    ),
    # GPUs
    "a replica would be split": Refused(
        {"workerGroups": {"h100": {"gpus": 6}}}, "a replica would be split unevenly", "h100-tp4"
    ),
    "more GPUs than there are": Refused({"config": {"replicas": {"count": 8}}}, "want 8 GPUs", "gpu"),
    "two models, too few GPUs": Refused(
        {"config": TWO_MODELS, "workerGroups": gpu_group(1, 4)}, "want 8 GPUs, all workers together have 4"
    ),
    "stages, too few GPUs": Refused(
        {"config": {**LARGE, "replicas": gpus(1, 8, 2)}, "workerGroups": gpu_group(1, 8)}, "want 16 GPUs"
    ),
    "ranks, too few GPUs": Refused(
        {
            "config": {**LARGE, "replicas": {**gpus(1, 2), "data_parallel_size": 4}},
            "workerGroups": gpu_group(1, 4),
        },
        "want 8 GPUs, all workers together have 4",
    ),
    "autoscaling, too few GPUs": Refused(
        {**SCALED, "workerGroups": {"workers": {"maxReplicas": 2}}}, "want 4 GPUs at autoscaling.maxReplicas", "gpu"
    ),
    "elastic replicas, too few GPUs": Refused(
        {**elastic(max=8), "workerGroups": {"workers": {"maxReplicas": 2}}}, "want 8 GPUs", "gpu"
    ),
    "a host tier above the shared memory": Refused(
        {"config": {"replicas": {"cpu_offload_bytes": 17 << 30}}},
        "workerGroups.workers.sharedMemory: 16Gi has less than 18253611008 bytes, which config.replicas.cpu_",
        "gpu",
    ),
    "two host tiers in a pod": Refused(
        {"workerGroups": {"h100": {"sharedMemory": "511Gi"}}},
        "workerGroups.h100.sharedMemory: 511Gi has less than 549755813888 bytes",
        "h100-tp4",
    ),
    # load
    "ranks do not follow the load": Refused(
        {**SCALED, "config": {"replicas": {"data_parallel_size": 2}}}, "data_parallel_size (2) needs a fixed count"
    ),
    "two that decide the number": Refused(
        {**SCALED, "config": {"replicas": {"max": 4}}}, "KEDA and config.replicas.max would both decide"
    ),
    "a minimum above the maximum": Refused(elastic(min=5, max=4), "config.replicas.min: 5 exceeds max (4)"),
    "a minimum without a maximum": Refused({"config": {"replicas": {"min": 0}}}, "config.replicas.min: needs max"),
    "elastic groups of ranks": Refused(
        elastic(max=4, data_parallel_size=2), "config.replicas.data_parallel_size: 2 needs a fixed count"
    ),
    "a further model's minimum": Refused(
        {"config": {"models": {"b": {"source": "/b", "replicas": {"min": 1}}}}}, "config.models.b.replicas.min: needs"
    ),
    "elastic replicas need the Kubernetes API": Refused({"config": {"replicas": {"max": 4}}}, "kubernetesApi.cidrs"),
    "bounds of autoscaling": Refused(
        {**SCALED, "autoscaling": {"enabled": True, "minReplicas": 5}}, "autoscaling.minReplicas: 5 exceeds"
    ),
    "no replicas": Refused({"autoscaling": {"minReplicas": 0}}, "autoscaling.minReplicas"),
    "bounds of a group": Refused(scaled_group(minReplicas=5), "workerGroups.workers.minReplicas: 5 exceeds"),
    "more workers than the maximum": Refused(scaled_group(replicas=9), "workerGroups.workers.replicas: 9 is not"),
    "fewer workers than the minimum": Refused(
        scaled_group(replicas=1, minReplicas=2), "workerGroups.workers.replicas: 1 is not"
    ),
    "budgets in percent": Refused(
        {"podDisruptionBudgets": {"workersMaxUnavailable": "25%"}}, "podDisruptionBudgets.workersMaxUnavailable"
    ),
    "a budget of the head": Refused({"podDisruptionBudgets": {"headMaxUnavailable": 1}}, "headMaxUnavailable"),
    "at least one group": Refused({"workerGroups": {"workers": None}}, "at least one group"),
    "kubernetesApi.cidrs": Refused({"autoscaling": {"enabled": True}}, "kubernetesApi.cidrs"),
    "gatewayClassName": Refused(
        {"upgrade": {"strategy": "NewClusterWithIncrementalUpgrade"}}, "upgrade.incremental.gatewayClassName"
    ),
    "incremental upgrades need autoscaling": Refused(
        {"upgrade": {"strategy": "NewClusterWithIncrementalUpgrade", "incremental": {"gatewayClassName": "x"}}},
        "incremental upgrades need autoscaling",
    ),
    "makes the Gateway": Refused(
        {**ACCEPTED["incremental"].values, "ingress": {"enabled": True, "tlsSecret": "t"}}, "makes the Gateway"
    ),
    # networking
    "would travel unencrypted": Refused({"ingress": {"enabled": True}}, "would travel unencrypted"),
    "name a Gateway": Refused({"httpRoute": {"enabled": True}}, "name a Gateway"),
    "a Gateway without TLS": Refused(
        {"httpRoute": {"enabled": True, "gateway": {"create": True, "className": "x"}}},
        "the Gateway's listener is HTTPS",
    ),
    "a class without a load balancer": Refused({"service": {"loadBalancerClass": "x"}}, "service.loadBalancerClass"),
    "a pool without its CRD": Refused(
        {"inferencePool": {"enabled": True, "endpointPicker": {"name": "x"}}}, "the cluster has no InferencePool"
    ),
    "a pool without a picker": Refused({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name"),
    "no ports of DNS": Refused({"networkPolicy": {"dnsPorts": []}}, "networkPolicy.dnsPorts"),
    "DNS of everybody": Refused({"networkPolicy": {"dns": []}}, "networkPolicy.dns"),
    "a controller without annotations of the chart": Refused({"ingress": {"controller": "traefik"}}, "controller"),
    "runbooks of a path": Refused({"monitoring": {"runbooksUrl": "docs/runbooks.md"}}, "monitoring.runbooksUrl"),
    # storage
    "download without a cache": Refused({"modelCache": {"download": {"enabled": True}}}, "needs modelCache.enabled"),
    "download to a read-only volume": Refused({"modelCache": {"readOnly": True}}, "cannot be written", "gpu"),
    "download from nowhere": Refused({"modelCache": {"download": {"cidrs": []}}}, "download.cidrs", "gpu"),
    "Redis without addresses": Refused(
        {"redis": {"bundled": False, "external": {"host": "h", "password": False}}}, "redis.external.cidrs"
    ),
    "Redis without a host": Refused(
        {"redis": {"bundled": False, "external": {"cidrs": ["10.0.0.0/8"], "password": False}}}, "redis.external.host"
    ),
    "Redis without a password": Refused(
        {"redis": {"bundled": False, "external": {"host": "h", "cidrs": ["10.0.0.0/8"]}}}, "redis.existingSecret"
    ),
    "a user without a password": Refused(
        {"redis": {"bundled": False, "external": {"host": "h", "cidrs": ["::/0"], "password": False, "username": "u"}}},
        "redis.external.username",
    ),
    "an authority without TLS": Refused(
        {
            "redis": {
                "bundled": False,
                "existingSecret": "s",
                "external": {"host": "h", "cidrs": ["::/0"], "caSecret": {"name": "ca"}},
            }
        },
        "redis.external.caSecret",
    ),
    "Redis without a limit": Refused(
        {"redis": {"resources": {"limits": {"memory": None}}}}, "redis.resources.limits.memory: the Redis"
    ),
    "a limit of Redis that cannot be read": Refused(
        {"redis": {"resources": {"limits": {"memory": "1GB"}}}}, "redis.resources.limits.memory: 1GB is no number"
    ),
    # secrets
    "keys are made only where they are kept": Refused({"generateSecrets": "auto"}, "keys.existingSecret: the chart"),
    "a password is made only where it is kept": Refused(
        {"generateSecrets": "auto", "keys": {"existingSecret": "k"}}, "redis.existingSecret: the chart makes"
    ),
    "a token is made only where it is kept": Refused(
        {**OWN_SECRETS, "rayAuth": {"existingSecret": ""}}, "rayAuth.existingSecret: the chart makes"
    ),
    "a key of role metrics": Refused(
        {"keys": {"existingSecret": "k"}, "monitoring": {"scrape": "ingress"}}, "a key of role metrics"
    ),
    "a key in the namespace of the monitor": Refused(
        {"monitoring": {"scrape": "ingress", "namespace": "monitoring"}}, "in the namespace of the monitor"
    ),
    "a profile without a file": Refused({"podSecurity": {"seccompProfile": {"type": "Localhost"}}}, "seccompProfile"),
}
