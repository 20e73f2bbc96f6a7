"""The queue of grammars that an engine compiles: small ones have a thread of their own, and tenants take turns.

vLLM compiles in the order of arrival, also for requests that have ended. A few large schemas then delay those of all
others. A compilation that has begun cannot be stopped; `cluster.api.structured_output_limits` bounds its size.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from cluster.api.structured_output_limits import estimated_s
from cluster.core.program import tenant_of

SMALL_S = 0.25
"""Estimated seconds up to which a compilation counts as small."""


@dataclass(frozen=True, slots=True)
class _Job:
    future: "Future[Any]"
    create: Callable[[Any], Any]
    request: Any


class _Lane:
    """Jobs by tenant, for some threads, which start with the first job."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._jobs: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._news = threading.Condition()

    def put(self, tenant: str, job: _Job) -> None:
        with self._news:
            while self._threads:
                self._threads -= 1
                threading.Thread(target=self._work, name="grammars", daemon=True).start()
            self._jobs.setdefault(tenant, deque()).append(job)
            self._news.notify()

    def _work(self) -> None:
        while True:
            _run(self._take())

    def _take(self) -> _Job:
        """Wait for a job of the tenant whose turn it is."""
        with self._news:
            self._news.wait_for(lambda: self._jobs)
            tenant, jobs = self._jobs.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._jobs[tenant] = jobs
            return job


class GrammarQueue:
    """In place of the executor of vLLM's `StructuredOutputManager`. Its threads end with the process.

    Args:
        workers: number of threads for compilations that are not small.
    """

    def __init__(self, workers: int) -> None:
        self._small, self._large = _Lane(1), _Lane(workers)

    def submit(self, create: Callable[[Any], Any], request: Any) -> "Future[Any]":
        """Call ``create`` with vLLM's ``request``, unless the request has ended before its turn comes."""
        future: Future[Any] = Future()
        _, spec = request.structured_output_request.structured_output_key
        lane = self._small if estimated_s(spec) <= SMALL_S else self._large
        lane.put(tenant_of(request.session_id or ""), _Job(future, create, request))
        return future


def _run(job: _Job) -> None:
    if job.request.is_finished():
        job.future.cancel()
    if not job.future.set_running_or_notify_cancel():
        return
    try:
        job.future.set_result(job.create(job.request))
    except Exception as error:  # noqa: BLE001 - it is this request's, and the scheduler fails the request with it
        job.future.set_exception(error)
