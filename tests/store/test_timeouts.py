"""A limit for answers, while the event loop stands still, and without that."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import pytest
import uvloop

from cluster.core.timeouts import LONGEST, STEPS, stall_tolerant_timeout
from tests import garbage

LIMIT_S = 0.2
POLICIES = {"asyncio": asyncio.DefaultEventLoopPolicy(), "uvloop": uvloop.EventLoopPolicy()}
"""Ray Serve's processes have uvloop's, whose timers come before what can be read."""
STILL_S = 3 * LIMIT_S


@pytest.fixture(params=POLICIES)
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return POLICIES[request.param]


async def a_byte_after(seconds: float) -> None:
    """Read one that a thread sends, however the event loop is."""
    ours, theirs = socket.socketpair()
    sender = threading.Timer(seconds, theirs.send, (b"!",))
    sender.start()
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        assert await reader.readexactly(1) == b"!"
    finally:
        writer.close()
        sender.join()
        theirs.close()


@pytest.mark.parametrize("after_s", [0.0, 0.3 * LIMIT_S, 0.9 * LIMIT_S])
async def test_what_was_answered_while_the_loop_stood_still_is_read(after_s: float) -> None:
    asyncio.get_running_loop().call_later(after_s, time.sleep, STILL_S)
    async with stall_tolerant_timeout(LIMIT_S):
        await a_byte_after(after_s + 0.005)


async def test_what_is_not_answered_ends() -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with stall_tolerant_timeout(LIMIT_S):
            await asyncio.Event().wait()
    assert time.monotonic() - began_s >= LIMIT_S


async def test_it_ends_even_if_the_loop_always_stands_still() -> None:
    loop = asyncio.get_running_loop()

    def stand_still() -> None:
        time.sleep(LIMIT_S / 4)
        loop.call_soon(stand_still)

    loop.call_soon(stand_still)
    with pytest.raises(TimeoutError):
        async with stall_tolerant_timeout(LIMIT_S):
            await asyncio.Event().wait()


async def test_a_loop_that_is_always_late_hardly_prolongs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        """Of virtual time: whatever is to happen happens an eighth of the limit later."""

        now_s = 0.0

        def time(self) -> float:
            return self.now_s

        def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.Handle:
            self.now_s += delay_s + LIMIT_S / STEPS
            return loop.call_soon(callback)

    late, loop = Late(), asyncio.get_running_loop()
    monkeypatch.setattr("cluster.core.timeouts.asyncio.get_running_loop", lambda: late)
    with pytest.raises(TimeoutError):
        async with stall_tolerant_timeout(LIMIT_S):
            monkeypatch.undo()
            await asyncio.Event().wait()
    assert late.now_s == pytest.approx((LONGEST + 2 / STEPS) * LIMIT_S)


async def test_what_was_answered_in_time_is_not_ended_later() -> None:
    async with stall_tolerant_timeout(LIMIT_S / 10):
        pass
    await asyncio.sleep(LIMIT_S)


async def test_it_leaves_no_garbage() -> None:
    """A turn waits for the store several times."""
    with garbage.none_of():
        for _ in range(garbage.TIMES):
            async with stall_tolerant_timeout(LIMIT_S):
                await asyncio.sleep(0)
