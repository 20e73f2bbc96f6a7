"""Holds the turns of a model that has no replica, and asks for one, until a replica has started.

The number of turns and their wait are bounded. A turn that would exceed a bound is rejected with the time after which a
replica is expected.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from cluster.core.clock import Clock
from cluster.core.supervision import SupervisedTasks
from router.decisions import Refused
from router.placement import rejection

logger = logging.getLogger("ray.serve")

FIRST_START_S = 60.0
"""The start of a replica, until one has reported how long it took (seconds)."""
LATE_RETRY_S = 5.0
"""After a start that takes longer than expected, clients retry after this long."""
ASK_AGAIN_S = 1.0
"""Seconds between a request for a replica that failed and the next one."""


class ColdStart:
    """The turns that wait for the first replica.

    Args:
        wake: asks for a replica, and returns when there is one. It is called while turns wait, once at a time.
        clock: measures waits.
        tasks: run the asking.
        limit_s: a turn that has waited for so long is rejected (seconds).
        max_waiting: number of turns that may wait.
    """

    def __init__(
        self,
        wake: Callable[[], Awaitable[object]],
        clock: Clock,
        tasks: SupervisedTasks,
        *,
        limit_s: float,
        max_waiting: int,
    ) -> None:
        self.start_s = FIRST_START_S
        """Expected start of a replica (seconds)."""
        self.waiting = 0
        self._wake = wake
        self._clock = clock
        self._tasks = tasks
        self._limit_s = limit_s
        self._max_waiting = max_waiting
        self._started = asyncio.Event()
        self._asked_s: float | None = None

    def observe(self, replicas: int) -> None:
        """The number of replicas that can be reached now."""
        if replicas:
            self._started.set()
        else:
            self._started.clear()

    async def replica(self) -> None:
        """Wait until there is a replica.

        Raises:
            Overloaded: too many turns wait, or no replica has started in time.
        """
        if self._started.is_set():
            return
        if self.waiting >= self._max_waiting:
            raise rejection(Refused.QUEUE_FULL, self._expected_s())
        self.waiting += 1
        try:
            if self._asked_s is None:
                self._asked_s = self._clock.now_s()
                self._tasks.run("ask for a replica", self._ask())
            async with asyncio.timeout(self._limit_s):
                await self._started.wait()
        except TimeoutError:
            raise rejection(Refused.NO_REPLICA, self._expected_s()) from None
        finally:
            self.waiting -= 1

    def _expected_s(self) -> float:
        """Seconds until a replica is expected to serve."""
        waited_s = 0.0 if self._asked_s is None else self._clock.now_s() - self._asked_s
        return max(LATE_RETRY_S, self.start_s - waited_s)

    async def _ask(self) -> None:
        try:
            while self.waiting and not self._started.is_set():
                try:
                    await self._wake()
                except Exception as error:  # noqa: BLE001 - whatever the reason, it is asked again
                    logger.warning("no replica has started yet: %r", error)
                if not self._started.is_set():  # its snapshot follows, or it is asked again
                    await asyncio.sleep(ASK_AGAIN_S)
        finally:
            self._asked_s = None
