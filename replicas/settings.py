"""The settings with which a replica's engine and scheduler are started.

A scheduler gets its settings through vLLM's ``additional_config``. This module imports neither vLLM nor Ray, because a
CPU replica's environment has to be set before.
"""

import ast
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cluster.config.schema import CaesuraConfig, LimitsConfig, PolicyConfig, SloConfig
from cluster.core.errors import ConfigError
from cluster.core.program import ProgramIdentity, tenant_of
from cluster.core.registry import POLICIES
from cluster.core.slo import Slo
from replicas.cost_model import CostModel
from replicas.policy import Policy
from replicas.presets import DEFAULT, cost_model_for, preset

CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vLLM's own condition for the in-process executor on CPU
    "OMP_NUM_THREADS": "1",  # a replica's threads fight each other on a small model: 649 against 114 tokens/s measured
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",  # of 1,024: steps are of all lengths, and each leaves a kernel
    "TOKENIZERS_PARALLELISM": "false",  # its threads would not survive the fork of EngineCore
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of a CPU replica. Other variables of the machine stay."""


ARGUMENT_CLASSES = {"engine/arg_utils.py": "EngineArgs", "entrypoints/launchers/cli_args.py": "FrontendArgs"}
"""vLLM's files that define its arguments, and the end of the names of the classes whose fields they are."""


def unknown_engine_arguments(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that the installed vLLM does not know, in their order.

    vLLM's source is read and not imported, because the import takes twenty seconds and prints warnings.

    Ray Serve LLM accepts arguments of the engine and of the OpenAI server in its ``engine_kwargs``; ``chat_template``,
    for example, belongs to the server.

    Raises:
        ConfigError: vLLM is not installed.
    """
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        raise ConfigError("engine arguments cannot be checked: vLLM is not installed")
    (folder, *_) = vllm.submodule_search_locations
    known = {
        field.target.id
        for file, suffix in ARGUMENT_CLASSES.items()
        for owner in ast.parse((Path(folder) / file).read_text(encoding="utf-8")).body
        if isinstance(owner, ast.ClassDef) and owner.name.endswith(suffix)
        for field in owner.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    return [name for name in names if name not in known]


def in_one_process(config: Any, arguments: Any) -> None:
    """Change vLLM's configuration of a CPU engine to that of a replica. Other configurations stay as they are.

    vLLM's worker gets no process of its own, and the KV cache size of the arguments is used.

    Args:
        config: the VllmConfig, which is changed in place.
        arguments: the AsyncEngineArgs from which it was made.
    """
    if arguments.kv_cache_memory_bytes is not None:
        # On CPU the machine's VLLM_CPU_KVCACHE_SPACE would win over the configuration.
        config.cache_config.kv_cache_memory_bytes = arguments.kv_cache_memory_bytes
    if config.device_config.device_type == "cpu" and config.parallel_config.world_size == 1:
        config.parallel_config.distributed_executor_backend = "uni"


KEY = "caesura"
"""The key of ``additional_config``."""


class SchedulerSettings(BaseModel):
    """Settings of one AgentScheduler."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    policy: PolicyConfig = Field(default_factory=lambda: PolicyConfig(name="vllm"))
    """The policy at start."""
    cost: CostModel = Field(default_factory=lambda: preset(DEFAULT))
    """The costs of steps and transfers on this replica's hardware."""
    finds_cost: bool = False
    """Whether the engine replaces ``cost`` by that of its model and device (`replicas.engine_costs`)."""
    slo: SloConfig = Field(default_factory=SloConfig)
    """The SLO of turns, by which policies decide."""
    tenant_slos: dict[str, SloConfig] = Field(default_factory=dict)
    """The SLO of each tenant that has its own."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """Limits of holds, programs and waiting times."""
    tool_parser: str | None = None
    """Name of vLLM's tool parser, which reads the names of the tools that a turn calls. None: text formats are read."""

    def additional_config(self) -> dict[str, Any]:
        """Return the value of vLLM's engine argument ``additional_config``."""
        return {KEY: self.model_dump(mode="json")}

    def bounds_of(self, identity: ProgramIdentity) -> Slo:
        """Return the bounds of a turn: its tenant's, else the model's, and the client's deadline for its end."""
        bounds = self.tenant_slos.get(identity.tenant, self.slo).bounds
        if (deadline_s := identity.hints.deadline_s) is None:
            return bounds
        return replace(bounds, e2e_s=deadline_s if bounds.e2e_s is None else min(bounds.e2e_s, deadline_s))

    def bounds_of_program(self, key: str) -> Slo:
        """Return the bounds of the turns of a program that have no deadline of their own."""
        return self.tenant_slos.get(tenant_of(key), self.slo).bounds

    @classmethod
    def for_replica(cls, config: CaesuraConfig) -> "SchedulerSettings":
        """Return the settings of a replica with this configuration.

        Raises:
            ConfigError: the cost model cannot be loaded.
        """
        cost = cost_model_for(config)
        return cls(
            policy=config.policy,
            cost=cost or preset(DEFAULT),
            finds_cost=cost is None,
            slo=config.slo,
            tenant_slos={tenant: config.slo_of(tenant) for tenant in config.tenants},
            limits=config.limits,
            tool_parser=config.model.tool_parser,
        )

    @classmethod
    def of(cls, additional_config: Any) -> "SchedulerSettings":
        """Read the settings from ``additional_config``. They are the defaults where vLLM was started without Caesura.

        Raises:
            pydantic.ValidationError: the value has no valid settings.
        """
        values = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
        return cls.model_validate(values)


def build_policy(config: PolicyConfig) -> Policy:
    """Return the configured policy, with axes of other policies where the configuration mixes them.

    ``is_late``, ``ranks_running``, ``max_wait_s`` and ``guards_memory`` belong to the order, which defines what a rank
    means, and ``evicts_ends`` and ``meets_requests`` to the pause, which knows its holds. The rest is that of the
    policy ``name``.
    """

    def axes_of(name: str) -> Policy:
        built: Policy = POLICIES.load(name)().build()
        return built

    whole: Policy = POLICIES.load(config.name).model_validate(config.parameters).build()
    ordering = axes_of(config.order) if config.order else whole
    pausing = axes_of(config.pause) if config.pause else whole
    return replace(
        whole,
        order=ordering.order,
        is_late=ordering.is_late,
        ranks_running=ordering.ranks_running,
        max_wait_s=ordering.max_wait_s,
        guards_memory=ordering.guards_memory,
        pause=pausing.pause,
        evicts_ends=pausing.evicts_ends,
        meets_requests=pausing.meets_requests,
        budget=axes_of(config.budget).budget if config.budget else whole.budget,
    )
