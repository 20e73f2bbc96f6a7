"""Families of models, each as a tiny checkpoint with random weights that is made here from its configuration."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel

from replicas.tiny.model import VOCABULARY

BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # With the usual 0.02, greedy decoding repeats one token whatever the prompt is.
    "initializer_range": 0.3,
}
"""Fields of a configuration. None leaves the model's own default."""

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "head_dim": None,
}
"""The sizes of DeepSeek's models: vLLM's CPU kernel has no others."""
LOCAL = ["sliding_attention"] * 3 + ["full_attention"]
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
BF16 = {"dtype": "bfloat16"}


@dataclass(frozen=True)
class Family:
    """A family of models."""

    name: str
    models: str
    """Models of this family, for the page."""
    layers: str
    """What its layers keep, for the page."""
    model_type: str
    """Hugging Face's name of the architecture."""
    config: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    reuses: bool = True
    """Whether a turn uses KV of the turn before it on this machine."""
    every_run: bool = False
    """Whether `make test` has it, and not only `make models`."""
    batches: bool = False
    """Whether a turn generates the same tokens alone and in a batch. Sums of other models depend on the batch."""
    drafts: bool = False
    """Whether the last layer of the checkpoint becomes a layer for multi-token prediction."""


FAMILIES = (
    Family("dense", "Llama 3, Qwen3", "full attention", "llama"),
    Family(
        "moe",
        "Qwen3-MoE, Mixtral",
        "full attention, experts",
        "qwen3_moe",
        {**MOE, "num_experts": 4},
        batches=True,
    ),
    Family("window", "Mistral 7B v0.1", "sliding window", "mistral", {"sliding_window": 64}),
    Family(
        "windows-and-full",
        "Gemma 3",
        "sliding window and full attention",
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "layer_types": LOCAL,
            "query_pre_attn_scalar": 32,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        every_run=True,
        batches=True,
    ),
    Family(
        "sinks",
        "gpt-oss",
        "sliding window with sinks and full attention, experts",
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "layer_types": LOCAL[2:]},
        BF16,
    ),
    Family(
        "chunks",
        "Llama 4",
        "chunked local and full attention, experts",
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
            "intermediate_size_mlp": 128,
        },
    ),
    Family(
        "mla",
        "DeepSeek V3, Kimi K2",
        "MLA, experts",
        "deepseek_v3",
        {
            **MLA,
            **MOE,
            "q_lora_rank": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        reuses=False,
        every_run=True,
    ),
    Family(
        "state-and-attention",
        "Falcon-H1",
        "state space (Mamba 2) and full attention in each layer",
        "falcon_h1",
        {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16},
        BF16,
        every_run=True,
    ),
    Family(
        "state-layers",
        "Nemotron-H, Granite 4",
        "state space (Mamba 2) or full attention",
        "nemotron_h",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 32,
            "conv_kernel": 4,
        },
        BF16,
    ),
    Family(
        "linear-layers",
        "Qwen3-Next",
        "linear attention (gated delta net) or full attention, experts",
        "qwen3_next",
        {
            **MOE,
            "num_hidden_layers": 4,
            "layer_types": LINEAR,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "head_dim": 128,
            "num_key_value_heads": 4,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
        },
        BF16,
    ),
    Family(
        "state-only",
        "Mamba 2",
        "state space (Mamba 2) only",
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "state_size": 16,
            "expand": 2,
            "chunk_size": 32,
            "num_key_value_heads": None,
            "num_attention_heads": None,
        },
        BF16,
        reuses=False,
    ),
    Family(
        "ngram",
        "Llama 3 with `method: ngram`",
        "full attention, speculative decoding from the prompt",
        "llama",
        engine={
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 1,
            }
        },
    ),
    Family(
        "mtp",
        "GLM-4.5 with `method: mtp`",
        "full attention, experts, multi-token prediction",
        "glm4_moe",
        {
            **MOE,
            "num_hidden_layers": 3,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "partial_rotary_factor": 0.5,
        },
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        drafts=True,
    ),
)


def write_checkpoint(family: Family, directory: Path, tokenizer: Path) -> Path:
    """Write a family's checkpoint, and let vLLM know its class.

    Args:
        family: the family.
        directory: where to write it.
        tokenizer: a directory with the tokenizer's files.

    Returns:
        ``directory``.
    """
    wanted = {name: value for name, value in {**BASE, **family.config}.items() if value is not None}
    config = AutoConfig.for_model(family.model_type, **wanted)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    if family.drafts:
        _last_layer_drafts(directory, model.config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer / name, directory / name)
    _register(*model.config.architectures)
    return directory


def _last_layer_drafts(directory: Path, config: Any) -> None:
    """Make the checkpoint's last layer one that drafts: it gets the projections and norms of DeepSeek's and GLM's."""
    last, size = config.num_hidden_layers - 1, config.hidden_size
    file = directory / "model.safetensors"
    weights = load_file(file)
    prefix = f"model.layers.{last}"
    weights |= {f"{prefix}.{norm}.weight": torch.ones(size) for norm in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{prefix}.eh_proj.weight"] = torch.randn(size, 2 * size) * 0.1
    weights[f"{prefix}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{prefix}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    settings |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(settings))


def _register(*architectures: str) -> None:
    """Import the classes here. vLLM would import all of itself in another process for each, which takes 20 seconds."""
    for architecture in architectures:
        known = ModelRegistry.models[architecture]
        if not isinstance(known, _RegisteredModel):
            ModelRegistry.models[architecture] = _RegisteredModel.from_model_cls(known.load_model_cls())
