"""What a Prometheus answers to the questions, and whether that will do."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.metrics import CATALOGUE, PREFIX, Kind
from cluster.proof.prometheus import Prometheus, PrometheusFailed, Rule
from cluster.proof.questions import Question


class Verdict(StrEnum):
    """What an answer is worth."""

    OK = "ok"
    SILENT = "silent"
    """No series, where none need be: the panel shows 0."""
    NO_NUMBER = "NaN"
    """Series, but none of them has a number: nothing over nothing."""
    EMPTY = "EMPTY"
    """No series: the panel would show nothing."""
    ERROR = "ERROR"

    @property
    def will_do(self) -> bool:
        """A reader of the panel sees something that is right."""
        return self in (Verdict.OK, Verdict.SILENT)


@dataclass(frozen=True, slots=True)
class Answer:
    """One question answered."""

    where: str
    what: str
    expression: str
    series: int
    verdict: Verdict
    told: str = ""
    """The error, or of an alert its state."""


def answered(prometheus: Prometheus, questions: Sequence[Question], at_s: float | None = None) -> list[Answer]:
    """Ask them all, as of ``at_s`` (Unix seconds) or else each as of its own now."""
    return [_ask(prometheus, one.dashboard, one.panel, one.expression, one.may_be_silent, at_s) for one in questions]


def rules_answered(prometheus: Prometheus, at_s: float | None = None) -> list[Answer]:
    """Each rule: a recording rule has to have series, an alert's expression has to be evaluated without an error."""
    return [_rule(prometheus, rule, at_s) for rule in prometheus.rules()]


def _rule(prometheus: Prometheus, rule: Rule, at_s: float | None) -> Answer:
    if not rule.healthy:
        return Answer("rules", rule.name, rule.expression, 0, Verdict.ERROR, rule.error or "not evaluated yet")
    if rule.state:
        found = _ask(prometheus, "alerts", rule.name, rule.expression, True, at_s)
        return Answer(found.where, found.what, found.expression, found.series, found.verdict, rule.state)
    return _ask(prometheus, "rules", rule.name, rule.name, False, at_s)


def _ask(
    prometheus: Prometheus, where: str, what: str, expression: str, may_be_silent: bool, at_s: float | None
) -> Answer:
    try:
        series = prometheus.query(expression, at_s)
    except PrometheusFailed as error:
        return Answer(where, what, expression, 0, Verdict.ERROR, str(error))
    if not series:
        verdict = Verdict.SILENT if may_be_silent else Verdict.EMPTY
    elif all(math.isnan(one.value) for one in series) and not may_be_silent:
        verdict = Verdict.NO_NUMBER
    else:
        verdict = Verdict.OK
    return Answer(where, what, expression, len(series), verdict)


def without_series(prometheus: Prometheus) -> list[str]:
    """The metrics of the catalogue that nobody has told yet, by their exported names."""
    there = {
        series.labels["__name__"] for series in prometheus.query(f'group by (__name__) ({{__name__=~"{PREFIX}.+"}})')
    }
    wanted = {
        f"{metric.exported}_count" if metric.kind is Kind.HISTOGRAM else metric.exported: metric.exported
        for metric in CATALOGUE
    }
    return sorted(exported for name, exported in wanted.items() if name not in there)


def unknown_names(prometheus: Prometheus) -> list[str]:
    """Series with our prefix that the catalogue does not have."""
    known = {metric.exported for metric in CATALOGUE}
    there = {
        series.labels["__name__"] for series in prometheus.query(f'group by (__name__) ({{__name__=~"{PREFIX}.+"}})')
    }
    return sorted(
        name for name in there if re.sub(r"_(bucket|sum|count)$", "", name) not in known and name not in known
    )
