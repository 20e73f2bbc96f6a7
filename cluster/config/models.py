"""Configuration of models: which are served, on which replicas, and which model a class of programs uses."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from cluster.config.engine_arguments import check_engine_argument, reject_transfers
from cluster.config.sections import Section, SloConfig

TINY = "tiny"
"""The model source that means the built-in model of `caesura model tiny`."""

RESERVED_ENGINE_KWARGS = {
    "model": "model.source",
    "served_model_name": "model.id",
    "tensor_parallel_size": "replicas.tensor_parallel_size",
    "pipeline_parallel_size": "replicas.pipeline_parallel_size",
    "data_parallel_size": "replicas.data_parallel_size",
    "scheduler_cls": "policy.name",
    "scheduling_policy": "policy.name",
    "tool_call_parser": "model.tool_parser",
    "enable_auto_tool_choice": "model.tool_parser",
    "additional_config": "policy.parameters",
    "enable_lora": "model.adapters",
    "lora_modules": "model.adapters",
}
"""Engine arguments that Caesura sets itself, each with the configuration key that determines it."""


def _not_reserved(key: str) -> str:
    if key in RESERVED_ENGINE_KWARGS:
        raise ValueError(f"is decided by {RESERVED_ENGINE_KWARGS[key]}; set that instead")
    return key


def _typed(arguments: dict[str, Any]) -> dict[str, Any]:
    wrong: list[InitErrorDetails] = []
    for name, value in arguments.items():
        try:
            if name == "kv_transfer_config":
                reject_transfers(value)
            check_engine_argument(name, value)
        except ValueError as error:
            kind = PydanticCustomError("engine_argument", "{message}", {"message": str(error)})
            wrong.append({"type": kind, "loc": (name,), "input": value})
    if wrong:
        raise ValidationError.from_exception_data("engine", wrong)
    return arguments


EngineArguments = Annotated[dict[Annotated[str, AfterValidator(_not_reserved)], Any], AfterValidator(_typed)]
"""vLLM's engine arguments by name."""

CLASS_PREFIX = "auto:"
"""Prefix of the name of a class in a request's `model`."""


def _not_a_class(model_id: str) -> str:
    if model_id.startswith(CLASS_PREFIX):
        raise ValueError(f"begins with {CLASS_PREFIX!r}, which names a class")
    return model_id


def adapter_model(model_id: str, adapter: str) -> str:
    """Return the name by which clients call an adapter of a model."""
    return f"{model_id}:{adapter}"


ModelId = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_not_a_class)]


ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


class AdapterConfig(Section):
    """A LoRA adapter of a model."""

    path: str = Field(min_length=1)
    """A local directory with the adapter's `adapter_config.json` and weights, or a Hugging Face id. Every replica of
    the model needs it."""


class ModelWeights(Section):
    """A model's weights, and the parser of its output."""

    source: str = Field(TINY, min_length=1)
    """A local path or a Hugging Face id. `tiny` is the built-in model with random weights, which is made on first
    use."""
    tool_parser: str | None = "hermes"
    """vLLM's parser for tool calls in this model's output (`--tool-call-parser`). null: tool calls are not parsed."""
    adapters: dict[Annotated[str, Field(pattern=ADAPTER_NAME)], AdapterConfig] = Field(default_factory=dict)
    """LoRA adapters of this model, by name. Clients send `model: ID:NAME`. They are loaded when a replica starts.
    `engine.max_loras` is the number that one step may use, and `engine.max_lora_rank` the largest rank."""


class DiskTierConfig(Section):
    """A tier on disk below the host tier, for the KV of paused programs. It survives the replica."""

    path: str = Field(pattern=r"^/", max_length=1024)
    """Folder for the KV, absolute. Replicas that see the same folder load what the others have written. In a container
    it has to be a volume."""
    bytes: int = Field(ge=1 << 20)
    """Largest size of the folder, in bytes, for all replicas of this model on one machine together. Each replica may
    fill an equal share. A higher value keeps the KV of more programs."""


class KvStoreConfig(Section):
    """A KV store of another project, in place of the host tier and the disk tier."""

    name: Literal["lmcache", "mooncake"]
    """The store: LMCache's server (0.5) or Mooncake's store."""
    address: str | None = Field(None, pattern=r"^[A-Za-z0-9.-]+:[0-9]{1,5}$", validate_default=True)
    """Host and port of LMCache's server, on the machine of the replica. Required by lmcache."""
    config_file: str | None = Field(None, pattern=r"^/", max_length=1024, validate_default=True)
    """Mooncake's configuration file on each replica, absolute. Required by mooncake."""

    @field_validator("address", "config_file")
    @classmethod
    def _is_what_the_store_needs(cls, value: str | None, info: ValidationInfo) -> str | None:
        needed = {"lmcache": "address", "mooncake": "config_file"}.get(info.data.get("name", ""))
        if needed == info.field_name and value is None:
            raise ValueError(f"is required by {info.data['name']}")
        if needed is not None and needed != info.field_name and value is not None:
            raise ValueError(f"has no effect with {info.data['name']}; remove it")
        return value

    @property
    def knows_only_tokens(self) -> bool:
        """Whether its keys have the model's name, the tokens and the salt, and not vLLM's hashes of adapters and
        images.
        """
        return self.name == "lmcache"


class ReplicaConfig(Section):
    """The replicas of a model: their number, their devices and their limits."""

    count: int = Field(1, ge=1, le=1024)
    """Number of vLLM replicas. Leave it out if `max` is set."""
    min: int | None = Field(None, ge=0, le=1024)
    """Smallest number of replicas if their number follows the load, which needs `max`. null: 1. With 0, the last
    replica is removed when no program is expected back soon, and the next turn waits until a replica has started."""
    max: int | None = Field(None, ge=1, le=1024)
    """Largest number of replicas. If it is set, the number of replicas follows the load, between `min` and `max`. null:
    the number is `count`."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Number of devices (or CPU processes) over which each layer of one replica is split. If a machine has fewer
    devices, a replica on GPUs spans several machines."""
    pipeline_parallel_size: int = Field(1, ge=1, le=64)
    """Number of stages into which the layers of one replica are divided. A replica has this number times
    `tensor_parallel_size` devices, in one Ray placement group. Increase it if a model does not fit on one machine and
    the network between machines is slow, since stages exchange less than tensor parallel devices."""
    data_parallel_size: int = Field(1, ge=1, le=1024)
    """Number of data parallel ranks. Each of the `count` replicas becomes a group of so many Serve replicas, which
    start and fail together and have devices and KV of their own. Set it for models with experts, together with
    `engine.enable_expert_parallel: true`, which divides the experts over the ranks."""
    accelerator: Literal["cpu", "gpu"] = "cpu"
    """Type of device that a replica runs on."""
    accelerator_type: str | None = None
    """Ray's name of the GPU type, such as H100. null: any type."""
    cpus: float = Field(0.5, gt=0)
    """Ray CPUs reserved for each process of a replica."""
    kv_cache_bytes: int | None = Field(None, ge=1 << 20)
    """Size of the KV cache of one CPU replica in bytes. null: 128 MiB. On a GPU, set `engine.gpu_memory_utilization`
    instead."""
    cpu_offload_bytes: int | None = Field(None, ge=0)
    """Host memory of one replica for the KV of paused programs, in bytes, for all its devices together. null: the
    replicas of a machine share half of its available memory, and on CPU a replica gets at most twice its KV cache. 0:
    there is no host tier."""
    disk_tier: DiskTierConfig | None = None
    """Disk space for the KV of paused programs, below the host tier. A program whose replica has failed or restarted
    then loads its context in place of computing it. null: there is none."""
    kv_store: KvStoreConfig | None = None
    """A KV store of another project, in place of the host tier and the disk tier. Programs are then neither swapped nor
    fetched ahead, and the model's weights cannot be changed while it serves. With lmcache a model has no adapters and
    reads no images. null: there is none."""
    max_ongoing_requests: int = Field(256, ge=1)
    """Maximum number of turns in one replica. Further turns wait there in the order of their arrival."""
    max_queued_requests: int = Field(2048, ge=-1)
    """Maximum number of turns that wait in one replica. Further turns get 503. -1: no limit."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds that a replica may take to start and load its model."""
    rewrite_ahead: bool = True
    """Whether a replica computes the next prompt in the pause if the client, or the chat template, will drop the
    reasoning or render the history again. It takes free memory, and time that no turn needs."""
    stream_interval_ms: int = Field(50, ge=0)
    """Milliseconds for which a replica collects the tokens of one stream before it sends them together. A higher value
    makes fewer messages and bursts of tokens; 0 sends each token when it is ready."""

    @field_validator("disk_tier")
    @classmethod
    def _has_a_host_tier(cls, disk: DiskTierConfig | None, info: ValidationInfo) -> DiskTierConfig | None:
        if disk is not None and info.data.get("cpu_offload_bytes") == 0:
            raise ValueError("needs the host tier, through which KV is moved; remove `cpu_offload_bytes: 0`")
        return disk

    @field_validator("kv_store")
    @classmethod
    def _is_alone(cls, store: KvStoreConfig | None, info: ValidationInfo) -> KvStoreConfig | None:
        if store is None:
            return None
        if info.data.get("disk_tier") is not None:
            raise ValueError("takes the place of disk_tier; remove one of them")
        if info.data.get("cpu_offload_bytes"):
            raise ValueError("takes the place of the host tier; remove cpu_offload_bytes")
        if info.data.get("accelerator") == "cpu":
            raise ValueError(f"{store.name} needs GPUs; set `accelerator: gpu`")
        return store

    @model_validator(mode="after")
    def _count_or_bounds(self) -> Self:
        wrong = None
        if self.max is None and self.min is not None:
            wrong = "min", self.min, "needs max, the largest number of replicas"
        elif self.max is not None and self.least > self.max:
            wrong = "min", self.least, f"exceeds max ({self.max})"
        elif self.max is not None and self.count != 1:
            wrong = "count", self.count, "is the number of replicas if it does not follow the load; remove it or max"
        elif self.max is not None and self.data_parallel_size > 1:
            wrong = (
                "data_parallel_size",
                self.data_parallel_size,
                "needs a fixed count: groups of ranks do not follow the load",
            )
        if wrong is not None:
            field, given, message = wrong
            kind = PydanticCustomError("replica_bounds", "{message}", {"message": message})
            line: InitErrorDetails = {"type": kind, "loc": (field,), "input": given}
            raise ValidationError.from_exception_data("replicas", [line])
        return self

    @property
    def is_elastic(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max is not None

    @property
    def least(self) -> int:
        """Smallest number of replicas."""
        if self.max is None:
            return self.count
        return 1 if self.min is None else self.min

    @property
    def most(self) -> int:
        """Largest number of replicas."""
        return self.count if self.max is None else self.max

    @property
    def devices(self) -> int:
        """Number of devices (or CPU processes) of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def servers(self) -> int:
        """Largest number of Serve replicas: all ranks of all replicas."""
        return self.most * self.data_parallel_size


def check_adapters(replicas: ReplicaConfig, adapters: Mapping[str, AdapterConfig] | None) -> ReplicaConfig:
    """Return the replicas, if no tier of theirs can load KV that another adapter of the model has computed.

    Raises:
        ValidationError: one can.
    """
    store = replicas.kv_store
    reasons = {
        "disk_tier": "an adapter has only a name, and files may be of an earlier one" if replicas.disk_tier else None,
        "kv_store": f"{store.name} finds KV by the name of the model" if store and store.knows_only_tokens else None,
    }
    wrong: list[InitErrorDetails] = []
    for key, reason in reasons.items():
        if adapters and reason is not None:
            message = f"cannot be used with model.adapters, since {reason}"
            kind = PydanticCustomError("adapters_mixed", "{message}", {"message": message})
            wrong.append({"type": kind, "loc": (key,), "input": getattr(replicas, key).model_dump(exclude_none=True)})
    if wrong:
        raise ValidationError.from_exception_data("replicas", wrong)
    return replicas


class ModelConfig(ModelWeights):
    """The first model that is served."""

    id: ModelId = "tiny"
    """The name that clients send as `model`."""


class FurtherModel(ModelWeights):
    """A model that is served beside the first one, on replicas of its own."""

    engine: EngineArguments = Field(default_factory=dict)
    """vLLM engine arguments of this model."""
    replicas: ReplicaConfig = Field(default_factory=ReplicaConfig)
    cost_model: str | None = Field(None, min_length=1)
    """Costs of the steps of this model's replicas. It has the meaning of the top-level key `cost_model`."""
    slo: SloConfig = Field(default_factory=SloConfig)
    """SLO bounds for this model. A bound that is not set here is that of the top-level key `slo`."""

    @field_validator("replicas")
    @classmethod
    def _knows_adapters(cls, replicas: ReplicaConfig, info: ValidationInfo) -> ReplicaConfig:
        return check_adapters(replicas, info.data.get("adapters"))


class ClassRule(Section):
    """A rule that sends a program of a class to a model if all of its conditions hold."""

    model: ModelId
    """The model that the program goes to: an id of `model` or `models`."""
    tools: tuple[str, ...] | None = None
    """The condition holds if a tool that the turn offers, or has just used, matches one of these patterns, in which `*`
    stands for any text. null: no condition."""
    min_prompt_tokens: int | None = Field(None, ge=1)
    """The condition holds if the prompt has at least this number of tokens. For a text they are estimated, at four
    bytes a token. null: no condition."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """The condition holds if the prompt has at most this number of tokens. null: no condition."""
    max_start_s: float | None = Field(None, gt=0)
    """The condition holds if a turn is expected to start on this model within this time (seconds). null: no
    condition."""

    @property
    def unconditional(self) -> bool:
        """Whether the rule has no conditions, so that it always holds."""
        return self == ClassRule(model=self.model)
