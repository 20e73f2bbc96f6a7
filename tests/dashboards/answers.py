"""Every query of the dashboards and every rule, and whether a Prometheus has an answer to it."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.observing.catalogue import CATALOGUE, PREFIX, Kind
from cluster.offline.dashboards.promql import OR_ZERO
from tests.dashboards.prometheus_server import Prometheus, PrometheusFailed

WINDOW = "2m"
"""Replaces Grafana's windows; a short run lies within it."""
WINDOWS = re.compile(r"\$__(rate_interval|range|interval)\b")
CHOICE = re.compile(r"\$(?!__)\w+|\$\{\w+\}")
LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")
QUERY_RESULT = re.compile(r"query_result\((?P<expression>.+)\)")


@dataclass(frozen=True)
class Question:
    """One query and the panel that has it."""

    dashboard: str
    panel: str
    expression: str
    may_be_empty: bool = False
    """The panel shows 0 where the query has no series."""


class Verdict(StrEnum):
    """What the panel shows."""

    OK = "ok"
    ZERO = "zero"
    """No series, which the panel shows as 0."""
    NO_NUMBER = "NaN"
    """All series are 0 divided by 0."""
    EMPTY = "EMPTY"
    ERROR = "ERROR"


@dataclass(frozen=True)
class Answer:
    """The answer to one question."""

    dashboard: str
    panel: str
    expression: str
    verdict: Verdict
    error: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether the panel shows something right."""
        return self.verdict in (Verdict.OK, Verdict.ZERO)


def questions(dashboards: Sequence[str]) -> list[Question]:
    """All queries of dashboards, given as the text of their files: of panels and of variables, all variables at All."""
    found: list[Question] = []
    for text in dashboards:
        dashboard = json.loads(text)
        title = dashboard["title"]
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                found.append(Question(title, f"variable {variable['name']}", _choice(variable["query"])))
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                expression = substituted(target["expr"])
                whole = expression.removesuffix(OR_ZERO).rstrip()
                found.append(Question(title, panel["title"], whole, may_be_empty=whole != expression))
    return found


def substituted(expression: str) -> str:
    """An expression without Grafana's variables."""
    return CHOICE.sub(".*", WINDOWS.sub(WINDOW, expression))


def answers(prometheus: Prometheus, asked: Sequence[Question], at_s: float | None = None) -> list[Answer]:
    """The answers as of ``at_s`` (Unix seconds), or else each as of now."""
    return [_answer(prometheus, question, at_s) for question in asked]


def rule_answers(prometheus: Prometheus, at_s: float | None = None) -> list[Answer]:
    """The evaluation of each rule: a recorded series must not be empty, an alert's expression may be."""
    found = []
    for rule in prometheus.rules():
        if not rule.healthy:
            found.append(Answer("rules", rule.name, rule.expression, Verdict.ERROR, rule.error or "not evaluated"))
        else:
            expression = rule.expression if rule.is_alert else rule.name
            found.append(_answer(prometheus, Question("rules", rule.name, expression, rule.is_alert), at_s))
    return found


def metrics_without_series(prometheus: Prometheus) -> set[str]:
    """The metrics of the catalogue that have no series."""
    exported = _series_names(prometheus)
    return {
        metric.name
        for metric in CATALOGUE
        if (f"{metric.exported}_count" if metric.kind is Kind.HISTOGRAM else metric.exported) not in exported
    }


def unknown_series(prometheus: Prometheus) -> set[str]:
    """Names of series with our prefix that are not in the catalogue."""
    known = {metric.exported for metric in CATALOGUE}
    return {
        name
        for name in _series_names(prometheus)
        if re.sub(r"_(bucket|sum|count)$", "", name) not in known and name not in known
    }


def _answer(prometheus: Prometheus, question: Question, at_s: float | None) -> Answer:
    verdict, error = Verdict.OK, ""
    try:
        series = prometheus.query(question.expression, at_s)
    except PrometheusFailed as failed:
        verdict, error = Verdict.ERROR, str(failed)
    else:
        if not series:
            verdict = Verdict.ZERO if question.may_be_empty else Verdict.EMPTY
        elif all(math.isnan(one.value) for one in series) and not question.may_be_empty:
            verdict = Verdict.NO_NUMBER
    return Answer(question.dashboard, question.panel, question.expression, verdict, error)


def _series_names(prometheus: Prometheus) -> set[str]:
    found = prometheus.query(f'group by (__name__) ({{__name__=~"{PREFIX}.+"}})')
    return {series.labels["__name__"] for series in found}


def _choice(query: str) -> str:
    query = substituted(query)
    if found := LABEL_VALUES.fullmatch(query):
        return f"count by ({found['label']}) ({found['selector']})"
    if found := QUERY_RESULT.fullmatch(query):
        return found["expression"]
    raise ValueError(f"{query!r} cannot be the query of a variable")
