"""Threads that run jobs, with a fair share for each tenant."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Job:
    future: "Future[Any]"
    work: Callable[[], Any]
    is_unwanted: Callable[[], bool]


class FairThreads:
    """Runs jobs in threads, which start with the first job and end with the process. Tenants take turns.

    A spare job runs when no other job waits.

    Args:
        threads: number of jobs that run at once.
        name: name of the threads.
    """

    def __init__(self, threads: int, name: str = "grammars") -> None:
        self._threads = threads
        self._name = name
        self._jobs: OrderedDict[str, deque[_Job]] = OrderedDict()
        """The jobs of each tenant that has any. The first tenant is the next."""
        self._spare: OrderedDict[str, deque[_Job]] = OrderedDict()
        """The spare jobs, in the same form."""
        self._news = threading.Condition()

    def submit(
        self,
        tenant: str,
        work: Callable[[], Any],
        is_unwanted: Callable[[], bool] = lambda: False,
        *,
        is_spare: bool = False,
    ) -> "Future[Any]":
        """Call ``work`` in a thread, when it is the tenant's turn.

        Args:
            tenant: whose job it is.
            work: its result or exception becomes that of the returned future. What is raised and is no Exception, such
                as a panic of a library in Rust, becomes the cause of a RuntimeError.
            is_unwanted: called when the job's turn comes; True cancels it. If it raises, this is the job's exception,
                and ``work`` is not called. The future can be cancelled until then, too.
            is_spare: whether it waits for all jobs that are not spare.
        """
        job = _Job(Future(), work, is_unwanted)
        with self._news:
            while self._threads:
                self._threads -= 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            (self._spare if is_spare else self._jobs).setdefault(tenant, deque()).append(job)
            self._news.notify()
        return job.future

    def _work(self) -> None:
        while True:
            _run(self._take())

    def _take(self) -> _Job:
        """Wait for a job of the tenant whose turn it is. Spare jobs are taken where there are no others."""
        with self._news:
            self._news.wait_for(lambda: self._jobs or self._spare)
            waiting = self._jobs or self._spare
            tenant, jobs = waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                waiting[tenant] = jobs
            return job


def _run(job: _Job) -> None:
    """Run a job. Nothing that it raises may end the thread, for which all later jobs wait."""
    failure: BaseException | None = None
    try:
        if job.is_unwanted():
            job.future.cancel()
    except BaseException as error:  # noqa: BLE001 - it is the job's
        failure = error
    if not job.future.set_running_or_notify_cancel():
        return
    result = None
    if failure is None:
        try:
            result = job.work()
        except BaseException as error:  # noqa: BLE001 - it is the job's
            failure = error
    if failure is None:
        job.future.set_result(result)
    elif isinstance(failure, Exception):
        job.future.set_exception(failure)
    else:  # it would pass all handlers of errors, and end the engine or the replica
        wrapped = RuntimeError(f"a job ended with {failure!r}")
        wrapped.__cause__ = failure
        job.future.set_exception(wrapped)
