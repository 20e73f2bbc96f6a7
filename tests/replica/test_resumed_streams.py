"""A stream that goes on here is brought to its state beside other streams."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from vllm.sampling_params import SamplingParams

from cluster.core.stream import Begun, Ending, Progress, prompt_digest
from cluster.core.turn import pack_ids
from replicas.resumption import REPLAYED, Watch

KNOWN = 4000
PROMPT = [1, 2, 3]


async def test_other_streams_take_turns_with_the_known_outputs_of_a_resumed_one() -> None:
    ids, sizes, begun = pack_ids(range(KNOWN)), pack_ids([1] * KNOWN), Begun(prompt_digest(pack_ids(PROMPT)), 0)
    watch = Watch(Progress(KNOWN, ids, sizes, begun, Ending("length")))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def generate(*_: Any) -> AsyncGenerator[Any]:
        raise AssertionError("the stream has ended: the engine is not asked")

    async def end(_: str) -> None:
        raise AssertionError("no stop string was found")

    beside = asyncio.create_task(other())
    prompt, params = {"type": "token", "prompt_token_ids": PROMPT}, SamplingParams(detokenize=False)
    made = [output async for output in watch.outputs(generate, end, None, prompt, params, "one")]
    beside.cancel()
    assert [one.outputs[0].token_ids for one in made] == [[number] for number in range(KNOWN)]
    assert turns >= KNOWN // REPLAYED
