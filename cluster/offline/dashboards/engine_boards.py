"""The dashboards of vLLM's and Ray's own metrics."""

from functools import partial

from cluster.offline.dashboards import foreign as f
from cluster.offline.dashboards.board import Board, Row, Shape, Unit, Variable, lines, panel
from cluster.offline.dashboards.promql import REPLICAS, ended_replicas, or_zero, per, quantile, rate, sum_of, total

REPLICA = ("ReplicaId",)
LEGEND = "{{ReplicaId}}"

replica_panel = partial(panel, scope=REPLICAS)


def or_idle(gauge: str, by: str = "ReplicaId") -> str:
    """Return a gauge of vLLM, or 0 for each replica without it, as an idle engine does not export its gauges."""
    return f"{gauge}\nor 0 * {sum_of(f.VLLM_GENERATED, by=(by,), scope=REPLICAS)}"


CACHE_HIT_RATE = per(
    rate(f.VLLM_CACHE_HITS, by=REPLICA, scope=REPLICAS), rate(f.VLLM_CACHE_QUERIES, by=REPLICA, scope=REPLICAS)
)
TOKENS = Row(
    "Tokens",
    (
        replica_panel(f.VLLM_GENERATED, "Generated tokens", by=REPLICA, shape=Shape.STACKED),
        replica_panel(f.VLLM_PROMPT_TOKENS, "Prompt tokens by source", shape=Shape.STACKED),
        replica_panel(f.VLLM_STEP_TOKENS, "Tokens per step"),
        lines("Prefix cache hit rate", "Share of the looked-up prompt tokens.", {LEGEND: CACHE_HIT_RATE}, Unit.SHARE),
        lines(
            "KV cache usage",
            "vLLM counts held blocks as used. An idle engine exports nothing, which is shown as 0.",
            {LEGEND: or_idle(total(f.VLLM_KV_USAGE, by=REPLICA, scope=REPLICAS, aggregate="max"))},
            Unit.SHARE,
        ),
        replica_panel(f.VLLM_PREEMPTIONS, "Preemptions", by=REPLICA),
    ),
)

REQUESTS = Row(
    "Requests",
    (
        lines(
            "Running requests",
            "By replica.",
            {LEGEND: or_idle(total(f.VLLM_RUNNING, by=REPLICA, scope=REPLICAS))},
            shape=Shape.STACKED,
        ),
        lines(
            "Waiting requests by reason",
            f"{f.VLLM_WAITING.help}.",
            {"{{reason}}": or_zero(total(f.VLLM_WAITING, by=("reason",), scope=REPLICAS))},
            shape=Shape.STACKED,
        ),
        replica_panel(f.VLLM_FINISHED, "Finished requests by reason", shape=Shape.STACKED),
    ),
)

LATENCY = Row(
    "Latency inside the engine",
    (
        replica_panel(f.VLLM_TTFT, "Time to first token"),
        replica_panel(f.VLLM_INTER_TOKEN, "Inter-token latency"),
        replica_panel(f.VLLM_E2E, "End-to-end latency"),
        replica_panel(f.VLLM_QUEUE, "Queueing time"),
        replica_panel(f.VLLM_PREFILL, "Prefill time"),
        replica_panel(f.VLLM_DECODE, "Decode time"),
    ),
)

ENGINE = Board(
    "caesura-engine",
    "Caesura / Engine (vLLM)",
    "vLLM's own metrics.",
    (Variable.MODEL, Variable.REPLICA),
    (TOKENS, REQUESTS, LATENCY),
)

GPU = "{{ip}} {{GpuIndex}}"
NODES = Row(
    "Nodes",
    (
        panel(f.RAY_CPU, "CPU", aggregate="max", unit=Unit.PERCENT),
        lines(
            "Memory",
            "Used share, by node.",
            {"{{ip}}": per(total(f.RAY_MEMORY, by=("ip",)), total(f.RAY_MEMORY_TOTAL, by=("ip",)))},
            Unit.SHARE,
            bad_from=0.9,
        ),
        panel(f.RAY_DISK, "Disk", unit=Unit.PERCENT),
        lines(
            "Network",
            "All nodes together.",
            {"sent": total(f.RAY_SENT), "received": total(f.RAY_RECEIVED)},
            Unit.BYTES_PER_S,
        ),
        lines(
            "GPU utilisation",
            f"{f.RAY_GPU.help}.",
            {GPU: or_zero(total(f.RAY_GPU, by=("ip", "GpuIndex"), aggregate="max"))},
            Unit.PERCENT,
        ),
        lines(
            "GPU memory",
            f"{f.RAY_GPU_MEMORY.help}.",
            {GPU: or_zero(total(f.RAY_GPU_MEMORY, by=("ip", "GpuIndex"), aggregate="max"))},
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        panel(f.RAY_RSS, "Memory by component", by=("Component",), shape=Shape.STACKED),
        panel(f.RAY_COMPONENT_CPU, "CPU by component", by=("Component",), unit=Unit.PERCENT, shape=Shape.STACKED),
        panel(f.RAY_ACTORS, "Actors by state", by=("State",)),
        panel(f.RAY_OBJECTS, "Object store", unit=Unit.BYTES),
        lines(
            "Ended replica processes",
            "Of the last half hour, without those that the autoscaler removed. One is a crash or a new version,"
            " many are a crash loop.",
            {"": ended_replicas()},
            shape=Shape.NUMBER,
            bad_from=3,
        ),
        panel(f.SERVE_HEALTHY, "Healthy Serve replicas", by=("deployment",), shape=Shape.BARS),
    ),
)

SERVE = Row(
    "Ray Serve",
    (
        panel(f.SERVE_ONGOING, "Requests in replicas", by=("deployment",), width=12),
        lines(
            "Event loop delay, p99",
            f"{f.SERVE_LOOP.help}.",
            {"{{component}} {{loop_type}}": quantile(0.99, f.SERVE_LOOP, by=("component", "loop_type"))},
            Unit.MILLISECONDS,
            width=12,
        ),
    ),
)

RAY = Board(
    "caesura-cluster",
    "Caesura / Cluster (Ray)",
    "Nodes, processes and Ray Serve. Needs the scrape of Ray's own ports.",
    (),
    (NODES, PROCESSES, SERVE),
)
