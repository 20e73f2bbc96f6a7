"""Hold, swap and resume of each family of models, on the real CPU engine.

Every family has one engine. A family whose KV no turn can reuse must keep nothing, and `caesura config check` must
report that.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from cluster.config.model_features import Feature, features_off
from cluster.config.schema import PolicyConfig
from cluster.core.program import Hints, ProgramIdentity
from replicas.control import ControlChannel
from replicas.host_tier import fit_tiers, kv_transfer_config
from replicas.settings import SchedulerSettings
from tests.contracts.test_host_tier import COST, cached, generate, numbers, until
from tests.models.families import Family, write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TURNS = 3
PROMPT = [7 + i % 900 for i in range(300)]
TIER_BYTES = 64 << 20
BLOCKS = 129


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


@pytest.fixture(scope="module")
def checkpoint(family: Family, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(family, tmp_path_factory.mktemp("models") / family.name, tiny_model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(family: Family, checkpoint: Path) -> AsyncIterator[AsyncLLM]:
    settings = SchedulerSettings(policy=PolicyConfig(name="infercept"), cost=COST, tool_parser="hermes")
    arguments = AsyncEngineArgs(
        **{
            "model": str(checkpoint),
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
            "enforce_eager": True,
            "block_size": 32,
            "num_gpu_blocks_override": BLOCKS,
            "max_num_seqs": 16,
            "distributed_executor_backend": "uni",
            "scheduler_cls": "replicas.control.AgentScheduler",
            "kv_transfer_config": kv_transfer_config(TIER_BYTES),
            "additional_config": settings.additional_config(),
            **family.engine,
        }
    )
    config = arguments.create_engine_config()
    fit_tiers(config)
    engine = AsyncLLM.from_vllm_config(config)
    yield engine
    engine.shutdown(timeout=0)


@pytest.fixture
def channel(engine: AsyncLLM) -> ControlChannel:
    return ControlChannel(engine, timeout_s=60.0)


async def turns(engine: AsyncLLM, name: str, prompt: list[int], between: Callable[[], Any]) -> list[list[int]]:
    """Run a program of growing context. Return what each of its turns generated."""
    context, generated = list(prompt), []
    for turn in range(TURNS):
        identity = ProgramIdentity(program_id=name, last_turn=turn == TURNS - 1, hints=Hints(expected_tool="ls"))
        generated.append(await generate(engine, f"{name}-{turn}", context, 20, identity))
        context = context + generated[-1] + [11 + turn] * 60
        if turn < TURNS - 1:
            await between()
    return generated


async def paused(
    engine: AsyncLLM, channel: ControlChannel, name: str, policy: str, pause: str, *, reuses: bool
) -> list[list[int]]:
    """Run a program whose KV is discarded, held, swapped or fetched in each pause."""
    key = f"default/{name}"

    async def between() -> None:
        if pause == "discarded":
            await channel.call("reset")
        elif not reuses:
            await until(channel, name, "released")
        elif pause == "held":
            await until(channel, name, "held")
        else:
            await until(channel, name, "swapped")
            assert await engine.reset_prefix_cache()
            if pause == "fetched":
                assert (await channel.call("tool_finished", key=key))["fetching"]
                await until(channel, name, "held")

    await channel.call("reset")
    await channel.call("set_policy", name=policy)
    return await turns(engine, name, PROMPT, between)


async def test_hold_swap_and_resume_give_the_tokens_of_a_recomputation(
    engine: AsyncLLM, channel: ControlChannel, family: Family, record_property: Callable[[str, object], None]
) -> None:
    before = await numbers(channel)
    for name in ("name", "models", "layers"):
        record_property(name, getattr(family, name))
    record_property("groups", before["kv_groups"])
    recomputed = await paused(engine, channel, "discarded", "vllm", "discarded", reuses=family.reuses)
    assert len({tuple(tokens) for tokens in recomputed}) == TURNS, "the model's output does not depend on its prompt"
    for pause, policy in [("held", "continuum"), ("swapped", "infercept"), ("fetched", "infercept")]:
        assert await paused(engine, channel, pause, policy, pause, reuses=family.reuses) == recomputed, pause
        reused = await cached(channel, pause)
        record_property(pause, reused)
        assert reused[0] == 0
        assert all(reused[1:]) if family.reuses else not any(reused), pause
    after = await numbers(channel)
    assert (after["held_blocks"], after["free_blocks"]) == (0, after["total_blocks"])
    kept = [after["counters"].get(name, 0) for name in ("swapped", "fetched")]
    assert kept == ([4, 2] if family.reuses else [0, 0])
    assert after["host_tokens"] > 0 if family.reuses else after["host_tokens"] == 0


async def test_programs_that_evict_each_other_leak_nothing(
    engine: AsyncLLM, channel: ControlChannel, family: Family
) -> None:
    """Their contexts do not fit together, so that holds are evicted and copies return from the host."""
    prompts = {f"p{number}": [5 + number, *PROMPT * 2] for number in range(6)}

    async def between() -> None:
        await asyncio.sleep(0)

    await channel.call("set_policy", name="caesura")
    await channel.call("reset")
    together = await asyncio.gather(*(turns(engine, name, prompt, between) for name, prompt in prompts.items()))
    assert all(len(tokens) == 20 for generated in together for tokens in generated)
    after = await numbers(channel)
    assert (after["held_blocks"], after["free_blocks"]) == (0, after["total_blocks"])
    if family.batches:
        for (name, prompt), generated in zip(prompts.items(), together, strict=True):
            await channel.call("reset")
            assert await turns(engine, f"alone-{name}", prompt, between) == generated


async def test_config_check_reports_what_the_engine_does_not_use(
    channel: ControlChannel, family: Family, checkpoint: Path, record_property: Callable[[str, object], None]
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    off = [one.feature for one in features_off(config, family.engine, accelerator="cpu")]
    seen = await numbers(channel)
    record_property("off", ", ".join(off))
    assert (Feature.KV_REUSE in off) == (not seen["reuses_kv"])
    assert (Feature.PARTIAL_CONTEXTS in off) == (not seen["reuses_partial_contexts"])
    assert bool(off) == (not seen["computes_early"])
