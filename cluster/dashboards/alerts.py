"""When somebody is told. Each alert has a runbook under its name in docs/runbooks.md."""

from cluster import metrics as m
from cluster.dashboards import recordings as r
from cluster.dashboards.flapping import WINDOW, ended_replicas
from cluster.dashboards.promql import rate, select, total
from cluster.dashboards.rule import Alert, Group, Severity

OBJECTIVE = 0.95
"""Share of turns, and of programs, that should be good over 30 days."""

FEWEST = 20
"""Turns or programs in the longer window below which its share says nothing."""

SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "2h": 7200, "6h": 21600, "1d": 86400, "3d": 259200}

BURNS: tuple[tuple[str, str, float, str, Severity], ...] = (
    ("1h", "5m", 14.4, "2m", Severity.PAGE),
    ("6h", "30m", 6.0, "15m", Severity.PAGE),
    ("1d", "2h", 3.0, "1h", Severity.TICKET),
    ("3d", "6h", 1.0, "3h", Severity.TICKET),
)
"""Longer window, shorter window, how many times the budget's even pace, how long, who is told: SRE workbook, table 5-8.

The short window ends an alert soon after its cause has ended. 14.4 times the pace for an hour is 2 % of a month's
budget, 6 times for six hours 5 %, once for three days 10 %.
"""


def _burning(name: str, what: str, severity: Severity, objective: float) -> Alert:
    errors, offered = (r.turn_errors, r.turns) if what == "turns" else (r.program_errors, r.programs)
    budget = 1.0 - objective
    parts = [
        f"({errors(longer)} > {min(pace * budget, 0.99):.4g}"
        f" and {errors(shorter)} > {min(pace * budget, 0.99):.4g}"
        f" and {offered(longer)} * {SECONDS[longer]} >= {FEWEST})"
        for longer, shorter, pace, _, told in BURNS
        if told is severity
    ]
    held = next(held for *_, held, told in BURNS if told is severity)
    return Alert(
        name,
        "\nor ".join(parts),
        held,
        severity,
        f"{{{{ $labels.model }}}}: {{{{ $value | humanizePercentage }}}} of {what} are not good",
        f"The budget of {budget:.3g} for {what} outside their SLO is being used up"
        f" {'within days' if severity is Severity.PAGE else 'faster than it is given'}.",
    )


def goodput(objective: float) -> Group:
    """The alerts on what clients get. ``objective``: share of turns, and of programs, that should be good."""
    return Group(
        "caesura-goodput-alerts",
        (
            _burning("CaesuraTurnsMissTheirSloFast", "turns", Severity.PAGE, objective),
            _burning("CaesuraTurnsMissTheirSlo", "turns", Severity.TICKET, objective),
            _burning("CaesuraProgramsMissTheirSloFast", "programs", Severity.PAGE, objective),
            _burning("CaesuraProgramsMissTheirSlo", "programs", Severity.TICKET, objective),
        ),
    )


REFUSED = rate(m.REFUSALS, by=("model",), over="5m")
PLACED = rate(m.PLACEMENTS, by=("model",), over="5m")
STARVED = rate(m.STARVED, by=("model",), over="10m")
ADMITTED = f"sum by (model) (rate({select(m.QUEUE_S, part='_count', over='10m')}))"
CALLS = rate(m.TOOL_CALLS, by=("tool",), over="10m")
CALLS_OK = rate(m.TOOL_CALLS, 'outcome="ok"', by=("tool",), over="10m")
BROKEN = rate(m.HOLDS_ENDED, 'how=~"broken_.+"', by=("model",), over="5m")
PAUSED = rate(m.PAUSES, by=("model",), over="5m")
ASKED = rate(m.FORECASTS, 'answered!="statistics"', over="10m")
ANSWERED = rate(m.FORECASTS, 'answered="service"', over="10m")

CLUSTER = Group(
    "caesura-cluster-alerts",
    (
        Alert(
            "CaesuraNothingToScrape",
            f"absent({m.REPLICA_UP.exported})",
            "2m",
            Severity.PAGE,
            "No replica of Caesura tells anything",
            "Prometheus finds no replica: the cluster is down, or its metrics are not scraped.",
        ),
        Alert(
            "CaesuraNoReplica",
            total(m.REPLICA_UP, 'state="up"', by=("model",)) + " < 1",
            "1m",
            Severity.PAGE,
            "{{ $labels.model }}: no replica is up",
            "Turns of this model are refused.",
        ),
        Alert(
            "CaesuraReplicaFlaps",
            f"{ended_replicas()}\n>= 3",
            "0m",
            Severity.PAGE,
            "{{ $labels.model }}: {{ $value }} replica processes ended within " + WINDOW,
            "Each takes the KV of its programs with it; what they were generating begins again elsewhere.",
        ),
        Alert(
            "CaesuraRouterKnowsOldThings",
            total(m.SNAPSHOT_AGE, by=("model",), how="max") + " > 10",
            "2m",
            Severity.TICKET,
            "{{ $labels.model }}: the router's oldest word of a replica is {{ $value | humanizeDuration }} old",
            "Turns are placed by a view that is no longer so.",
        ),
        Alert(
            "CaesuraRefusals",
            f"{REFUSED}\n/ ({REFUSED} + ({PLACED} or 0 * {REFUSED})) > 0.05",
            "5m",
            Severity.TICKET,
            "{{ $labels.model }}: {{ $value | humanizePercentage }} of turns are refused at the door",
            "Load is above what the replicas can take within the SLO, or one tenant asks for more than its share.",
        ),
        Alert(
            "CaesuraStoreDown",
            total(m.STORE_UP, by=("by",), how="min") + " == 0",
            "1m",
            Severity.PAGE,
            "The store cannot be reached by a {{ $labels.by }}",
            "Turns go on with what is known; programs that the cluster runs cannot be started or taken over.",
        ),
        Alert(
            "CaesuraToolFails",
            f"1 - ({CALLS_OK} or 0 * {CALLS})\n/ ({CALLS} > 0) > 0.2",
            "10m",
            Severity.TICKET,
            "{{ $labels.tool }}: {{ $value | humanizePercentage }} of its calls do not end well",
            "Programs go on with errors in place of answers.",
        ),
    ),
)

SCHEDULING = Group(
    "caesura-scheduling-alerts",
    (
        Alert(
            "CaesuraKvThrash",
            f"{r.RECOMPUTED} > 0.3\nand on (model) {BROKEN}\n/ ({PAUSED} > 0) > 0.2",
            "10m",
            Severity.TICKET,
            "{{ $labels.model }}: {{ $value | humanizePercentage }} of known context is computed again",
            "Holds are broken before their programs come back, and what was freed is computed again: memory is short.",
        ),
        Alert(
            "CaesuraStarvation",
            f"{STARVED}\n/ ({ADMITTED} > 0) > 0.01",
            "5m",
            Severity.TICKET,
            "{{ $labels.model }}: {{ $value | humanizePercentage }} of turns wait longer than the starvation bound",
            "Some turns are passed over again and again.",
        ),
        Alert(
            "CaesuraTurnStuck",
            total(m.OLDEST_WAITING, by=("model",), how="max") + " > 120",
            "2m",
            Severity.PAGE,
            "{{ $labels.model }}: a turn has waited for {{ $value | humanizeDuration }}",
            "A replica does not admit a turn: it is stuck, or its memory never suffices.",
        ),
        Alert(
            "CaesuraStepsAreSlow",
            total(m.STEP_PACE, by=("model",), how="max") + " > 3",
            "15m",
            Severity.TICKET,
            "{{ $labels.model }}: steps take {{ $value | humanize }} times as long as the cost model says",
            "The machine is shared or throttled, or the cost model is of another one; policies reckon with the factor.",
        ),
    ),
)

FORECASTS = Group(
    "caesura-forecast-alerts",
    (
        Alert(
            "CaesuraForecastsDrift",
            f"{r.FORECAST_ERROR} > 0.5"
            f"\nand {r.FORECAST_ERROR} > 1.5 * avg_over_time({r.FORECAST_ERROR}[1d] offset 2h)"
            f"\nand {r.FORECASTS_COMPARED} * 3600 >= 50",
            "30m",
            Severity.TICKET,
            "Forecasts of {{ $labels.of }} are off by {{ $value | humanizePercentage }} of what came",
            "That is half as much again as the day before: programs are no longer those that the model learnt from.",
        ),
        Alert(
            "CaesuraForecastsFallBack",
            f"1 - ({ANSWERED} or 0 * {ASKED})\n/ ({ASKED} > 0) > 0.2",
            "10m",
            Severity.TICKET,
            "{{ $value | humanizePercentage }} of forecasts are not the service's",
            "It is late, overloaded or gone; statistics answer for it.",
        ),
    ),
)


def groups(objective: float = OBJECTIVE) -> tuple[Group, ...]:
    """All alerts."""
    return (goodput(objective), CLUSTER, SCHEDULING, FORECASTS)
