"""What Caesura needs of vLLM's engine, on the real CPU engine, synchronous and forced-asynchronous."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from cluster.config.schema import PolicyConfig
from cluster.core.errors import ControlRefused, EngineGone
from cluster.core.program import WIRE_KEY, Hints, ProgramIdentity
from cluster.core.replica_snapshot import ReplicaSnapshot, program_name, unpack_names
from cluster.durations.table import OVERALL, DurationTable
from replicas.control import ControlChannel
from replicas.duration_sync import unpack_parts
from replicas.router_side import RouterSide
from replicas.settings import SchedulerSettings
from tests.waiting import WITHIN_S

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


def engine_of(model: Path, asynchronous: bool) -> AsyncLLM:
    settings = SchedulerSettings(policy=PolicyConfig(name="continuum"), tool_parser="hermes")
    arguments = AsyncEngineArgs(
        model=str(model),
        max_model_len=4096,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=129,
        max_num_seqs=16,
        distributed_executor_backend="uni",
        scheduler_cls="replicas.control.AgentScheduler",
        additional_config=settings.additional_config(),
    )
    config = arguments.create_engine_config()
    # The CPU platform turns it off; the path a GPU takes is tested all the same.
    config.scheduler_config.async_scheduling = asynchronous
    return AsyncLLM.from_vllm_config(config)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["sync", "async"])
async def engine(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[AsyncLLM]:
    engine = engine_of(tiny_model, request.param)
    yield engine
    engine.shutdown()


@pytest.fixture
def channel(engine: AsyncLLM) -> ControlChannel:
    return ControlChannel(engine, timeout_s=30.0)


async def generate(engine: AsyncLLM, request_id: str, prompt: list[int], max_tokens: int, **kwargs: Any) -> list[int]:
    identity: ProgramIdentity | None = kwargs.pop("identity", None)
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=0.0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={WIRE_KEY: identity.encode()} if identity else None,
    )
    async for output in engine.generate({"prompt_token_ids": prompt}, params, request_id, **kwargs):
        return list(output.outputs[0].token_ids)
    raise AssertionError("the engine answered nothing")


async def snapshot(channel: ControlChannel) -> dict[str, Any]:
    answer = await channel.call("exchange")
    numbers: dict[str, Any] = answer["snapshot"]
    return numbers


async def program(engine: AsyncLLM, name: str) -> list[list[int]]:
    """Three turns of growing context; what each generated."""
    context, generated = [7 + i % 900 for i in range(300)], []
    for turn in range(3):
        identity = ProgramIdentity(program_id=name, last_turn=turn == 2, hints=Hints(expected_tool="ls"))
        generated.append(await generate(engine, f"{name}-{turn}", context, 20, identity=identity))
        context = context + generated[-1] + [11 + turn] * 25
    return generated


async def test_hold_and_discard_give_identical_tokens_and_no_block_leaks(
    engine: AsyncLLM, channel: ControlChannel
) -> None:
    await channel.call("set_policy", name="vllm")
    await channel.call("reset")
    discarded = await program(engine, "discarded")
    await channel.call("set_policy", name="continuum")
    await channel.call("reset")
    held = await program(engine, "held")
    assert held == discarded
    story = await channel.call("program", key="default/held")
    # 319 of the first turn's 320 tokens have KV: 9 blocks of 32 are whole.
    assert [turn["cached_tokens"] for turn in story["turns"]] == [0, 288, 352]
    numbers = await snapshot(channel)
    assert (numbers["held_blocks"], numbers["free_blocks"]) == (0, numbers["total_blocks"])


async def test_identity_priority_and_session_arrive(engine: AsyncLLM, channel: ControlChannel) -> None:
    identity = ProgramIdentity(program_id="x", tenant="acme", hints=Hints(priority=7, expected_tool="grep"))
    await generate(engine, "hints", [5] * 40, 2, identity=identity)
    [turn] = (await channel.call("program", key="acme/x"))["turns"]
    assert (turn["priority"], turn["tools"], turn["outcome"]) == (7, ["grep"], "length_capped")
    await generate(engine, "native", [6] * 40, 2, session_id="bare-session")
    story = await channel.call("program", key="default/bare-session")
    assert story["phase"] == "held"
    assert (await channel.call("release", key="default/bare-session"))["released"]
    assert (await channel.call("release", key="acme/x"))["released"]


async def test_a_wire_value_that_nobody_wrote_is_a_turn_without_a_program(
    engine: AsyncLLM, channel: ControlChannel
) -> None:
    params = SamplingParams(max_tokens=1, extra_args={WIRE_KEY: "{not json"})
    async for _ in engine.generate({"prompt_token_ids": [4] * 9}, params, "junk"):
        pass
    assert (await snapshot(channel))["counters"]["unreadable_identity"] == 1


async def test_the_router_is_told_of_a_program_until_it_moves_away(engine: AsyncLLM, channel: ControlChannel) -> None:
    side = RouterSide(channel, "r1", "tiny", lambda kind: pytest.fail(f"{kind}"))
    await channel.call("reset")
    await generate(engine, "mover-1", [8] * 100, 5, identity=ProgramIdentity(program_id="mover"))

    async def told() -> tuple[bool, int]:
        packed = await side.publish()
        assert packed is not None
        snapshot = ReplicaSnapshot.decode(packed)
        there = unpack_names(snapshot.residents) & unpack_names(snapshot.on_device)
        return program_name("default/mover") in there, snapshot.held_tokens

    assert await told() == (True, 104)
    assert await side.moved_away("default/mover", 2) == {"moved": True}
    assert await told() == (False, 0)


async def test_the_control_channel_round_trips(engine: AsyncLLM, channel: ControlChannel) -> None:
    others = DurationTable()
    for seconds in (1.0, 2.0, 3.0):
        others.observe("far_tool", seconds)
    answer = await channel.call("exchange", durations=others.to_bytes(), revision=0)
    assert "far_tool" not in unpack_parts(answer["durations"])  # the others' part does not come back as ours
    await generate(engine, "r", [9] * 70, 2, identity=ProgramIdentity(program_id="r"))
    assert (await channel.call("tool_started", key="default/r", tools=["sh"], expected_s=30.0))["held"]
    assert (await channel.call("hold", key="default/r", seconds=60.0))["held_blocks"] == 3
    assert (await channel.call("tool_finished", key="default/r"))["held"]
    answer = await channel.call("exchange", revision=answer["revision"])
    assert {"sh", OVERALL} <= unpack_parts(answer["durations"]).keys()
    assert (await channel.call("end", key="default/r"))["ended"]
    assert (await channel.call("program", key="default/r"))["phase"] == "ended"
    assert await channel.call("program", key="nobody") == {}


@pytest.mark.parametrize(
    ("operation", "payload", "why"),
    [
        ("no_such_thing", {}, "unknown operation"),
        ("set_policy", {"name": "nope"}, "choose one of: .*continuum"),
        ("set_policy", {"name": "continuum", "parameters": {"delta": 2}}, "delta"),
        ("hold", {"key": "nobody", "seconds": 1.0}, "holds nothing"),
        ("tool_started", {"key": "nobody", "tool": "x"}, "tool"),
        ("program", {"unexpected": 1}, "unexpected"),
        ("exchange", {"durations": b"garbage"}, "exchange"),
    ],
)
async def test_what_makes_no_sense_is_refused_and_the_engine_lives(
    engine: AsyncLLM, channel: ControlChannel, operation: str, payload: dict[str, Any], why: str
) -> None:
    before = await channel.call("policy")
    with pytest.raises(ControlRefused, match=why):
        await channel.call(operation, **payload)
    assert await channel.call("policy") == before
    assert len(await generate(engine, f"after-{operation}-{why}", [3] * 20, 3)) == 3


async def test_an_aborted_turn_frees_its_blocks(engine: AsyncLLM, channel: ControlChannel) -> None:
    async def read_two() -> None:
        params = SamplingParams(
            max_tokens=2000,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={WIRE_KEY: ProgramIdentity(program_id="gone").encode()},
        )
        count = 0
        async for _ in engine.generate({"prompt_token_ids": [8] * 100}, params, "gone"):
            count += 1
            if count == 2:
                return

    await read_two()
    async with asyncio.timeout(WITHIN_S):
        while (numbers := await snapshot(channel))["running"]:  # noqa: ASYNC110 - the engine has no event
            await asyncio.sleep(0.05)
    assert numbers["held_blocks"] == 0
    assert numbers["free_blocks"] == numbers["total_blocks"]


async def test_a_dead_engine_is_told_apart_from_a_slow_one(tiny_model: Path) -> None:
    engine = engine_of(tiny_model, asynchronous=False)
    try:
        channel = ControlChannel(engine, timeout_s=5.0)
        await channel.call("policy")
        # The process may have other engines' cores, too.
        (core,) = engine.engine_core.resources.engine_manager.processes
        os.kill(core.pid, signal.SIGKILL)
        with pytest.raises(EngineGone):
            async with asyncio.timeout(WITHIN_S):
                while True:
                    await channel.call("policy")
                    await asyncio.sleep(0.1)
    finally:
        engine.shutdown()
