"""What is off for a model, by its configuration alone; and the replicas of a data parallel model."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ray.llm._internal.serve.serving_patterns.data_parallel.dp_server import DPServer
from ray.serve._private.config import DeploymentConfig
from typer.testing import CliRunner
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from cluster.app import bundles, engine_kwargs, llm_config_of, server_class
from cluster.cli import app
from cluster.config.model_features import features_off
from cluster.config.schema import CaesuraConfig
from replicas.kv_groups import KvGroups
from replicas.server import ProgramServer

PARALLEL = {"replicas": {"count": 2, "data_parallel_size": 4, "tensor_parallel_size": 2, "accelerator": "gpu"}}


@pytest.mark.parametrize(
    ("config", "engine", "accelerator", "off"),
    [
        ({"num_attention_heads": 8}, {}, "gpu", []),
        ({"num_attention_heads": 8}, {"enable_prefix_caching": False}, "gpu", ["KV reuse", "partial contexts"]),
        ({"kv_lora_rank": 512}, {}, "gpu", []),
        ({"kv_lora_rank": 512}, {}, "cpu", ["KV reuse", "partial contexts"]),
        ({"text_config": {"sliding_window": 512}}, {}, "gpu", ["partial contexts"]),
        ({"sliding_window": 512, "use_sliding_window": False}, {}, "gpu", []),
        ({"sliding_window": 512, "layer_types": ["full_attention"]}, {}, "gpu", []),
        ({"state_size": 16}, {}, "gpu", ["KV reuse", "partial contexts"]),
        ({"state_size": 16}, {"enable_prefix_caching": True}, "gpu", ["partial contexts"]),
        ({"state_size": 16, "num_attention_heads": 8}, {}, "gpu", ["partial contexts"]),
        ({}, {"speculative_config": {"method": "ngram", "model": None}}, "gpu", []),
        ({}, {"speculative_config": {"method": "glm4_moe_mtp"}}, "gpu", ["early prefill"]),
        ({}, {"speculative_config": {"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}}, "gpu", ["early prefill"]),
        ({"sliding_window": 512}, {"speculative_config": {"method": "eagle3"}}, "gpu", ["partial contexts"]),
    ],
)
def test_what_is_off(config: dict[str, Any], engine: dict[str, Any], accelerator: str, off: list[str]) -> None:
    assert [one.feature for one in features_off(config, engine, accelerator)] == off


def test_config_check_reports_what_is_off_for_each_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": 512}))
    answer = CliRunner().invoke(app, ["config", "check", "--set", f"model.source={tmp_path}"])
    first, second, valid = answer.output.splitlines()
    assert answer.exit_code == 0 and valid.endswith("is valid")
    assert "model tiny: KV reuse is off (vLLM has no prefix caching for MLA" in first
    assert "partial contexts is off" in second


def test_a_data_parallel_model_is_a_group_of_rays_servers() -> None:
    config = CaesuraConfig.model_validate(PARALLEL | {"engine": {"enable_expert_parallel": True}})
    llm = llm_config_of(config)
    order = server_class(config).__mro__
    assert order.index(ProgramServer) < order.index(DPServer)
    assert server_class(config).get_deployment_options.__func__ is DPServer.get_deployment_options.__func__
    assert llm.deployment_config["num_replicas"] == 2  # Ray multiplies it by the ranks
    arguments = engine_kwargs(config)
    assert (arguments["data_parallel_size"], arguments["enable_expert_parallel"]) == (4, True)
    assert (config.num_replicas, len(bundles(config))) == (8, 2)


def test_without_data_parallel_ranks_nothing_changes() -> None:
    config = CaesuraConfig()
    assert server_class(config) is ProgramServer
    assert "data_parallel_size" not in engine_kwargs(config)


def test_the_ranks_are_set_in_replicas() -> None:
    with pytest.raises(ValidationError, match=r"replicas\.data_parallel_size"):
        CaesuraConfig.model_validate({"engine": {"data_parallel_size": 2}})


def groups_of(*specs: Any, caching: bool = True) -> KvGroups:
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return KvGroups.of(KVCacheConfig(8, [], groups), 16, caching=caching)


def test_the_main_group_is_the_first_that_keeps_every_token() -> None:
    import torch

    shape = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    full, window = FullAttentionSpec(16, **shape), SlidingWindowSpec(16, sliding_window=64, **shape)
    assert groups_of(full).prefixes_stay
    assert not groups_of(full, caching=False).prefixes_stay
    assert not groups_of(window).prefixes_stay
    both = groups_of(window, full)
    assert (both.main, both.prefixes_stay) == (1, False)
    assert both.blocks_of(1600) == 100 + 5
    assert both.tokens_in(100) == 1600
    assert groups_of(full, full).tokens_in(100) == 800


@pytest.mark.parametrize(("configured", "asked_of_ray"), [(-1, -1), (0, 1), (7, 7)])
def test_ray_takes_every_number_of_turns_that_may_wait(configured: int, asked_of_ray: int) -> None:
    config = CaesuraConfig.model_validate({"replicas": {"max_queued_requests": configured}})
    asked = llm_config_of(config).deployment_config["max_queued_requests"]
    assert asked == asked_of_ray
    assert DeploymentConfig(max_queued_requests=asked).max_queued_requests == asked_of_ray
    with pytest.raises(ValidationError, match="max_queued_requests"):
        DeploymentConfig(max_queued_requests=0)
