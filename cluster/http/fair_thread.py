"""Reads bodies that take long, in one thread beside the event loop, with a fair share for each tenant.

The thread and the event loop share Python's interpreter lock. There is one thread, since each further thread would
take another share of the time from the event loop.
"""

import asyncio
from collections.abc import Callable
from math import ceil
from time import thread_time
from typing import Any, TypeVar

from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import TooManyRequests
from cluster.core.interpreter import computing
from cluster.http.body_shares import MAX_WAIT_S, BodyShares

SHORT_BYTES = 16 << 10
"""Size of a body that is read at once, in the event loop. It takes at most about 2 ms."""

Done = TypeVar("Done")


class FairThread:
    """Runs functions one after another in a thread. Tenants take turns, as `BodyShares` decides.

    Args:
        clock: measures how long a tenant waits.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._shares: BodyShares[_Job] = BodyShares()
        self._news = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    async def run(self, tenant: str, size: int, work: Callable[[], Done]) -> Done:
        """Return the result of ``work``. It raises what the work raises.

        Args:
            tenant: whose work it is.
            size: the size of the body in bytes.
            work: a function without effects. It is not called if the caller is cancelled before its turn.

        Raises:
            TooManyRequests: the work would have to wait for more than MAX_WAIT_S, because of other costly bodies of the
                tenant.
        """
        now_s = self._clock.now_s()
        self._shares.seen(tenant, now_s)
        if size <= SHORT_BYTES:
            return work()
        if (wait_s := self._shares.wait_s(tenant, now_s)) > MAX_WAIT_S:
            raise TooManyRequests(
                f"bodies of this tenant wait for about {wait_s:.0f} s, because they are costly to read",
                code="too_many_costly_bodies",
                retry_after_s=ceil(wait_s - MAX_WAIT_S),
            )
        job = _Job(work, size)
        self._shares.add(tenant, job)
        self._news.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        result: Done = await job.result
        return result

    async def _work(self) -> None:
        while True:
            taken = self._shares.take(self._clock.now_s())
            if taken is None:
                self._news.clear()
                wait_s = self._shares.next_s(self._clock.now_s())
                if wait_s is None:
                    return
                await _within(self._news, wait_s)
                continue
            tenant, job = taken
            if job.result.done():  # its caller has left
                continue
            await asyncio.to_thread(job.work)
            self._shares.charge(tenant, self._clock.now_s(), job.cpu_s, job.size, is_accepted=job.is_accepted)
            job.settle()


async def _within(event: asyncio.Event, seconds: float) -> None:
    """Wait until ``event`` is set, for ``seconds`` at most."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


class _Job:
    cpu_s = 0.0
    """CPU time of the work."""

    def __init__(self, work: Callable[[], Any], size: int) -> None:
        self.size = size
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._work = work
        self._returned: Any = None
        self._raised: BaseException | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether the work has returned, and not raised."""
        return self._raised is None

    def work(self) -> None:
        """Call the function, and keep what it returns or raises."""
        begun_s = thread_time()
        try:
            with computing():
                self._returned = self._work()
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._raised = error
        self.cpu_s = thread_time() - begun_s

    def settle(self) -> None:
        """Give the result to the caller, unless it has left."""
        if self.result.done():
            return
        if self._raised is not None:
            self.result.set_exception(self._raised)
        else:
            self.result.set_result(self._returned)
