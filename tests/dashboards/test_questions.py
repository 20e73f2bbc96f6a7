"""What is asked for a dashboard, and what an answer is worth; the rest is `tests/serving/test_observe.py`'s."""

import json
import shutil
from pathlib import Path

import pytest

from cluster.dashboards.board import Variable
from cluster.dashboards.boards import BOARDS
from cluster.dashboards.drawing import as_json
from cluster.proof.answers import Verdict, answered, rules_answered, unknown_names, without_series
from cluster.proof.goodput import Comparison
from cluster.proof.prometheus import Prometheus, PrometheusFailed
from cluster.proof.questions import Question, questions, substituted

RULES = (Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yml").read_text()
NOTHING_SCRAPED = "global: {scrape_interval: 1s, evaluation_interval: 100ms}\nrule_files: [rules.yml]\n"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)


def test_every_query_of_a_dashboard_is_asked_without_grafanas_variables() -> None:
    texts = [as_json(board) for board in BOARDS]
    asked = questions(texts)
    targets = sum(len(panel.get("targets", ())) for text in texts for panel in json.loads(text)["panels"])
    choices = sum(len(board.variables) for board in BOARDS)
    assert len(asked) == targets + choices
    assert {f"variable {variable}" for variable in Variable} <= {one.panel for one in asked}
    assert not [one for one in asked if "$" in one.expression]


def test_variables_are_all_and_windows_cover_a_short_run() -> None:
    assert substituted('rate(x{model=~"$model"}[$__rate_interval])') == 'rate(x{model=~".*"}[2m])'
    assert substituted("x[$__range]") == "x[2m]"
    assert substituted('x{job="${datasource}"}') == 'x{job=".*"}'


def test_goodput_agrees_within_one_percent_or_by_one_and_what_was_offered_exactly() -> None:
    assert Comparison("", 1000.0, 990.0).agrees
    assert not Comparison("", 1000.0, 989.0).agrees
    assert Comparison("", 15.0, 16.0).agrees
    assert not Comparison("", 15.0, 17.0).agrees
    assert not Comparison("", 1000.0, 999.0, exact=True).agrees
    assert Comparison("", 0.0, 0.0, exact=True).error == 0.0


@needs_prometheus
def test_empty_answers_numbers_that_are_none_and_errors_are_told_apart() -> None:
    with Prometheus({"prometheus.yml": NOTHING_SCRAPED, "rules.yml": RULES}) as prometheus:
        asked = {
            "vector(1)": Verdict.OK,
            "vector(0) / 0": Verdict.NO_NUMBER,
            "caesura_running": Verdict.EMPTY,
            "sum(": Verdict.ERROR,
        }
        answers = answered(prometheus, [Question("", "", expression) for expression in asked])
        assert [one.verdict for one in answers] == list(asked.values())
        silent = answered(prometheus, [Question("", "", "caesura_running", may_be_silent=True)])
        assert [(one.verdict, one.verdict.will_do) for one in silent] == [(Verdict.SILENT, True)]
        assert "caesura_running" in without_series(prometheus)
        assert unknown_names(prometheus) == []
        assert {one.verdict for one in rules_answered(prometheus) if one.where == "rules"} <= {
            Verdict.EMPTY,
            Verdict.ERROR,
        }


@needs_prometheus
def test_a_configuration_that_prometheus_does_not_take_is_told() -> None:
    with pytest.raises(PrometheusFailed, match="does not start"), Prometheus({"prometheus.yml": "nonsense: 1\n"}):
        pass
