"""The queries of the dashboards, and the verdicts on the answers of a Prometheus."""

import json
from pathlib import Path

import pytest

from cluster.observing.catalogue import CATALOGUE
from cluster.offline.dashboards.board import Variable
from cluster.offline.dashboards.boards import BOARDS
from cluster.offline.dashboards.grafana import as_json
from tests.dashboards.answers import (
    Question,
    Verdict,
    answers,
    metrics_without_series,
    questions,
    rule_answers,
    substituted,
    unknown_series,
)
from tests.dashboards.prometheus_server import Prometheus, PrometheusFailed, needs_prometheus

RULES = (Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yml").read_text()
NOTHING_SCRAPED = "global: {scrape_interval: 1s, evaluation_interval: 100ms}\nrule_files: [rules.yml]\n"


def test_every_query_of_a_dashboard_is_found_without_grafanas_variables() -> None:
    texts = [as_json(board) for board in BOARDS]
    found = questions(texts)
    targets = sum(len(panel.get("targets", ())) for text in texts for panel in json.loads(text)["panels"])
    assert len(found) == targets + sum(len(board.variables) for board in BOARDS)
    assert {f"variable {variable}" for variable in Variable} <= {one.panel for one in found}
    assert not [one for one in found if "$" in one.expression]


def test_variables_are_all_and_windows_cover_a_short_run() -> None:
    assert substituted('rate(x{model=~"$model"}[$__rate_interval])') == 'rate(x{model=~".*"}[2m])'
    assert substituted("x[$__range]") == "x[2m]"
    assert substituted('x{job="${datasource}"}') == 'x{job=".*"}'


@needs_prometheus
def test_empty_answers_numbers_that_are_none_and_errors_are_distinguished() -> None:
    with Prometheus({"prometheus.yml": NOTHING_SCRAPED, "rules.yml": RULES}) as prometheus:
        asked = {
            "vector(1)": Verdict.OK,
            "vector(0) / 0": Verdict.NO_NUMBER,
            "caesura_replica_up": Verdict.EMPTY,
            "sum(": Verdict.ERROR,
        }
        found = answers(prometheus, [Question("", "", expression) for expression in asked])
        assert [one.verdict for one in found] == list(asked.values())
        assert [one.is_fine for one in found] == [True, False, False, False]
        [zero] = answers(prometheus, [Question("", "", "caesura_replica_up", may_be_empty=True)])
        assert zero.verdict is Verdict.ZERO and zero.is_fine
        assert metrics_without_series(prometheus) == {metric.name for metric in CATALOGUE}
        assert unknown_series(prometheus) == set()
        assert not [one for one in rule_answers(prometheus) if one.is_fine and one.panel.startswith("caesura:")]


@needs_prometheus
def test_a_configuration_that_prometheus_rejects_is_an_error() -> None:
    with pytest.raises(PrometheusFailed, match="does not start"), Prometheus({"prometheus.yml": "nonsense: 1\n"}):
        pass
