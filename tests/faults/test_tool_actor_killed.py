"""Fault: the actor that runs tools is killed in the middle of calls, under load."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.faults.promises import Promised
from tests.faults.stand import TOOLS, Stand, until
from tests.faults.under_load import clients, completion, lost, run, stream
from tests.serving.program_requests import answer
from tests.serving.tool_site import ToolSite

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FAULT = "tool actor killed mid-call"


async def items(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """The output items of a streamed response as they are done, and when."""
    async with client.stream("POST", "/v1/responses", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if event["type"] == "response.output_item.done":
                    yield time.monotonic(), event["item"]


async def answers(client: httpx.AsyncClient, body: dict[str, Any]) -> list[tuple[float, str]]:
    """What each tool call of a response was told, and when."""
    return [(at_s, answer(item)) async for at_s, item in items(client, body) if item["type"] == "mcp_call"]


async def killed_in_calls(stand: Stand, site: ToolSite, name: str, programs: int) -> tuple[float, int, list[Any]]:
    """Kill it while each program is in a call of this tool: when, how often the tool ran, what was told."""
    site.gate.clear()
    before = len(site.bookings)
    async with clients(stand.url) as client:
        others = [asyncio.create_task(stream(client, completion(f"Other {n}:", 300))) for n in range(4)]
        asked = [asyncio.create_task(answers(client, run(name, input=f"Go {n}."))) for n in range(programs)]
        await asyncio.to_thread(until, lambda: len(site.bookings) == before + programs, "the tool is not called")
        (actor,) = stand.named(TOOLS)
        os.kill(actor.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        if name == "look":
            expected = before + 2 * programs
            await asyncio.to_thread(until, lambda: len(site.bookings) >= expected, "they are not tried again")
            site.gate.set()
        told = await asyncio.gather(*asked)
        site.gate.set()
        assert lost(await asyncio.gather(*others)) == 0
    return killed_s, len(site.bookings) - before, told


async def test_a_tool_with_effects_is_never_run_twice(
    whole: Stand, site: ToolSite, is_long: bool, promised: Promised
) -> None:
    programs = 12 if is_long else 3
    killed_s, ran, told = await killed_in_calls(whole, site, "book", programs)
    assert all(text.startswith("unknown: ") for [(_, text)] in told)
    promised(FAULT, "runs of a tool that is not idempotent, per call", ran / programs, exactly=1)
    slowest_s = max(at_s for [(at_s, _)] in told) - killed_s
    promised(FAULT, "`unknown` told", slowest_s, unit="s", at_most=1)


async def test_an_idempotent_tool_is_run_once_more(
    whole: Stand, site: ToolSite, is_long: bool, promised: Promised
) -> None:
    programs = 12 if is_long else 3
    _, ran, told = await killed_in_calls(whole, site, "look", programs)
    promised(FAULT, "runs of an idempotent tool, per call", ran / programs, exactly=2)
    answered = sum(text.startswith("booked") for [(_, text)] in told)
    promised(FAULT, "idempotent calls answered", answered, unit=f"of {programs}", exactly=programs)
