"""What every request goes through, or what watches over it, is killed: no program is lost, and each client is told.

The router is a part of the ingress (`router.pinned_router`); the only ingress is killed here.
"""

import asyncio
from collections.abc import Callable

import pytest

from tests.faults.stand import CONTROLLER, INGRESS, Stand, until
from tests.faults.under_load import Outcome, background, clients, completion, lost, run, stream

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PARTS = {"ingress and router": INGRESS, "controller": CONTROLLER}
RUNS = 6
STREAMS = 4
TOKENS = 800
BEGUN_WITHIN_S = 180.0


@pytest.mark.parametrize("part", PARTS)
async def test_a_part_is_killed(whole: Stand, part: str, is_long: bool, promised: Callable[..., None]) -> None:
    fault = f"{part} killed"
    lost_ones = failed_runs = failed_streams = false = silent = 0
    async with clients(whole.url) as client:
        text = (await stream(client, completion("Once", TOKENS))).text
        for _ in range(3 if is_long else 1):
            whole.site.gate.clear()
            whole.site.bookings.clear()
            runs = [asyncio.create_task(background(client, run("look", "book", "look"))) for _ in range(RUNS)]
            await asyncio.to_thread(
                until, lambda: len(whole.site.bookings) >= RUNS, "not each calls a tool", BEGUN_WITHIN_S
            )
            streams = [asyncio.create_task(stream(client, completion("Once", TOKENS))) for _ in range(STREAMS)]
            await asyncio.to_thread(until, lambda: any(one["running"] for one in whole.replicas()), "no stream")
            (victim,) = whole.named(PARTS[part])
            victim.kill()
            whole.site.gate.set()
            ended_runs, ended_streams = await asyncio.gather(asyncio.gather(*runs), asyncio.gather(*streams))
            lost_ones += lost((*ended_runs, *ended_streams))
            broken = [one.text for one in ended_streams if one.outcome is Outcome.LOST]
            silent += sum("Error(" not in text for text in broken)
            failed_runs += sum(one.outcome is not Outcome.DONE for one in ended_runs)
            failed_streams += sum(one.outcome is not Outcome.DONE for one in ended_streams)
            false += sum(not text.startswith(one.text) for one in ended_streams if one.outcome is Outcome.DONE)
            print([(one.outcome.name, one.text[:200]) for one in (*ended_runs, *ended_streams)])
            await asyncio.to_thread(whole.await_whole)
            await asyncio.to_thread(until, lambda: whole.named(PARTS[part]), f"no {part} again", 60.0)
    promised(fault, "background programs lost or failed", failed_runs, exactly=0)
    promised(fault, "other texts", false, exactly=0)
    promised(fault, "streams that ended without an error of the connection", silent, exactly=0)
    if part == "controller":  # the ingress had the clients' connections
        promised(fault, "programs lost", lost_ones, exactly=0)
        promised(fault, "streams that ended in an error", failed_streams, exactly=0)
