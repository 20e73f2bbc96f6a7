"""Background tasks of one owner. A loop that fails is logged, counted and started again.

The owner starts its loops and one-off jobs here, and closes them here. A Ray deployment raises from `check_health`
while `healthy` is False, so that Ray replaces a process whose loops keep failing.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from cluster.core.clock import Clock

logger = logging.getLogger("ray.serve")

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Seconds before a failed loop is started again: the first value, which doubles with each failure in a row, and its
maximum."""
RECOVERED_S = 60.0
"""A loop that has run for this long (seconds) counts as recovered. Its next failure starts a new count."""
UNHEALTHY_AFTER = 5
"""Number of failures in a row after which the owner is unhealthy."""


@dataclass(slots=True)
class _Loop:
    task: asyncio.Task[None]
    started_s: float
    failures_in_a_row: int = 0


async def run_all(work: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run all of it concurrently. If one fails, the others are stopped, and its exception is raised."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SupervisedTasks:
    """The background tasks of one owner.

    Args:
        owner: names the owner in log lines.
        clock: measures how long a loop has run.
        sleep: waits before a loop is started again.
    """

    def __init__(
        self, owner: str, clock: Clock, *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        self.failures: Counter[str] = Counter()
        """Number of unexpected exceptions since the start, by the name of the task."""
        self._owner = owner
        self._clock = clock
        self._sleep = sleep
        self._loops: dict[str, _Loop] = {}
        self._jobs: set[asyncio.Task[bool]] = set()

    def start(self, name: str, loop: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a loop until `aclose`. It is called again after each exception. If it returns, it is not called again.

        Args:
            name: a name that is unique among the loops of this owner, for log lines and counters.
            loop: makes the loop's coroutine. It is called again after each failure.

        Raises:
            ValueError: a loop of this name runs already.
        """
        if name in self._loops:
            raise ValueError(f"{self._owner} already runs a loop named {name!r}")
        task = asyncio.create_task(self._supervise(name, loop), name=f"{self._owner}: {name}")
        self._loops[name] = _Loop(task, self._clock.now_s())

    def run(self, name: str, job: Coroutine[Any, Any, object]) -> None:
        """Run a job once, in the background. Its exception is logged and counted, and its result is dropped."""
        self._jobs.add(task := asyncio.create_task(self._fails(name, job), name=f"{self._owner}: {name}"))
        task.add_done_callback(self._jobs.discard)

    @property
    def pending_jobs(self) -> int:
        """Number of jobs that have not ended."""
        return len(self._jobs)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the loops that failed `UNHEALTHY_AFTER` times in a row and have not run for `RECOVERED_S` since."""
        now_s = self._clock.now_s()
        return tuple(
            name
            for name, loop in self._loops.items()
            if loop.failures_in_a_row >= UNHEALTHY_AFTER and now_s - loop.started_s < RECOVERED_S
        )

    @property
    def healthy(self) -> bool:
        """Whether `failed` is empty."""
        return not self.failed

    async def aclose(self) -> None:
        """Cancel all loops and jobs, and wait until they have ended."""
        tasks = [*(loop.task for loop in self._loops.values()), *self._jobs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loops.clear()

    async def _supervise(self, name: str, loop: Callable[[], Coroutine[Any, Any, object]]) -> None:
        while await self._fails(name, loop()):
            state = self._loops[name]
            if self._clock.now_s() - state.started_s >= RECOVERED_S:
                state.failures_in_a_row = 0
            # The exponent is bounded, since a loop may fail for as long as the process lives.
            backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(16, state.failures_in_a_row))
            state.failures_in_a_row += 1
            state.started_s = self._clock.now_s() + backoff_s
            await self._sleep(backoff_s)
        del self._loops[name]

    async def _fails(self, name: str, work: Coroutine[Any, Any, object]) -> bool:
        """Run the work, and return whether it raised an exception. A cancellation of this task is passed on."""
        task = asyncio.current_task()
        try:
            await work
        except (Exception, asyncio.CancelledError) as error:
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error
            # Without a cancellation of this task, the work awaited something that was cancelled elsewhere.
            self.failures[name] += 1
            logger.exception("%s: background task %r failed", self._owner, name)
            return True
        return False
