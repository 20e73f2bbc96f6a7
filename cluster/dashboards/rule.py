"""Prometheus' rules as data, and their file."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.dashboards import written

RUNBOOKS = "docs/runbooks.md"
"""In the repository: one heading an alert, which its ``runbook_url`` leads to."""


class Severity(StrEnum):
    """Who is told of an alert."""

    PAGE = "page"
    """Somebody now: clients suffer."""
    TICKET = "ticket"
    """Somebody this week."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A series that Prometheus keeps, so that long windows are not computed at each look."""

    record: str
    expression: str


@dataclass(frozen=True, slots=True)
class Alert:
    """When somebody is told."""

    name: str
    expression: str
    held: str
    """How long it has to hold."""
    severity: Severity
    summary: str
    description: str

    @property
    def heading(self) -> str:
        """Of its runbook, as a link's fragment."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated together, in order."""

    name: str
    rules: tuple[Recording | Alert, ...]


def as_yaml(groups: Sequence[Group], runbooks_url: str) -> str:
    """The rule file. ``runbooks_url`` is where `RUNBOOKS` can be read, without a fragment."""
    data = {
        "groups": [
            {"name": group.name, "rules": [_rule(rule, runbooks_url) for rule in group.rules]} for group in groups
        ]
    }
    return written.as_yaml(data)


def _rule(rule: Recording | Alert, runbooks_url: str) -> dict[str, Any]:
    if isinstance(rule, Recording):
        return {"record": rule.record, "expr": rule.expression}
    return {
        "alert": rule.name,
        "expr": rule.expression,
        "for": rule.held,
        "labels": {"severity": rule.severity.value},
        "annotations": {
            "summary": rule.summary,
            "description": rule.description,
            "runbook_url": f"{runbooks_url}#{rule.heading}",
        },
    }
