"""A timeout for answers of other processes that does not count the stalls of this process's own event loop.

`asyncio.timeout` also expires when the answer has arrived but the event loop had no time to read it. On a busy machine
a healthy store would then look unavailable.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

STEPS = 8
"""Number of equal steps of a timeout. Each step starts when the step before it ends, so a stall of any length uses up
one step at most."""
LONGEST = 1.25
"""After this multiple of the timeout, at most one step is left, however long the stalls were."""


@asynccontextmanager
async def stall_tolerant_timeout(seconds: float) -> AsyncIterator[None]:
    """Time out after ``seconds`` in which the event loop could have read the answer.

    Raises:
        TimeoutError: the body of the context did not end in time.
    """
    async with asyncio.timeout(None) as limit:
        steps = _Steps(seconds, limit)
        steps.begin()
        try:
            yield
        finally:
            steps.cancel()


class _Steps:
    """The steps of one timeout. Two closures instead would form a reference cycle, which only the collector frees."""

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
            self._limit.reschedule(self._loop.time())  # the loop first handles what can be read now
