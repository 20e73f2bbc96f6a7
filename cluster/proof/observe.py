"""A real cluster under load, scraped by a real Prometheus: does every dashboard, rule and number hold?"""

import asyncio
import time
from dataclasses import dataclass

from cluster.bench.runner import BenchProgress, run_bench
from cluster.bench.settings import BenchSettings
from cluster.bench.summary import by_policy
from cluster.bench.workload import Shaping
from cluster.clock import Clock, MonotonicClock
from cluster.dashboards import ray_cluster, scraping
from cluster.dashboards.rendering import rendered
from cluster.demo.server_side import run_programs
from cluster.goodput import Slo
from cluster.proof.answers import Answer, answered, rules_answered, unknown_names, without_series
from cluster.proof.goodput import Comparison, compared, settled
from cluster.proof.moment import gapless_moment
from cluster.proof.prometheus import Prometheus, PrometheusFailed
from cluster.proof.questions import questions
from cluster.serving import LocalCluster

INTERVAL = "3s"
"""Of scrapes and of rules: a short run has few of either. A busy machine needs a second for a page."""
SCRAPED_WITHIN_S = 30.0
GAPLESS_S = 12.0
GAPLESS_WITHIN_S = 120.0
TIMES = 2
"""The programs with tools run. What is told once, with all that it ever counts, has no rate."""
POLL_S = 0.2

SCALE_TOOLS = 0.05
MAX_CONTEXT_TOKENS = 3000
MAX_TURNS = 6


@dataclass(frozen=True, slots=True)
class Load:
    """What the cluster is given to do."""

    rate_per_s: float = 1.0
    duration_s: float = 100.0
    seed: int = 0
    ttft_s: float = 1.0
    """The SLO, which has to be the cluster's, too."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What came out."""

    answers: tuple[Answer, ...]
    """Of a Prometheus that scrapes the nodes."""
    through_ingress: tuple[Answer, ...]
    """Of one that sees the ingress's `/metrics` only, without the dashboard of Ray's own metrics."""
    comparisons: tuple[Comparison, ...]
    silent_metrics: tuple[str, ...]
    """Of the catalogue, those without any series."""
    unknown_metrics: tuple[str, ...]
    """Series with our prefix that the catalogue does not have."""

    @property
    def complaints(self) -> list[str]:
        """What must not be so."""
        return [
            *(_complaint(one, "") for one in self.answers if not one.verdict.will_do),
            *(_complaint(one, " through the ingress") for one in self.through_ingress if not one.verdict.will_do),
            *(
                f"{one.what}: the client measured {one.client:.4g}, Prometheus has {one.prometheus:.4g}"
                for one in self.comparisons
                if not one.agrees
            ),
            *(f"{name} is not in the catalogue" for name in self.unknown_metrics),
        ]


def _complaint(answer: Answer, how: str) -> str:
    return f"{answer.where} / {answer.what}{how}: {answer.verdict} {answer.told}".rstrip()


def files(scrape: str) -> dict[str, str]:
    """What the folder of our Prometheus gets: its configuration, and the committed rules."""
    return {"prometheus.yml": scrape, scraping.RULES_FILE: rendered()[f"prometheus/{scraping.RULES_FILE}"]}


def dashboards(*, nodes: bool) -> list[str]:
    """The dashboards' files; without ``nodes`` those that a Prometheus can fill that sees the ingress only."""
    return [
        text
        for path, text in rendered().items()
        if path.startswith("grafana/") and (nodes or ray_cluster.BOARD.uid not in path)
    ]


def observe(cluster: LocalCluster, load: Load, progress: BenchProgress, clock: Clock | None = None) -> Findings:
    """Scrape ``cluster``, give it load, and ask every question.

    Raises:
        PrometheusFailed: it does not start, or cannot scrape.
    """
    clock = clock or MonotonicClock()
    ingress = f"{cluster.config.http.host}:{cluster.config.http.port}"
    with (
        Prometheus(files(scraping.from_nodes(cluster.metrics_addresses, interval=INTERVAL)), clock) as prometheus,
        Prometheus(files(scraping.through_ingress(ingress, interval=INTERVAL)), clock) as outside,
    ):
        _await_scraped(prometheus, clock)
        _await_scraped(outside, clock)
        before = settled(prometheus, clock)
        settings = BenchSettings(
            url=cluster.url,
            shaping=Shaping(scale_tools=SCALE_TOOLS, max_context=MAX_CONTEXT_TOKENS, max_turns=MAX_TURNS),
            rate_per_s=load.rate_per_s,
            duration_s=load.duration_s,
            seed=load.seed,
            slo=Slo(load.ttft_s),
        )
        result = asyncio.run(run_bench(settings, progress))
        after = settled(prometheus, clock)
        if cluster.config.tools.defined:
            for _ in range(TIMES):
                asyncio.run(run_programs(cluster.url, cluster.config.model.id))
                settled(prometheus, clock)
        return Findings(
            answers=_answers(prometheus, clock, nodes=True),
            through_ingress=_answers(outside, clock, nodes=False),
            comparisons=tuple(compared(before, after, by_policy(result)[0].goodput)),
            silent_metrics=tuple(without_series(prometheus)),
            unknown_metrics=tuple(unknown_names(prometheus)),
        )


def _answers(prometheus: Prometheus, clock: Clock, *, nodes: bool) -> tuple[Answer, ...]:
    at_s = gapless_moment(prometheus, clock, over_s=GAPLESS_S, within_s=GAPLESS_WITHIN_S)
    asked = questions(dashboards(nodes=nodes))
    return (*answered(prometheus, asked, at_s), *rules_answered(prometheus, at_s))


def _await_scraped(prometheus: Prometheus, clock: Clock) -> None:
    deadline_s = clock.now_s() + SCRAPED_WITHIN_S
    while not prometheus.scraped():
        if clock.now_s() > deadline_s:
            raise PrometheusFailed(f"not every target could be scraped within {SCRAPED_WITHIN_S:g} s")
        time.sleep(POLL_S)
