"""A dashboard as data: what is asked, how it is drawn, in which order; `drawing` makes Grafana's of it."""

from dataclasses import dataclass
from enum import StrEnum

WIDTH = 24
"""Columns of Grafana's grid."""


class Shape(StrEnum):
    """How a panel draws its series."""

    LINES = "lines"
    STACKED = "stacked"
    """Lines upon each other: parts of a whole."""
    NUMBER = "number"
    BARS = "bars"
    """One bar a series, the newest value."""
    HEAT = "heat"
    """A histogram's buckets over time."""


class Unit(StrEnum):
    """Grafana's names of units."""

    SHARE = "percentunit"
    PERCENT = "percent"
    SECONDS = "s"
    MILLISECONDS = "ms"
    BYTES = "bytes"
    BYTES_PER_S = "Bps"
    PER_S = "cps"
    COUNT = "short"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of PromQL; ``legend`` names its series, with labels in double braces."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture."""

    title: str
    text: str
    """What it says and when to worry, for who points at its title."""
    unit: Unit
    queries: tuple[Query, ...]
    shape: Shape = Shape.LINES
    width: int = 8
    height: int = 8
    good_from: float | None = None
    """Values from here on are green, lower ones red."""
    bad_from: float | None = None
    """Values from here on are red, lower ones green."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


class Variable(StrEnum):
    """What a reader can choose at the top of a dashboard, beside the data source."""

    MODEL = "model"
    TENANT = "tenant"
    TOOL = "tool"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    uid: str
    """Also the name of its file."""
    title: str
    text: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
