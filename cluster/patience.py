"""A time limit for what other processes answer, in which this process's own standstills do not count.

`asyncio.timeout` also runs out where the answer is there and the event loop had no time to read it: on a busy machine a
store in good health would seem to be gone.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

STEPS = 8
"""A limit passes in so many steps, one begun when the one before has ended: of a standstill, one step counts."""
LONGEST = 1.25
"""Whatever the standstills: after so many times the limit, one step is left."""


@asynccontextmanager
async def answered_within(seconds: float) -> AsyncIterator[None]:
    """End what is waited for after ``seconds`` in which the event loop could have read the answer.

    Raises:
        TimeoutError: there was none.
    """
    loop = asyncio.get_running_loop()
    steps_left, last_s = STEPS, loop.time() + LONGEST * seconds
    handle: asyncio.TimerHandle

    def begin_step() -> None:
        nonlocal handle
        handle = loop.call_later(seconds / STEPS, end_step)

    def end_step() -> None:
        nonlocal steps_left
        steps_left -= 1
        if loop.time() >= last_s:
            steps_left = min(steps_left, 1)
        if steps_left:
            begin_step()
        else:
            limit.reschedule(loop.time())  # after what can be read now

    async with asyncio.timeout(None) as limit:
        begin_step()
        try:
            yield
        finally:
            handle.cancel()
