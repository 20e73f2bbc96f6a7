"""PromQL over the catalogue. Its names and labels are used, so that no query has a metric that is not exported.

Expressions are strings. ``matchers`` are the parts in braces, such as ``outcome="ok"``. ``over`` is a duration or one
of Grafana's variables for it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.observing.catalogue import REPLICA_UP, REPLICAS_REMOVED, Kind

STEP = "$__rate_interval"
"""Grafana's variable for the shortest window over which a rate always has values."""

PROCESS = "process"
"""A label that the scrape configuration adds: the first letters of Ray's id of the process that exports a metric."""

NODE_LABELS = frozenset(
    {"NodeAddress", "WorkerId", "ReplicaId", "SessionName", "Component", PROCESS, "job", "instance"}
)
"""Labels of every metric that is scraped from Ray's nodes."""

MATCHER = re.compile(r'(?P<label>[A-Za-z_]\w*)(?:=~|!~|!=|=)"[^"]*"')


class Named(Protocol):
    """A metric of the catalogue, of vLLM or of Ray."""

    @property
    def exported(self) -> str:
        """The name in Prometheus; for a histogram without ``_bucket``, ``_sum`` or ``_count``."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the metric, without `NODE_LABELS`."""
        ...

    @property
    def kind(self) -> Kind:
        """Prometheus type of the metric."""
        ...

    @property
    def unit(self) -> str:
        """See `cluster.observing.catalogue.UNITS`."""
        ...

    @property
    def help(self) -> str:
        """Description of what the metric measures."""
        ...


@dataclass(frozen=True, slots=True)
class Scope:
    """Matchers for the variables of a dashboard. Each applies to the metrics that have its label."""

    matchers: tuple[tuple[str, str], ...] = ()
    """Pairs of a label and its matcher."""
    always: tuple[str, ...] = ()
    """Matchers of labels that every metric has."""

    def of(self, metric: Named) -> tuple[str, ...]:
        """Return the matchers that apply to ``metric``."""
        return (*(matcher for label, matcher in self.matchers if label in metric.labels), *self.always)


MODEL_MATCHER = 'model=~"$model"'
ENGINE_MODEL_MATCHER = 'model_name=~"$model"'
_MODELS = (("model", MODEL_MATCHER), ("model_name", ENGINE_MODEL_MATCHER))

EVERYTHING = Scope()
CLUSTER = Scope((*_MODELS, ("tenant", 'tenant=~"$tenant"'), ("tool", 'tool=~"$tool"')))
"""Scope of metrics of the whole cluster."""
REPLICAS = Scope(_MODELS, always=(f'{PROCESS}=~"$replica"',))
"""Scope of metrics that replicas export: the chosen replicas."""


def select(metric: Named, *matchers: str, scope: Scope = EVERYTHING, part: str = "", over: str = "") -> str:
    """Return a selector. ``part`` is a suffix of a histogram's name.

    Raises:
        ValueError: a matcher is malformed, or the metric does not have its label.
    """
    for matcher in matchers:
        _require_label(metric, _label_of(matcher))
    braces = ",".join((*scope.of(metric), *matchers))
    return f"{metric.exported}{part}" + (f"{{{braces}}}" if braces else "") + (f"[{over}]" if over else "")


def rate(metric: Named, *matchers: str, by: Sequence[str] = (), over: str = STEP, scope: Scope = EVERYTHING) -> str:
    """Return the rate of a counter per second, summed over all labels except ``by``."""
    _require_kind(metric, Kind.COUNTER)
    return f"{_aggregate(metric, by)}(rate({select(metric, *matchers, scope=scope, over=over)}))"


def sum_of(metric: Named, *matchers: str, by: Sequence[str] = (), scope: Scope = EVERYTHING) -> str:
    """Return the value of a counter, summed over all labels except ``by``."""
    _require_kind(metric, Kind.COUNTER)
    return f"{_aggregate(metric, by)}({select(metric, *matchers, scope=scope)})"


def total(
    metric: Named, *matchers: str, by: Sequence[str] = (), scope: Scope = EVERYTHING, aggregate: str = "sum"
) -> str:
    """Return a gauge, aggregated over all labels except ``by``."""
    _require_kind(metric, Kind.GAUGE)
    return f"{_aggregate(metric, by, aggregate)}({select(metric, *matchers, scope=scope)})"


def quantile(
    share: float, metric: Named, *matchers: str, by: Sequence[str] = (), over: str = STEP, scope: Scope = EVERYTHING
) -> str:
    """Return a quantile of a histogram."""
    _require_kind(metric, Kind.HISTOGRAM)
    buckets = select(metric, *matchers, scope=scope, part="_bucket", over=over)
    return f"histogram_quantile({share:g}, {_aggregate(metric, by, extra=('le',))}(rate({buckets})))"


def mean(metric: Named, *matchers: str, by: Sequence[str] = (), over: str = STEP, scope: Scope = EVERYTHING) -> str:
    """Return the mean of a histogram's values."""
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
    """Return the rate per second of a histogram's count or sum, or of its buckets by ``le``."""
    _require_kind(metric, Kind.HISTOGRAM)
    extra = ("le",) if part == "_bucket" else ()
    selected = select(metric, *matchers, scope=scope, part=part, over=over)
    return f"{_aggregate(metric, by, extra=extra)}(rate({selected}))"


def per(part: str, whole: str) -> str:
    """Return a quotient. 0 divided by 0 is NaN, which panels omit."""
    return f"{part}\n/ {whole}"


OR_ZERO = "or on() vector(0)"
"""End of a query for events that may not have occurred yet."""


def or_zero(expression: str) -> str:
    """Return the expression, or 0 where it has no series."""
    return f"({expression}) {OR_ZERO}"


ENDED_WINDOW = "30m"
REMOVED_WINDOW = "45m"
"""Longer than `ENDED_WINDOW`: a replica that the autoscaler removes ends when its last turn has."""


def ended_replicas() -> str:
    """Return, by model, the number of replica processes that existed within `ENDED_WINDOW` and have ended.

    Those that the autoscaler removed do not count. A process has this gauge until it ends, in one series for each pod
    that Prometheus has asked. Ray exports a counter until its node ends.
    """
    state, processes = 'state="up"', "count by (model) (group by (model, process) ({}))"
    seen = processes.format(f"last_over_time({select(REPLICA_UP, state, over=ENDED_WINDOW)})")
    removed = f"sum by (model) (increase({select(REPLICAS_REMOVED, over=REMOVED_WINDOW)}))"
    here = processes.format(select(REPLICA_UP, state))
    return f"{seen}\n- ({here} or 0 * {seen})\n- (round({removed}) or 0 * {seen})"


def _aggregate(metric: Named, by: Sequence[str], aggregate: str = "sum", extra: tuple[str, ...] = ()) -> str:
    for label in by:
        _require_label(metric, label)
    labels = (*by, *extra)
    return f"{aggregate} by ({', '.join(labels)}) " if labels else aggregate


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
