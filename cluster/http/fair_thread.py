"""Work that is too long for the event loop, in one thread, with a fair share for each tenant.

The thread and the event loop share Python's interpreter lock. There is one thread, since each further thread would
take another share of the time from the event loop.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, TypeVar

SHORT_BYTES = 64 << 10
"""Size of a body whose work is done at once, in the event loop. It takes a few milliseconds."""

Done = TypeVar("Done")


class FairThread:
    """Runs functions one after another in a thread. Tenants take turns, whatever the number of their functions is."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        """The jobs of each tenant that has any. The first tenant is the next."""
        self._worker: asyncio.Task[None] | None = None

    async def run(self, tenant: str, size: int, work: Callable[[], Done]) -> Done:
        """Return the result of ``work``. It raises what the work raises.

        Args:
            tenant: whose work it is.
            size: the size of the body in bytes.
            work: a function without effects. It is not called if the caller is cancelled before its turn.
        """
        if size <= SHORT_BYTES:
            return work()
        job = _Job(work)
        self._waiting.setdefault(tenant, deque()).append(job)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        result: Done = await job.result
        return result

    async def _work(self) -> None:
        while self._waiting:
            tenant, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs
            if not job.result.done():  # its caller has not left
                await asyncio.to_thread(job.work)
                job.settle()


class _Job:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._work = work
        self._returned: Any = None
        self._raised: BaseException | None = None

    def work(self) -> None:
        """Call the function, and keep what it returns or raises."""
        try:
            self._returned = self._work()
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._raised = error

    def settle(self) -> None:
        """Give the result to the caller, unless it has left."""
        if self.result.done():
            return
        if self._raised is not None:
            self.result.set_exception(self._raised)
        else:
            self.result.set_result(self._returned)
