"""Hold, swap and resume of contexts with an image, on the real CPU engine."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from cluster.config.schema import PolicyConfig
from cluster.core.program import WIRE_KEY, Hints, ProgramIdentity
from replicas.control import ControlChannel
from replicas.host_tier import fit_tiers, kv_transfer_config
from replicas.settings import SchedulerSettings
from tests.contracts.test_host_tier import COST, cached, numbers, until
from tests.models.vision import PART_TOKENS, write_vision_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TURNS = 3
TEXT = [7 + i % 900 for i in range(300)]
MIDDLE = 100
"""Place of the image in the text (tokens)."""


@pytest.fixture(scope="module", autouse=True)
def _long(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("a part of `make models`")


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The directory, and the id of the image's token."""
    directory = tmp_path_factory.mktemp("models") / "vision"
    return directory, write_vision_checkpoint(directory, tiny_model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(checkpoint: tuple[Path, int]) -> AsyncIterator[AsyncLLM]:
    settings = SchedulerSettings(policy=PolicyConfig(name="infercept"), cost=COST, tool_parser="hermes")
    arguments = AsyncEngineArgs(
        model=str(checkpoint[0]),
        dtype="float32",
        max_model_len=1024,
        max_num_batched_tokens=256,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=129,
        max_num_seqs=16,
        distributed_executor_backend="uni",
        scheduler_cls="replicas.control.AgentScheduler",
        kv_transfer_config=kv_transfer_config(64 << 20),
        additional_config=settings.additional_config(),
    )
    config = arguments.create_engine_config()
    fit_tiers(config)
    engine = AsyncLLM.from_vllm_config(config)
    yield engine
    engine.shutdown(timeout=0)


@pytest.fixture
def channel(engine: AsyncLLM) -> ControlChannel:
    return ControlChannel(engine, timeout_s=60.0)


def picture(shade: int) -> Image.Image:
    image = Image.new("RGB", (80, 60), (shade, 255 - shade, 40))
    image.paste((255 - shade, 10, shade), (10, 10, 50, 40))
    return image


async def turns(
    engine: AsyncLLM, name: str, shade: int, image: int, between: Callable[[], Any] | None = None
) -> list[list[int]]:
    """Run a program of growing context with an image. Return what each of its turns generated."""
    context, generated = [*TEXT[:MIDDLE], image, *TEXT[MIDDLE:]], []
    for turn in range(TURNS):
        identity = ProgramIdentity(program_id=name, last_turn=turn == TURNS - 1, hints=Hints(expected_tool="ls"))
        params = SamplingParams(
            max_tokens=20,
            ignore_eos=True,
            temperature=0.0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={WIRE_KEY: identity.encode()},
        )
        prompt: Any = {"prompt_token_ids": context, "multi_modal_data": {"image": picture(shade)}}
        async for output in engine.generate(prompt, params, f"{name}-{turn}"):
            generated.append(list(output.outputs[0].token_ids))
        context = context + generated[-1] + [11 + turn] * 60
        if turn < TURNS - 1 and between is not None:
            await between()
    return generated


async def paused(
    engine: AsyncLLM, channel: ControlChannel, name: str, policy: str, image: int, shade: int = 10
) -> list[list[int]]:
    """Run a program whose KV is discarded, held, swapped or fetched in each pause."""
    key = f"default/{name}"

    async def between() -> None:
        if name == "discarded":
            await channel.call("reset")
            await engine.reset_mm_cache()
            await engine.reset_encoder_cache()
        elif name == "held":
            await until(channel, name, "held")
        else:
            await until(channel, name, "swapped")
            assert await engine.reset_prefix_cache()
            if name == "fetched":
                print(await channel.call("tool_finished", key=key))
                await until(channel, name, "held")

    await channel.call("reset")
    await channel.call("set_policy", name=policy)
    return await turns(engine, name, shade, image, between)


async def test_hold_swap_and_resume_give_the_tokens_of_a_recomputation(
    engine: AsyncLLM, channel: ControlChannel, checkpoint: tuple[Path, int]
) -> None:
    image = checkpoint[1]
    recomputed = await paused(engine, channel, "discarded", "vllm", image)
    other = await turns(engine, "other", 200, image)
    assert other != recomputed, "the model's output does not depend on the image"
    for name, policy in (("held", "continuum"), ("swapped", "infercept"), ("fetched", "infercept")):
        assert await paused(engine, channel, name, policy, image) == recomputed, name
        reused = await cached(channel, name)
        assert reused[0] == 0 and all(tokens > MIDDLE + 5 * PART_TOKENS for tokens in reused[1:]), (name, reused)
    after = await numbers(channel)
    assert (after["held_blocks"], after["free_blocks"]) == (0, after["total_blocks"])


async def test_another_image_in_the_same_place_uses_nothing_of_a_hold(
    engine: AsyncLLM, channel: ControlChannel, checkpoint: tuple[Path, int]
) -> None:
    """The ids of the two prompts are the same."""
    image = checkpoint[1]
    await channel.call("reset")
    await channel.call("set_policy", name="continuum")
    alone = await turns(engine, "alone", 200, image)
    await channel.call("reset")
    await turns(engine, "first", 10, image)
    assert await turns(engine, "second", 200, image) == alone
    assert (await cached(channel, "second"))[0] <= MIDDLE
