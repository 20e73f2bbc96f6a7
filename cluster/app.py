"""The Ray Serve application: HTTP ingress over each model's ProgramServers; also the import path of `serve deploy`."""

from math import ceil
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_llm_deployment

from cluster.config.models import TINY
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import ConfigError
from cluster.core.registry import OUR_ROUTER, ROUTERS
from cluster.direct.note import ROUTER_DEPLOYMENT
from cluster.direct.replica import DirectProgramServer
from cluster.direct.router import router_class
from cluster.http.ingress import ingress_class
from predictor_service.service import predictor_application
from replicas.engine import LocalModel
from replicas.host_tier import kv_transfer_config
from replicas.server import ProgramServer
from replicas.settings import CPU_ENVIRONMENT, SchedulerSettings
from replicas.tiny.model import tiny_model_directory
from router.pinned_router import CONTROL_SLOTS

APPLICATION = "caesura"
"""Name of the Serve application."""

SCHEDULER = "replicas.control.AgentScheduler"
"""vLLM resolves it in EngineCore's process."""

CPU_ENGINE = {"block_size": 32, "enforce_eager": True}
"""Engine arguments on CPU unless the configuration names others: vLLM's own block size there is 128 tokens."""

CPU_KV_CACHE_BYTES = 128 << 20
"""KV cache of one CPU replica unless the configuration says otherwise: 131,072 tokens of the built-in model. vLLM
itself would take nearly all of the machine."""

ENGINE = {"enable_prompt_tokens_details": True}
"""Engine arguments everywhere unless the configuration names others: `usage` shows the cached tokens."""

EMBEDDED = "embedded"

SHUTDOWN_SLACK_S = 30.0
"""Seconds above ``http.request_timeout_s``, the longest turn, for which a process that is replaced goes on with what it
has begun. Ray's own 20 s would cut it off."""

HEALTH_CHECK_PERIOD_S = 5.0
ROUTING_STATS_PERIOD_S = 1.0
ROUTING_STATS_TIMEOUT_S = 5.0
INGRESS_CPUS = 0.1
ROUTER_REQUESTS = 100_000
"""Questions that the direct data plane's router works on at a time; those of requests that wait are among them."""
INGRESS_SLACK = 256
"""Requests above ``http.max_concurrent_requests`` that still reach an ingress: probes, and those answered with 503."""


def build(config: CaesuraConfig) -> Application:
    """The application for ``serve.run``; Ray makes the configuration from the `args` of a Serve config file.

    Raises:
        ConfigError: the store is `embedded`, which only `caesura serve` can provide; the cost model cannot be had; or
            the environment is not that of the data plane.
    """
    if config.redis.url == EMBEDDED:
        raise ConfigError("redis.url: 'embedded' is made by `caesura serve`; give the URL of a Redis, redis://...")
    if config.http.data_plane == "direct":
        return _direct(config)
    replicas = {
        model: build_llm_deployment(llm_config_of(own), deployment_cls=ProgramServer, bind_kwargs={"config": own})
        for model, own in config.served.items()
    }
    ingress = serve.deployment(
        ingress_class(config),
        name="Ingress",
        num_replicas=config.http.ingress_replicas,
        max_ongoing_requests=config.http.max_concurrent_requests + INGRESS_SLACK,
        graceful_shutdown_timeout_s=config.http.request_timeout_s + SHUTDOWN_SLACK_S,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
    )
    predictor = predictor_application(config) if config.predictor.mode == "service" else None
    return ingress.bind(replicas, config, predictor)


def _direct(config: CaesuraConfig) -> Application:
    """The replicas as their own ingress behind HAProxy, and the router that HAProxy asks."""
    if not RAY_SERVE_ENABLE_HA_PROXY:
        raise ConfigError(
            "http.data_plane: direct needs RAY_SERVE_ENABLE_HA_PROXY=1 in the environment of every process of the Ray "
            "cluster, and of this one before it imports Ray"
        )
    if not RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY:
        raise ConfigError("http.data_plane: direct needs RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY=1, as above")
    replicas = build_llm_deployment(
        llm_config_of(config),
        deployment_cls=serve.ingress()(DirectProgramServer),
        name_prefix="ProgramServer:",
        bind_kwargs={"config": config},
        override_serve_options={
            # What waits here waits before its request has been read: the door's own bound must come first.
            "max_ongoing_requests": config.http.max_concurrent_requests + INGRESS_SLACK + CONTROL_SLOTS,
        },
    )
    router = serve.deployment(router_class(), name=ROUTER_DEPLOYMENT, max_ongoing_requests=ROUTER_REQUESTS)
    return replicas._with_ingress_request_router(router.bind(replicas, config))


def llm_config_of(config: CaesuraConfig) -> LLMConfig:
    """The configuration of Ray Serve LLM: the model, its engine and its replicas."""
    replicas, on_cpu = config.replicas, config.replicas.accelerator == "cpu"
    source, ours = model_source(config), config.router.name == OUR_ROUTER
    return LLMConfig(
        model_loading_config={"model_id": config.model.id, "model_source": source},
        accelerator_type=replicas.accelerator_type,
        accelerator_config={"kind": replicas.accelerator},
        engine_kwargs=engine_kwargs(config),
        deployment_config={
            "num_replicas": replicas.count,
            "max_ongoing_requests": replicas.max_ongoing_requests + (CONTROL_SLOTS if ours else 0),
            "max_queued_requests": replicas.max_queued_requests,
            "health_check_period_s": HEALTH_CHECK_PERIOD_S,
            "graceful_shutdown_timeout_s": config.http.request_timeout_s + SHUTDOWN_SLACK_S,
            "ray_actor_options": {"num_cpus": replicas.cpus},
            "request_router_config": RequestRouterConfig(
                request_router_class=ROUTERS.load(config.router.name),
                request_router_kwargs={} if ours else config.router.parameters,
                request_routing_stats_period_s=ROUTING_STATS_PERIOD_S,
                request_routing_stats_timeout_s=ROUTING_STATS_TIMEOUT_S,
            ),
        },
        placement_group_config={"bundles": bundles(config)},
        runtime_env={"env_vars": CPU_ENVIRONMENT if on_cpu else {}},
        log_engine_metrics=True,
        **({"callback_config": {"callback_class": LocalModel}} if Path(source).is_dir() else {}),
    )


def bundles(config: CaesuraConfig) -> list[dict[str, float]]:
    """One placement bundle for each device of a replica; the replica's own actor joins the first."""
    replicas = config.replicas
    device = {"CPU": replicas.cpus} if replicas.accelerator == "cpu" else {"CPU": replicas.cpus, "GPU": 1.0}
    return [device] * replicas.tensor_parallel_size


def engine_kwargs(config: CaesuraConfig) -> dict[str, Any]:
    """vLLM's engine arguments: ours, the configuration's `engine` over them, and those that nobody may change.

    Raises:
        ConfigError: the cost model cannot be had.
    """
    on_cpu = config.replicas.accelerator == "cpu"
    arguments: dict[str, Any] = {**ENGINE, **(CPU_ENGINE if on_cpu else {})}
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = config.replicas.kv_cache_bytes or CPU_KV_CACHE_BYTES
    if config.replicas.cpu_offload_bytes != 0:
        here = ceil(config.num_replicas / num_machines())
        arguments["kv_transfer_config"] = kv_transfer_config(config.replicas.cpu_offload_bytes, replicas_here=here)
    arguments |= config.engine
    if config.model.tool_parser is not None:
        arguments |= {"enable_auto_tool_choice": True, "tool_call_parser": config.model.tool_parser}
    return arguments | {
        "tensor_parallel_size": config.replicas.tensor_parallel_size,
        "scheduler_cls": SCHEDULER,
        "additional_config": SchedulerSettings.for_replica(config).additional_config(),
    }


def num_machines() -> int:
    """Of the Ray cluster; 1 where there is none yet."""
    nodes = ray.nodes() if ray.is_initialized() else []
    return max(1, len({node["NodeManagerHostname"] for node in nodes if node["Alive"]}))


def model_source(config: CaesuraConfig) -> str:
    """A path or a Hugging Face id; the built-in model is made on first use."""
    return str(tiny_model_directory()) if config.model.source == TINY else config.model.source
