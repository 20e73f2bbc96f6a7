"""Cost models by roofline: the papers' models on common GPUs, named ``model/device``, such as ``opt-13b/h800``.

Data sheets give the roofs, an :class:`Engine` what a serving engine reaches of them: today's, or with ``@2023`` behind
the name that of the papers' time. `caesura profile` measures instead; take a preset where the hardware is not at hand.
The built-in model on a CPU is such a measurement.
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
"""Of that share, on each device: activations, CUDA graphs, communication buffers."""
LINK_EFFICIENCY = 0.8
"""Share of its nominal bandwidth that a host or a device link reaches."""
ALL_REDUCE_S = 10e-6
"""Latency of one all-reduce between tensor-parallel ranks; each layer has two."""
MIN_CAPACITY_TOKENS = 4096
"""A replica whose memory takes fewer tokens does not count as fitting."""


ENGINE_MARK = "@"


@dataclass(frozen=True, slots=True)
class Engine:
    """What a serving engine reaches of a device's roofs. Shares are in (0, 1]."""

    compute_efficiency: float
    """Of the dense peak, by the linear layers and attention in a full batch."""
    bandwidth_efficiency: float
    """Of the memory bandwidth, in reading weights and KV."""
    step_overhead_s: float
    """An iteration before any work: what of scheduling and launching does not overlap with the device."""
    sequence_overhead_s: float
    """Each sequence of a batch: block table, sampling, output."""


TODAY = Engine(0.55, 0.8, step_overhead_s=1.5e-3, sequence_overhead_s=10e-6)
ENGINES = {
    # vLLM 0.2, on which InferCept, MARS and AugServe are built: eager launches, scheduling, sampling and detokenising
    # in Python between two iterations, the first paged-attention kernel. Assumed, not measured.
    "2023": Engine(0.4, 0.5, step_overhead_s=15e-3, sequence_overhead_s=150e-6),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model's architecture its costs follow from. Weights and KV have ``dtype_bytes`` a number."""

    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    tensor_parallel: int = 1
    """Devices of one replica."""
    dtype_bytes: int = 2

    @property
    def weight_bytes(self) -> int:
        """All ranks together."""
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """A key and a value for each layer and KV head, all ranks together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def linear_flops_per_token(self) -> int:
        """One multiplication and one addition for each parameter."""
        return 2 * self.parameters

    @property
    def attention_flops_per_pair(self) -> int:
        """Query times key and weight times value, each a multiplication and an addition per dimension."""
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def all_reduce_bytes_per_token(self) -> float:
        """What each rank sends for a token: two ring all-reduces a layer."""
        ring = 2 * (self.tensor_parallel - 1) / self.tensor_parallel
        return 2 * self.layers * ring * self.hidden * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU as its data sheet has it. Bytes are decimal; link rates are per direction."""

    memory_bytes: float
    bandwidth: float
    """Bytes per second of the device memory."""
    flops: float
    """Dense 16-bit operations per second, accumulated in 32 bits."""
    host_link: float
    """Bytes per second from or to the host: PCIe x16."""
    device_link: float
    """Bytes per second to other devices: NVLink, else the host link."""


PCIE4, PCIE5 = 32e9, 64e9
"""Bytes per second of sixteen lanes, one direction."""

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
"""Where nothing is known of a replica: policies need the ratios of its costs, not their seconds."""

TINY_CPU = CostModel(
    name="tiny/cpu",
    kv_bytes_per_token=512,
    kv_capacity_tokens=262_144,
    overhead_s=1.0e-3,
    sequence_s=4.8e-5,
    weights_s=3.5e-5,
    token_s=2.1e-6,
    context_s=6.0e-8,
    pair_s=7.5e-9,
    swap_token_s=2.5e-8,
    turn_s=1.2e-3,
)
"""The built-in model on one core, without HTTP: benchmarks/results/profile_tiny_cpu.json, rounded."""


def cost_model(source: str) -> CostModel:
    """What ``source`` names: a preset, or by its path a ``.json`` file that `caesura profile` wrote.

    Raises:
        ConfigError: no such preset, or not such a file.
    """
    return CostModel.load(Path(source)) if source.endswith(".json") else preset(source)


def cost_model_for(config: CaesuraConfig) -> CostModel:
    """The cost model of a replica: the configured one, else the preset that fits its model and device, else DEFAULT.

    Raises:
        ConfigError: the configured one cannot be had.
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
    """The cost model of ``model/device`` or ``model/device@engine``.

    Raises:
        ConfigError: no such model, device or engine, or the model does not fit; the message has by how much.
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
    """Every ``model/device`` that fits; each may have an engine behind it."""
    for model_name, model in MODELS.items():
        for device_name, device in DEVICES.items():
            if _capacity_tokens(model, device) >= MIN_CAPACITY_TOKENS:
                yield f"{model_name}/{device_name}"


def _capacity_tokens(model: ModelShape, device: Device) -> int:
    """Tokens whose KV fits; negative where the weights alone are too much."""
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
