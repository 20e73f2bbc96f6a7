"""Every query of the dashboards, as Grafana would send it with all variables at `All`."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.dashboards.promql import OR_ZERO

WINDOW = "2m"
"""In place of Grafana's windows: so long that a short run is all in it."""

VARIABLES = {
    "$__rate_interval": WINDOW,
    "$__range": WINDOW,
    "$__interval": WINDOW,
}
CHOICE = re.compile(r"\$(?!__)\w+|\$\{\w+\}")
LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")
QUERY_RESULT = re.compile(r"query_result\((?P<expression>.+)\)")


@dataclass(frozen=True, slots=True)
class Question:
    """One query and where it stands."""

    dashboard: str
    panel: str
    expression: str
    """What has to have a series."""
    may_be_silent: bool = False
    """The panel shows 0 where this has none: nothing of the kind has happened yet."""


def questions(dashboards: Sequence[str]) -> list[Question]:
    """All queries of dashboards, given as the text of their files: of panels, and of what a reader can choose."""
    asked: list[Question] = []
    for text in dashboards:
        dashboard = json.loads(text)
        title = dashboard["title"]
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                asked.append(Question(title, f"variable {variable['name']}", _choice(variable["query"])))
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                asked.append(_question(title, panel["title"], target["expr"]))
    return asked


def substituted(expression: str, variables: Mapping[str, str] = VARIABLES) -> str:
    """An expression without Grafana's variables."""
    for name, value in variables.items():
        expression = expression.replace(name, value)
    return CHOICE.sub(".*", expression)


def _question(dashboard: str, panel: str, expression: str) -> Question:
    expression = substituted(expression)
    if expression.endswith(OR_ZERO):
        return Question(dashboard, panel, expression.removesuffix(OR_ZERO).rstrip(), may_be_silent=True)
    return Question(dashboard, panel, expression)


def _choice(query: str) -> str:
    query = substituted(query)
    if found := LABEL_VALUES.fullmatch(query):
        return f"count by ({found['label']}) ({found['selector']})"
    if found := QUERY_RESULT.fullmatch(query):
        return found["expression"]
    raise ValueError(f"{query!r} is none of the queries that a variable can have")
