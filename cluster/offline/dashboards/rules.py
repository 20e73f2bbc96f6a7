"""Prometheus' rules: recorded series, and alerts on them. Each alert has a runbook in docs/runbooks.md."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.core.slo import Outcome, Verdict
from cluster.observing import catalogue as m
from cluster.offline.dashboards.promql import (
    ENDED_WINDOW,
    ended_replicas,
    mean,
    or_zero,
    per,
    quantile,
    rate,
    select,
    total,
)

RUNBOOKS = "docs/runbooks.md"
"""Path of the runbooks in the repository. Each alert's ``runbook_url`` links to its heading there."""


class Severity(StrEnum):
    """Urgency of an alert."""

    PAGE = "page"
    """Somebody has to act now, because clients are affected."""
    TICKET = "ticket"
    """Somebody has to act within the week."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording rule: a series that Prometheus precomputes, so that queries need not evaluate long windows."""

    record: str
    expression: str


@dataclass(frozen=True, slots=True)
class Alert:
    """An alerting rule: Prometheus fires it while its expression has a value for long enough. It has a runbook."""

    name: str
    expression: str
    held: str
    """Duration for which the expression has to hold before the alert fires."""
    severity: Severity
    summary: str
    description: str

    @property
    def heading(self) -> str:
        """The heading of its runbook, as a link's fragment."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Group:
    """A group of rules, which Prometheus evaluates together and in order."""

    name: str
    rules: tuple[Recording | Alert, ...]


def as_data(groups: Sequence[Group], runbooks_url: str) -> dict[str, Any]:
    """Return the content of the rule file. ``runbooks_url``: the URL of `RUNBOOKS` without a fragment."""
    return {
        "groups": [
            {"name": group.name, "rules": [_rule(rule, runbooks_url) for rule in group.rules]} for group in groups
        ]
    }


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


# --- recorded series --------------------------------------------------------------------------------------------------

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
"""Windows of the multi-window burn rates of Google's SRE workbook, chapter 5."""
SHORT = "5m"
PREDICTIONS_OVER = "1h"
MODEL = ("model",)
TENANTS = ("model", "tenant")
GOOD = f'verdict="{Verdict.GOOD.value}"'
CLIENT_STAYED = f'outcome!="{Outcome.UNFINISHED.value}"'
"""Excludes turns whose client disconnected, since these are no failures."""
NAMED, UNNAMED = 'model!=""', 'model=""'
"""Selects requests with a model, and those that an ingress or Ray's proxy rejected before it read their model."""
NOT_ABANDONED = f'verdict!="{Verdict.ABANDONED.value}"'
"""Excludes programs whose client disconnected."""


def turn_errors(window: str) -> str:
    """Return the series of the share of turns in ``window`` that were not good, by model."""
    return f"caesura:turns_not_good:ratio_rate{window}"


def program_errors(window: str) -> str:
    """Return the series of the share of programs that ended in ``window`` and were not good, by model."""
    return f"caesura:programs_not_good:ratio_rate{window}"


def turns(window: str) -> str:
    """Return the series of turns per second, by model.

    Each model has a part of the requests that were rejected before their model was read: its part of the other turns.
    """
    return f"caesura:turns:rate{window}"


def programs(window: str) -> str:
    """Return the series of ended programs per second, by model."""
    return f"caesura:programs_ended:rate{window}"


PREDICTION_ERROR = f"caesura:prediction_error:ratio_rate{PREDICTIONS_OVER}"
"""Series of the sum of the errors divided by the sum of the actual values, by quantity."""
PREDICTIONS_COMPARED = f"caesura:predictions_compared:rate{PREDICTIONS_OVER}"
RECOMPUTED = f"caesura:recomputed_context:ratio_rate{SHORT}"
"""Series of the share of known prompt tokens that are recomputed, by model."""
HELD = "caesura:held_blocks:ratio"
"""Series of the share of KV blocks that are held, by model."""


def _window(window: str) -> tuple[Recording, ...]:
    ended = rate(m.REQUESTS, CLIENT_STAYED, NAMED, by=MODEL, over=window)
    all_ended = rate(m.REQUESTS, CLIENT_STAYED, over=window)
    all_named = rate(m.REQUESTS, CLIENT_STAYED, NAMED, over=window)
    decided = rate(m.PROGRAM_ENDS, NOT_ABANDONED, by=MODEL, over=window)
    good_turns = rate(m.GOOD_REQUESTS, by=MODEL, over=window)
    good_programs = rate(m.PROGRAM_ENDS, GOOD, by=MODEL, over=window)
    return (
        Recording(turns(window), f"{ended}\n* on () group_left () ({all_ended} / ({all_named} > 0))"),
        Recording(turn_errors(window), f"1 - ({good_turns} or 0 * {turns(window)}) / ({turns(window)} > 0)"),
        Recording(programs(window), decided),
        Recording(
            program_errors(window), f"1 - ({good_programs} or 0 * {programs(window)}) / ({programs(window)} > 0)"
        ),
    )


def _context(*sources: str) -> str:
    return rate(m.CONTEXT_TOKENS, f'source=~"{"|".join(sources)}"', by=MODEL, over=SHORT)


RECORDINGS: tuple[Group, ...] = (
    Group(
        "caesura-goodput",
        (
            Recording(f"caesura:good_turns:rate{SHORT}", rate(m.GOOD_REQUESTS, by=TENANTS, over=SHORT)),
            Recording(f"caesura:good_programs:rate{SHORT}", rate(m.PROGRAM_ENDS, GOOD, by=TENANTS, over=SHORT)),
            Recording(f"caesura:offered_programs:rate{SHORT}", rate(m.PROGRAMS, by=TENANTS, over=SHORT)),
            *(recording for window in WINDOWS for recording in _window(window)),
        ),
    ),
    Group(
        "caesura-latency",
        (
            Recording(f"caesura:ttft_seconds:p95_rate{SHORT}", quantile(0.95, m.TTFT, by=MODEL, over=SHORT)),
            Recording(f"caesura:tpot_seconds:p95_rate{SHORT}", quantile(0.95, m.TPOT, by=MODEL, over=SHORT)),
            Recording(f"caesura:normalized_latency_seconds:mean_rate{SHORT}", mean(m.NORMALIZED, by=MODEL, over=SHORT)),
            Recording(f"caesura:program_seconds:p95_rate{SHORT}", quantile(0.95, m.PROGRAM_S, by=MODEL, over=SHORT)),
            Recording(
                f"caesura:bubble_seconds:p95_rate{SHORT}",
                quantile(0.95, m.QUEUE_S, 'turn="resumed"', by=MODEL, over=SHORT),
            ),
        ),
    ),
    Group(
        "caesura-memory",
        (
            Recording(HELD, per(total(m.HELD_BLOCKS, by=MODEL), total(m.TOTAL_BLOCKS, by=MODEL))),
            Recording(RECOMPUTED, per(_context("recomputed"), f"({_context('recomputed', 'reused', 'fetched')} > 0)")),
        ),
    ),
    Group(
        "caesura-predictions",
        (
            Recording(PREDICTIONS_COMPARED, rate(m.PREDICTIONS_COMPARED, by=("quantity",), over=PREDICTIONS_OVER)),
            Recording(
                PREDICTION_ERROR,
                per(
                    rate(m.PREDICTION_ERROR, by=("quantity",), over=PREDICTIONS_OVER),
                    f"({rate(m.PREDICTION_ACTUAL, by=('quantity',), over=PREDICTIONS_OVER)} > 0)",
                ),
            ),
        ),
    ),
)

# --- alerts on goodput ------------------------------------------------------------------------------------------------

OBJECTIVE = 0.95
"""Share of turns, and of programs, that should be good over 30 days."""

FEWEST = 20
"""Turns or programs in the longer window below which their share is not significant."""

SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "2h": 7200, "6h": 21600, "1d": 86400, "3d": 259200}

BURNS: tuple[tuple[str, str, float, str, Severity], ...] = (
    ("1h", "5m", 14.4, "2m", Severity.PAGE),
    ("6h", "30m", 6.0, "15m", Severity.PAGE),
    ("1d", "2h", 3.0, "1h", Severity.TICKET),
    ("3d", "6h", 1.0, "3h", Severity.TICKET),
)
"""Longer window, shorter window, burn rate, hold time, severity: SRE workbook, table 5-8.

The short window ends an alert soon after its cause has ended. A burn rate of 14.4 for an hour uses up 2 % of a month's
budget, 6 for six hours 5 %, 1 for three days 10 %.
"""


def _burn_rate(name: str, what: str, severity: Severity, objective: float) -> Alert:
    errors, offered = (turn_errors, turns) if what == "turns" else (program_errors, programs)
    budget = 1.0 - objective
    parts = [
        f"({errors(longer)} > {min(pace * budget, 0.99):.4g}"
        f" and {errors(shorter)} > {min(pace * budget, 0.99):.4g}"
        f" and {offered(longer)} * {SECONDS[longer]} >= {FEWEST})"
        for longer, shorter, pace, _, of in BURNS
        if of is severity
    ]
    return Alert(
        name,
        "\nor ".join(parts),
        next(held for *_, held, of in BURNS if of is severity),
        severity,
        f"{{{{ $labels.model }}}}: {{{{ $value | humanizePercentage }}}} of {what} do not meet the SLO",
        f"The error budget of {budget:.3g} for {what} will be used up"
        f" {'within days' if severity is Severity.PAGE else 'before the 30 days have passed'}.",
    )


def burn_rates(objective: float) -> Group:
    """Return the alerts on the error budget. ``objective``: the share of turns and of programs that should be good."""
    return Group(
        "caesura-goodput-alerts",
        (
            _burn_rate("CaesuraTurnSloBurnFast", "turns", Severity.PAGE, objective),
            _burn_rate("CaesuraTurnSloBurnSlow", "turns", Severity.TICKET, objective),
            _burn_rate("CaesuraProgramSloBurnFast", "programs", Severity.PAGE, objective),
            _burn_rate("CaesuraProgramSloBurnSlow", "programs", Severity.TICKET, objective),
        ),
    )


# --- other alerts -----------------------------------------------------------------------------------------------------

REJECTED = rate(m.REQUESTS_REJECTED, NAMED, by=MODEL, over="5m")
ROUTED = rate(m.ROUTING_DECISIONS, by=MODEL, over="5m")
REJECTED_UNNAMED = rate(m.REQUESTS_REJECTED, UNNAMED, over="5m")
ALL_REJECTED = rate(m.REQUESTS_REJECTED, over="5m")
ALL_ROUTED = rate(m.ROUTING_DECISIONS, over="5m")
UP = total(m.REPLICA_UP, 'state="up"', by=MODEL)
CONFIGURED = total(m.REPLICAS_MIN, by=MODEL, aggregate="max")
CONFIGURED_BEFORE = f"max by (model) ({select(m.REPLICAS_MIN)} offset 15m)"
"""Ingresses export it. 15 minutes before: a replica has had the time to start."""
UNPLACED = rate(m.REQUESTS_REJECTED, 'reason="no_replica"', by=MODEL, over="5m")
STARVED = rate(m.STARVED, by=MODEL, over="10m")
ADMITTED = f"sum by (model) (rate({select(m.QUEUE_S, part='_count', over='10m')}))"
CALLS = rate(m.TOOL_CALLS, by=("tool",), over="10m")
CALLS_OK = rate(m.TOOL_CALLS, 'outcome="ok"', by=("tool",), over="10m")
EVICTED = rate(m.KV_PINS_RELEASED, 'reason=~"broken_.+"', by=MODEL, over="5m")
PAUSED = rate(m.KV_RETENTION_DECISIONS, by=MODEL, over="5m")
FOR_SERVICE = rate(m.PREDICTIONS, 'source!="statistics"', over="10m")
BY_SERVICE = rate(m.PREDICTIONS, 'source="service"', over="10m")

CLUSTER_ALERTS = Group(
    "caesura-cluster-alerts",
    (
        Alert(
            "CaesuraMetricsAbsent",
            f"absent({m.REPLICAS_MIN.exported})"
            f"\nor (absent({m.REPLICA_UP.exported})"
            f" unless on () {total(m.REPLICAS_MIN, by=(), aggregate='max')} == 0)",
            "2m",
            Severity.PAGE,
            "Prometheus has no metrics of any ingress, or of any replica",
            "The cluster is down, or its metrics are not scraped.",
        ),
        Alert(
            "CaesuraNoReplicaUp",
            f"(({CONFIGURED} > 0 and {CONFIGURED_BEFORE} > 0)"
            f"\nor ({CONFIGURED} == 0 and {UNPLACED} > 0))\nunless {UP} >= 1",
            "1m",
            Severity.PAGE,
            "{{ $labels.model }}: no replica is up",
            "All turns of this model are rejected.",
        ),
        Alert(
            "CaesuraReplicaCrashLoop",
            f"{ended_replicas()}\n>= 3",
            "0m",
            Severity.PAGE,
            "{{ $labels.model }}: {{ $value }} replica processes ended within " + ENDED_WINDOW,
            "Each loses the KV of its programs, and their turns in flight continue on other replicas.",
        ),
        Alert(
            "CaesuraRouterSnapshotStale",
            total(m.SNAPSHOT_AGE, by=MODEL, aggregate="max") + " > 10",
            "2m",
            Severity.TICKET,
            "{{ $labels.model }}: the router's oldest replica snapshot is {{ $value | humanizeDuration }} old",
            "Turns are routed by outdated information.",
        ),
        Alert(
            "CaesuraRejectionRateHigh",
            f"{REJECTED}\n/ ({REJECTED} + ({ROUTED} or 0 * {REJECTED})) > 0.05"
            f"\nor {REJECTED_UNNAMED}\n/ ({ALL_REJECTED} + ({or_zero(ALL_ROUTED)})) > 0.05",
            "5m",
            Severity.TICKET,
            '{{ or $labels.model "Before their model is read" }}:'
            " {{ $value | humanizePercentage }} of turns are rejected",
            "The load exceeds what the replicas can serve within the SLO, or a tenant exceeds its share.",
        ),
        Alert(
            "CaesuraStoreDown",
            total(m.STORE_UP, by=("component",), aggregate="min") + " == 0",
            "1m",
            Severity.PAGE,
            "The store cannot be reached by a {{ $labels.component }}",
            "Turns are served with the last known data. Server-side programs cannot be started or taken over.",
        ),
        Alert(
            "CaesuraStoreNearlyFull",
            f"max({select(m.STORE_USED_BYTES)} / ({select(m.STORE_MAX_BYTES)} > 0)) > 0.7",
            "5m",
            Severity.TICKET,
            "Redis uses {{ $value | humanizePercentage }} of its memory",
            "From 75% on, ended programs are deleted before their retention time. From 90% on, new ones are rejected.",
        ),
        Alert(
            "CaesuraToolFailing",
            f"1 - ({CALLS_OK} or 0 * {CALLS})\n/ ({CALLS} > 0) > 0.2",
            "10m",
            Severity.TICKET,
            "{{ $labels.tool }}: {{ $value | humanizePercentage }} of its calls fail",
            "Programs continue with errors in place of results.",
        ),
    ),
)

SCHEDULING_ALERTS = Group(
    "caesura-scheduling-alerts",
    (
        Alert(
            "CaesuraKvThrashing",
            f"{RECOMPUTED} > 0.3\nand on (model) {EVICTED}\n/ ({PAUSED} > 0) > 0.2",
            "10m",
            Severity.TICKET,
            "{{ $labels.model }}: {{ $value | humanizePercentage }} of known context is recomputed",
            "Held KV is evicted before its program resumes, and then recomputed: KV memory is short.",
        ),
        Alert(
            "CaesuraStarvation",
            f"{STARVED}\n/ ({ADMITTED} > 0) > 0.01",
            "5m",
            Severity.TICKET,
            "{{ $labels.model }}: {{ $value | humanizePercentage }} of turns wait longer than the starvation bound",
            "Other turns are admitted before them again and again.",
        ),
        Alert(
            "CaesuraTurnStuck",
            total(m.OLDEST_WAITING, by=MODEL, aggregate="max") + " > 120",
            "2m",
            Severity.PAGE,
            "{{ $labels.model }}: a turn has waited for {{ $value | humanizeDuration }}",
            "A replica does not admit a turn: it is stuck, or its memory never suffices.",
        ),
        Alert(
            "CaesuraStepTimeHigh",
            total(m.STEP_TIME_RATIO, by=MODEL, aggregate="max") + " > 3",
            "15m",
            Severity.TICKET,
            "{{ $labels.model }}: steps take {{ $value | humanize }} times as long as the cost model says",
            "The machine is shared or throttled, or the cost model is of another machine. Policies apply the ratio.",
        ),
    ),
)

PREDICTION_ALERTS = Group(
    "caesura-prediction-alerts",
    (
        Alert(
            "CaesuraPredictionDrift",
            f"{PREDICTION_ERROR} > 0.5"
            f"\nand {PREDICTION_ERROR} > 1.5 * avg_over_time({PREDICTION_ERROR}[1d] offset 2h)"
            f"\nand {PREDICTIONS_COMPARED} * 3600 >= 50",
            "30m",
            Severity.TICKET,
            "The relative error of predicted {{ $labels.quantity }} is {{ $value | humanizePercentage }}",
            "It is 1.5 times that of the day before: programs differ from those that the model was trained on.",
        ),
        Alert(
            "CaesuraPredictorDegraded",
            f"1 - ({BY_SERVICE} or 0 * {FOR_SERVICE})\n/ ({FOR_SERVICE} > 0) > 0.2",
            "10m",
            Severity.TICKET,
            "{{ $value | humanizePercentage }} of predictions are not from the service",
            "The service is slow, overloaded or gone. Statistics replace its predictions.",
        ),
    ),
)


def alerts(objective: float = OBJECTIVE) -> tuple[Group, ...]:
    """Return all alerts. ``objective``: see `burn_rates`."""
    return (burn_rates(objective), CLUSTER_ALERTS, SCHEDULING_ALERTS, PREDICTION_ALERTS)


def alerts_on(metric: m.Metric) -> list[str]:
    """Return the names of the alerts that depend on this metric, directly or through a recorded series."""
    series = {one.record: one.expression for group in RECORDINGS for one in group.rules if isinstance(one, Recording)}

    def uses(expression: str) -> bool:
        name = rf"\b{metric.exported}(_count|_sum|_bucket)?\b"
        return re.search(name, expression) is not None or any(
            record in expression and uses(series[record]) for record in series
        )

    every = (one for group in alerts() for one in group.rules if isinstance(one, Alert))
    return [alert.name for alert in every if uses(alert.expression)]
