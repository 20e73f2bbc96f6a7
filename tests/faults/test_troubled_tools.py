"""Fault: slow, hanging and flooding tools, beside programs whose tools are well."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.faults.promises import Promised, percentile
from tests.faults.stand import Stand
from tests.faults.under_load import Outcome, ask, clients, completion, run, stream
from tests.serving.program_requests import answer as answer_of
from tests.serving.program_requests import called
from tests.serving.tool_site import FLOOD_CAP_BYTES
from tools_runtime.text import cut_marker

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

FAULT = "slow, hanging, flooding tool"
TROUBLED = ["hang", "flood", "hang", "flood"]
"""Of each program, the tool that it calls, one call after the other."""
WELL = ["nap", "book", "nap", "book"]
"""Tools that take as long, and do no harm."""
VICTIMS = 2
"""Clients that ask one thing after the other beside them."""
BLOCK_S, LONG_BLOCK_S = 3.0, 20.0
ROUNDS, LONG_ROUNDS = 1, 18
"""Of six long rounds, some 1,600 requests on either side, the ratio of two p99 is beyond 1.1 once in seven times where
nothing differs (resampled from the blocks of one run); of three times as many it spreads about half as far."""
DEADLINE_S = 2.0
"""Of `hang`."""
AT_ONCE = 4
"""Calls that end at the same time: two for each core. Each end and the turn after it take 12 ms of a core, and 36 ms
where the machine is slow, so that the bound is about the deadline and not about the machine."""


async def calls(client: httpx.AsyncClient, body: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Seconds from the model's call of each tool to its answer, as a client reads them, and the answer."""
    asked_s, answers = 0.0, []
    async with client.stream("POST", "/v1/responses", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {"type": ""}
            match event["type"]:
                case "response.mcp_call_arguments.done":
                    asked_s = time.monotonic()
                case "response.output_item.done" if event["item"]["type"] == "mcp_call":
                    answers.append((time.monotonic() - asked_s, answer_of(event["item"])))
    return answers


async def test_a_tool_that_hangs_ends_at_its_deadline(whole: Stand, is_long: bool, promised: Promised) -> None:
    many = AT_ONCE if is_long else 3
    async with clients(whole.url) as client:
        ended = await asyncio.gather(*(calls(client, run("hang", input=f"{n}")) for n in range(many)))
        flooded = await ask(client, "/v1/responses", run("flood"))
    assert all(text.startswith("timeout: ") for [(_, text)] in ended), ended
    off_ms = max(abs(took_s - DEADLINE_S) for [(took_s, _)] in ended) * 1000
    promised(FAULT, "a call's end, off its deadline", off_ms, unit="ms", at_most=100)
    (output,) = (answer_of(call) for call in called(json.loads(flooded.text)))
    room = FLOOD_CAP_BYTES + len(cut_marker(FLOOD_CAP_BYTES))
    promised(FAULT, "bytes of a flood that reach the model", len(output.encode()), at_most=room)


async def latencies(client: httpx.AsyncClient, stop: asyncio.Event, beside: list[str]) -> list[float]:
    """Of clients that ask, while programs call these tools.

    Raises:
        AssertionError: one of them, or of the programs, was not answered.
    """

    async def troubled(tool: str) -> None:
        while not stop.is_set():
            assert (await ask(client, "/v1/responses", run(tool, max_output_tokens=60))).outcome is Outcome.DONE

    async def victim(number: int) -> list[float]:
        took_s = []
        while not stop.is_set():
            ended = await stream(client, completion(f"Victim {number}:", 24))
            assert ended.outcome is Outcome.DONE
            took_s.append(ended.latency_s)
        return took_s

    going = [asyncio.create_task(troubled(tool)) for tool in beside]
    told = await asyncio.gather(*(victim(number) for number in range(VICTIMS)))
    await asyncio.gather(*going)
    return [one for each in told for one in each]


async def test_programs_beside_them_are_answered(whole: Stand, is_long: bool, promised: Promised) -> None:
    """The blocks take turns, so that what else the machine does is in both."""
    block_s, rounds = (LONG_BLOCK_S, LONG_ROUNDS) if is_long else (BLOCK_S, ROUNDS)
    well, ill = [], []
    async with clients(whole.url) as client:
        for _ in range(rounds):
            for tools, into in ((WELL, well), (TROUBLED, ill)):
                stop = asyncio.Event()
                asyncio.get_running_loop().call_later(block_s, stop.set)
                into += await latencies(client, stop, tools)
    ratio = percentile(ill, 0.99) / percentile(well, 0.99)
    promised(FAULT, "p99 of other programs, of that beside tools that are well", ratio, unit="x", at_most=1.1)
