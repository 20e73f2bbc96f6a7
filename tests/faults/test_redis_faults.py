"""Redis dies, stands still, is slow or out of reach: what was accepted ends, and what is new is told soon."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from tests.faults.stand import Stand, until
from tests.faults.under_load import Ended, Outcome, ask, background, clients, completion, end_of, lost, run, stream

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RUNS = 6
STREAMS = 3
LONG_TOKENS = 600
NEW_EVERY_S = 0.25
RECOVERS_WITHIN_S = 60.0


@contextmanager
def killed(stand: Stand) -> Iterator[None]:
    """Redis is gone; it keeps what it was told, and is there again at the end."""
    assert stand.redis.pid is not None
    psutil.Process(stand.redis.pid).kill()
    until(lambda: stand.redis.pid is None, "Redis does not die")
    try:
        yield
    finally:
        stand.redis.start()


@contextmanager
def frozen(stand: Stand) -> Iterator[None]:
    assert stand.redis.pid is not None
    process = psutil.Process(stand.redis.pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


FAULTS: dict[str, tuple[Callable[[Stand], AbstractContextManager[None]], float, float]] = {
    "Redis killed": (killed, 2.0, 10.0),
    "Redis frozen": (frozen, 2.0, 30.0),
    "Redis slow (2 s)": (lambda stand: stand.wire.slow(2.0), 2.0, 20.0),
    "Redis partitioned": (lambda stand: stand.wire.partitioned(), 2.0, 20.0),
    "Redis cut off": (lambda stand: stand.wire.cut(), 2.0, 10.0),
}
"""How; and for how many seconds, in the short form and in the long one."""
LONG_ONLY = ("Redis slow (2 s)", "Redis cut off")
"""The others stand for them in the short form."""


@dataclass
class Newcomers:
    """Turns of new programs, and new programs that the cluster runs, while Redis is away."""

    turns: list[Ended] = field(default_factory=list)
    runs: list[Ended] = field(default_factory=list)

    async def come(self, client: httpx.AsyncClient, stop: asyncio.Event) -> None:
        """One of each, again and again."""
        coming: list[asyncio.Task[None]] = []
        while not stop.is_set():
            coming.append(asyncio.create_task(self._turn(client, len(coming))))
            coming.append(asyncio.create_task(self._run(client)))
            await asyncio.sleep(NEW_EVERY_S)
        await asyncio.gather(*coming)

    @property
    def refused(self) -> list[Ended]:
        """Those that were told to come again."""
        return [one for one in (*self.turns, *self.runs) if one.outcome is Outcome.REFUSED]

    @property
    def left_alone(self) -> list[Ended]:
        """Those that were neither served nor told when to come again."""
        unserved = [one for one in (*self.turns, *self.runs) if one.outcome is not Outcome.DONE]
        return [one for one in unserved if one.outcome is not Outcome.REFUSED or one.retry_after is None]

    async def _turn(self, client: httpx.AsyncClient, number: int) -> None:
        self.turns.append(await stream(client, completion("New", 4, session_id=f"new-{id(self)}-{number}")))

    async def _run(self, client: httpx.AsyncClient) -> None:
        told = await ask(client, "/v1/responses", {**run(), "background": True, "max_output_tokens": 8})
        self.runs.append(told)


@pytest.mark.parametrize("fault", FAULTS)
async def test_accepted_programs_end_and_new_ones_are_told(
    whole: Stand, fault: str, is_long: bool, promised: Callable[..., None]
) -> None:
    if fault in LONG_ONLY and not is_long:
        pytest.skip("others stand for it: with --long")
    breaks, short_s, long_s = FAULTS[fault]
    whole.site.gate.clear()
    before = len(whole.site.bookings)
    newcomers, stop = Newcomers(), asyncio.Event()
    async with clients(whole.url) as client:
        begun = [asyncio.create_task(background(client, run("look", "book"))) for _ in range(RUNS)]
        streams = [
            asyncio.create_task(stream(client, completion("Once", LONG_TOKENS, session_id=f"{fault}-{number}")))
            for number in range(STREAMS)
        ]
        await asyncio.to_thread(until, lambda: len(whole.site.bookings) >= before + RUNS, "no tool is called")
        with breaks(whole):
            coming = asyncio.create_task(newcomers.come(client, stop))
            await asyncio.sleep(1.0)
            whole.site.gate.set()
            await asyncio.sleep(long_s if is_long else short_s)
            stop.set()
            await coming
        recovery_s = await recovered(client)
        ended = [*await asyncio.gather(*begun, *streams), *await ends_of(client, newcomers.runs)]
    texts = {one.text for one in ended[RUNS : RUNS + STREAMS]}
    promised(fault, "accepted programs lost", lost(ended), exactly=0)
    promised(fault, "accepted programs that failed", sum(one.outcome is not Outcome.DONE for one in ended), exactly=0)
    promised(fault, "different texts of one story", len(texts), exactly=1)
    promised(fault, "new ones neither served nor told when to come again", len(newcomers.left_alone), exactly=0)
    promised(fault, "new turns served", sum(one.outcome is Outcome.DONE for one in newcomers.turns), at_least=1)
    slowest_s = max((one.latency_s for one in newcomers.refused), default=0.0)
    promised(fault, "slowest refusal", slowest_s, unit="s", at_most=1)
    promised(fault, "recovery", recovery_s, unit="s", at_most=5)


async def recovered(client: httpx.AsyncClient) -> float:
    """Seconds until a new program is accepted that the cluster runs, and has ended."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + RECOVERS_WITHIN_S:
        told = await background(client, run() | {"max_output_tokens": 8})
        if told.outcome is Outcome.DONE:
            break
        await asyncio.sleep(0.05)
    return time.monotonic() - began_s


async def ends_of(client: httpx.AsyncClient, told: list[Ended]) -> list[Ended]:
    """What became of those that were accepted."""
    return list(await asyncio.gather(*(end_of(client, one) for one in told if one.outcome is Outcome.DONE)))
