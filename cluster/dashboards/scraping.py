"""What Prometheus scrapes, and what becomes of the names: Ray's prefix goes, vLLM's get their own name again."""

from collections.abc import Sequence
from typing import Any

from cluster.dashboards.promql import PROCESS
from cluster.dashboards.written import as_yaml

RAY_TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"
"""Where the head node of a Ray cluster keeps the addresses of its nodes' metrics, as Ray documents it."""

RULES_FILE = "rules.yml"
JOB = "caesura"
INTERVAL = "15s"

RELABELLING: tuple[dict[str, Any], ...] = (
    {"source_labels": ["__name__"], "regex": "ray_(.+)", "target_label": "__name__", "replacement": "$1"},
    {"source_labels": ["__name__"], "regex": "vllm_(.+)", "target_label": "__name__", "replacement": "vllm:$1"},
    # Ray's id of a process has 56 letters; these are enough to tell one from the other.
    {
        "source_labels": ["__name__", "WorkerId"],
        "regex": "(?:caesura_|vllm:).+;(.{8}).*",
        "target_label": PROCESS,
        "replacement": "$1",
    },
    {"regex": "otel_scope_.+|Version", "action": "labeldrop"},
)


def from_nodes(targets: Sequence[str] | None = None, *, interval: str = INTERVAL) -> str:
    """The configuration that scrapes each node of a Ray cluster: `host:port` of each, or else those of Ray's file."""
    found = (
        {"static_configs": [{"targets": list(targets)}]} if targets else {"file_sd_configs": [{"files": [RAY_TARGETS]}]}
    )
    return _configuration({**found, "metrics_path": "/metrics"}, interval)


def through_ingress(address: str, *, interval: str = INTERVAL) -> str:
    """The configuration that scrapes the whole cluster through the ingress at ``address`` (`host:port`)."""
    return _configuration({"static_configs": [{"targets": [address]}], "metrics_path": "/metrics"}, interval)


def _configuration(found: dict[str, Any], interval: str) -> str:
    data = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [RULES_FILE],
        "scrape_configs": [{"job_name": JOB, **found, "metric_relabel_configs": list(RELABELLING)}],
    }
    return as_yaml(data)
