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
    async with asyncio.timeout(None) as limit:
        steps = _Steps(seconds, limit)
        steps.begin()
        try:
            yield
        finally:
            steps.cancel()


class _Steps:
    """Those of one limit. (Two functions that call each other would be left to the garbage collector.)"""

    def __init__(self, seconds: float, limit: asyncio.Timeout) -> None:
        self._loop = asyncio.get_running_loop()
        self._step_s = seconds / STEPS
        self._last_s = self._loop.time() + LONGEST * seconds
        self._limit = limit
        self._left = STEPS

    def begin(self) -> None:
        self._handle = self._loop.call_later(self._step_s, self._end)

    def cancel(self) -> None:
        self._handle.cancel()

    def _end(self) -> None:
        self._left -= 1
        if self._loop.time() >= self._last_s:
            self._left = min(self._left, 1)
        if self._left:
            self.begin()
        else:
            self._limit.reschedule(self._loop.time())  # after what can be read now
