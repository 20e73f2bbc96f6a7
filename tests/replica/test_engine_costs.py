"""The cost model that an engine finds by itself, beside the presets of the same models and devices."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import ModelConfig
from vllm.platforms import current_platform

from cluster.config.schema import PolicyConfig
from replicas.engine_costs import engine_costs, shape_of, weight_bits
from replicas.presets import DEFAULT, MODELS, device_named, preset
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.virtual_engine import Shape, VirtualEngine

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
OPT_13B = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "hidden_size": 5120,
    "word_embed_proj_dim": 5120,
    "ffn_dim": 20480,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MIXTRAL = LLAMA_8B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
Model = Callable[[dict[str, Any]], ModelConfig]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    def make(config: dict[str, Any]) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")

    return make


@pytest.mark.parametrize(("config", "name"), [(LLAMA_8B, "llama-3.1-8b"), (OPT_13B, "opt-13b")])
def test_the_costs_are_those_of_the_preset_of_the_same_model(model: Model, config: dict[str, Any], name: str) -> None:
    known = preset(f"{name}/h100")
    found = engine_costs(model(config), 1, "NVIDIA H100 80GB HBM3", known.kv_bytes_per_token, known.kv_capacity_tokens)
    for tokens, context, sequences in [(2048, 2048, 1), (64, 64_000, 64), (1, 1, 1)]:
        expected = known.step_s(tokens, context, sequences)
        assert found.step_s(tokens, context, sequences) == pytest.approx(expected, rel=0.01)
    assert found.swap_s(1000) == pytest.approx(known.swap_s(1000))
    assert found.kv_capacity_tokens == known.kv_capacity_tokens


def test_the_shape_of_a_dense_model_has_its_parameters(model: Model) -> None:
    shape, active = shape_of(model(LLAMA_8B), 2)
    assert shape.parameters == active == pytest.approx(MODELS["llama-3.1-8b"].parameters, rel=0.001)
    assert (shape.tensor_parallel, shape.kv_heads, shape.head_dim) == (2, 8, 128)


def test_a_token_uses_some_experts_and_a_step_reads_all(model: Model) -> None:
    """Mixtral 8x7B has 46.7 billion parameters, of which a token uses 12.9 billion."""
    shape, active = shape_of(model(MIXTRAL), 1)
    assert (shape.parameters / 1e9, active / 1e9) == pytest.approx((46.7, 12.9), rel=0.01)


def test_the_engine_knows_its_kv_and_weights_of_four_bits_are_read_faster(model: Model) -> None:
    known, plain = preset("llama-3.1-8b/h100"), model(LLAMA_8B)
    half = engine_costs(plain, 1, "NVIDIA H100 80GB HBM3", known.kv_bytes_per_token / 2, 900_000)
    assert (half.kv_capacity_tokens, half.context_s) == (900_000, pytest.approx(known.context_s / 2))
    assert half.swap_token_s == pytest.approx(known.swap_token_s / 2)
    plain.quantization = "gptq_marlin"
    small = engine_costs(plain, 1, "NVIDIA H100 80GB HBM3", known.kv_bytes_per_token, 900_000)
    assert small.weights_s == pytest.approx(known.weights_s / 4, rel=0.01)
    assert [weight_bits(name) for name in (None, "fp8", "compressed-tensors-nvfp4")] == [16, 8, 4]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", None),
    ],
)
def test_cuda_names_a_device(name: str, device: str | None) -> None:
    assert device_named(name) == device


def test_a_device_that_was_not_measured_is_named_in_the_log(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = engine_costs(model(LLAMA_8B), 1, "NVIDIA L40S", 131072, 100_000)
    assert "No step of a NVIDIA L40S was measured" in caplog.text
    assert found.token_s == pytest.approx(preset("llama-3.1-8b/h100").token_s, rel=0.01)


def test_a_model_without_attention_heads_gets_the_costs_of_the_default_preset(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    plain = model(LLAMA_8B)
    plain.hf_text_config.num_attention_heads = 0
    with caplog.at_level(logging.WARNING):
        assert engine_costs(plain, 1, "NVIDIA H200", 1000, 100_000) == preset(DEFAULT)
    assert "no attention heads" in caplog.text


def test_a_width_for_each_layer_counts_with_its_mean(model: Model) -> None:
    plain, varied = model(LLAMA_8B), model(LLAMA_8B)
    object.__setattr__(varied.hf_text_config, "intermediate_size", [14336 - 100, 14336 + 100])
    assert shape_of(varied, 1) == shape_of(plain, 1)


@pytest.mark.parametrize("finds", [True, False])
def test_a_scheduler_takes_the_costs_of_its_engine_if_none_are_configured(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, finds: bool
) -> None:
    monkeypatch.setattr(current_platform, "get_device_name", lambda: "NVIDIA H200")
    settings = SchedulerSettings(policy=PolicyConfig(name="caesura"), finds_cost=finds)
    scheduler = VirtualEngine(AgentScheduler, tiny_config, Shape(num_blocks=64), settings).scheduler
    assert isinstance(scheduler, AgentScheduler)
    assert scheduler.facts.cost == scheduler.pace.cost == scheduler.settings.cost
    assert scheduler.facts.cost.name == (f"{tiny_config}/NVIDIA H200" if finds else "llama-3.1-8b/h100")
    if finds:
        assert scheduler.facts.cost.kv_capacity_tokens == 64 * scheduler.block_size
