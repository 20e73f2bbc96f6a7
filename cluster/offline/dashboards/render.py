"""Renders the files of `deploy/grafana` and `deploy/prometheus`: dashboards, rules and scrape configurations."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cluster.offline.dashboards import rules
from cluster.offline.dashboards.boards import BOARDS
from cluster.offline.dashboards.grafana import as_json
from cluster.offline.dashboards.promql import PROCESS

HEADER = "# Written by `caesura dashboards render`; change cluster/offline/dashboards/ instead.\n"
INGRESS = "localhost:8000"
"""Address in `prometheus-ingress.yml`, which operators replace with their own."""
RAY_TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"
"""File with the metrics addresses of all nodes on the head node of a Ray cluster, as documented by Ray."""
RULES_FILE = "rules.yml"
INTERVAL = "15s"

RELABELLING: tuple[dict[str, Any], ...] = (
    # Ray's prefix is removed, and vLLM's names get their colon back.
    {"source_labels": ["__name__"], "regex": "ray_(.+)", "target_label": "__name__", "replacement": "$1"},
    {"source_labels": ["__name__"], "regex": "vllm_(.+)", "target_label": "__name__", "replacement": "vllm:$1"},
    # Ray's id of a process has 56 letters. Eight of them are enough to tell processes apart.
    {
        "source_labels": ["__name__", "WorkerId"],
        "regex": "(?:caesura_|vllm:).+;(.{8}).*",
        "target_label": PROCESS,
        "replacement": "$1",
    },
    {"regex": "otel_scope_.+|Version", "action": "labeldrop"},
)


def rendered(*, objective: float = rules.OBJECTIVE, runbooks_url: str = rules.RUNBOOKS) -> Mapping[str, str]:
    """Return the text of each file by its path below `deploy/`."""
    all_rules = rules.as_data((*rules.RECORDINGS, *rules.alerts(objective)), runbooks_url)
    return {
        **{f"grafana/{board.uid}.json": as_json(board) for board in BOARDS},
        f"prometheus/{RULES_FILE}": _as_yaml(all_rules),
        "prometheus/prometheus.yml": scrape_nodes(),
        "prometheus/prometheus-ingress.yml": scrape_ingress(INGRESS),
    }


def scrape_nodes(targets: Sequence[str] | None = None, *, interval: str = INTERVAL) -> str:
    """Return the configuration that scrapes the nodes of a Ray cluster at ``targets``, or else those of Ray's file."""
    found = (
        {"static_configs": [{"targets": list(targets)}]} if targets else {"file_sd_configs": [{"files": [RAY_TARGETS]}]}
    )
    return _scrape(found, interval)


def scrape_ingress(address: str, *, interval: str = INTERVAL) -> str:
    """Return the configuration that scrapes the whole cluster through the ingress at ``address`` (`host:port`)."""
    return _scrape({"static_configs": [{"targets": [address]}]}, interval)


def _scrape(found: dict[str, Any], interval: str) -> str:
    job = {"job_name": "caesura", **found, "metrics_path": "/metrics", "metric_relabel_configs": list(RELABELLING)}
    return _as_yaml(
        {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [RULES_FILE],
            "scrape_configs": [job],
        }
    )


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes strings of several lines as literal blocks."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


def _as_yaml(data: Any) -> str:
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=10_000, default_flow_style=False)
    return HEADER + text
