"""Fault: a request that kills engines, under load."""

import asyncio
import time

import psutil
import pytest

from tests.faults.engine_side.breaking import KEY, WAYS
from tests.faults.promises import Promised
from tests.faults.stand import REPLICA, Stand
from tests.faults.under_load import Ended, Outcome, clients, completion, lost, stream

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

FAULT = "poison request"
STREAMS, TOKENS = 6, 600
OBSERVED_S = 3.0
"""After the refusal, for a death that comes late."""


async def refused(stand: Stand, way: str, number: int) -> tuple[Ended, Ended, float, list[Ended]]:
    """The poison's end, and once more; how long it took to refuse it then; and the ends of the streams beside it."""
    poison = completion(f"Poison {number}:", 50) | {"vllm_xargs": {KEY: way}}
    async with clients(stand.url) as client:
        beside = [
            asyncio.create_task(stream(client, completion(f"Beside {number}.{n}:", TOKENS))) for n in range(STREAMS)
        ]
        await asyncio.sleep(0.5)
        first = await stream(client, poison)
        began_s = time.monotonic()
        again = await stream(client, poison)
        return first, again, time.monotonic() - began_s, await asyncio.gather(*beside)


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_that_breaks_an_engine(whole: Stand, is_long: bool, promised: Promised, way: str) -> None:
    if way == "aborts" and not is_long:
        pytest.skip("with --long: a replica's start more")
    for number in range(3 if is_long else 1):
        before = whole.named(REPLICA)
        first, again, refused_s, beside = await refused(whole, way, number)
        await asyncio.sleep(OBSERVED_S)
        _, living = psutil.wait_procs(before, timeout=0)
        assert [one.outcome for one in (first, again)] == [Outcome.REFUSED] * 2, first.text
        assert [one.status for one in (first, again)] == [422] * 2
        assert "quarantined" in first.text
        promised(FAULT, f"{way}: replica restarts", len(before) - len(living), at_most=1)
        promised(FAULT, f"{way}: time to refuse it again", refused_s, unit="s", at_most=1)
        promised(FAULT, f"{way}: programs beside it lost", lost(beside), exactly=0)
        went_on = sum(one.outcome is Outcome.DONE for one in beside)
        promised(FAULT, f"{way}: streams beside it that went on", went_on, unit=f"of {STREAMS}", at_least=STREAMS)
        await asyncio.to_thread(whole.await_whole)
