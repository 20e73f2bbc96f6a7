"""The Ray Serve application: an HTTP ingress, and each model's replicas. `serve deploy` imports this module."""

import warnings
from math import ceil
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_dp_deployment
from ray.serve.schema import LoggingConfig

from cluster.config.models import TINY, adapter_model
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import ConfigError
from cluster.core.registry import OUR_AUTOSCALER, OUR_ROUTER, ROUTERS
from cluster.http.ingress import ingress_class
from predictor_service.service import predictor_application
from replicas.engine import LocalModel
from replicas.host_tier import kv_transfer_config
from replicas.kv_store import store_environment, store_transfer_config
from replicas.parallel_server import ParallelServer
from replicas.server import ProgramServer
from replicas.settings import CPU_ENVIRONMENT, SchedulerSettings
from replicas.tiny.model import tiny_model_directory

APPLICATION = "caesura"
"""Name of the Serve application."""

SCHEDULER = "replicas.control.AgentScheduler"
"""Import path of the scheduler class, which vLLM resolves in EngineCore's process."""

CPU_ENGINE = {"block_size": 32, "enforce_eager": True}
"""Default engine arguments on CPU, where vLLM's own block size is 128 tokens. The configuration can override them."""

CPU_KV_CACHE_BYTES = 128 << 20
"""Default size of the KV cache of one CPU replica, which is 131,072 tokens of the built-in model. vLLM's own default
would use nearly all memory of the machine."""

ENGINE = {"enable_prompt_tokens_details": True, "structured_outputs_config": {"backend": "xgrammar"}}
"""Default engine arguments on all devices. With them, `usage` has the cached tokens, and a schema that xgrammar cannot
enforce is rejected. With vLLM's default (`auto`), the first request with a schema chooses the backend of all: after one
that xgrammar cannot enforce, `tool_choice: required` fails until the engine restarts."""

EMBEDDED = "embedded"

SHUTDOWN_SLACK_S = 30.0
"""A process that is replaced may continue its requests for ``http.request_timeout_s``, which is the longest turn, plus
this time (seconds). Ray's default of 20 s would cut them."""

HEALTH_CHECK_PERIOD_S = 5.0
ROUTING_STATS_PERIOD_S = 1.0
ROUTING_STATS_TIMEOUT_S = 5.0
AUTOSCALER = "router.autoscaling.serve_autoscaler:ServeAutoscaler"
SCALING_PERIOD_S = 1.0
"""Seconds between two reports of a replica to the autoscaler."""
INGRESS_CPUS = 0.1
INGRESS_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""With it, the HTTP server of an ingress runs in the event loop of its handlers. Otherwise each piece of an answer
would pass from thread to thread."""
INGRESS_SLACK = 256
"""Number of requests above ``http.max_concurrent_requests`` that Ray still sends to an ingress: probes, and requests
that are rejected with 503."""


def build(config: CaesuraConfig) -> Application:
    """Build the application for ``serve.run``.

    Args:
        config: the configuration. Ray makes it from the `args` of a Serve config file.

    Raises:
        ConfigError: the store is `embedded`, which only `caesura serve` can start; or the cost model cannot be read.
    """
    if config.redis.url == EMBEDDED:
        raise ConfigError("redis.url: 'embedded' is made by `caesura serve`; give the URL of a Redis, redis://...")
    replicas = {
        model: build_dp_deployment(llm_config_of(own), deployment_cls=server_class(own), bind_kwargs={"config": own})
        for model, own in config.served.items()
    }
    ingress = serve.deployment(
        ingress_class(config),
        name="Ingress",
        num_replicas=config.http.ingress_replicas,
        max_ongoing_requests=config.http.max_concurrent_requests + INGRESS_SLACK,
        graceful_shutdown_timeout_s=config.http.request_timeout_s + SHUTDOWN_SLACK_S,
        logging_config=LoggingConfig(
            enable_access_log=False, encoding="JSON" if config.logs.format == "json" else "TEXT"
        ),
        ray_actor_options={"num_cpus": INGRESS_CPUS, "runtime_env": {"env_vars": INGRESS_ENVIRONMENT}},
    )
    predictor = predictor_application(config) if config.predictor.mode == "service" else None
    return ingress.bind(replicas, config, predictor)


def llm_config_of(config: CaesuraConfig) -> LLMConfig:
    """Make the configuration of Ray Serve LLM for a model, its engine and its replicas."""
    replicas, on_cpu = config.replicas, config.replicas.accelerator == "cpu"
    source, ours = model_source(config), config.router.name == OUR_ROUTER
    return LLMConfig(
        model_loading_config={"model_id": config.model.id, "model_source": source},
        accelerator_type=replicas.accelerator_type,
        accelerator_config={"kind": replicas.accelerator},
        engine_kwargs=engine_kwargs(config),
        deployment_config={
            **number_of_replicas(config),
            "max_ongoing_requests": replicas.max_ongoing_requests,
            # Ray takes no 0. The replica itself refuses what would wait then.
            "max_queued_requests": replicas.max_queued_requests or 1,
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
        runtime_env={"env_vars": {**(CPU_ENVIRONMENT if on_cpu else {}), **store_environment(replicas.kv_store)}},
        log_engine_metrics=True,
        **({"callback_config": {"callback_class": LocalModel}} if Path(source).is_dir() else {}),
    )


def number_of_replicas(config: CaesuraConfig) -> dict[str, Any]:
    """Return Ray's deployment options for the number of a model's replicas."""
    replicas = config.replicas
    if not replicas.is_elastic:
        return {"num_replicas": replicas.count}
    settings = {"policy": OUR_AUTOSCALER, "model": config.model.id, "metrics": config.metrics.enabled}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of metrics_interval_s, which no option replaces yet
        scaling = AutoscalingConfig(
            min_replicas=replicas.least,
            max_replicas=replicas.most,
            metrics_interval_s=SCALING_PERIOD_S,
            look_back_period_s=5 * SCALING_PERIOD_S,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=AutoscalingPolicy(policy_function=AUTOSCALER, policy_kwargs=settings),
        )
    return {"num_replicas": "auto", "autoscaling_config": scaling}


def server_class(config: CaesuraConfig) -> type[ProgramServer]:
    """Return the class of a model's replicas."""
    return ParallelServer if config.replicas.data_parallel_size > 1 else ProgramServer


def bundles(config: CaesuraConfig) -> list[dict[str, float]]:
    """Return one placement bundle for each device of a replica. The replica's own actor is in the first bundle."""
    replicas = config.replicas
    device = {"CPU": replicas.cpus} if replicas.accelerator == "cpu" else {"CPU": replicas.cpus, "GPU": 1.0}
    return [device] * replicas.devices


def engine_kwargs(config: CaesuraConfig) -> dict[str, Any]:
    """Return vLLM's engine arguments.

    The configuration's `engine` overrides Caesura's defaults, but not the arguments in
    `cluster.config.models.RESERVED_ENGINE_KWARGS`.

    Raises:
        ConfigError: the cost model cannot be read.
    """
    on_cpu = config.replicas.accelerator == "cpu"
    arguments: dict[str, Any] = {**ENGINE, **(CPU_ENGINE if on_cpu else {})}
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = config.replicas.kv_cache_bytes or CPU_KV_CACHE_BYTES
    if config.replicas.kv_store is not None:
        arguments["kv_transfer_config"] = store_transfer_config(config.replicas.kv_store)
    elif config.replicas.cpu_offload_bytes != 0:
        here = ceil(config.num_replicas / num_machines(config))
        arguments["kv_transfer_config"] = kv_transfer_config(
            config.replicas.cpu_offload_bytes, replicas_here=here, disk=config.replicas.disk_tier
        )
    arguments |= config.engine
    if config.model.tool_parser is not None:
        arguments |= {"enable_auto_tool_choice": True, "tool_call_parser": config.model.tool_parser}
    return arguments | {
        "tensor_parallel_size": config.replicas.tensor_parallel_size,
        "pipeline_parallel_size": config.replicas.pipeline_parallel_size,
        **({"data_parallel_size": ranks} if (ranks := config.replicas.data_parallel_size) > 1 else {}),
        **lora_arguments(config),
        "scheduler_cls": SCHEDULER,
        "additional_config": SchedulerSettings.for_replica(config).additional_config(),
    }


def lora_arguments(config: CaesuraConfig) -> dict[str, Any]:
    """Return vLLM's arguments for the adapters of a model. vLLM knows each by the name that clients send."""
    adapters = config.model.adapters
    if not adapters:
        return {}
    modules = [
        {"name": adapter_model(config.model.id, name), "path": adapter.path, "base_model_name": config.model.id}
        for name, adapter in adapters.items()
    ]
    return {"enable_lora": True, "lora_modules": modules}


def num_machines(config: CaesuraConfig) -> int:
    """Return the number of machines of the Ray cluster that can have a device of a replica; 1 if there is none yet."""
    needed = bundles(config)[0]
    if config.replicas.accelerator_type is not None:
        needed = needed | {f"accelerator_type:{config.replicas.accelerator_type}": 0.001}
    nodes = ray.nodes() if ray.is_initialized() else []
    fitting = {
        node["NodeManagerHostname"]
        for node in nodes
        if node["Alive"] and all(node["Resources"].get(name, 0.0) >= amount for name, amount in needed.items())
    }
    return max(1, len(fitting))


def model_source(config: CaesuraConfig) -> str:
    """Return the model's path or Hugging Face id. The built-in model is made on first use."""
    return str(tiny_model_directory()) if config.model.source == TINY else config.model.source
