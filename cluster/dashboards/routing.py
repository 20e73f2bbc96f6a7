"""Routing: where turns go and why, who waits at the door, and who is refused."""

from cluster import metrics as m
from cluster.dashboards.board import Board, Panel, Query, Row, Shape, Unit, Variable
from cluster.dashboards.foreign import VLLM_GENERATED
from cluster.dashboards.promql import PROCESS, mean, or_zero, per, quantile, rate, total
from cluster.dashboards.scopes import CLUSTER, REPLICAS

PLACEMENT = Row(
    "Placement",
    (
        Panel(
            "Placements by reason",
            "Stayed: the program's replica has its KV. Moved: it had to leave it.",
            Unit.PER_S,
            (Query(rate(m.PLACEMENTS, by=("reason",), scope=CLUSTER), "{{reason}}"),),
            Shape.STACKED,
            width=12,
        ),
        Panel(
            "Turns that found their program's replica",
            "Of the turns in the time shown, without programs' first ones.",
            Unit.SHARE,
            (
                Query(
                    per(
                        rate(m.PLACEMENTS, 'reason=~"stayed|found"', over="$__range", scope=CLUSTER),
                        rate(m.PLACEMENTS, 'reason!="new"', over="$__range", scope=CLUSTER),
                    )
                ),
            ),
            Shape.NUMBER,
            width=6,
            good_from=0.9,
        ),
        Panel(
            "Moves",
            "Programs a second that left one replica for another. Each pays for its KV again.",
            Unit.PER_S,
            (Query(or_zero(rate(m.MOVES, by=("model",), scope=CLUSTER)), "{{model}}"),),
            width=6,
        ),
        Panel(
            "Turns in each replica's batch",
            "Lines that stay apart are load that is not shared.",
            Unit.COUNT,
            (Query(total(m.RUNNING, by=(PROCESS,), scope=REPLICAS), "{{process}}"),),
        ),
        Panel(
            "Turns that wait at each replica",
            "Admitted to it by an ingress, not yet by its scheduler.",
            Unit.COUNT,
            (Query(total(m.WAITING, by=(PROCESS,), scope=REPLICAS), "{{process}}"),),
        ),
        Panel(
            "Tokens of each replica",
            "Generated a second, by the replica's id.",
            Unit.PER_S,
            (Query(rate(VLLM_GENERATED, by=("ReplicaId",), scope=REPLICAS), "{{ReplicaId}}"),),
        ),
    ),
)

DOOR = Row(
    "At the door",
    (
        Panel(
            "Turns that wait to be admitted",
            "At the ingresses, because no replica should take more now.",
            Unit.COUNT,
            (Query(total(m.WAITING_TURNS, by=("model",), scope=CLUSTER), "{{model}}"),),
        ),
        Panel(
            "Wait at the door",
            "Seconds until a replica may take the turn.",
            Unit.SECONDS,
            (
                Query(mean(m.ADMISSION_S, scope=CLUSTER), "mean"),
                Query(quantile(0.95, m.ADMISSION_S, scope=CLUSTER), "p95"),
            ),
        ),
        Panel(
            "Refusals by reason",
            "Hopeless: the turn could not have met its SLO. Tenant share: one tenant has more waiting than its part.",
            Unit.PER_S,
            (Query(or_zero(rate(m.REFUSALS, by=("reason",), scope=CLUSTER)), "{{reason}}"),),
        ),
        Panel(
            "Age of what the router knows",
            "Of the oldest snapshot of a replica. Some seconds are usual; more means that a replica does not tell.",
            Unit.SECONDS,
            (Query(total(m.SNAPSHOT_AGE, by=("model",), how="max", scope=CLUSTER), "{{model}}"),),
            bad_from=10,
        ),
        Panel(
            "Placements without something",
            "The router went on without the store, or without a view of the replicas.",
            Unit.PER_S,
            (Query(or_zero(rate(m.PLACEMENT_FALLBACKS, by=("kind",), scope=CLUSTER)), "{{kind}}"),),
        ),
        Panel(
            "Replicas by state",
            "As the ingresses see them.",
            Unit.COUNT,
            (Query(total(m.REPLICAS, by=("model", "state"), how="max", scope=CLUSTER), "{{model}} {{state}}"),),
            Shape.BARS,
        ),
    ),
)

BOARD = Board(
    "caesura-routing",
    "Caesura / Routing",
    "Where turns go and why, who waits at the door, and who is refused.",
    (Variable.MODEL, Variable.REPLICA),
    (PLACEMENT, DOOR),
)
