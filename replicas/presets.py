"""Cost models by roofline for the papers' models on common GPUs, named ``model/device``, such as ``opt-13b/h800``.

Data sheets give the roofs, and an :class:`Engine` the share of them that a serving engine reaches. The suffix ``@2023``
selects the engines of the papers' time; without it, the engine is a current one. `caesura profile` measures a cost
model instead; use a preset where the hardware is not available. The built-in model on a CPU is such a measurement.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.config.models import TINY
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import ConfigError
from replicas.cost_model import CostModel

MEMORY_UTILIZATION = 0.9
"""vLLM's default share of the device's memory."""
WORKING_BYTES = 1.0e9
"""Bytes of this share on each device that activations, CUDA graphs and communication buffers take."""
LINK_EFFICIENCY = 0.8
"""Share of its nominal bandwidth that a host or device link reaches."""
ALL_REDUCE_S = 10e-6
"""Latency in seconds of one all-reduce between tensor-parallel ranks. Each layer has two."""
MIN_CAPACITY_TOKENS = 4096
"""Least number of tokens of KV. A model that leaves less memory does not fit a device."""


ENGINE_MARK = "@"


@dataclass(frozen=True, slots=True)
class Engine:
    """The share of a device's roofs that a serving engine reaches. Shares are in (0, 1]."""

    compute_efficiency: float
    """Share of the dense peak that linear layers and attention reach in a full batch."""
    bandwidth_efficiency: float
    """Share of the memory bandwidth that is reached in reading weights and KV."""
    step_overhead_s: float
    """Seconds of scheduling and launching in an iteration that do not overlap with the device."""
    sequence_overhead_s: float
    """Seconds for each sequence of a batch: block table, sampling, output."""


TODAY = Engine(0.55, 0.8, step_overhead_s=1.5e-3, sequence_overhead_s=10e-6)
ENGINES = {
    # vLLM 0.2, on which InferCept, MARS and AugServe are built: eager launches, scheduling, sampling and detokenising
    # in Python between two iterations, the first paged-attention kernel. Assumed, not measured.
    "2023": Engine(0.4, 0.5, step_overhead_s=15e-3, sequence_overhead_s=150e-6),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The parts of a model's architecture on which its costs depend.

    Each number of weights and KV has ``dtype_bytes``.
    """

    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    tensor_parallel: int = 1
    """Number of devices of one replica."""
    dtype_bytes: int = 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, all ranks together."""
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a key and a value for each layer and KV head, all ranks together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def linear_flops_per_token(self) -> int:
        """Operations of the linear layers per token: one multiplication and one addition for each parameter."""
        return 2 * self.parameters

    @property
    def attention_flops_per_pair(self) -> int:
        """Operations of attention per pair: query · key and weight · value, with two operations per dimension each."""
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def all_reduce_bytes_per_token(self) -> float:
        """Bytes that each rank sends for one token: two ring all-reduces per layer."""
        ring = 2 * (self.tensor_parallel - 1) / self.tensor_parallel
        return 2 * self.layers * ring * self.hidden * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU according to its data sheet. Bytes are decimal, and link rates are per direction."""

    memory_bytes: float
    bandwidth: float
    """Bytes per second of the device memory."""
    flops: float
    """Dense 16-bit operations per second, accumulated in 32 bits."""
    host_link: float
    """Bytes per second from or to the host over PCIe x16."""
    device_link: float
    """Bytes per second to other devices over NVLink, or else over the host link."""


PCIE4, PCIE5 = 32e9, 64e9
"""Bytes per second of sixteen PCIe lanes, in one direction."""

MODELS = {
    # From each model's config.json; parameters as counted in its checkpoint.
    "opt-13b": ModelShape(12_853_473_280, layers=40, hidden=5120, heads=40, kv_heads=40, head_dim=128),
    "gpt-j-6b": ModelShape(6_050_882_784, layers=28, hidden=4096, heads=16, kv_heads=16, head_dim=256),
    "vicuna-13b": ModelShape(13_015_864_320, layers=40, hidden=5120, heads=40, kv_heads=40, head_dim=128),
    "llama-3.1-8b": ModelShape(8_030_261_248, layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128),
    "llama-3.1-70b": ModelShape(
        70_553_706_496, layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, tensor_parallel=4
    ),
}

DEVICES = {
    # NVIDIA's data sheets and architecture white papers; the SXM form where there are several.
    "rtx-4090": Device(24e9, bandwidth=1.008e12, flops=165.2e12, host_link=PCIE4, device_link=PCIE4),
    "a100-40": Device(40e9, bandwidth=1.555e12, flops=312e12, host_link=PCIE4, device_link=300e9),
    "a100-80": Device(80e9, bandwidth=2.039e12, flops=312e12, host_link=PCIE4, device_link=300e9),
    # The H100 with less NVLink: 400 instead of 900 GB/s, both directions together.
    "h800": Device(80e9, bandwidth=3.35e12, flops=989e12, host_link=PCIE5, device_link=200e9),
    "h100": Device(80e9, bandwidth=3.35e12, flops=989e12, host_link=PCIE5, device_link=450e9),
    "h200": Device(141e9, bandwidth=4.8e12, flops=989e12, host_link=PCIE5, device_link=450e9),
    # As in the DGX B200: 1,440 GB in eight.
    "b200": Device(180e9, bandwidth=8.0e12, flops=2250e12, host_link=PCIE5, device_link=900e9),
}

DEFAULT = "llama-3.1-8b/h100"
"""The preset where nothing is known of a replica. Policies need the ratios of its costs, not their absolute values."""

TINY_CPU = CostModel(
    name="tiny/cpu",
    kv_bytes_per_token=512,
    kv_capacity_tokens=262_144,
    overhead_s=1.0e-3,
    sequence_s=5.1e-5,
    weights_s=2.5e-5,
    token_s=1.5e-6,
    context_s=4.3e-8,
    pair_s=8.2e-9,
    swap_token_s=2.5e-8,
    turn_s=1.2e-3,
)
"""The built-in model on one core, without HTTP. It is rounded from benchmarks/results/profile_tiny_cpu.json."""


def cost_model(source: str) -> CostModel:
    """Return the cost model of a preset, or of a ``.json`` file that `caesura profile` wrote.

    Raises:
        ConfigError: there is no such preset, or the file is not valid.
    """
    return CostModel.load(Path(source)) if source.endswith(".json") else preset(source)


def cost_model_for(config: CaesuraConfig) -> CostModel:
    """Return a replica's cost model: the configured one, else the preset of its model and device, else DEFAULT.

    Raises:
        ConfigError: the configured cost model cannot be loaded.
    """
    if config.cost_model is not None:
        try:
            return cost_model(config.cost_model)
        except ConfigError as error:
            raise ConfigError(f"cost_model: {error}") from None
    replicas = config.replicas
    if replicas.accelerator == "cpu":
        return TINY_CPU if config.model.source == TINY else preset(DEFAULT)
    model_name = config.model.source.rpartition("/")[2].lower()
    device = (replicas.accelerator_type or "").lower().removesuffix("g")  # Ray has A100-80G
    for name in preset_names():
        model, _, on = name.partition("/")
        if model in model_name and on == device and MODELS[model].tensor_parallel == replicas.tensor_parallel_size:
            return preset(name)
    return preset(DEFAULT)


def preset(name: str) -> CostModel:
    """Return the cost model of ``model/device`` or ``model/device@engine``.

    Raises:
        ConfigError: there is no such model, device or engine, or the model does not fit. The message has the sizes.
    """
    if name == TINY_CPU.name:
        return TINY_CPU
    hardware, mark, engine_name = name.partition(ENGINE_MARK)
    model_name, _, device_name = hardware.partition("/")
    chosen = [("model", model_name, list(MODELS)), ("device", device_name, list(DEVICES))]
    if mark:
        chosen.append(("engine", engine_name, list(ENGINES)))
    for kind, part, known in chosen:
        if part not in known:
            raise ConfigError(f"preset {name!r}: unknown {kind} {part!r}; choose one of: {', '.join(known)}")
    model, device = MODELS[model_name], DEVICES[device_name]
    capacity = _capacity_tokens(model, device)
    if capacity < MIN_CAPACITY_TOKENS:
        raise ConfigError(_misfit(name, model, device, capacity))
    return _roofline(name, model, device, ENGINES[engine_name] if mark else TODAY, capacity)


def preset_names() -> Iterator[str]:
    """Yield every ``model/device`` that fits. Each may be followed by an engine."""
    for model_name, model in MODELS.items():
        for device_name, device in DEVICES.items():
            if _capacity_tokens(model, device) >= MIN_CAPACITY_TOKENS:
                yield f"{model_name}/{device_name}"


def _capacity_tokens(model: ModelShape, device: Device) -> int:
    """Return the number of tokens whose KV fits. It is negative where the weights alone do not fit."""
    per_device = device.memory_bytes * MEMORY_UTILIZATION - WORKING_BYTES
    free = per_device * model.tensor_parallel - model.weight_bytes
    return int(free // model.kv_bytes_per_token)


def _misfit(name: str, model: ModelShape, device: Device, capacity: int) -> str:
    ranks = f"{model.tensor_parallel} devices give" if model.tensor_parallel > 1 else "one device gives"
    usable = (device.memory_bytes * MEMORY_UTILIZATION - WORKING_BYTES) * model.tensor_parallel
    what = f"preset {name!r} does not fit: its weights are {model.weight_bytes / 1e9:.1f} GB"
    left = f"which leaves room for {max(capacity, 0)} tokens of KV (at least {MIN_CAPACITY_TOKENS} are needed)"
    return f"{what}, {ranks} {usable / 1e9:.1f} GB after working memory, {left}"


def _roofline(name: str, model: ModelShape, device: Device, engine: Engine, capacity: int) -> CostModel:
    ranks = model.tensor_parallel
    bandwidth = ranks * device.bandwidth * engine.bandwidth_efficiency
    flops = ranks * device.flops * engine.compute_efficiency
    # Communication grows with the tokens as compute does, and nothing overlaps with it.
    communication_s = model.all_reduce_bytes_per_token / (device.device_link * LINK_EFFICIENCY)
    latency_s = 2 * model.layers * ALL_REDUCE_S if ranks > 1 else 0.0
    return CostModel(
        name=name,
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_capacity_tokens=capacity,
        overhead_s=engine.step_overhead_s + latency_s,
        sequence_s=engine.sequence_overhead_s,
        weights_s=model.weight_bytes / bandwidth,
        token_s=model.linear_flops_per_token / flops + communication_s,
        context_s=model.kv_bytes_per_token / bandwidth,
        pair_s=model.attention_flops_per_pair / flops,
        swap_token_s=model.kv_bytes_per_token / (ranks * device.host_link * LINK_EFFICIENCY),
    )
