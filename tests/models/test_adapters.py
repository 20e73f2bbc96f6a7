"""LoRA adapters: in the configuration, in requests, and in the blocks of vLLM's real CPU engine."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from cluster.app import engine_kwargs
from cluster.auth.tenants import Tenants
from cluster.config.loader import read_config
from cluster.config.schema import CaesuraConfig, PolicyConfig
from cluster.core.errors import BadRequest, ConfigError
from cluster.core.message_chain import chain_of
from cluster.core.program import WIRE_KEY, Hints, ProgramIdentity
from cluster.core.replica_snapshot import prefix_blocks, prompt_of, salt_of
from cluster.dispatch.model_selection import ModelSelection
from replicas.control import ControlChannel
from replicas.engine import lora_modules
from replicas.host_tier import kv_transfer_config
from replicas.settings import SchedulerSettings
from replicas.tiny.model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS
from tests.contracts.test_host_tier import COST, cached, numbers, until

RANK = 8
PROMPT = [7 + i % 900 for i in range(300)]
engine_test = pytest.mark.asyncio(loop_scope="module")


def config_with(**more: Any) -> CaesuraConfig:
    model = {"adapters": {"sql": {"path": "org/sql"}, "ops": {"path": "org/ops"}}}
    return CaesuraConfig.model_validate({"model": model, **more})


# --- configuration and requests ---------------------------------------------------------------------------------------


def test_vllm_gets_each_adapter_by_the_name_that_clients_send() -> None:
    arguments = engine_kwargs(config_with())
    assert arguments["enable_lora"] is True
    assert [(one.name, one.path) for one in lora_modules(arguments["lora_modules"])] == [
        ("tiny:sql", "org/sql"),
        ("tiny:ops", "org/ops"),
    ]
    assert "enable_lora" not in engine_kwargs(CaesuraConfig())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"model": {"adapters": {"a b": {"path": "x"}}}}, "a b"),
        ({"model": {"adapters": {"a": {}}}}, "path"),
        ({"model": {"adapters": {"a": {"path": "x"}}}, "models": {"tiny:a": {}}}, "'tiny:a' is the name of an adapter"),
        ({"engine": {"enable_lora": True}}, r"model\.adapters"),
        ({"engine": {"lora_modules": []}}, r"model\.adapters"),
        ({"tenants": {"acme": {"models": ["tiny:sql"]}}}, "there is no 'tiny:sql'"),
    ],
)
def test_a_wrong_adapter_is_refused_by_its_key(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        CaesuraConfig.model_validate(wrong)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "caesura.yaml"
    file.write_text("model: {adapters: {sql: {path: ./nowhere}}}\n")
    with pytest.raises(ConfigError, match=r"model\.adapters\.sql\.path: no such path"):
        read_config(file, None)
    (tmp_path / "nowhere").mkdir()
    assert read_config(file, None).model.adapters["sql"].path == str(tmp_path / "nowhere")


class NoLoads:
    def start_s(self) -> dict[str, float | None]:
        return {}


async def test_an_adapter_is_served_by_its_model_and_an_unknown_one_is_404() -> None:
    homes: Any = None
    selection = ModelSelection(config_with(), NoLoads(), homes)
    for known in ("tiny", "tiny:sql", None):
        selection.check(known)
    assert await selection.model_of({"model": "tiny:sql"}, None) == "tiny"
    with pytest.raises(BadRequest, match="'tiny:poems' does not exist") as refused:
        selection.check("tiny:poems")
    assert refused.value.status == 404


def test_a_tenant_may_use_the_adapters_of_its_list() -> None:
    tenants = Tenants(config_with(tenants={"acme": {"models": ["tiny", "tiny:sql"]}}))
    named = ("tiny", "tiny:sql", "tiny:ops")
    assert [tenants.may_name("acme", one) for one in named] == [True, True, False]
    assert all(tenants.may_name("other", one) for one in named)


def test_prompts_for_different_adapters_share_no_blocks_and_no_program() -> None:
    bodies = [{"model": model, "messages": [{"role": "user", "content": "x" * 999}]} for model in ("tiny", "tiny:sql")]
    base, adapted = (set(prefix_blocks(prompt_of(body), salt_of(body))) for body in bodies)
    assert base and adapted and not base & adapted
    assert salt_of({"model": "tiny:sql", "cache_salt": "a"}) != salt_of({"model": "tiny:sql", "cache_salt": "b"})
    chains = [chain_of("acme", body) for body in bodies]
    assert chains[0] is not None and chains[0] != chains[1]


# --- the real engine --------------------------------------------------------------------------------------------------


def write_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter of the built-in model with random weights."""
    random = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    weights = {}
    for layer in range(LAYERS):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=random) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, RANK, generator=random) * 0.3
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": list(sizes), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {f"tiny:{name}": write_adapter(folder / name, seed) for seed, name in enumerate(("sql", "ops"))}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[AsyncLLM]:
    settings = SchedulerSettings(policy=PolicyConfig(name="infercept"), cost=COST, tool_parser="hermes")
    arguments = AsyncEngineArgs(
        model=str(tiny_model),
        max_model_len=1024,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=129,
        max_num_seqs=8,
        distributed_executor_backend="uni",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=RANK,
        scheduler_cls="replicas.control.AgentScheduler",
        kv_transfer_config=kv_transfer_config(8 << 20),
        additional_config=settings.additional_config(),
    )
    engine = AsyncLLM.from_engine_args(arguments)
    yield engine
    engine.shutdown(timeout=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loaded(engine: AsyncLLM, tiny_model: Path, adapters: dict[str, Path]) -> dict[str, LoRARequest]:
    """The adapters as vLLM's server loads those of the configuration."""
    modules = lora_modules([{"name": name, "path": str(path)} for name, path in adapters.items()])
    base = [BaseModelPath(name="tiny", model_path=str(tiny_model))]
    serving = OpenAIServingModels(engine, base, lora_modules=modules)
    await serving.init_static_loras()
    return serving.lora_requests


@pytest.fixture
def channel(engine: AsyncLLM) -> ControlChannel:
    return ControlChannel(engine, timeout_s=60.0)


async def turn(engine: AsyncLLM, name: str, number: int, prompt: list[int], adapter: LoRARequest | None) -> list[int]:
    identity = ProgramIdentity(program_id=name, last_turn=number == 1, hints=Hints(expected_tool="ls"))
    params = SamplingParams(
        max_tokens=20,
        ignore_eos=True,
        temperature=0.0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={WIRE_KEY: identity.encode()},
    )
    answers = engine.generate({"prompt_token_ids": prompt}, params, f"{name}-{number}", lora_request=adapter)
    async for output in answers:
        return list(output.outputs[0].token_ids)
    raise AssertionError("the engine answered nothing")


@pytest.mark.engine
@engine_test
async def test_kv_is_keyed_by_adapter_and_held_swapped_and_recomputed_turns_are_equal(
    engine: AsyncLLM, channel: ControlChannel, loaded: dict[str, LoRARequest]
) -> None:
    generated = {}
    for model in ("tiny", "tiny:sql", "tiny:ops"):
        adapter, name = loaded.get(model), model.replace(":", "-")
        await channel.call("reset")
        for pause, policy in (("discarded", "vllm"), ("held", "continuum"), ("swapped", "infercept")):
            program = f"{name}-{pause}"
            await channel.call("set_policy", name=policy)
            await channel.call("reset")
            first = await turn(engine, program, 0, PROMPT, adapter)
            if pause == "discarded":
                await channel.call("reset")
            else:
                await until(channel, program, pause)
            if pause == "swapped":
                assert await engine.reset_prefix_cache()
            second = await turn(engine, program, 1, [*PROMPT, *first, *[11] * 40], adapter)
            assert generated.setdefault(model, (first, second)) == (first, second), (model, pause)
            assert await cached(channel, program) == [0, 0 if pause == "discarded" else 288]
    assert len({str(one) for one in generated.values()}) == 3, "the adapters change nothing"
    # No reset between these: the same prompt finds no block of another adapter, on the device or on the host.
    await channel.call("reset")
    for model in ("tiny", "tiny:sql", "tiny:ops"):
        program = f"cold-{model.replace(':', '-')}"
        assert await turn(engine, program, 0, PROMPT, loaded.get(model)) == generated[model][0]
        assert await cached(channel, program) == [0]
    # A program that changes its adapter uses nothing of its hold.
    await channel.call("set_policy", name="continuum")
    await channel.call("reset")
    await turn(engine, "changes", 0, PROMPT, loaded["tiny:sql"])
    await until(channel, "changes", "held")
    await turn(engine, "changes", 1, PROMPT, loaded["tiny:ops"])
    assert await cached(channel, "changes") == [0, 0]
    after = await numbers(channel)
    assert (after["held_blocks"], after["free_blocks"]) == (0, after["total_blocks"])
