"""The host tier on the real CPU engine, synchronous and forced-asynchronous.

What is not tested here, for want of a machine: vLLM's own CUDA worker, and tensor parallelism.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestGroupState,
    RequestOffloadState,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.metrics.loggers import LoggingStatLogger, PerEngineStatLoggerAdapter

from cluster.config.schema import PolicyConfig
from cluster.core.program import WIRE_KEY, Hints, ProgramIdentity
from replicas.control import ControlChannel
from replicas.engine import ReplicaEngine
from replicas.host_tier import kv_transfer_config
from replicas.presets import DEFAULT, preset
from replicas.settings import SchedulerSettings
from replicas.vllm_patches import store_again

TIER_BYTES = 8 << 20
"""Four times the KV cache of these engines: 16,384 tokens."""

COST = replace(preset(DEFAULT), swap_token_s=1e-12, swap_overhead_s=0.0)
"""InferCept swaps what an iteration hides. However fast these engines' iterations turn out, they hide this link's."""

WRITTEN_WITHIN_S = 20.0

engine_test = pytest.mark.asyncio(loop_scope="module")


def engine_of(model: Path, asynchronous: bool) -> AsyncLLM:
    settings = SchedulerSettings(policy=PolicyConfig(name="infercept"), cost=COST, tool_parser="hermes")
    arguments = AsyncEngineArgs(
        model=str(model),
        max_model_len=4096,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=129,
        max_num_seqs=16,
        distributed_executor_backend="uni",
        scheduler_cls="replicas.control.AgentScheduler",
        kv_transfer_config=kv_transfer_config(TIER_BYTES),
        additional_config=settings.additional_config(),
    )
    config = arguments.create_engine_config()
    # The CPU platform turns it off; the path a GPU takes is tested all the same.
    config.scheduler_config.async_scheduling = asynchronous
    # A replica's vLLM logs at this level by itself; the tests' logs less.
    return AsyncLLM.from_vllm_config(config, stat_loggers=[LoggingStatLogger])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["sync", "async"])
async def engine(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[AsyncLLM]:
    engine = engine_of(tiny_model, request.param)
    yield engine
    engine.shutdown()


@pytest.fixture
def channel(engine: AsyncLLM) -> ControlChannel:
    return ControlChannel(engine, timeout_s=60.0)


async def generate(
    engine: AsyncLLM, request_id: str, prompt: list[int], max_tokens: int, identity: ProgramIdentity | None = None
) -> list[int]:
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=0.0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={WIRE_KEY: identity.encode()} if identity else None,
    )
    async for output in engine.generate({"prompt_token_ids": prompt}, params, request_id):
        return list(output.outputs[0].token_ids)
    raise AssertionError("the engine answered nothing")


async def numbers(channel: ControlChannel) -> dict[str, Any]:
    snapshot: dict[str, Any] = (await channel.call("exchange"))["snapshot"]
    return snapshot


async def until(channel: ControlChannel, name: str, phase: str) -> None:
    for _ in range(600):
        if (await channel.call("program", key=f"default/{name}"))["phase"] == phase:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(await channel.call("program", key=f"default/{name}"))


async def program(engine: AsyncLLM, channel: ControlChannel, name: str, policy: str, pause: str) -> list[list[int]]:
    """Three turns of growing context, of which the first one ends on a block's last token; what each generated.

    Args:
        pause: what happens in each pause: `nothing`, `discard` (all caches are emptied), `swap` (the device's is), or
            `fetch` (the device's is, then the tool finishes).
    """
    await channel.call("reset")
    await channel.call("set_policy", name=policy)
    context, generated = [7 + i % 900 for i in range(300)], []
    for turn in range(3):
        identity = ProgramIdentity(program_id=name, last_turn=turn == 2, hints=Hints(expected_tool="ls"))
        generated.append(await generate(engine, f"{name}-{turn}", context, 20, identity))
        context = context + generated[-1] + [11 + turn] * 25
        if turn == 2:
            continue
        if pause in ("swap", "fetch"):
            await until(channel, name, "swapped")
            await engine.reset_prefix_cache()
        if pause == "discard":
            await channel.call("reset")
        if pause == "fetch":
            assert (await channel.call("tool_finished", key=f"default/{name}"))["fetching"]
            await until(channel, name, "held")
    return generated


@pytest.mark.engine
@engine_test
async def test_hold_discard_swap_and_fetch_give_identical_tokens_and_no_block_leaks(
    engine: AsyncLLM, channel: ControlChannel
) -> None:
    discarded = await program(engine, channel, "discarded", "vllm", "discard")
    assert await cached(channel, "discarded") == [0, 0, 0]
    before = (await numbers(channel))["counters"]
    # 319 of the first turn's 320 tokens have KV: 9 blocks of 32 are whole; of the second's 365 tokens 11 are.
    for name, policy, pause in [
        ("held", "continuum", "nothing"),
        ("swapped", "infercept", "swap"),
        ("fetched", "infercept", "fetch"),
    ]:
        assert await program(engine, channel, name, policy, pause) == discarded, name
        assert await cached(channel, name) == [0, 288, 352], name
    after = await numbers(channel)
    grown = {kind: count - before.get(kind, 0) for kind, count in after["counters"].items()}
    assert (grown["swapped"], grown["fetched"]) == (4, 2)
    assert not {"swap_refused", "fetch_lost", "fetch_failed"} & grown.keys()
    assert (after["held_blocks"], after["free_blocks"]) == (0, after["total_blocks"])


async def cached(channel: ControlChannel, name: str) -> list[int]:
    story = await channel.call("program", key=f"default/{name}")
    return [turn["cached_tokens"] for turn in story["turns"]]


@pytest.mark.engine
@engine_test
async def test_what_nobody_overwrote_is_held_again_without_a_load(engine: AsyncLLM, channel: ControlChannel) -> None:
    await channel.call("reset")
    await channel.call("set_policy", name="infercept")
    await generate(engine, "near-0", [9] * 200, 10, ProgramIdentity(program_id="near", hints=Hints(expected_tool="x")))
    await until(channel, "near", "swapped")
    assert (await channel.call("tool_finished", key="default/near"))["fetching"]
    await until(channel, "near", "held")
    assert (await numbers(channel))["held_blocks"] == 209 // 32
    assert (await channel.call("end", key="default/near"))["ended"]
    after = await numbers(channel)
    assert (after["held_blocks"], after["free_blocks"]) == (0, after["total_blocks"])


@pytest.mark.engine
@engine_test
async def test_a_reset_empties_the_tier_and_a_program_that_was_swapped_starts_anew(
    engine: AsyncLLM, channel: ControlChannel
) -> None:
    await channel.call("set_policy", name="infercept")
    identity = ProgramIdentity(program_id="reset", hints=Hints(expected_tool="x"))
    await generate(engine, "reset-0", [12] * 200, 10, identity)
    await until(channel, "reset", "swapped")
    for _ in range(2):  # again before the engine has made a step
        assert (await channel.call("reset"))["reset"]
    assert (await numbers(channel))["host_used_tokens"] == 0
    assert (await channel.call("program", key="default/reset"))["phase"] == "released"
    assert not (await channel.call("tool_finished", key="default/reset"))["fetching"]
    await generate(engine, "reset-1", [12] * 220, 10, identity)
    assert await cached(channel, "reset") == [0, 0]


@pytest.mark.engine
@engine_test
async def test_the_policies_know_what_the_tier_takes(engine: AsyncLLM, channel: ControlChannel) -> None:
    # A token of the built-in model takes 512 bytes.
    assert (await numbers(channel))["host_tokens"] == TIER_BYTES // 512


@pytest.mark.engine
@engine_test
async def test_what_the_loggers_gather_of_copies_is_kept_until_they_write_it(
    engine: AsyncLLM, channel: ControlChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When this fails because nothing is gathered, `ReplicaEngine.log_for_ever` is but a line in the log."""
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.05")
    await channel.call("set_policy", name="infercept")
    of_ray = ReplicaEngine.__new__(ReplicaEngine)
    of_ray._engine_client = engine
    fails = True

    async def log_once_it_works() -> None:
        nonlocal fails
        if fails:
            fails = False
            raise AssertionError("an unknown number")
        await AsyncLLM.do_log_stats(engine)

    monkeypatch.setattr(engine, "do_log_stats", log_once_it_works)
    for name in ("gathered", "gathered-again"):
        await generate(engine, name, [13] * 200, 10, ProgramIdentity(program_id=name, hints=Hints(expected_tool="x")))
        await until(channel, name, "swapped")
        assert gathered(engine) > 0
        logging = asyncio.create_task(of_ray.log_for_ever())
        async with asyncio.timeout(WRITTEN_WITHIN_S):
            while gathered(engine):
                assert not logging.done()
                await asyncio.sleep(0.01)
        logging.cancel()


def gathered(engine: AsyncLLM) -> int:
    """Numbers of copies that vLLM's loggers keep."""
    assert engine.logger_manager is not None
    of_engine = (one for one in engine.logger_manager.stat_loggers if isinstance(one, PerEngineStatLoggerAdapter))
    loggers = [one for adapter in of_engine for one in adapter.per_engine_stat_loggers.values()]
    kept = [one.kv_connector_logging.transfer_stats_accumulator for one in loggers]
    assert kept, "vLLM logs in another way"
    return sum(len(one.reduce()) for one in kept if one is not None)


# --- the private names of vLLM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (Scheduler, "_get_local_prefix_cache_hit", ["self", "request"]),
        (Scheduler, "_inflight_prefill_reserved_blocks", ["self"]),
        (Scheduler, "_update_waiting_for_remote_kv", ["self", "request"]),
        (Scheduler, "_free_request", ["self", "request", "delay_free_blocks"]),
        (Scheduler, "finish_requests", ["self", "request_ids", "finished_status"]),
        (OffloadingConnectorScheduler, "get_num_new_matched_tokens", ["self", "request", "num_computed_tokens"]),
        (OffloadingConnectorScheduler, "_build_store_jobs", ["self", "scheduler_output"]),
        (
            OffloadingConnectorScheduler,
            "update_state_after_alloc",
            ["self", "request", "blocks", "num_external_tokens"],
        ),
        (CPUOffloadingManager, "prepare_store", ["self", "keys", "req_context"]),
        (CPUOffloadingManager, "touch", ["self", "keys", "req_context"]),
        (CPUOffloadingSpec, "_uses_shared_region", ["self"]),
        (CPUOffloadingSpec, "get_worker", ["self", "kv_caches"]),
    ],
)
def test_the_names_we_use_have_the_signatures_we_wrote_for(owner: type, name: str, parameters: list[str]) -> None:
    """Parameters that a newer version adds have defaults."""
    found = list(inspect.signature(getattr(owner, name)).parameters.values())
    assert [one.name for one in found[: len(parameters)]] == parameters
    assert all(one.default is not one.empty for one in found[len(parameters) :])


def test_the_cache_policy_is_the_one_we_implement() -> None:
    assert CachePolicy.__abstractmethods__ == {"get", "insert", "remove", "touch", "evict", "clear"}


def test_a_request_has_the_fields_that_bound_what_is_stored() -> None:
    assert "max_offload_tokens" in RequestOffloadState.__dataclass_fields__
    assert "next_stored_chunk_idx" in RequestGroupState.__dataclass_fields__
    assert "sliding_window_size_in_chunks" in GroupOffloadConfig._fields


def test_chunks_before_a_sliding_window_are_not_stored_again() -> None:
    """Their blocks are free, and may have another content by now."""
    full, sliding, begun = (RequestGroupState(next_stored_chunk_idx=n) for n in (20, 20, 3))
    request = SimpleNamespace(num_computed_tokens=20 * 16 + 15)
    configs = [SimpleNamespace(sliding_window_size_in_chunks=n, tokens_per_chunk=16) for n in (None, 4, 4)]
    offloading: Any = SimpleNamespace(
        _req_status={"turn": SimpleNamespace(req=request, group_states=(full, sliding, begun))},
        config=SimpleNamespace(kv_group_configs=configs),
    )
    assert store_again(offloading, "turn")
    # The window of the token after 20 whole chunks begins in chunk 16 or later, so that 17, 18 and 19 are there.
    assert [group.next_stored_chunk_idx for group in (full, sliding, begun)] == [0, 17, 3]
    assert not store_again(offloading, "unknown")
