"""A real cluster under load and real Prometheuses: every panel, rule and alert has an answer, and counts are right."""

import asyncio
import time

import pytest

from cluster.core.slo import Slo
from cluster.local.cluster import LocalCluster
from cluster.observing import catalogue as m
from cluster.offline.bench.results import by_policy
from cluster.offline.bench.runner import Silent, run_bench
from cluster.offline.bench.settings import BenchSettings
from cluster.offline.bench.workload import Shaping
from cluster.offline.dashboards.engine_boards import RAY
from cluster.offline.dashboards.promql import select
from cluster.offline.dashboards.render import RULES_FILE, rendered, scrape_ingress, scrape_nodes
from cluster.offline.demo.server_side import run_programs
from tests.dashboards.answers import Answer, answers, metrics_without_series, questions, rule_answers, unknown_series
from tests.dashboards.prometheus_server import Prometheus, needs_prometheus, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), needs_prometheus]

INTERVAL = "3s"
"""Of scrapes and rules, since the run is short. A busy machine takes a second per page."""
SCRAPED_WITHIN_S = 30.0
GAPLESS_S, GAPLESS_WITHIN_S = 12.0, 120.0
STILL_S, SETTLED_WITHIN_S = 18.0, 60.0
"""Counters that have not changed for so long are final: Ray reports metrics every ten seconds."""
RUNS = 2
"""Of the programs with tools. A counter that is reported once, with its final value, has no rate."""
COUNTED = {
    "programs": f"last_over_time({select(m.PROGRAMS, over='1m')})",
    "turns": f"last_over_time({select(m.REQUESTS, over='1m')})",
}
"""A failed scrape takes a series away until the next one."""
RARE = {
    # One ingress needs no shared verdicts, reads no nodes here, and nothing fails.
    "scrape_failures",
    "store_failures",
    "degraded_decisions",
    # Nothing is predicted, rejected, or taken over in this configuration.
    "predictions",
    "prediction_seconds",
    "predictions_compared",
    "prediction_absolute_error",
    "prediction_actual",
    "requests_rejected",
    "scheduler_events",
    # No batch runs, unless an earlier test of this cluster had one.
    "batch_lines",
    # The number of replicas is fixed.
    "replicas_removed",
    # No request has a part without effect, and none is refused.
    "ignored_request_parts",
    "http_refusals",
}
"""Metrics that need not have a series in this run."""


def prometheus(scrape: str) -> Prometheus:
    return Prometheus({"prometheus.yml": scrape, RULES_FILE: rendered()[f"prometheus/{RULES_FILE}"]})


def settled(server: Prometheus) -> dict[str, float]:
    """The counters once they no longer change."""
    counts: dict[str, float] = {}
    since_s = time.monotonic()

    def still() -> bool:
        nonlocal counts, since_s
        now = {what: server.total(expression) for what, expression in COUNTED.items()}
        if now != counts:
            counts, since_s = now, time.monotonic()
        return time.monotonic() - since_s >= STILL_S

    until(still, SETTLED_WITHIN_S + STILL_S, "counters no longer change")
    return counts


def all_answers(server: Prometheus, *, nodes: bool) -> list[Answer]:
    """Of every query and rule; without ``nodes`` except those of Ray's own metrics."""
    boards = [
        text for path, text in rendered().items() if path.startswith("grafana/") and (nodes or RAY.uid not in path)
    ]
    at_s = server.gapless_moment(GAPLESS_S, GAPLESS_WITHIN_S)
    return [*answers(server, questions(boards), at_s), *rule_answers(server, at_s)]


def test_every_panel_and_rule_has_an_answer_and_counts_are_the_client_s(cluster: LocalCluster) -> None:
    ingress = f"{cluster.config.http.host}:{cluster.config.http.port}"
    with (
        prometheus(scrape_nodes(cluster.metrics_addresses, interval=INTERVAL)) as inside,
        prometheus(scrape_ingress(ingress, interval=INTERVAL)) as outside,
    ):
        for server in (inside, outside):
            until(server.scraped, SCRAPED_WITHIN_S, "every target is scraped")
        before = settled(inside)
        settings = BenchSettings(
            url=cluster.url,
            shaping=Shaping(scale_tools=0.05, max_context=3000, max_turns=6),
            rate_per_s=2.0,
            duration_s=6.0,
            seed=0,
            slo=Slo(ttft_s=1.0),
        )
        client = by_policy(asyncio.run(run_bench(settings, Silent())))[0].goodput
        after = settled(inside)
        for _ in range(RUNS):
            asyncio.run(run_programs(cluster.url, cluster.config.model.id))
            settled(inside)
        found = [*all_answers(inside, nodes=True), *all_answers(outside, nodes=False)]
        assert not (wrong := [one for one in found if not one.is_fine]), "\n".join(map(str, wrong))
        assert unknown_series(inside) == set()
        assert metrics_without_series(inside) - RARE == set()
    counted = {what: after[what] - before[what] for what in COUNTED}
    assert counted == {"programs": client.offered_programs, "turns": client.offered_requests}
