"""Contracts of every registered policy, live and simulated: programs that pause under memory pressure, the same tokens.

Registered is tested. Live is one real CPU engine whose policy is switched over the control channel; simulated is the
same scheduler under virtual time.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from cluster.config.schema import PolicyConfig, SloConfig
from cluster.core.clock import ManualClock
from cluster.core.program import WIRE_KEY, Hints, ProgramIdentity
from cluster.core.registry import POLICIES
from replicas.control import ControlChannel
from replicas.presets import preset
from replicas.settings import SchedulerSettings
from replicas.virtual_engine import Shape
from replicas.virtual_replica import VirtualReplica, VirtualTurn

BLOCKS, BLOCK = 37, 32
PROGRAMS, TURNS, OUTPUT = 6, 3, 12
EVERY_POLICY = pytest.mark.parametrize("policy", list(POLICIES))


def fresh(program: int, turn: int) -> list[int]:
    """What a turn's prompt adds to the context: 200 tokens at first; six programs need twice the memory there is."""
    count = 200 if turn == 0 else 60
    ids: list[int] = np.random.default_rng((program, turn)).integers(300, 2000, count).tolist()
    return ids


def identity(name: str, turn: int) -> ProgramIdentity:
    tool = "ls" if turn % 2 else "pytest"
    return ProgramIdentity(program_id=name, last_turn=turn == TURNS - 1, hints=Hints(expected_tool=tool))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[AsyncLLM]:
    arguments = AsyncEngineArgs(
        model=str(tiny_model),
        dtype="float32",  # in half the digits, two tokens may be equally likely, and the batch decides
        max_model_len=1024,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        enforce_eager=True,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        distributed_executor_backend="uni",
        scheduler_cls="replicas.control.AgentScheduler",
        additional_config=SchedulerSettings(policy=PolicyConfig(name="vllm")).additional_config(),
    )
    engine = AsyncLLM.from_vllm_config(arguments.create_engine_config())
    yield engine
    engine.shutdown()


async def generate(engine: AsyncLLM, prompt: list[int], who: ProgramIdentity, turn: int) -> list[int]:
    params = SamplingParams(
        max_tokens=OUTPUT,
        ignore_eos=True,
        temperature=0.0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={WIRE_KEY: who.encode()},
    )
    async for output in engine.generate({"prompt_token_ids": prompt}, params, f"{who.program_id}-{turn}"):
        return list(output.outputs[0].token_ids)
    raise AssertionError("the engine answered nothing")


async def programs(engine: AsyncLLM, policy: str) -> list[list[int]]:
    """All programs at once, each turn after a pause; what each generated."""

    async def one(number: int) -> list[int]:
        context: list[int] = []
        generated: list[int] = []
        for turn in range(TURNS):
            context = context + fresh(number, turn)
            tokens = await generate(engine, context, identity(f"{policy}-{number}", turn), turn)
            context, generated = context + tokens, generated + tokens
            await asyncio.sleep(0.01 * (1 + number % 3))
        return generated

    return list(await asyncio.gather(*(one(number) for number in range(PROGRAMS))))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stock(engine: AsyncLLM) -> list[list[int]]:
    """What the programs generate one after the other, each alone in the memory, under vLLM's own scheduling."""
    alone = []
    for number in range(PROGRAMS):
        context: list[int] = []
        generated: list[int] = []
        for turn in range(TURNS):
            context = context + fresh(number, turn)
            tokens = await generate(engine, context, identity(f"alone-{number}", turn), turn)
            context, generated = context + tokens, generated + tokens
        alone.append(generated)
    return alone


async def snapshot(channel: ControlChannel) -> dict[str, Any]:
    numbers: dict[str, Any] = (await channel.call("exchange"))["snapshot"]
    return numbers


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="module")
@EVERY_POLICY
async def test_live_every_program_finishes_with_vllms_own_tokens_and_no_block_leaks(
    engine: AsyncLLM, stock: list[list[int]], policy: str
) -> None:
    channel = ControlChannel(engine, timeout_s=30.0)
    assert (await channel.call("set_policy", name=policy))["name"] == policy
    await channel.call("reset")
    before = (await snapshot(channel))["programs_completed"]
    assert await programs(engine, policy) == stock
    numbers = await snapshot(channel)
    assert numbers["programs_completed"] == before + PROGRAMS
    assert (numbers["running"], numbers["waiting"], numbers["held_blocks"]) == (0, 0, 0)
    assert numbers["free_blocks"] == numbers["total_blocks"] == BLOCKS - 1
    stories = [await channel.call("program", key=f"default/{policy}-{number}") for number in range(PROGRAMS)]
    turns = [turn for story in stories for turn in story["turns"]]
    assert {turn["outcome"] for turn in turns} == {"length_capped"}
    assert any(turn["queue_s"] > 0 or turn["preemptions"] for turn in turns), "memory was never short"


@EVERY_POLICY
def test_simulated_every_program_finishes_with_the_tokens_it_was_given_and_no_block_leaks(
    policy: str, tiny_model: Path
) -> None:
    clock = ManualClock()
    shape = Shape(BLOCKS, BLOCK, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024)
    cost, slo = preset("opt-13b/h800"), SloConfig()
    replica = VirtualReplica.build(PolicyConfig(name=policy), cost, slo, shape, tiny_model, clock)
    due = [(0.01 * number, number, 0) for number in range(PROGRAMS)]
    contexts: dict[int, list[int]] = {number: [] for number in range(PROGRAMS)}
    under_way: dict[str, tuple[int, int, VirtualTurn]] = {}
    finished, most_waiting = 0, 0
    while due or under_way:
        if not under_way:
            clock.move_to(max(clock.now_s(), due[0][0]))
        while due and due[0][0] <= clock.now_s():
            _, number, turn = heapq.heappop(due)
            contexts[number] += fresh(number, turn)
            request_id, who = f"{number}-{turn}", identity(f"p{number}", turn)
            submitted = replica.submit(request_id, list(contexts[number]), OUTPUT, who, 0)
            under_way[request_id] = (number, turn, submitted)
        seconds = replica.begin_step()
        assert seconds is not None, "turns are under way, but there is nothing to do"
        clock.advance(seconds)
        most_waiting = max(most_waiting, replica.engine.scheduler.get_request_counts()[1])
        for ended in replica.end_step():
            number, turn, _ = under_way.pop(ended.request.request_id)
            assert list(ended.request.prompt_token_ids or ()) == contexts[number]
            assert len(ended.generated) == OUTPUT
            contexts[number] += ended.generated
            finished += turn == TURNS - 1
            if turn < TURNS - 1:
                heapq.heappush(due, (clock.now_s() + 0.01 * (1 + number % 3), number, turn + 1))
    assert finished == PROGRAMS
    assert most_waiting > 0, "memory was never short"
    replica.check_integrity()
