"""One engine of the kit with Caesura's scheduler and host tier, in the part's process, and turns on it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.gpu_kit.task import Task
from cluster.config.schema import PolicyConfig
from cluster.core.clock import MonotonicClock
from cluster.core.program import WIRE_KEY, ProgramIdentity
from replicas.control import ControlChannel
from replicas.cost_model import CostModel
from replicas.host_tier import kv_transfer_config
from replicas.presets import DEFAULT, preset
from replicas.settings import SchedulerSettings, in_one_process

CHEAP_LINK: CostModel = replace(preset(DEFAULT), swap_token_s=1e-12, swap_overhead_s=0.0)
"""A cost model by which the policies swap whenever the host has room, so that the offload path is used."""
ANSWER_WITHIN_S = 60.0
"""Seconds within which the engine has to answer a control call, and to become what a caller waits for."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory and the bounds of one engine."""

    block_tokens: int
    blocks: int
    """KV blocks on the device, vLLM's null block included."""
    tier_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(slots=True)
class Engine:
    """A running engine and its control channel."""

    client: AsyncLLM
    channel: ControlChannel
    memory: Memory
    clock: MonotonicClock = field(default_factory=MonotonicClock)

    async def turn(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        identity: ProgramIdentity | None = None,
        logprobs: int | None = None,
        salt: str | None = None,
    ) -> "Answer":
        """Run a greedy turn of exactly ``max_tokens`` tokens.

        Args:
            request_id: the request's id.
            prompt: token ids.
            max_tokens: tokens to generate.
            identity: its program; None: it has none.
            logprobs: number of the most probable first tokens to return with their log probabilities.
            salt: with a salt of its own, a prompt finds nothing in a cache.
        """
        parameters = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0,
            logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA,
            extra_args={WIRE_KEY: identity.encode()} if identity else None,
        )
        begun_s, answer = self.clock.now_s(), Answer()
        given: dict[str, Any] = {"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {})
        stream = self.client.generate(given, parameters, request_id)
        async with aclosing(stream):
            async for output in stream:
                [completion] = output.outputs
                answer.first_s = answer.first_s or self.clock.now_s() - begun_s
                answer.tokens += completion.token_ids
                answer.cached = output.num_cached_tokens or answer.cached
                if completion.logprobs and not answer.first_logprobs:
                    answer.first_logprobs = {token: found.logprob for token, found in completion.logprobs[0].items()}
        return answer

    async def numbers(self) -> dict[str, Any]:
        """Return the scheduler's numbers, with the counters under ``counters``."""
        snapshot: dict[str, Any] = (await self.channel.call("exchange"))["snapshot"]
        return snapshot

    async def erase(self) -> None:
        """Erase the device's prefix cache; the host tier keeps its copies.

        Raises:
            TimeoutError: blocks were in use all the time.
        """
        give_up_s = self.clock.now_s() + ANSWER_WITHIN_S
        while not await self.client.reset_prefix_cache():
            if self.clock.now_s() > give_up_s:
                raise TimeoutError(f"the device's cache could not be erased within {ANSWER_WITHIN_S:g} s")
            await asyncio.sleep(0.05)

    async def reset(self) -> None:
        """End all holds, and erase the device's prefix cache and the host tier.

        Raises:
            TimeoutError: blocks were in use all the time.
        """
        give_up_s = self.clock.now_s() + ANSWER_WITHIN_S
        while not (await self.channel.call("reset"))["reset"]:
            if self.clock.now_s() > give_up_s:
                raise TimeoutError(f"the caches could not be erased within {ANSWER_WITHIN_S:g} s")
            await asyncio.sleep(0.05)

    async def story(self, program: str) -> dict[str, Any]:
        """Return what the scheduler knows of a program; empty if nothing."""
        return await self.channel.call("program", key=f"default/{program}")

    async def until(self, program: str, phase: str) -> None:
        """Wait until a program is in a phase.

        Raises:
            TimeoutError: it did not get there; the message has its phase.
        """
        give_up_s, now = self.clock.now_s() + ANSWER_WITHIN_S, ""
        while self.clock.now_s() < give_up_s:
            now = str((await self.story(program)).get("phase"))
            if now == phase:
                return
            await asyncio.sleep(0.02)
        raise TimeoutError(f"program {program} is {now} and not {phase} after {ANSWER_WITHIN_S:g} s")

    async def idle(self) -> dict[str, Any]:
        """Wait until nothing runs, waits or is loaded, and return the numbers of then.

        Raises:
            TimeoutError: something still runs; the message has the numbers.
        """
        give_up_s = self.clock.now_s() + ANSWER_WITHIN_S
        while self.clock.now_s() < give_up_s:
            found = await self.numbers()
            if not (found["running"] or found["waiting"] or found["fetching_programs"]):
                return found
            await asyncio.sleep(0.05)
        raise TimeoutError(f"the engine is not idle after {ANSWER_WITHIN_S:g} s: {found}")


@dataclass(slots=True)
class Answer:
    """What came of a turn."""

    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    """Seconds to the first token."""
    cached: int = 0
    """Prompt tokens that needed no computation."""
    first_logprobs: dict[int, float] = field(default_factory=dict)
    """Log probabilities of the most probable first tokens."""


@asynccontextmanager
async def running(
    task: Task, model: Path, memory: Memory, *, dtype: str, policy: str, tier: dict[str, Any] | None = None
) -> AsyncIterator[Engine]:
    """Run an engine and stop it.

    Args:
        task: the part's task; its device decides how the engine runs.
        model: the model's folder.
        memory: memory and bounds.
        dtype: type of weights and KV.
        policy: the policy at start.
        tier: value of ``kv_transfer_config``; None: Caesura's host tier.
    """
    settings = SchedulerSettings(policy=PolicyConfig(name=policy), cost=CHEAP_LINK)
    arguments = AsyncEngineArgs(
        model=str(model),
        dtype=dtype,
        max_model_len=memory.max_model_len,
        block_size=memory.block_tokens,
        num_gpu_blocks_override=memory.blocks,
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=memory.max_num_batched_tokens,
        disable_hybrid_kv_cache_manager=False,
        scheduler_cls="replicas.control.AgentScheduler",
        kv_transfer_config=tier or kv_transfer_config(memory.tier_bytes),
        additional_config=settings.additional_config(),
        **({} if task.on_gpu else {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}),
    )
    config = arguments.create_engine_config()
    in_one_process(config, arguments)
    if not task.on_gpu:
        config.scheduler_config.async_scheduling = True  # as on a GPU; vLLM turns it off on CPU
    client = AsyncLLM.from_vllm_config(config)
    try:
        yield Engine(client, ControlChannel(client, ANSWER_WITHIN_S), memory)
    finally:
        client.shutdown()
