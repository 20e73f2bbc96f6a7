"""What the application tells a replica's scheduler, carried through vLLM's ``additional_config``."""

from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cluster.config import CaesuraConfig, ControlConfig, PolicyConfig, SloConfig
from cluster.registry import POLICIES
from replicas.cost_model import CostModel
from replicas.policy import Policy
from replicas.presets import DEFAULT, cost_model_for, preset

KEY = "caesura"
"""The key of ``additional_config``."""


class SchedulerSettings(BaseModel):
    """Settings of one AgentScheduler."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    policy: PolicyConfig = Field(default_factory=lambda: PolicyConfig(name="vllm"))
    """The policy at start."""
    cost: CostModel = Field(default_factory=lambda: preset(DEFAULT))
    """What steps and transfers cost on this replica's hardware."""
    slo: SloConfig = Field(default_factory=SloConfig)
    """What a turn is good by."""
    control: ControlConfig = Field(default_factory=ControlConfig)
    """Bounds."""
    tool_parser: str | None = None
    """vLLM's tool parser, for the names of the tools that a turn asks for."""

    def additional_config(self) -> dict[str, Any]:
        """What goes into vLLM's engine argument of that name."""
        return {KEY: self.model_dump(mode="json")}

    @classmethod
    def for_replica(cls, config: CaesuraConfig) -> "SchedulerSettings":
        """Those of a replica of this configuration.

        Raises:
            ConfigError: the cost model cannot be had.
        """
        return cls(
            policy=config.policy,
            cost=cost_model_for(config),
            slo=config.slo,
            control=config.control,
            tool_parser=config.model.tool_parser,
        )

    @classmethod
    def of(cls, additional_config: Any) -> "SchedulerSettings":
        """The inverse; defaults where vLLM was started without Caesura's application.

        Raises:
            pydantic.ValidationError: what stands there are not settings.
        """
        values = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
        return cls.model_validate(values)


def build_policy(config: PolicyConfig) -> Policy:
    """The policy of that name, with an axis of another where the configuration mixes.

    Admission goes with the order, since who waits for room is whoever ranks first, and so does what a rank means.
    """

    def axes_of(name: str) -> Policy:
        built: Policy = POLICIES.load(name)().build()
        return built

    whole: Policy = POLICIES.load(config.name).model_validate(config.parameters).build()
    ordering = axes_of(config.order) if config.order else whole
    return replace(
        whole,
        order=ordering.order,
        admission=ordering.admission,
        late_rank=ordering.late_rank,
        pause=axes_of(config.pause).pause if config.pause else whole.pause,
        budget=axes_of(config.budget).budget if config.budget else whole.budget,
    )
