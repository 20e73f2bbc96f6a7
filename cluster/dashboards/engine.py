"""The engines, as vLLM itself tells of them."""

from cluster.dashboards import foreign as f
from cluster.dashboards.board import Board, Panel, Query, Row, Shape, Unit, Variable
from cluster.dashboards.promql import or_zero, per, quantile, rate, sum_of, total
from cluster.dashboards.scopes import REPLICAS

REPLICA = ("ReplicaId",)
LEGEND = "{{ReplicaId}}"
TAILS = (0.5, 0.95, 0.99)


def or_idle(gauge: str) -> str:
    """A gauge of vLLM's by replica, 0 where it says none: an engine that is idle tells nothing."""
    return f"{gauge}\nor 0 * {sum_of(f.VLLM_GENERATED, by=REPLICA, scope=REPLICAS)}"


def _tails(metric: f.Foreign) -> tuple[Query, ...]:
    return tuple(Query(quantile(share, metric, scope=REPLICAS), f"p{100 * share:g}") for share in TAILS)


TOKENS = Row(
    "Tokens",
    (
        Panel(
            "Generated",
            "Tokens a second, by replica.",
            Unit.PER_S,
            (Query(rate(f.VLLM_GENERATED, by=REPLICA, scope=REPLICAS), LEGEND),),
            Shape.STACKED,
        ),
        Panel(
            "Prompt tokens by source",
            "Computed here, found in the prefix cache, or loaded from the host tier.",
            Unit.PER_S,
            (Query(rate(f.VLLM_PROMPT_TOKENS, by=("source",), scope=REPLICAS), "{{source}}"),),
            Shape.STACKED,
        ),
        Panel(
            "Tokens of a step",
            "What one step of the engine computes.",
            Unit.COUNT,
            _tails(f.VLLM_STEP_TOKENS),
        ),
        Panel(
            "Prefix cache hits",
            "Of the prompt tokens that were looked up.",
            Unit.SHARE,
            (
                Query(
                    per(
                        rate(f.VLLM_CACHE_HITS, by=REPLICA, scope=REPLICAS),
                        rate(f.VLLM_CACHE_QUERIES, by=REPLICA, scope=REPLICAS),
                    ),
                    LEGEND,
                ),
            ),
        ),
        Panel(
            "KV cache usage",
            "vLLM counts held blocks as used. An engine that is idle tells nothing, which is drawn as 0.",
            Unit.SHARE,
            (Query(or_idle(total(f.VLLM_KV_USAGE, by=REPLICA, scope=REPLICAS, how="max")), LEGEND),),
        ),
        Panel(
            "Preemptions",
            "Running requests that lost their memory and begin again.",
            Unit.PER_S,
            (Query(or_zero(rate(f.VLLM_PREEMPTIONS, by=REPLICA, scope=REPLICAS)), LEGEND),),
        ),
    ),
)

REQUESTS = Row(
    "Requests",
    (
        Panel(
            "Running",
            "By replica.",
            Unit.COUNT,
            (Query(or_idle(total(f.VLLM_RUNNING, by=REPLICA, scope=REPLICAS)), LEGEND),),
            Shape.STACKED,
        ),
        Panel(
            "Waiting, by reason",
            "Capacity: for memory or a place in the batch. Deferred: for something else, such as KV on its way.",
            Unit.COUNT,
            (Query(or_zero(total(f.VLLM_WAITING, by=("reason",), scope=REPLICAS)), "{{reason}}"),),
            Shape.STACKED,
        ),
        Panel(
            "Finished, by reason",
            "Stop, length, or abort.",
            Unit.PER_S,
            (Query(rate(f.VLLM_FINISHED, by=("finished_reason",), scope=REPLICAS), "{{finished_reason}}"),),
            Shape.STACKED,
        ),
    ),
)

LATENCY = Row(
    "Latency inside the engine",
    (
        Panel("Time to first token", "From the engine's receipt.", Unit.SECONDS, _tails(f.VLLM_TTFT)),
        Panel("Between tokens", "Of all tokens after the first.", Unit.SECONDS, _tails(f.VLLM_INTER_TOKEN)),
        Panel("End to end", "From the engine's receipt to the last token.", Unit.SECONDS, _tails(f.VLLM_E2E)),
        Panel("Queue", "Until a request is scheduled first.", Unit.SECONDS, _tails(f.VLLM_QUEUE)),
        Panel("Prefill", "From there to the first token.", Unit.SECONDS, _tails(f.VLLM_PREFILL)),
        Panel("Decode", "From the first token to the last.", Unit.SECONDS, _tails(f.VLLM_DECODE)),
    ),
)

BOARD = Board(
    "caesura-engine",
    "Caesura / Engine (vLLM)",
    "The engines, as vLLM itself tells of them.",
    (Variable.MODEL, Variable.REPLICA),
    (TOKENS, REQUESTS, LATENCY),
)
