"""The first dashboard that one opens: is what clients get good, and if not, which part of the cluster says so."""

from cluster import metrics as m
from cluster.dashboards.board import Board, Panel, Query, Row, Shape, Unit, Variable
from cluster.dashboards.promql import mean, or_zero, per, quantile, rate, total
from cluster.dashboards.scopes import CLUSTER

GOOD = 'verdict="good"'
SHOWN = "$__range"
OBJECTIVE = 0.95

GOODPUT = Row(
    "Goodput",
    (
        Panel(
            "Goodput, programs",
            "Programs a second that ended with all turns within their SLO and none failed.",
            Unit.PER_S,
            (Query(or_zero(rate(m.PROGRAM_ENDS, GOOD, scope=CLUSTER))),),
            Shape.NUMBER,
            width=6,
            height=5,
        ),
        Panel(
            "Goodput, turns",
            "Turns a second that ended well and met every bound of their SLO.",
            Unit.PER_S,
            (Query(or_zero(rate(m.GOOD_REQUESTS, scope=CLUSTER))),),
            Shape.NUMBER,
            width=6,
            height=5,
        ),
        Panel(
            "Good programs",
            "Of the programs that ended in the time shown, the share that was good.",
            Unit.SHARE,
            (
                Query(
                    per(
                        rate(m.PROGRAM_ENDS, GOOD, scope=CLUSTER, over=SHOWN),
                        rate(m.PROGRAM_ENDS, scope=CLUSTER, over=SHOWN),
                    )
                ),
            ),
            Shape.NUMBER,
            width=6,
            height=5,
            good_from=OBJECTIVE,
        ),
        Panel(
            "Good turns",
            "Of the turns that ended in the time shown, the share that was good: the SLO's attainment.",
            Unit.SHARE,
            (
                Query(
                    per(
                        rate(m.GOOD_REQUESTS, scope=CLUSTER, over=SHOWN),
                        rate(m.REQUESTS, scope=CLUSTER, over=SHOWN),
                    )
                ),
            ),
            Shape.NUMBER,
            width=6,
            height=5,
            good_from=OBJECTIVE,
        ),
        Panel(
            "Programs: offered and ended",
            "Where the good ones leave the offered ones behind, load is above what the SLO allows.",
            Unit.PER_S,
            (
                Query(rate(m.PROGRAMS, scope=CLUSTER), "offered"),
                Query(rate(m.PROGRAM_ENDS, by=("verdict",), scope=CLUSTER), "{{verdict}}"),
            ),
        ),
        Panel(
            "Turns by outcome",
            "Every turn has one outcome. A turn that is ok may still be late: see the goodput.",
            Unit.PER_S,
            (
                Query(rate(m.REQUESTS, by=("outcome",), scope=CLUSTER), "{{outcome}}"),
                Query(rate(m.GOOD_REQUESTS, scope=CLUSTER), "good"),
            ),
        ),
        Panel(
            "Bounds not met",
            "Which bound of the SLO turns missed that ended well.",
            Unit.PER_S,
            (Query(or_zero(rate(m.SLO_MISSES, by=("bound",), scope=CLUSTER)), "{{bound}}"),),
        ),
    ),
)

TAILS = (0.5, 0.95, 0.99)

LATENCY = Row(
    "What clients wait for",
    (
        Panel(
            "Time to first token",
            "From a turn's arrival, what waited in front of the cluster included.",
            Unit.SECONDS,
            tuple(Query(quantile(share, m.TTFT, scope=CLUSTER), f"p{100 * share:g}") for share in TAILS),
            width=6,
        ),
        Panel(
            "Time per output token",
            "Mean seconds between a turn's tokens after the first.",
            Unit.SECONDS,
            tuple(Query(quantile(share, m.TPOT, scope=CLUSTER), f"p{100 * share:g}") for share in TAILS),
            width=6,
        ),
        Panel(
            "End to end",
            "From a turn's arrival to its last token.",
            Unit.SECONDS,
            tuple(Query(quantile(share, m.E2E, scope=CLUSTER), f"p{100 * share:g}") for share in TAILS),
            width=6,
        ),
        Panel(
            "Normalised latency",
            "End-to-end seconds for each generated token, of a turn.",
            Unit.SECONDS,
            (
                Query(mean(m.NORMALIZED, scope=CLUSTER), "mean"),
                Query(quantile(0.95, m.NORMALIZED, scope=CLUSTER), "p95"),
            ),
            width=6,
        ),
    ),
)

CLUSTER_AT_A_GLANCE = Row(
    "The cluster",
    (
        Panel(
            "Replicas",
            "Replicas that can be sent turns, by state.",
            Unit.COUNT,
            (Query(total(m.REPLICAS, by=("model", "state"), scope=CLUSTER, how="max"), "{{model}} {{state}}"),),
            width=6,
        ),
        Panel(
            "Turns under way",
            "In the running batches, waiting at replicas, and waiting at the ingresses to be let in.",
            Unit.COUNT,
            (
                Query(total(m.RUNNING, scope=CLUSTER), "running"),
                Query(total(m.WAITING, scope=CLUSTER), "waiting"),
                Query(total(m.WAITING_TURNS, scope=CLUSTER), "at the door"),
            ),
            Shape.STACKED,
            width=6,
        ),
        Panel(
            "KV memory in use",
            "Of all KV blocks: used by running turns, and held for paused programs.",
            Unit.SHARE,
            (
                Query(
                    f"1 - ({total(m.FREE_BLOCKS, scope=CLUSTER)}\n+ {total(m.HELD_BLOCKS, scope=CLUSTER)})"
                    f"\n/ {total(m.TOTAL_BLOCKS, scope=CLUSTER)}",
                    "running",
                ),
                Query(per(total(m.HELD_BLOCKS, scope=CLUSTER), total(m.TOTAL_BLOCKS, scope=CLUSTER)), "held"),
            ),
            Shape.STACKED,
            width=6,
        ),
        Panel(
            "Store",
            "1 while the last exchange with the store went well. At 0 everything goes on with what was known.",
            Unit.COUNT,
            (Query(total(m.STORE_UP, by=("by",), how="min"), "{{by}}"),),
            Shape.BARS,
            width=6,
            good_from=1,
        ),
    ),
)

WITHOUT = Row(
    "States, and what goes on without something",
    (
        Panel(
            "Replicas by their own word",
            "The state that each replica's process says it is in.",
            Unit.COUNT,
            (Query(total(m.REPLICA_UP, by=("model", "state"), scope=CLUSTER), "{{model}} {{state}}"),),
            Shape.BARS,
            width=6,
        ),
        Panel(
            "Fallbacks of replicas",
            "Decisions taken without the store's statistics, or without the scheduler's answer.",
            Unit.PER_S,
            (Query(or_zero(rate(m.FALLBACKS, by=("kind",), scope=CLUSTER)), "{{kind}}"),),
            width=6,
        ),
        Panel(
            "Verdicts without the other ingresses",
            "Programs that were judged by one ingress's part alone, because the store did not answer.",
            Unit.PER_S,
            (Query(or_zero(rate(m.LEDGER_FALLBACKS, by=("kind",))), "{{kind}}"),),
            width=6,
        ),
        Panel(
            "Nodes that were not scraped",
            "By the last scrape through the ingress; 0 where Prometheus scrapes the nodes itself.",
            Unit.COUNT,
            (Query(or_zero(total(m.SCRAPE_FAILURES, by=("kind",), how="max")), "{{kind}}"),),
            width=6,
        ),
    ),
)

BOARD = Board(
    "caesura-overview",
    "Caesura / Overview",
    "Goodput first: what clients get, and what the cluster does for it.",
    (Variable.MODEL, Variable.TENANT),
    (GOODPUT, LATENCY, CLUSTER_AT_A_GLANCE, WITHOUT),
)
