"""A dashboard as data. `cluster.offline.dashboards.grafana` turns it into Grafana's JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.observing.catalogue import Kind
from cluster.offline.dashboards.promql import EVERYTHING, Named, Scope, mean, observed, or_zero, quantile, rate, total

WIDTH, HEIGHT = 24, 8
"""Columns of Grafana's grid, and height of a panel in rows of it."""
TAILS = (0.5, 0.95, 0.99)
CHOSEN = frozenset({"model", "model_name", "tenant"})
"""Labels that the variables of a dashboard choose."""


class Shape(StrEnum):
    """How a panel draws its series."""

    LINES = "lines"
    STACKED = "stacked"
    """Stacked lines, for the parts of a whole."""
    NUMBER = "number"
    BARS = "bars"
    """One bar for the newest value of each series."""
    HEAT = "heat"
    """A heat map of a histogram's buckets over time."""


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


UNITS = {
    (Kind.COUNTER, "bytes"): Unit.BYTES_PER_S,
    (Kind.COUNTER, "byte_seconds"): Unit.BYTES,
    (Kind.GAUGE, "seconds"): Unit.SECONDS,
    (Kind.GAUGE, "bytes"): Unit.BYTES,
    (Kind.HISTOGRAM, "seconds"): Unit.SECONDS,
}
"""Grafana's unit by type and unit of a metric. Other counters have `Unit.PER_S`, other metrics `Unit.COUNT`."""


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; ``legend`` names its series, with labels in double braces."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of a dashboard: its queries, how Grafana draws them, and the values that it colours."""

    title: str
    text: str
    """Description of the panel, which Grafana shows at its title."""
    unit: Unit
    queries: tuple[Query, ...]
    shape: Shape = Shape.LINES
    width: int = 8
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
    """A variable that the reader chooses at the top of a dashboard, in addition to the data source."""

    MODEL = "model"
    TENANT = "tenant"
    TOOL = "tool"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard of Grafana: rows of panels, and the variables that its reader chooses."""

    uid: str
    """Id in Grafana, and name of the dashboard's file."""
    title: str
    text: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]


def panel(
    metric: Named,
    title: str,
    *matchers: str,
    text: str = "",
    by: Sequence[str] | None = None,
    scope: Scope = EVERYTHING,
    aggregate: str = "sum",
    unit: Unit | None = None,
    shape: Shape = Shape.LINES,
    width: int = 8,
    good_from: float | None = None,
    bad_from: float | None = None,
) -> Panel:
    """Make the standard panel of a metric.

    It shows the rate of a counter (0 where it has no series), the value of a gauge, or the quantiles of a histogram.

    Args:
        metric: the metric.
        title: title of the panel.
        matchers: matchers that select series.
        text: description of the panel; empty uses the metric's help text.
        by: labels by which the series are grouped; None uses the metric's labels without those of the variables. A
            histogram with such labels is shown by its p95.
        scope: the dashboard's variables.
        aggregate: aggregation of the series of a gauge.
        unit: unit of the values; None uses the metric's own.
        shape: how the panel is drawn.
        width: width in columns of the grid.
        good_from: see `Panel`.
        bad_from: see `Panel`.
    """
    by = [label for label in metric.labels if label not in CHOSEN] if by is None else by
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    match metric.kind:
        case Kind.COUNTER:
            queries = {legend: or_zero(rate(metric, *matchers, by=by, scope=scope))}
        case Kind.GAUGE:
            queries = {legend: total(metric, *matchers, by=by, scope=scope, aggregate=aggregate)}
        case Kind.HISTOGRAM if by:
            queries = {legend: quantile(0.95, metric, *matchers, by=by, scope=scope)}
        case Kind.HISTOGRAM:
            queries = {f"p{100 * share:g}": quantile(share, metric, *matchers, scope=scope) for share in TAILS}
    unit = unit or UNITS.get((metric.kind, metric.unit), Unit.PER_S if metric.kind is Kind.COUNTER else Unit.COUNT)
    return lines(title, text or f"{metric.help}.", queries, unit, shape, width, good_from, bad_from)


def lines(
    title: str,
    text: str,
    queries: Mapping[str, str],
    unit: Unit = Unit.COUNT,
    shape: Shape = Shape.LINES,
    width: int = 8,
    good_from: float | None = None,
    bad_from: float | None = None,
) -> Panel:
    """Make a panel of several expressions, which are keyed by their legends."""
    named = tuple(Query(expression, legend) for legend, expression in queries.items())
    return Panel(title, text, unit, named, shape, width, good_from=good_from, bad_from=bad_from)


def mean_and_p95(metric: Named, title: str, *, scope: Scope, width: int = 8) -> Panel:
    """Make a panel with a histogram's mean and p95."""
    queries = {"mean": mean(metric, scope=scope), "p95": quantile(0.95, metric, scope=scope)}
    return lines(title, f"{metric.help}.", queries, UNITS.get((metric.kind, metric.unit), Unit.COUNT), width=width)


def distribution(metric: Named, title: str, *, scope: Scope = EVERYTHING) -> Panel:
    """Make a panel with the heat map of a histogram of seconds."""
    return lines(
        title, f"{metric.help}.", {"{{le}}": observed(metric, part="_bucket", scope=scope)}, Unit.SECONDS, Shape.HEAT
    )
