"""Cost models of common models on common GPUs, named ``model/device``, such as ``opt-13b/h800``.

The model's shape gives the work of a step, the data sheet gives the roofs of the device, and an :class:`Efficiency`
says which share of the roofs an engine reaches. Efficiencies are fitted to public measurements: see `replicas.silicon`,
whose files name their sources, licences, dates and errors. ``llama-3.1-8b/h100x2`` is tensor-parallel over two devices;
without a number the model's usual one is used. The suffix ``@2023`` selects vLLM 0.2, on which the papers were built:
its efficiency was measured on one A100 and is assumed for the others.
`caesura profile` measures the engine itself instead. The built-in model on a CPU is such a measurement.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic_core import from_json

from cluster.config.models import TINY
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import ConfigError
from replicas.cost_model import CostModel

MEMORY_UTILIZATION = 0.92
"""vLLM 0.29's default share of the device's memory."""
WORKING_BYTES = 1.3e9
"""Bytes of this share on each device that activations, CUDA graphs and communication buffers take. It is the median of
what six engines left (`replicas/silicon/kv_capacity.csv`: 0.4 to 1.6 GB)."""
LINK_EFFICIENCY = 0.8
"""Share of its nominal bandwidth that a host link reaches. It is assumed."""
MIN_CAPACITY_TOKENS = 4096
"""Least number of tokens of KV. A model that leaves less memory does not fit a device."""

ENGINE_MARK = "@"
OLD_ENGINES = ("2023",)
FITS = Path(__file__).parent / "silicon"
"""Folder of the fitted efficiencies: a file for each measured device, and ``engine-NAME`` for an engine of the past."""

Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What an engine reaches on a device: shares of the data sheet's roofs, and times that no roof explains."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    compute: Share
    """Share of the dense peak that the linear layers reach in a full batch."""
    attention: Share
    """Share of the dense peak that attention over a prompt reaches."""
    bandwidth: Share
    """Share of the memory bandwidth that is reached in reading weights and KV."""
    link: Share
    """Share of the link between devices that a large all-reduce reaches."""
    layer_s: Seconds
    """Seconds of each layer in any step: small kernels, and the gaps between kernels."""
    layer_sequence_s: Seconds
    """Seconds of each layer for each sequence of the batch."""
    all_reduce_s: Seconds
    """Seconds of the smallest all-reduce between the ranks. Each layer has two."""


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
    vocabulary: int
    tied: bool = False
    """Whether the output layer uses the weights of the embedding."""
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
    def layer_parameters(self) -> int:
        """Parameters of the layers, without embedding and output layer."""
        return self.parameters - self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that a step reads: layers and output layer, but only a few rows of the embedding."""
        return (self.layer_parameters + self.vocabulary * self.hidden) * self.dtype_bytes

    @property
    def linear_flops_per_token(self) -> int:
        """Operations of the layers per token: one multiplication and one addition for each parameter.

        The output layer is left out, because it computes only on the last token of a prompt.
        """
        return 2 * self.layer_parameters

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
    """One GPU. Link rates are per direction, and bytes are decimal."""

    memory_gib: float
    """Memory in GiB as CUDA reports it, which is less than the data sheet's."""
    bandwidth: float
    """Bytes per second of the device memory."""
    flops: float
    """Dense 16-bit operations per second, accumulated in 32 bits."""
    host_link: float
    """Bytes per second from or to the host over PCIe x16."""
    device_link: float
    """Bytes per second to other devices over NVLink, or else over the host link."""
    measured_on: str
    """The device whose efficiency is used: itself, or the nearest one that was measured."""
    step_tokens: int = 2048
    """Tokens of a step at most, by the default of vLLM 0.29's server on this device."""
    step_sequences: int = 256
    """Sequences of a step at most, likewise."""

    @property
    def drive(self) -> tuple[float, float]:
        """Bytes per second of the NVMe drive that each device has: reads and writes. It has the PCIe of the host."""
        return NVME5 if self.host_link >= PCIE5 else NVME4

    @property
    def memory_bytes(self) -> float:
        """Bytes of the device memory."""
        return self.memory_gib * (1 << 30)


PCIE4, PCIE5 = 32e9, 64e9
"""Bytes per second of sixteen PCIe lanes, in one direction."""

NVME4, NVME5 = (6.5e9, 4e9), (12e9, 6e9)
"""Bytes per second that a drive with four PCIe lanes reads and writes. They are typical of data sheets, and assumed."""

MODELS = {
    # From each model's config.json; parameters as counted in its checkpoint.
    "opt-13b": ModelShape(12_853_473_280, 40, 5120, heads=40, kv_heads=40, head_dim=128, vocabulary=50272, tied=True),
    "tinyllama-1.1b": ModelShape(1_100_048_384, 22, 2048, heads=32, kv_heads=4, head_dim=64, vocabulary=32000),
    "gpt-j-6b": ModelShape(6_050_882_784, 28, 4096, heads=16, kv_heads=16, head_dim=256, vocabulary=50400),
    "vicuna-13b": ModelShape(13_015_864_320, 40, 5120, heads=40, kv_heads=40, head_dim=128, vocabulary=32000),
    "llama-3.1-8b": ModelShape(8_030_261_248, 32, 4096, heads=32, kv_heads=8, head_dim=128, vocabulary=128256),
    "llama-3.1-70b": ModelShape(
        70_553_706_496, 80, 8192, heads=64, kv_heads=8, head_dim=128, vocabulary=128256, tensor_parallel=4
    ),
    "qwen3-32b": ModelShape(
        32_762_123_264, 64, 5120, heads=64, kv_heads=8, head_dim=128, vocabulary=151936, tensor_parallel=2
    ),
}

LARGE = {"step_tokens": 8192, "step_sequences": 1024}
"""vLLM's limits of a step on GPUs of 70 GiB or more other than the A100."""

DEVICES = {
    # NVIDIA's data sheets and architecture white papers, the SXM form where there are several. Memory is as CUDA
    # reports it.
    "rtx-4090": Device(23.52, 1.008e12, 165.2e12, host_link=PCIE4, device_link=PCIE4, measured_on="rtx-4090"),
    "a100-40": Device(39.49, 1.555e12, 312e12, host_link=PCIE4, device_link=300e9, measured_on="a100-80"),
    "a100-80": Device(79.19, 2.039e12, 312e12, host_link=PCIE4, device_link=300e9, measured_on="a100-80"),
    # The H100 with less NVLink: 400 instead of 900 GB/s, both directions together.
    "h800": Device(79.19, 3.35e12, 989e12, host_link=PCIE5, device_link=200e9, measured_on="h100", **LARGE),
    "h100": Device(79.19, 3.35e12, 989e12, host_link=PCIE5, device_link=450e9, measured_on="h100", **LARGE),
    "h200": Device(139.8, 4.8e12, 989e12, host_link=PCIE5, device_link=450e9, measured_on="h200", **LARGE),
    # vLLM's limit of tokens is larger from 160 GiB on.
    "b200": Device(178.35, 8.0e12, 2250e12, PCIE5, 900e9, measured_on="b200", step_tokens=16384, step_sequences=1024),
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


def cost_model_for(config: CaesuraConfig) -> CostModel | None:
    """Return a replica's cost model: the configured one, or on CPUs a preset. None: the engine has to find its own.

    Raises:
        ConfigError: the configured cost model cannot be loaded.
    """
    if config.cost_model is not None:
        try:
            return cost_model(config.cost_model)
        except ConfigError as error:
            raise ConfigError(f"cost_model: {error}") from None
    if config.replicas.accelerator != "cpu":
        return None
    return TINY_CPU if config.model.source == TINY else preset(DEFAULT)


def device_named(name: str) -> str | None:
    """Return the device of a name that CUDA gives, such as ``h100`` for ``NVIDIA H100 80GB HBM3``. None: unknown."""
    words = set(re.split(r"[\s-]+", name.lower()))
    if "a100" in words:
        return "a100-40" if "40gb" in words else "a100-80"
    if "4090" in words:
        return "rtx-4090"
    return next((device for device in DEVICES if device in words), None)


def preset(name: str, reached: Efficiency | None = None) -> CostModel:
    """Return the cost model of ``model/device``, with ``xRANKS`` and ``@engine`` where they are not the usual ones.

    Args:
        name: the preset.
        reached: an efficiency to use instead of the fitted one of the repository.

    Raises:
        ConfigError: there is no such model, device or engine, or the model does not fit. The message has the sizes.
    """
    if name == TINY_CPU.name:
        return TINY_CPU
    shape, device, fit = _parsed(name)
    if shape.kv_heads % shape.tensor_parallel:
        raise ConfigError(f"preset {name!r}: {shape.tensor_parallel} ranks do not divide {shape.kv_heads} KV heads")
    capacity = _capacity_tokens(shape, device)
    if capacity < MIN_CAPACITY_TOKENS:
        raise ConfigError(_misfit(name, shape, device, capacity))
    return roofline(name, shape, device, reached or efficiency(fit))


def drive_of(source: str) -> tuple[float, float]:
    """Return the bytes per second that the NVMe drives of a replica read and write: one drive for each device.

    Args:
        source: a preset, or the ``.json`` file of a cost model, which stands for one drive of today.

    Raises:
        ConfigError: there is no such preset.
    """
    if source.endswith(".json") or source == TINY_CPU.name:
        return NVME5
    shape, device, _ = _parsed(source)
    read, written = device.drive
    return shape.tensor_parallel * read, shape.tensor_parallel * written


def fit_of(name: str) -> str:
    """Return the name of the fit that a preset uses, such as ``h100`` for ``opt-13b/h800``.

    Raises:
        ConfigError: there is no such model, device or engine.
    """
    return _parsed(name)[2]


def _parsed(name: str) -> tuple[ModelShape, Device, str]:
    """Return a preset's shape with its ranks, its device and the name of its fit."""
    hardware, mark, engine = name.partition(ENGINE_MARK)
    model_name, _, on = hardware.partition("/")
    device_name, ranks = re.fullmatch(r"(.*?)(?:x([1-9]\d?))?", on, re.DOTALL).groups()  # type: ignore[union-attr]
    chosen = [("model", model_name, list(MODELS)), ("device", device_name, list(DEVICES))]
    if mark:
        chosen.append(("engine", engine, list(OLD_ENGINES)))
    for kind, part, known in chosen:
        if part not in known:
            raise ConfigError(f"preset {name!r}: unknown {kind} {part!r}; choose one of: {', '.join(known)}")
    shape, device = MODELS[model_name], DEVICES[device_name]
    if ranks is not None:
        shape = replace(shape, tensor_parallel=int(ranks))
    if mark:
        return shape, replace(device, step_tokens=2048, step_sequences=256), f"engine-{engine}"
    return shape, device, device.measured_on


def preset_names() -> Iterator[str]:
    """Yield every ``model/device`` that fits. Each may be followed by a number of ranks and an engine."""
    for model_name, model in MODELS.items():
        for device_name, device in DEVICES.items():
            if _capacity_tokens(model, device) >= MIN_CAPACITY_TOKENS:
                yield f"{model_name}/{device_name}"


@cache
def efficiency(fit: str) -> Efficiency:
    """Return the fitted efficiency of a measured device, or of an engine of the past (``engine-2023``)."""
    return _EFFICIENCY.validate_python(fit_file(fit)["efficiency"])


def fit_file(fit: str) -> dict[str, Any]:
    """Return the content of a fit's file: the efficiency, its sources, date and errors."""
    content: dict[str, Any] = from_json((FITS / f"{fit}.json").read_bytes())
    return content


def roofline(name: str, shape: ModelShape, device: Device, reached: Efficiency) -> CostModel:
    """Return the cost model of a shape on a device with a given efficiency. It does not check that the model fits."""
    ranks = shape.tensor_parallel
    bandwidth = ranks * device.bandwidth * reached.bandwidth
    flops = ranks * device.flops
    # Communication grows with the tokens as compute does, and nothing overlaps with it.
    communication_s = shape.all_reduce_bytes_per_token / (device.device_link * reached.link)
    latency_s = 2 * shape.layers * reached.all_reduce_s if ranks > 1 else 0.0
    return CostModel(
        name=name,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        kv_capacity_tokens=max(1, _capacity_tokens(shape, device)),
        overhead_s=shape.layers * reached.layer_s + latency_s,
        sequence_s=shape.layers * reached.layer_sequence_s,
        weights_s=shape.read_bytes / bandwidth,
        token_s=shape.linear_flops_per_token / (flops * reached.compute) + communication_s,
        context_s=shape.kv_bytes_per_token / bandwidth,
        pair_s=shape.attention_flops_per_pair / (flops * reached.attention),
        swap_token_s=shape.kv_bytes_per_token / (ranks * device.host_link * LINK_EFFICIENCY),
        step_tokens=device.step_tokens,
        step_sequences=device.step_sequences,
    )


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


_EFFICIENCY = TypeAdapter(Efficiency)
