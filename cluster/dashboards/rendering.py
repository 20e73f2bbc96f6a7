"""The files of `deploy/grafana` and `deploy/prometheus`."""

from collections.abc import Mapping

from cluster.dashboards import alerts, recordings, scraping
from cluster.dashboards.boards import BOARDS
from cluster.dashboards.drawing import as_json
from cluster.dashboards.rule import RUNBOOKS, as_yaml

INGRESS = "localhost:8000"
"""Where `prometheus-ingress.yml` looks for one; for the reader to change."""


def rendered(*, objective: float = alerts.OBJECTIVE, runbooks_url: str = RUNBOOKS) -> Mapping[str, str]:
    """By path below `deploy/`, the file's text."""
    files = {f"grafana/{board.uid}.json": as_json(board) for board in BOARDS}
    rules = as_yaml((*recordings.GROUPS, *alerts.groups(objective)), runbooks_url)
    return {
        **files,
        f"prometheus/{scraping.RULES_FILE}": rules,
        "prometheus/prometheus.yml": scraping.from_nodes(),
        "prometheus/prometheus-ingress.yml": scraping.through_ingress(INGRESS),
    }
