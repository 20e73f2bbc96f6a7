"""The predictor: who answers, how fast, and how far off the forecasts are."""

from cluster import metrics as m
from cluster.dashboards.board import Board, Panel, Query, Row, Shape, Unit
from cluster.dashboards.promql import observed, or_zero, per, quantile, rate, total

ANSWERS = Row(
    "Answers",
    (
        Panel(
            "Forecasts by who made them",
            "The service, the ingress's statistics, or why it was not the service.",
            Unit.PER_S,
            (Query(rate(m.FORECASTS, by=("answered",)), "{{answered}}"),),
            Shape.STACKED,
        ),
        Panel(
            "Seconds that a turn waits for its forecast",
            "By who is asked. `predictor.deadline_s` bounds it.",
            Unit.SECONDS,
            tuple(
                Query(quantile(share, m.FORECAST_SECONDS, by=("by",)), f"{{{{by}}}} p{100 * share:g}")
                for share in (0.5, 0.99)
            ),
        ),
        Panel(
            "How these waits are spread",
            "Forecasts a second, by the upper bound of their time.",
            Unit.SECONDS,
            (Query(observed(m.FORECAST_SECONDS, part="_bucket"), "{{le}}"),),
            Shape.HEAT,
        ),
    ),
)

ERRORS = Row(
    "Errors",
    (
        Panel(
            "Error, relative",
            "Sum of absolute errors over the sum of what came. It drifts up when programs are new.",
            Unit.SHARE,
            (
                Query(
                    or_zero(per(rate(m.FORECAST_ERROR, by=("of",)), rate(m.FORECAST_ACTUAL, by=("of",)))),
                    "{{of}}",
                ),
            ),
        ),
        Panel(
            "Error, mean",
            "Tokens, or seconds of tools, a forecast.",
            Unit.COUNT,
            (
                Query(
                    or_zero(per(rate(m.FORECAST_ERROR, by=("of",)), rate(m.FORECASTS_COMPARED, by=("of",)))),
                    "{{of}}",
                ),
            ),
        ),
        Panel(
            "Forecasts that could be compared",
            "What came later told how good they were.",
            Unit.PER_S,
            (Query(or_zero(rate(m.FORECASTS_COMPARED, by=("of",))), "{{of}}"),),
        ),
    ),
)

STORE = Row(
    "The store that they are learnt through",
    (
        Panel(
            "Reachable",
            "By who uses it.",
            Unit.COUNT,
            (Query(total(m.STORE_UP, by=("by",), how="min"), "{{by}}"),),
            Shape.BARS,
            good_from=1,
        ),
        Panel(
            "Failures",
            "Exchanges that failed.",
            Unit.PER_S,
            (Query(or_zero(rate(m.STORE_FAILURES, by=("by", "kind"))), "{{by}} {{kind}}"),),
            width=16,
        ),
    ),
)

BOARD = Board(
    "caesura-predictor",
    "Caesura / Predictor",
    "Who answers, how fast, and how far off the forecasts are.",
    (),
    (ANSWERS, ERRORS, STORE),
)
