"""The cost model of an engine on a GPU for which none is configured.

It is a roofline, as presets are: the shape comes from the model's own configuration, and the efficiency is that of the
device by its name. The engine knows its KV memory exactly. Like every cost model, it is corrected by the measured time
of steps (`replicas.step_pace`), so the ratios of its parts matter most.
"""

from dataclasses import replace
from statistics import fmean
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from replicas.cost_model import CostModel
from replicas.kv_groups import KvGroups
from replicas.presets import DEFAULT, DEVICES, ModelShape, device_named, efficiency, preset, roofline
from replicas.settings import SchedulerSettings

logger = init_logger(__name__)

SUBSTITUTE = "h100"
"""The device whose costs are used for one that was not measured."""
GATED = {"silu", "swish", "swiglu", "gelu_pytorch_tanh"}
"""Activations of multilayer perceptrons with a gate, which have three matrices; others have two."""
BITS = {"awq": 4, "gptq": 4, "bitsandbytes": 4, "mxfp4": 4, "nvfp4": 4, "fp4": 4, "fp8": 8, "modelopt": 8, "int8": 8}
"""Bits of a weight, by a part of the name of the quantization. The first that is found counts; others have 16."""


def kv_bytes_per_token(layout: KVCacheConfig, ranks: int, capacity_tokens: int) -> float:
    """Return the bytes of one token's KV, all ranks of the replica together."""
    rank_bytes = max((tensor.size for tensor in layout.kv_cache_tensors), default=0)  # all lie in one allocation
    return float(rank_bytes * ranks / capacity_tokens)


def settings_of(config: VllmConfig, layout: KVCacheConfig, groups: KvGroups) -> SchedulerSettings:
    """Return the settings of this process's scheduler, with the engine's own cost model if they say so.

    Raises:
        pydantic.ValidationError: vLLM's ``additional_config`` has no valid settings.
    """
    settings = SchedulerSettings.of(config.additional_config)
    if not settings.finds_cost:
        return settings
    parallel, tokens = config.parallel_config, groups.tokens_in(layout.num_blocks)
    kv_bytes = kv_bytes_per_token(layout, parallel.world_size, tokens)
    name = current_platform.get_device_name()
    own = engine_costs(config.model_config, parallel.tensor_parallel_size, name, kv_bytes, tokens)
    return settings.model_copy(update={"cost": own})


def engine_costs(model: ModelConfig, ranks: int, device_name: str, kv_bytes: float, capacity_tokens: int) -> CostModel:
    """Return the cost model of an engine.

    Args:
        model: vLLM's configuration of the model.
        ranks: devices over which each layer is split.
        device_name: name of a device, as CUDA has it, such as ``NVIDIA H100 80GB HBM3``.
        kv_bytes: bytes of one token's KV, all ranks together.
        capacity_tokens: tokens whose KV fits into the memory.
    """
    if not getattr(model.hf_text_config, "num_attention_heads", 0):
        logger.warning("The model has no attention heads: policies use the costs of %s. Set `cost_model`.", DEFAULT)
        return preset(DEFAULT)
    found = device_named(device_name)
    if found is None:
        logger.warning(
            "No step of a %s was measured: policies use the costs of an %s. Measure the engine with `caesura profile`,"
            " and set `cost_model`.",
            device_name,
            SUBSTITUTE,
        )
    device = DEVICES[found or SUBSTITUTE]
    shape, active = shape_of(model, ranks)
    reached = efficiency(device.measured_on)
    whole = roofline(f"{model.model}/{device_name}", shape, device, reached)
    kv = kv_bytes / shape.kv_bytes_per_token
    costs = replace(
        whole,
        kv_bytes_per_token=kv_bytes,
        kv_capacity_tokens=capacity_tokens,
        weights_s=whole.weights_s * weight_bits(model.quantization) / 16,
        token_s=roofline("", replace(shape, parameters=active), device, reached).token_s,
        context_s=whole.context_s * kv,
        swap_token_s=whole.swap_token_s * kv,
    )
    logger.info("Cost model from the model's configuration and the device: %s", costs)
    return costs


def shape_of(model: ModelConfig, ranks: int) -> tuple[ModelShape, int]:
    """Return the shape with all parameters, and the number of those that one token uses (fewer with experts)."""
    text = model.hf_text_config
    layers, hidden, vocabulary = model.get_total_num_hidden_layers(), model.get_hidden_size(), model.get_vocab_size()
    heads, kv_heads, head_dim = text.num_attention_heads, model.get_total_num_kv_heads(), model.get_head_size()
    tied = bool(getattr(text, "tie_word_embeddings", False))
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    total, used = _perceptrons(model, text, hidden)
    embeddings = vocabulary * hidden * (1 if tied else 2)
    parameters, active = (layers * (attention + one) + embeddings for one in (total, used))
    shape = ModelShape(
        parameters,
        layers,
        hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        tied=tied,
        tensor_parallel=ranks,
    )
    return shape, active


def _perceptrons(model: ModelConfig, text: Any, hidden: int) -> tuple[int, int]:
    """Return the parameters of a layer's perceptrons: of all experts, and of those that one token uses."""

    def first(*names: str) -> int | None:
        value = next((value for name in names if (value := getattr(text, name, None))), None)
        return round(fmean(value)) if isinstance(value, list) else value  # a width for each layer

    width = first("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size") or 4 * hidden
    matrices = 3 if getattr(text, "hidden_act", None) in GATED else 2
    experts = model.get_num_experts() if model.is_moe else 0
    if not experts:
        return (matrices * hidden * width,) * 2
    each = matrices * hidden * (first("moe_intermediate_size") or width)
    shared = first("n_shared_experts") or 0
    return (experts + shared) * each, (int(model.get_num_experts_per_tok() or experts) + shared) * each


def weight_bits(quantization: str | None) -> int:
    """Return the bits of a weight under vLLM's name of a quantization."""
    return next((bits for name, bits in BITS.items() if name in (quantization or "")), 16)
