"""Which models are served, on what, and which of them a class of programs goes to."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from cluster.config.sections import Section, SloConfig

TINY = "tiny"
"""The model source that stands for the built-in model of `caesura model tiny`."""

RESERVED_ENGINE_KWARGS = {
    "model": "model.source",
    "served_model_name": "model.id",
    "tensor_parallel_size": "replicas.tensor_parallel_size",
    "scheduler_cls": "policy.name",
    "scheduling_policy": "policy.name",
    "tool_call_parser": "model.tool_parser",
    "enable_auto_tool_choice": "model.tool_parser",
    "additional_config": "policy.parameters",
}
"""Engine arguments that Caesura sets itself, each with the key that decides it."""


def _not_reserved(key: str) -> str:
    if key in RESERVED_ENGINE_KWARGS:
        raise ValueError(f"is decided by {RESERVED_ENGINE_KWARGS[key]}; set that instead")
    return key


EngineArgument = Annotated[str, AfterValidator(_not_reserved)]

CLASS_PREFIX = "auto:"
"""What stands before the name of a class where a client names one as `model`."""


def _not_a_class(model_id: str) -> str:
    if model_id.startswith(CLASS_PREFIX):
        raise ValueError(f"begins with {CLASS_PREFIX!r}, which names a class")
    return model_id


ModelId = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_not_a_class)]


class ModelWeights(Section):
    """A model's weights, and how its output is read."""

    source: str = Field(TINY, min_length=1)
    """A local path or a Hugging Face id; `tiny` is the built-in random model, made on first use."""
    tool_parser: str | None = "hermes"
    """vLLM's parser for the tool calls in this model's output; null turns tool parsing off."""


class ReplicaConfig(Section):
    """How many engines, and on what."""

    count: int = Field(1, ge=1, le=1024)
    """Number of vLLM replicas."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Devices (or CPU processes) that one replica is split over, through a Ray placement group."""
    accelerator: Literal["cpu", "gpu"] = "cpu"
    """What a replica runs on."""
    accelerator_type: str | None = None
    """Ray's name of the GPU type, such as H100; null takes any."""
    cpus: float = Field(0.5, gt=0)
    """Ray CPUs reserved for each process of a replica."""
    kv_cache_bytes: int | None = Field(None, ge=1 << 20)
    """KV cache of one CPU replica; null is 128 MiB. On a GPU set `engine.gpu_memory_utilization` instead."""
    cpu_offload_bytes: int | None = Field(None, ge=0)
    """Host memory of one replica for the KV of paused programs, all its devices together. null: half of what the
    machine has available, over the replicas on it, and on CPU no more than twice the KV cache; 0: no host tier."""
    max_ongoing_requests: int = Field(256, ge=1)
    """Requests that one replica works on at a time; more wait in front of it."""
    max_queued_requests: int = Field(2048, ge=-1)
    """Requests that wait in front of the replicas before 503 is answered; -1 is no limit."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds for a replica to load its model."""
    stream_interval_ms: int = Field(50, ge=0)
    """Tokens of one stream that are ready within this time travel together."""


class ModelConfig(ModelWeights):
    """What is served."""

    id: ModelId = "tiny"
    """The name that clients send as `model`."""


class FurtherModel(ModelWeights):
    """A model that is served beside the first one, on replicas of its own."""

    engine: dict[EngineArgument, Any] = Field(default_factory=dict)
    """vLLM engine arguments of this model."""
    replicas: ReplicaConfig = Field(default_factory=ReplicaConfig)
    cost_model: str | None = Field(None, min_length=1)
    """As the key of the same name of the first model."""
    slo: SloConfig = Field(default_factory=SloConfig)
    """Bounds that count for this model; those that are not said are the default's (`slo`)."""


class ClassRule(Section):
    """Sends a program of a class to a model, if all that is said of it holds."""

    model: ModelId
    """Where it goes: an id of `model` or `models`."""
    tools: tuple[str, ...] | None = None
    """Holds if a tool that its turn offers, or has just used, matches one of these patterns (`*` for any part)."""
    min_prompt_tokens: int | None = Field(None, ge=1)
    """Holds from so many prompt tokens on; of a text they are estimated, at four bytes each."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Holds up to so many."""
    max_start_s: float | None = Field(None, gt=0)
    """Holds while a turn is expected to start there within this time."""

    @property
    def unconditional(self) -> bool:
        """Whether it always holds."""
        return self == ClassRule(model=self.model)
