"""Fault: the client goes away in the middle of a stream, under load."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.faults.promises import Promised
from tests.faults.stand import Stand, until
from tests.faults.under_load import Outcome, clients, completion, in_the_background, look_at, lost, run, stream
from tests.serving.tool_site import ToolSite

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FAULT = "client gone mid-stream"
GONE, LONG_GONE = 6, 24
"""Clients that go away."""
ASKED_TOKENS = 3500
"""Of each answer; its client leaves after the first."""
CALLED = "response.mcp_call_arguments.done"
TOLD_WITHIN_S = 30.0
FREED_WITHIN_S = 20.0
"""Well within the deadline of a tool, after which the tools of background responses would be stopped as well."""


async def read_until(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], mark: str, found: Callable[[], bool]
) -> tuple[float, str]:
    """Read a stream until an event has this mark and something is so, and hang up: when, and the first event."""
    first = None
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        if answer.status_code == 503 and "retry-after" in answer.headers:
            await asyncio.sleep(float(answer.headers["retry-after"]))
            return await read_until(client, path, body, mark, found)
        assert answer.status_code == 200, await answer.aread()
        lines = answer.aiter_lines()  # it hangs up when it is collected: it has to outlive the loop
        async for line in lines:
            if line.startswith("data: {"):
                first = first or line.removeprefix("data: ")
                if mark in line:
                    break
        await asyncio.to_thread(until, found, "it does not come so far")
    assert first is not None
    return time.monotonic(), first


def seconds_until_idle(stand: Stand, since_s: float) -> tuple[float, int]:
    """From ``since_s`` until no replica runs anything; and the programs that hold blocks then."""

    def idle() -> list[dict[str, Any]] | None:
        told = stand.replicas()
        return told if told and all(one["running"] == one["waiting"] == 0 for one in told) else None

    told = until(idle, "a replica still works for nobody")
    return time.monotonic() - since_s, sum(one["held_programs"] for one in told)


def held_programs(stand: Stand) -> int:
    return sum(one["held_programs"] for one in stand.replicas())


def held_runs(stand: Stand) -> int:
    """Programs with a run of the cluster that hold blocks: a completion that ended is held too, and is not one."""
    programs = httpx.get(f"{stand.url}/v1/programs", params={"limit": 100}, timeout=10.0).json()["data"]
    return sum(one["state"] == "held" and one["last_run"] is not None for one in programs)


def computed_tokens(stand: Stand) -> int:
    return sum(one["scheduled_tokens"] for one in stand.replicas())


async def test_generation_stops(whole: Stand, is_long: bool, promised: Promised) -> None:
    many = LONG_GONE if is_long else GONE
    before, computed = held_programs(whole), computed_tokens(whole)
    async with clients(whole.url) as client:
        bodies = [completion(f"Long {number}:", ASKED_TOKENS) for number in range(many)]
        reads = [read_until(client, "/v1/completions", body, "text", lambda: True) for body in bodies]
        gone = await asyncio.gather(*reads)
    took_s, holding = await asyncio.to_thread(seconds_until_idle, whole, max(at_s for at_s, _ in gone))
    asked = many * ASKED_TOKENS
    promised(
        FAULT, f"tokens computed, of {asked} that were asked for", computed_tokens(whole) - computed, at_most=asked / 2
    )
    promised(FAULT, "generation stops", took_s, unit="s", at_most=1)
    promised(FAULT, "programs that still hold blocks", holding, at_most=before)


async def test_foreground_tools_stop_and_background_goes_on(
    whole: Stand, site: ToolSite, is_long: bool, promised: Promised
) -> None:
    many = (LONG_GONE if is_long else GONE) // 2
    site.gate.clear()
    before, calls, hung_up = held_runs(whole), site.watched, len(site.hung_up_s)

    def all_in_calls() -> bool:
        return site.watched == calls + many + 2

    async with clients(whole.url) as client:
        going_on = asyncio.create_task(in_the_background(client, run("watched", input="Behind.")))
        other = asyncio.create_task(stream(client, completion("Other:", 200)))
        left = run("watched", input="Left.", background=True)
        (_, begun), *gone = await asyncio.gather(
            read_until(client, "/v1/responses", left, CALLED, all_in_calls),
            *(
                read_until(client, "/v1/responses", run("watched", input=f"{n}"), CALLED, all_in_calls)
                for n in range(many)
            ),
        )
        await asyncio.to_thread(until, lambda: len(site.hung_up_s) >= hung_up + many, "tools go on for nobody")
        stopped_s = max(0.0, max(site.hung_up_s[hung_up:]) - max(at_s for at_s, _ in gone))
        freed_s = await asyncio.to_thread(_seconds_until_freed, whole, before + 2, max(at_s for at_s, _ in gone))
        site.gate.set()
        behind = await going_on
        response = json.loads(begun)["response"]["id"]
        told = await _ended(client, response)
        assert lost([await other]) == 0
    promised(FAULT, "foreground tools stop", stopped_s, unit="s", at_most=1)
    promised(FAULT, "their blocks are freed", freed_s, unit="s", at_most=1)
    promised(FAULT, "tools of background responses that were stopped", len(site.hung_up_s) - hung_up - many, exactly=0)
    finished = (behind.outcome is Outcome.DONE) + (told["status"] in ("completed", "incomplete"))
    promised(FAULT, "background responses that went on", finished, unit="of 2", exactly=2)


def _seconds_until_freed(stand: Stand, runs: int, since_s: float) -> float:
    """Until no more than these hold blocks."""
    until(lambda: held_runs(stand) <= runs, "blocks are held for nobody", FREED_WITHIN_S)
    return time.monotonic() - since_s


async def _ended(client: httpx.AsyncClient, response: str) -> dict[str, Any]:
    give_up_s = time.monotonic() + TOLD_WITHIN_S
    while time.monotonic() < give_up_s:
        told = await look_at(client, f"/v1/responses/{response}")
        if told is not None and told["status"] not in ("queued", "in_progress"):
            return told
        await asyncio.sleep(0.1)
    raise AssertionError(f"{response} did not end")
