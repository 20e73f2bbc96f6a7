"""The metrics of vLLM and Ray that the dashboards query, with the names that the scrape configuration gives them."""

from dataclasses import dataclass

from cluster.observing.catalogue import Kind, unit_of


@dataclass(frozen=True, slots=True)
class Foreign:
    """A metric of vLLM or Ray."""

    exported: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("model_name",)

    @property
    def unit(self) -> str:
        """See `cluster.observing.catalogue.UNITS`."""
        return unit_of(self.exported)


def _vllm(name: str, kind: Kind, text: str, *labels: str) -> Foreign:
    return Foreign(f"vllm:{name}", kind, text, ("model_name", *labels))


GAUGE, COUNTER, HISTOGRAM = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM

VLLM_RUNNING = _vllm("num_requests_running", GAUGE, "Requests in the running batch")
VLLM_WAITING = _vllm(
    "num_requests_waiting_by_reason",
    GAUGE,
    "Capacity: for KV blocks or a slot in the batch. Deferred: for something else, such as KV being fetched",
    "reason",
)
VLLM_KV_USAGE = _vllm("kv_cache_usage_perc", GAUGE, "Used share of the KV blocks")
VLLM_PREEMPTIONS = _vllm(
    "num_preemptions_total", COUNTER, "Running requests that lost their KV blocks and have to be recomputed"
)
VLLM_PROMPT_TOKENS = _vllm(
    "prompt_tokens_by_source_total",
    COUNTER,
    "Computed, found in the prefix cache, or loaded from the host tier",
    "source",
)
VLLM_GENERATED = _vllm("generation_tokens_total", COUNTER, "Generated tokens per second, by the replica's id")
VLLM_CACHE_HITS = _vllm("prefix_cache_hits_total", COUNTER, "Prompt tokens found in the prefix cache")
VLLM_CACHE_QUERIES = _vllm("prefix_cache_queries_total", COUNTER, "Prompt tokens looked up in the prefix cache")
VLLM_FINISHED = _vllm("request_success_total", COUNTER, "Stop, length, or abort", "finished_reason")
VLLM_TTFT = _vllm("time_to_first_token_seconds", HISTOGRAM, "From the engine's receipt")
VLLM_INTER_TOKEN = _vllm("inter_token_latency_seconds", HISTOGRAM, "Of all tokens after the first")
VLLM_E2E = _vllm("e2e_request_latency_seconds", HISTOGRAM, "From the engine's receipt to the last token")
VLLM_QUEUE = _vllm("request_queue_time_seconds", HISTOGRAM, "Until a request is first scheduled")
VLLM_PREFILL = _vllm("request_prefill_time_seconds", HISTOGRAM, "From first scheduling to the first token")
VLLM_DECODE = _vllm("request_decode_time_seconds", HISTOGRAM, "From the first token to the last")
VLLM_STEP_TOKENS = _vllm("iteration_tokens_total", HISTOGRAM, "Tokens that one engine step computes")

RAY_CPU = Foreign("node_cpu_utilization", GAUGE, "By node", ("ip",))
RAY_MEMORY = Foreign("node_mem_used", GAUGE, "Used memory, by node", ("ip",))
RAY_MEMORY_TOTAL = Foreign("node_mem_total", GAUGE, "Memory, by node", ("ip",))
RAY_DISK = Foreign("node_disk_utilization_percentage", GAUGE, "Used share, by node", ("ip",))
RAY_SENT = Foreign("node_network_send_speed", GAUGE, "Sent bytes per second", ("ip",))
RAY_RECEIVED = Foreign("node_network_receive_speed", GAUGE, "Received bytes per second", ("ip",))
RAY_RSS = Foreign("component_rss_bytes", GAUGE, "Resident memory of all processes of a component", ("ip", "pid"))
RAY_COMPONENT_CPU = Foreign("component_cpu_percentage", GAUGE, "100 is one core", ("ip", "pid"))
_GPU = ("ip", "GpuIndex", "GpuDeviceName")
RAY_GPU = Foreign("node_gpus_utilization", GAUGE, "0 where there are no GPUs", _GPU)
RAY_GPU_MEMORY = Foreign("node_gram_used", GAUGE, "In mebibytes, as Ray exports it; 0 where there are no GPUs", _GPU)
RAY_ACTORS = Foreign("actors", GAUGE, "Of the whole cluster", ("State", "Name"))
RAY_OBJECTS = Foreign(
    "object_store_memory", GAUGE, "By location. Requests and answers do not pass through it", ("Location",)
)
_REPLICA = ("deployment", "application", "replica")
SERVE_HEALTHY = Foreign("serve_deployment_replica_healthy", GAUGE, "By deployment", _REPLICA)
SERVE_ONGOING = Foreign("serve_replica_processing_queries", GAUGE, "By deployment", _REPLICA)
SERVE_LOOP = Foreign(
    "serve_event_loop_scheduling_latency_ms",
    HISTOGRAM,
    "Of the processes of Serve. Add an ingress where an ingress's loop is delayed",
    ("component", "loop_type", "deployment"),
)
