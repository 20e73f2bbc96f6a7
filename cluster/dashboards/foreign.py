"""The metrics of vLLM and of Ray that the dashboards ask for, named as the scrape configuration leaves them."""

from dataclasses import dataclass

from cluster.metrics import Kind


@dataclass(frozen=True, slots=True)
class Foreign:
    """A metric that others export."""

    exported: str
    kind: Kind
    labels: tuple[str, ...] = ("model_name",)


def _vllm(name: str, kind: Kind, *labels: str) -> Foreign:
    return Foreign(f"vllm:{name}", kind, ("model_name", *labels))


VLLM_RUNNING = _vllm("num_requests_running", Kind.GAUGE)
VLLM_WAITING = _vllm("num_requests_waiting_by_reason", Kind.GAUGE, "reason")
VLLM_KV_USAGE = _vllm("kv_cache_usage_perc", Kind.GAUGE)
VLLM_PREEMPTIONS = _vllm("num_preemptions_total", Kind.COUNTER)
VLLM_PROMPT_TOKENS = _vllm("prompt_tokens_by_source_total", Kind.COUNTER, "source")
VLLM_GENERATED = _vllm("generation_tokens_total", Kind.COUNTER)
VLLM_CACHE_HITS = _vllm("prefix_cache_hits_total", Kind.COUNTER)
VLLM_CACHE_QUERIES = _vllm("prefix_cache_queries_total", Kind.COUNTER)
VLLM_FINISHED = _vllm("request_success_total", Kind.COUNTER, "finished_reason")
VLLM_TTFT = _vllm("time_to_first_token_seconds", Kind.HISTOGRAM)
VLLM_INTER_TOKEN = _vllm("inter_token_latency_seconds", Kind.HISTOGRAM)
VLLM_E2E = _vllm("e2e_request_latency_seconds", Kind.HISTOGRAM)
VLLM_QUEUE = _vllm("request_queue_time_seconds", Kind.HISTOGRAM)
VLLM_PREFILL = _vllm("request_prefill_time_seconds", Kind.HISTOGRAM)
VLLM_DECODE = _vllm("request_decode_time_seconds", Kind.HISTOGRAM)
VLLM_STEP_TOKENS = _vllm("iteration_tokens_total", Kind.HISTOGRAM)

RAY_CPU = Foreign("node_cpu_utilization", Kind.GAUGE, ("ip",))
RAY_MEMORY = Foreign("node_mem_used", Kind.GAUGE, ("ip",))
RAY_MEMORY_TOTAL = Foreign("node_mem_total", Kind.GAUGE, ("ip",))
RAY_DISK = Foreign("node_disk_utilization_percentage", Kind.GAUGE, ("ip",))
RAY_SENT = Foreign("node_network_send_speed", Kind.GAUGE, ("ip",))
RAY_RECEIVED = Foreign("node_network_receive_speed", Kind.GAUGE, ("ip",))
RAY_RSS = Foreign("component_rss_bytes", Kind.GAUGE, ("ip", "pid"))
RAY_COMPONENT_CPU = Foreign("component_cpu_percentage", Kind.GAUGE, ("ip", "pid"))
RAY_GPU = Foreign("node_gpus_utilization", Kind.GAUGE, ("ip", "GpuIndex", "GpuDeviceName"))
RAY_GPU_MEMORY = Foreign("node_gram_used", Kind.GAUGE, ("ip", "GpuIndex", "GpuDeviceName"))
RAY_ACTORS = Foreign("actors", Kind.GAUGE, ("State", "Name"))
RAY_OBJECTS = Foreign("object_store_memory", Kind.GAUGE, ("Location",))
SERVE_HEALTHY = Foreign("serve_deployment_replica_healthy", Kind.GAUGE, ("deployment", "application", "replica"))
SERVE_ONGOING = Foreign("serve_replica_processing_queries", Kind.GAUGE, ("deployment", "application", "replica"))
SERVE_REQUESTS = Foreign("serve_num_http_requests_total", Kind.COUNTER, ("route", "method", "status_code"))
SERVE_LATENCY = Foreign("serve_http_request_latency_ms", Kind.HISTOGRAM, ("route", "method", "status_code"))
SERVE_LOOP = Foreign("serve_event_loop_scheduling_latency_ms", Kind.HISTOGRAM, ("component", "loop_type", "deployment"))
