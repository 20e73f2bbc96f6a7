"""Writes caesura/values.schema.json: the chart's values, closed, and Caesura's configuration as it describes itself.

`python helm/values_schema.py` writes it, `--check` only tells whether it is current. Helm 3.10 reads draft-07.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cluster.config.loader import config_schema

TARGET = Path(__file__).parent / "caesura" / "values.schema.json"

Schema = dict[str, Any]

DECIDED_BY_CHART = {
    "RedisConfig": ("url", "path"),
    "AuthConfig": ("file",),
    "HttpConfig": ("host", "port"),
}
"""Keys of the configuration that the chart sets itself, by their section."""

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
SUBDOMAIN: Schema = {
    "type": "string",
    "maxLength": 253,
    "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)?$",
}
"""The name of an object such as a Secret (RFC 1123), or empty."""
LABEL: Schema = {"type": "string", "maxLength": 63, "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"}
"""A part of such a name, for example a namespace, or empty."""
SECRET_ENTRY: Schema = {"type": "string", "maxLength": 253, "pattern": "^[-._a-zA-Z0-9]*$"}
HOST: Schema = {
    "type": "string",
    "maxLength": 253,
    "pattern": r"^((\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)?$",
}
"""A name of hosts, which may begin with a wildcard, or empty."""
LABELS: Schema = {
    "type": "object",
    "propertyNames": {
        "pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        "not": {"pattern": r"^(app\.kubernetes\.io|helm\.sh|ray\.io)/"},
    },
    "additionalProperties": {
        "type": "string",
        "maxLength": 63,
        "pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
    },
}
"""Labels beside those that the chart, Helm and KubeRay set themselves."""
KUBERNETES_NAME: Schema = {"type": "string", "pattern": "^([a-z]([a-z0-9-]{0,61}[a-z0-9])?)?$"}
"""The beginning of the names of resources, services among them (RFC 1035). Empty: the chart's own."""
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|m|k)?$"}
CIDR: Schema = {"type": "string", "pattern": r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"}
DURATION: Schema = {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"}
DIGEST: Schema = {"type": "string", "pattern": r"^(sha256:[0-9a-f]{64})?$"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
KUBERNETES: Schema = {"type": "object"}
"""What is Kubernetes' own, and checked there."""
KUBERNETES_LIST: Schema = {"type": "array", "items": KUBERNETES}


def closed(properties: dict[str, Schema], *required: str) -> Schema:
    """An object that has these keys and no others."""
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def one_of(*values: str) -> Schema:
    """A string of these."""
    return {"type": "string", "enum": list(values)}


def list_of(schema: Schema, **more: Any) -> Schema:
    """Return the schema of an array whose items have ``schema``. ``more`` are further keywords, such as minItems."""
    return {"type": "array", "items": schema, **more}


RESOURCES = closed(
    {
        side: {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
        for side in ("requests", "limits")
    },
    "requests",
    "limits",
)
IMAGE = closed(
    {
        "repository": NAME,
        "tag": TEXT,
        "digest": DIGEST,
        "pullPolicy": one_of("Always", "IfNotPresent", "Never"),
    },
    "repository",
)
PLACE: dict[str, Schema] = {
    "nodeSelector": TEXTS,
    "tolerations": KUBERNETES_LIST,
    "affinity": KUBERNETES,
    "priorityClassName": SUBDOMAIN,
    "schedulerName": SUBDOMAIN,
}
POD: dict[str, Schema] = {
    **PLACE,
    "topologySpreadConstraints": KUBERNETES_LIST,
    "podAnnotations": TEXTS,
    "podLabels": LABELS,
    "resources": RESOURCES,
    "sharedMemory": QUANTITY,
}
GROUP = closed(
    {
        **POD,
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": POSITIVE,
        "gpus": COUNT,
        "gpuResource": NAME,
        "runtimeClassName": SUBDOMAIN,
    },
    "replicas",
    "resources",
)
SECRET_KEY = closed({"name": SUBDOMAIN, "key": SECRET_ENTRY})
SECCOMP: Schema = {
    **closed({"type": one_of("RuntimeDefault", "Localhost"), "localhostProfile": NAME}, "type"),
    "if": {"properties": {"type": {"const": "Localhost"}}},
    "then": {"required": ["localhostProfile"]},
    "else": {"not": {"required": ["localhostProfile"]}},
}
VARIABLE = {"type": "string", "pattern": "^[-._a-zA-Z][-._a-zA-Z0-9]*$"}
ENV = list_of(
    {
        **closed({"name": VARIABLE, "value": TEXT, "valueFrom": KUBERNETES}, "name"),
        "not": {"required": ["value", "valueFrom"]},
    }
)
VOLUMES = list_of({"type": "object", "required": ["name"], "properties": {"name": {**LABEL, "minLength": 1}}})
MOUNTS = list_of(
    {"type": "object", "required": ["name", "mountPath"], "properties": {"name": NAME, "mountPath": NAME}},
)
PORTS = list_of(PORT)
KEY_ENTRY = closed(
    {
        "tenant": {"type": "string", "pattern": r"^[A-Za-z0-9][A-Za-z0-9._-]*$"},
        "name": TEXT,
        "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
        "roles": list_of(one_of("serve", "metrics", "admin"), minItems=1),
        "expires": NAME,
    },
    "tenant",
    "sha256",
)


def _cluster() -> dict[str, Schema]:
    return {
        "image": IMAGE,
        "imagePullSecrets": list_of(closed({"name": {**SUBDOMAIN, "minLength": 1}}, "name")),
        "rayVersion": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
        "env": ENV,
        "envFrom": KUBERNETES_LIST,
        "extraVolumes": VOLUMES,
        "extraVolumeMounts": MOUNTS,
        "head": closed(POD, "resources"),
        "workerGroups": {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]([a-z0-9-]{0,28}[a-z0-9])?$"},
            "additionalProperties": GROUP,
        },
        "drain": closed({"marginSeconds": COUNT, "replacementSeconds": COUNT}),
        "upgrade": closed(
            {
                "strategy": one_of("NewCluster", "NewClusterWithIncrementalUpgrade", "None"),
                "incremental": closed(
                    {
                        "gatewayClassName": SUBDOMAIN,
                        "stepSizePercent": {"type": "integer", "minimum": 1, "maximum": 100},
                        "intervalSeconds": POSITIVE,
                        "maxSurgePercent": {"type": "integer", "minimum": 1, "maximum": 100},
                    }
                ),
            }
        ),
        "gcsFaultTolerance": closed({"enabled": FLAG}),
        "serviceAccount": closed({"annotations": TEXTS}),
        "podSecurity": closed(
            {
                "runAsUser": POSITIVE,
                "runAsGroup": POSITIVE,
                "fsGroup": POSITIVE,
                "seccompProfile": SECCOMP,
            }
        ),
        "podDisruptionBudgets": closed(
            {
                "enabled": FLAG,
                "workersMaxUnavailable": COUNT,
                "redisMaxUnavailable": COUNT,
            }
        ),
    }


def _storage() -> dict[str, Schema]:
    return {
        "redis": closed(
            {
                **PLACE,
                "bundled": FLAG,
                "image": IMAGE,
                "existingSecret": SUBDOMAIN,
                "external": closed(
                    {
                        "host": TEXT,
                        "port": PORT,
                        "database": COUNT,
                        "tls": FLAG,
                        "caSecret": SECRET_KEY,
                        "password": FLAG,
                        "username": TEXT,
                        "cidrs": list_of(CIDR),
                        "peers": KUBERNETES_LIST,
                    },
                ),
                "resources": RESOURCES,
                "persistence": closed({"enabled": FLAG, "size": QUANTITY, "storageClassName": SUBDOMAIN}),
            }
        ),
        "kvVolume": {"type": "object"},
        "modelCache": closed(
            {
                "enabled": FLAG,
                "existingClaim": SUBDOMAIN,
                "size": QUANTITY,
                "storageClassName": SUBDOMAIN,
                "accessMode": one_of("ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"),
                "readOnly": FLAG,
                "download": closed(
                    {
                        "enabled": FLAG,
                        "cidrs": list_of(CIDR),
                        "ports": list_of(PORT, minItems=1),
                        "peers": KUBERNETES_LIST,
                        "env": ENV,
                        "existingSecret": SUBDOMAIN,
                        "resources": RESOURCES,
                    }
                ),
            }
        ),
    }


def _reach() -> dict[str, Schema]:
    tool_egress = closed({"cidr": CIDR, "ports": list_of(PORT), "except": list_of(CIDR)}, "cidr")
    return {
        "generateSecrets": one_of("auto", "always"),
        "keys": closed({"enabled": FLAG, "existingSecret": SUBDOMAIN, "entries": list_of(KEY_ENTRY)}),
        "rayAuth": closed({"enabled": FLAG, "existingSecret": SUBDOMAIN}),
        "service": closed(
            {
                "type": one_of("ClusterIP", "NodePort", "LoadBalancer"),
                "loadBalancerClass": TEXT,
                "annotations": TEXTS,
            }
        ),
        "ingress": closed(
            {
                "enabled": FLAG,
                "className": SUBDOMAIN,
                "controller": one_of("", "nginx"),
                "host": HOST,
                "tlsSecret": SUBDOMAIN,
                "insecure": FLAG,
                "annotations": TEXTS,
            }
        ),
        "httpRoute": closed(
            {
                "enabled": FLAG,
                "hostnames": list_of({**HOST, "minLength": 1}),
                "parentRefs": KUBERNETES_LIST,
                "gateway": closed({"create": FLAG, "className": SUBDOMAIN, "tlsSecret": SUBDOMAIN}),
            }
        ),
        "inferencePool": closed(
            {
                "enabled": FLAG,
                "endpointPicker": closed(
                    {"name": SUBDOMAIN, "port": PORT, "failureMode": one_of("FailOpen", "FailClose")}
                ),
            }
        ),
        "networkPolicy": closed(
            {
                "enabled": FLAG,
                **dict.fromkeys(("apiFrom", "metricsFrom", "operatorFrom", "extraEgress"), KUBERNETES_LIST),
                # Kubernetes takes an empty list of peers for all peers.
                "dns": {**KUBERNETES_LIST, "minItems": 1},
                "dnsPorts": list_of(PORT, minItems=1),
                "toolEgress": list_of(tool_egress),
                "kubernetesApi": closed(
                    {"cidrs": list_of(CIDR), "peers": KUBERNETES_LIST, "ports": list_of(PORT, minItems=1)}
                ),
            }
        ),
    }


def _load() -> dict[str, Schema]:
    return {
        "autoscaling": closed(
            {
                "enabled": FLAG,
                "minReplicas": POSITIVE,
                "maxReplicas": POSITIVE,
                "idleTimeoutSeconds": POSITIVE,
                "prometheusAddress": {"type": "string", "pattern": "^https?://"},
                "turnsPerReplica": POSITIVE,
                "notGoodRatio": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                "pollingIntervalSeconds": POSITIVE,
                "scaleDownStabilizationSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
                "fallback": closed({"failureThreshold": POSITIVE, "replicas": POSITIVE}),
                "seatResources": RESOURCES,
            }
        ),
        "monitoring": closed(
            {
                "scrape": one_of("none", "pods", "ingress"),
                "interval": DURATION,
                "namespace": LABEL,
                "labels": LABELS,
                "keySecret": SECRET_KEY,
                "rules": FLAG,
                "runbooksUrl": {"type": "string", "pattern": "^(https?://[^#]+)?$"},
                "dashboards": FLAG,
                "dashboardLabels": {**LABELS, "minProperties": 1},
            }
        ),
        "tests": closed({"keySecret": SECRET_KEY}),
    }


def values_schema() -> Schema:
    """Return the JSON schema of the chart's values.

    `config` has the keys of the configuration that the chart does not decide itself.
    """
    config = config_schema()
    definitions = {name: _without_titles(definition) for name, definition in config.pop("$defs").items()}
    for section, keys in DECIDED_BY_CHART.items():
        for key in keys:
            del definitions[section]["properties"][key]
    config.pop("$schema")
    own = {
        "nameOverride": LABEL,
        "fullnameOverride": KUBERNETES_NAME,
        "namespaceOverride": LABEL,
        "commonLabels": LABELS,
        "config": _without_titles(config),
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart caesura",
        **closed({**own, **_cluster(), **_storage(), **_reach(), **_load(), "global": KUBERNETES}),
        "$defs": definitions,
    }


def _without_titles(schema: Any) -> Any:
    """Also without what stands beside a reference, which draft-07 ignores."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {"$ref": schema["$ref"]}
    # A property may be called title; as an annotation it is a string.
    return {key: _without_titles(part) for key, part in schema.items() if key != "title" or isinstance(part, dict)}


def main() -> None:
    """Write, or check."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="write nothing; exit status 1 if it is not current")
    text = json.dumps(values_schema(), indent=1) + "\n"
    if not arguments.parse_args().check:
        TARGET.write_text(text)
    elif not TARGET.exists() or TARGET.read_text() != text:
        sys.exit(f"{TARGET} is not current: python helm/values_schema.py")


if __name__ == "__main__":
    main()
