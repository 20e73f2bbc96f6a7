"""An engine stands still beside an idle one: new programs go to the other replica."""

import asyncio

import pytest

from tests.faults.promises import Promised
from tests.faults.stand import ENGINE, Stand
from tests.faults.under_load import Outcome, clients, completion, stream

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

FAULT = "an engine is frozen"
SILENT_S = 3.5
"""Until then the ingress cannot know: replicas publish every second, by Ray's controller."""
PROGRAMS = 6
WITHIN_S = 30.0
"""Far less than the engine is frozen; a busy machine may need as long."""


async def test_new_programs_go_to_the_other_replica(whole: Stand, promised: Promised) -> None:
    engine = whole.named(ENGINE)[0]
    async with clients(whole.url) as client:
        engine.suspend()
        try:
            await asyncio.sleep(SILENT_S)
            turns = [
                asyncio.create_task(stream(client, completion("New", 4, session_id=f"frozen-{number}")))
                for number in range(PROGRAMS)
            ]
            done, waiting = await asyncio.wait(turns, timeout=WITHIN_S)
        finally:
            engine.resume()
        if waiting:
            await asyncio.wait(waiting)
    ended = [turn.result() for turn in done]
    promised(FAULT, "new programs that waited for it", len(waiting), exactly=0)
    promised(FAULT, "new programs that failed", sum(one.outcome is not Outcome.DONE for one in ended), exactly=0)
    promised(FAULT, "slowest new turn", max(one.latency_s for one in ended), unit="s", at_most=2)
    await asyncio.to_thread(whole.check_idle)
