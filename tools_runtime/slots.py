"""How many calls of one tool run at a time; the others wait in order of arrival."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.errors import IntegrityError, ToolRefused


class Slots:
    """A tool's own places, so that a slow tool keeps nobody but its own callers waiting.

    Args:
        count: calls that run at a time.
        max_waiting: calls that wait; more are refused.
    """

    def __init__(self, count: int, max_waiting: int) -> None:
        self._count = count
        self._max_waiting = max_waiting
        self._free = asyncio.Semaphore(count)
        self.waiting = 0
        self.taken = 0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a place, and keep it.

        Raises:
            ToolRefused: too many wait already.
        """
        if self._free.locked() and self.waiting >= self._max_waiting:
            raise ToolRefused(f"the tool is busy: {self.taken} calls run and {self.waiting} wait; try again later")
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
            self._free.release()

    def check_integrity(self) -> None:
        """No place is lost.

        Raises:
            IntegrityError: one is.
        """
        if not (0 <= self.taken <= self._count and self.waiting >= 0):
            raise IntegrityError(f"{self.taken} of {self._count} places taken, {self.waiting} calls wait")
        if self.taken < self._count and self._free.locked() and not self.waiting:
            raise IntegrityError(f"no place is free although only {self.taken} of {self._count} are taken")
