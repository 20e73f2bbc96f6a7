"""PromQL over the catalogue: names and labels are taken from it, so that a query cannot ask for what nobody exports.

Expressions are strings. ``matchers`` are what stands in braces, such as ``outcome="ok"``; ``over`` is a duration or one
of Grafana's variables for it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.metrics import Kind, Metric

STEP = "$__rate_interval"
"""Grafana's shortest window over which a rate is sure to have values."""

PROCESS = "process"
"""Label that the scrape configuration makes: the first letters of Ray's id of the process that told a metric."""

NODE_LABELS = frozenset(
    {"NodeAddress", "WorkerId", "ReplicaId", "SessionName", "Component", PROCESS, "job", "instance"}
)
"""Labels that a metric has by being scraped from Ray's nodes, whatever it is."""

MATCHER = re.compile(r'(?P<label>[A-Za-z_]\w*)(?:=~|!~|!=|=)"[^"]*"')


class Named(Protocol):
    """What a query can ask for: a metric of the catalogue or one of vLLM's or Ray's."""

    @property
    def exported(self) -> str:
        """The name by which Prometheus knows it, of a histogram without ``_bucket``, ``_sum`` or ``_count``."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Its labels, without those of `NODE_LABELS`."""
        ...

    @property
    def kind(self) -> Kind:
        """What Prometheus takes it for."""
        ...


@dataclass(frozen=True, slots=True)
class Scope:
    """Matchers that are put to every selector whose metric has their label: the variables of a dashboard."""

    matchers: tuple[tuple[str, str], ...] = ()
    """Label and matcher."""
    always: tuple[str, ...] = ()
    """Matchers of labels that every metric has."""

    def of(self, metric: Named) -> tuple[str, ...]:
        """Those that apply to ``metric``."""
        return (*(matcher for label, matcher in self.matchers if label in metric.labels), *self.always)


EVERYTHING = Scope()


def select(
    metric: Named, *matchers: str, scope: Scope = EVERYTHING, part: str = "", over: str = "", ago: str = ""
) -> str:
    """A selector. ``part`` is a suffix of a histogram's name.

    Raises:
        ValueError: a matcher is not one, or its label is none of the metric's.
    """
    for matcher in matchers:
        _require_label(metric, _label_of(matcher))
    braces = ",".join((*scope.of(metric), *matchers))
    return (
        f"{metric.exported}{part}"
        + (f"{{{braces}}}" if braces else "")
        + (f"[{over}]" if over else "")
        + (f" offset {ago}" if ago else "")
    )


def rate(metric: Named, *matchers: str, by: Sequence[str] = (), over: str = STEP, scope: Scope = EVERYTHING) -> str:
    """How fast a counter grows, a second, summed up but for the labels ``by``."""
    _require_kind(metric, Kind.COUNTER)
    return f"{_sum(metric, by)}(rate({select(metric, *matchers, scope=scope, over=over)}))"


def sum_of(metric: Named, *matchers: str, by: Sequence[str] = (), scope: Scope = EVERYTHING) -> str:
    """A counter since its processes began, summed up but for the labels ``by``."""
    _require_kind(metric, Kind.COUNTER)
    return f"{_sum(metric, by)}({select(metric, *matchers, scope=scope)})"


def total(metric: Named, *matchers: str, by: Sequence[str] = (), scope: Scope = EVERYTHING, how: str = "sum") -> str:
    """A gauge, summed up but for the labels ``by``; or its ``max`` or ``min``."""
    _require_kind(metric, Kind.GAUGE)
    return f"{_sum(metric, by, how)}({select(metric, *matchers, scope=scope)})"


def quantile(
    share: float, metric: Named, *matchers: str, by: Sequence[str] = (), over: str = STEP, scope: Scope = EVERYTHING
) -> str:
    """A quantile of a histogram."""
    _require_kind(metric, Kind.HISTOGRAM)
    buckets = select(metric, *matchers, scope=scope, part="_bucket", over=over)
    return f"histogram_quantile({share:g}, {_sum(metric, by, extra=('le',))}(rate({buckets})))"


def mean(metric: Named, *matchers: str, by: Sequence[str] = (), over: str = STEP, scope: Scope = EVERYTHING) -> str:
    """The mean of a histogram's values."""
    return per(
        observed(metric, *matchers, part="_sum", by=by, over=over, scope=scope),
        observed(metric, *matchers, part="_count", by=by, over=over, scope=scope),
    )


def observed(
    metric: Named,
    *matchers: str,
    part: str = "_count",
    by: Sequence[str] = (),
    over: str = STEP,
    scope: Scope = EVERYTHING,
) -> str:
    """How fast a histogram's count or sum grows, a second; or its buckets, by ``le``."""
    _require_kind(metric, Kind.HISTOGRAM)
    extra = ("le",) if part == "_bucket" else ()
    selected = select(metric, *matchers, scope=scope, part=part, over=over)
    return f"{_sum(metric, by, extra=extra)}(rate({selected}))"


def per(part: str, whole: str) -> str:
    """A quotient; nothing over nothing is NaN, which panels leave out."""
    return f"{part}\n/ {whole}"


OR_ZERO = "or on() vector(0)"
"""What a query ends with that asks for what need not have happened yet."""


def or_zero(expression: str) -> str:
    """0 where there is no series at all."""
    return f"({expression}) {OR_ZERO}"


def labelled(metric: Metric, label: str, *values: str) -> str:
    """A matcher for one of ``values``.

    Raises:
        ValueError: the metric has no such label.
    """
    _require_label(metric, label)
    return f'{label}="{values[0]}"' if len(values) == 1 else f'{label}=~"{"|".join(values)}"'


def _sum(metric: Named, by: Sequence[str], how: str = "sum", extra: tuple[str, ...] = ()) -> str:
    for label in by:
        _require_label(metric, label)
    labels = (*by, *extra)
    return f"{how} by ({', '.join(labels)}) " if labels else how


def _label_of(matcher: str) -> str:
    if (found := MATCHER.fullmatch(matcher)) is None:
        raise ValueError(f"{matcher!r} is no matcher")
    return found["label"]


def _require_label(metric: Named, label: str) -> None:
    if label not in metric.labels and label not in NODE_LABELS:
        raise ValueError(f"{metric.exported} has no label {label!r}, only {', '.join(metric.labels)}")


def _require_kind(metric: Named, kind: Kind) -> None:
    if metric.kind is not kind:
        raise ValueError(f"{metric.exported} is a {metric.kind}, not a {kind}")
