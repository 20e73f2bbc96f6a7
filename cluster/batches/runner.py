"""The batches of one ingress: it starts lines as the replicas have room, and takes over batches of dead ingresses.

A batch belongs to one ingress at a time, by a lease in the store, as a run does (`cluster.runs.runner`). Each batch has
a window for its lines (`cluster.batches.window`), and an ingress has a largest number of lines of all. Tenants take
turns, and a tenant's batches come one after another, as long as the window of the first is open.

The lines of only a few batches are in memory. If there is no room for another batch, one that starts no lines now is
unloaded, or one of the tenant that has the most in memory. Its lines in flight go on.
"""

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from dataclasses import replace
from time import time
from typing import NoReturn, Protocol

import msgspec

from cluster.api.openai import RETRY_AFTER_S
from cluster.batches.input_lines import InputLine, LineRequest
from cluster.batches.records import (
    BATCH_LABEL,
    INPUT_LABEL,
    Accepted,
    Batch,
    BatchEvent,
    Ended,
    LineError,
    Pause,
    Progress,
    Status,
    batch_of,
    decode,
    encode,
    progress_of,
    to_text,
)
from cluster.batches.results import RETRIED, LineAnswer
from cluster.batches.task import BatchTask, new_run
from cluster.config.sections import BatchesConfig
from cluster.core.clock import Clock
from cluster.core.errors import (
    Overloaded,
    RunLeaseLost,
    RunStoreUnavailable,
    TooManyRequests,
)
from cluster.core.supervision import SupervisedTasks
from cluster.runs.renouncing import until_renounced
from cluster.store.files import FileStore
from cluster.store.runs.records import AlreadyThere, Idempotency, RunHead
from cluster.store.runs.store import MAX_LISTED, RunStore

logger = logging.getLogger("ray.serve")

LEASE_SHARE = 3
"""Number of renewals within the time of a lease."""
TAKEN_AT_ONCE = 8
"""Largest number of batches that are taken over, one after another, before the own ones are looked at."""
MAX_OPEN_OF_TENANT = 50
"""Largest number of a tenant's batches that have not ended."""
MAX_LOADED = 8
"""Largest number of batches whose lines are in memory."""
OWN_LINES = 2
"""Lines that each tenant may have in flight although those of others are as many as may be: theirs may hang."""
LOADED_S = 30.0
"""Seconds for which the lines of a batch stay in memory at least, before a batch gets their place whose lines have been
there before. It bounds how often inputs are read."""
IDLE_S = 1.0
"""Seconds between two looks for lines to start, unless something happens before."""
SWEEP_S = 30.0
"""Seconds between two looks for files that nobody completes."""
PAGE = 1024

STORE_GONE = "batches cannot be reached now"
STORE_FULL = "the store (redis) has no memory for another batch"


class Requests(Protocol):
    """Answers the requests of lines."""

    async def answer(self, batch: Batch, number: int, request: LineRequest) -> LineAnswer:
        """Return the answer to a line. It raises nothing but the cancellation of the calling task."""
        ...

    async def recorded(self, batch: Batch, number: int, request: LineRequest) -> None:
        """Forget what is kept of a line, since its answer is in the log of the batch."""
        ...

    async def cancelled(self, batch: Batch, number: int) -> None:
        """Stop what goes on for a line whose `answer` was cancelled, since its batch was."""
        ...


class BatchRunner:
    """The batches of this process.

    Args:
        name: the unique name of this process.
        store: the logs of all batches, opened under this name.
        files: the files of all tenants.
        requests: answers lines.
        config: the limits.
        lease_s: lease of a batch in seconds.
        clock: the clock of durations.
        is_full: returns whether the store has no memory for more.
        wall: returns the Unix time in seconds.
    """

    def __init__(
        self,
        *,
        name: str,
        store: RunStore,
        files: FileStore,
        requests: Requests,
        config: BatchesConfig,
        lease_s: float,
        clock: Clock,
        is_full: Callable[[], bool] = lambda: False,
        wall: Callable[[], float] = time,
    ) -> None:
        self.lines: Counter[tuple[str, str]] = Counter()
        """Number of lines that ended or were put back since the start, by tenant and what became of them."""
        self._store = store
        self._files = files
        self._requests = requests
        self._config = config
        self._lease_s = lease_s
        self._clock = clock
        self._is_full = is_full
        self._wall = wall
        self._tasks: dict[str, BatchTask] = {}
        self._working: dict[str, asyncio.Task[None]] = {}
        self._claimed: set[str] = set()
        """Batches whose lease is held here, and whose log is being read."""
        self._lines: dict[asyncio.Task[None], tuple[BatchTask, InputLine]] = {}
        self._turns: list[str] = []
        """Tenants with batches here. The first is the next to start a line."""
        self._wake = asyncio.Event()
        self._background = SupervisedTasks(name, clock)
        self._swept_s = clock.now_s()

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        return self._background.failed

    @property
    def in_flight(self) -> int:
        """Number of lines in flight."""
        return len(self._lines)

    def open_by_tenant(self) -> Counter[str]:
        """Return the number of batches that this process works on, by tenant."""
        return Counter(self._tasks[name].batch.tenant for name in self._working)

    def left_by_tenant(self) -> Counter[str]:
        """Return the number of lines without a result of these batches, by tenant."""
        left: Counter[str] = Counter()
        for name in self._working:
            left[self._tasks[name].batch.tenant] += self._tasks[name].left
        return left

    def attend(self) -> None:
        """Begin to work on batches."""
        self._background.start("leases of batches", self._renew_for_ever)
        self._background.start("batches of others", self._attend_for_ever)
        self._background.start("lines of batches", self._start_lines_for_ever)

    async def aclose(self) -> None:
        """Give up all batches, so that other ingresses can continue them at once."""
        await self._background.aclose()
        names = list(self._working)
        lines = list(self._lines)
        for name in names:
            self._tasks[name].abandon()
        for work in (*self._working.values(), *lines):
            work.cancel()
        await asyncio.gather(*self._working.values(), *lines, return_exceptions=True)
        with contextlib.suppress(RunStoreUnavailable):
            await self._store.release(names)

    # --- called for clients -------------------------------------------------------------------------------------------

    async def start(self, batch: Batch, idempotency: Idempotency | None = None) -> str:
        """Accept a batch and begin to work on it. Return its id, or that of the batch with the same idempotency key.

        Raises:
            Overloaded: nothing was accepted: the store is full, or cannot be reached.
            TooManyRequests: too many batches of the tenant are open, or are kept.
            IdempotencyConflict: the key was used with another body.
        """
        if self._is_full():
            raise Overloaded(f"{STORE_FULL}; retry later", retry_after_s=RETRY_AFTER_S, code="store_full")
        progress = Progress()
        run = new_run(batch, progress)
        try:
            await self._check_number(batch.tenant)
            created = await self._store.create(replace(run, idempotency=idempotency), [encode(Accepted(batch))])
        except RunStoreUnavailable as error:
            self._renounce(batch.id)
            raise _store_gone() from error
        except asyncio.CancelledError:  # the client has gone, and may come again only with an idempotency key
            if idempotency is None:
                self._renounce(batch.id)
            raise
        if isinstance(created, AlreadyThere):
            return created.of_same_request()
        self._begin(batch, progress, [Accepted(batch)])
        return batch.id

    async def repeated(self, tenant: str, idempotency: Idempotency | None) -> str | None:
        """Return the batch that was started for a request with this key and body before.

        So a request that comes again has its batch, although none could be started now.

        Raises:
            IdempotencyConflict: the key was used with another body.
            Overloaded: the store cannot be reached.
        """
        if idempotency is None:
            return None
        with _reachable():
            found = await self._store.repeated(tenant, idempotency)
        return None if found is None else found.of_same_request()

    def _renounce(self, batch_id: str) -> None:
        self._background.run(f"renounce {batch_id}", until_renounced(self._store, batch_id))

    async def show(self, tenant: str, batch_id: str) -> tuple[Batch, Progress] | None:
        """Return a batch and how far it is, or None if the tenant has none of this id.

        Raises:
            Overloaded: the store cannot be reached.
        """
        with _reachable():
            page = await self._store.read(batch_id, 0, 0)
        return None if page is None or page.head.tenant != tenant else _shown(page.head)

    async def listed(self, tenant: str) -> list[tuple[Batch, Progress]]:
        """Return a tenant's batches, the newest first, at most `MAX_LISTED`.

        Raises:
            Overloaded: the store cannot be reached.
        """
        with _reachable():
            return [_shown(head) for head in await self._store.runs(tenant, limit=MAX_LISTED)]

    async def cancel(self, batch_id: str) -> None:
        """Cancel a batch, whichever ingress works on it. One that has ended does not change.

        Raises:
            Overloaded: the store cannot be reached.
        """
        with _reachable():
            if batch_id in self._working:
                task = self._tasks[batch_id]
                self._close(task, "cancelled")
                with contextlib.suppress(RunLeaseLost):
                    await task.journal.flush()
            else:
                await self._store.ask_cancel(batch_id)

    async def uses(self, tenant: str, file_id: str) -> str | None:
        """Return the id of a batch that has not ended and whose input is this file; None: there is none.

        Raises:
            Overloaded: the store cannot be reached.
        """
        with _reachable():
            heads = await self._store.runs(tenant, limit=MAX_LISTED)
        return next((head.id for head in heads if head.open and head.labels.get(INPUT_LABEL) == file_id), None)

    async def _check_number(self, tenant: str) -> None:
        heads = await self._store.runs(tenant, limit=MAX_LISTED)
        if sum(head.open for head in heads) >= MAX_OPEN_OF_TENANT:
            message = f"{MAX_OPEN_OF_TENANT} batches of this tenant are open; wait until one ends"
            raise TooManyRequests(message, retry_after_s=RETRY_AFTER_S, code="too_many_batches")
        if len(heads) >= MAX_LISTED:
            message = f"{MAX_LISTED} batches of this tenant are kept; the oldest are deleted after batches.retention_s"
            raise TooManyRequests(message, retry_after_s=RETRY_AFTER_S, code="too_many_batches")

    # --- batches ------------------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch, progress: Progress, events: list[BatchEvent]) -> None:
        """Begin to work on a batch, in a context that belongs to no request (see `ProgramRunner`)."""
        Context().run(self._work_on, batch, progress, events)

    def _work_on(self, batch: Batch, progress: Progress, events: list[BatchEvent]) -> None:
        kept_s, most, wake = self._config.retention_s, self._config.max_concurrent, self._wake.set
        task = BatchTask(batch, progress, events, self._store, self._files, kept_s, most, wake, self._wall)
        self._tasks[batch.id] = task
        self._working[batch.id] = asyncio.create_task(self._until_ended(task))
        if batch.tenant not in self._turns:
            self._turns.append(batch.tenant)
        self._wake.set()

    async def _until_ended(self, task: BatchTask) -> None:
        name = task.batch.id
        try:
            await task.run()
        except RunLeaseLost:
            logger.warning("batch %s is worked on by another ingress", name)
            task.abandon()
        except Exception:  # a bug of ours: the batch stays open, and is taken over when its lease expires
            logger.exception("batch %s stopped", name)
            task.abandon()
        finally:
            del self._working[name], self._tasks[name]
            self._wake.set()

    async def _renew_for_ever(self) -> NoReturn:
        """Renew the leases. Nothing else is done between, since the logs and inputs of batches take long."""
        while True:
            try:
                await self._renew()
            except RunStoreUnavailable as error:
                logger.warning("leases of batches were not renewed: %s", error)
            await asyncio.sleep(self._lease_s / LEASE_SHARE)

    async def _attend_for_ever(self) -> NoReturn:
        while True:
            try:
                await self._take_over()
                await self._restore_inputs()
                await self._look()
            except RunStoreUnavailable as error:
                logger.warning("batches were not looked at: %s", error)
            await asyncio.sleep(self._lease_s / LEASE_SHARE)

    async def _renew(self) -> None:
        held = [*self._working, *self._claimed]
        if not held:
            return
        renewal = await self._store.renew(held)
        self._claimed -= renewal.lost
        for name in renewal.lost & self._working.keys():
            self._lose(self._tasks[name])
        for name in renewal.unknown & self._working.keys():
            self._tasks[name].restore()
        for name in renewal.cancelled & self._working.keys():
            self._close(self._tasks[name], "cancelled")

    async def _restore_inputs(self) -> None:
        for task in [self._tasks[name] for name in self._working]:
            await task.restore_input()

    def _lose(self, task: BatchTask) -> None:
        """Stop the work on a batch that another ingress has."""
        task.abandon()
        if (work := self._working.get(task.batch.id)) is not None:
            work.cancel()

    async def _take_over(self) -> None:
        for _ in range(TAKEN_AT_ONCE):
            names = await self._store.claim(1, self._working)
            if not names:
                return
            self._claimed.update(names)
            try:
                await self._continue(names[0])
            except BaseException:
                with contextlib.suppress(RunStoreUnavailable):
                    await self._store.release(names)
                raise
            finally:
                self._claimed.difference_update(names)

    async def _continue(self, name: str) -> None:
        """Begin to work on a batch that was claimed, unless the lease was lost while its log was read."""
        try:
            found = await self._log(name)
        except ValueError:
            logger.exception("batch %s cannot be read, and fails", name)
            await self._give_up(name)
            return
        if found is not None and name in self._claimed and name not in self._working:
            logger.warning("batch %s goes on here: its ingress is gone", name)
            self._begin(*found)
            if (task := self._tasks[name]).progress.closing is not None:  # the earlier ingress may not have come so far
                self._stop_lines(task.batch, task.left_by_others())
            elif self._wall() >= task.batch.expires_s:  # at once, so that no line begins
                self._close(task, "expired")

    async def _log(self, name: str) -> tuple[Batch, Progress, list[BatchEvent]] | None:
        """Return a batch with its log; None: it is not in the store.

        Raises:
            ValueError: it is damaged.
        """
        events: list[BatchEvent] = []
        head: RunHead | None = None
        while (page := await self._store.read(name, len(events), PAGE)) is not None and page.items:
            events += map(decode, page.items)
            head = page.head
        return None if head is None else (batch_of(head.labels[BATCH_LABEL]), progress_of(head.status), events)

    async def _give_up(self, name: str) -> None:
        page = await self._store.read(name, 0, 0)
        if page is not None:
            error = LineError("server_error", "the log of the batch is damaged")
            status = to_text(Progress(status="failed", ended_s=self._wall(), errors=(error,)))
            await self._store.append(name, page.length, [encode(Ended("failed"))], status=status, final=True)

    async def _look(self) -> None:
        """End batches whose time is over, pause those without memory for results, and delete unfinished files."""
        full = self._is_full()
        used = {tenant: (await self._files.reserved_bytes(tenant))[1] for tenant in self.open_by_tenant()}
        for name in self._working:
            task = self._tasks[name]
            used[task.batch.tenant] = used.get(task.batch.tenant, 0) + task.result_bytes
        for name in list(self._working):
            task = self._tasks[name]
            if self._wall() >= task.batch.expires_s:
                self._close(task, "expired")
            reason: Pause | None = "store_full" if full else None
            if reason is None and used[task.batch.tenant] > self._config.max_stored_bytes:
                reason = "storage_quota"
            task.pause(reason)
        if self._clock.now_s() - self._swept_s >= SWEEP_S:
            self._swept_s = self._clock.now_s()
            await self._files.sweep()

    def _close(self, task: BatchTask, status: Status) -> None:
        """End a batch before its last line, and stop what goes on for its lines."""
        numbers = list(task.in_flight)
        left = task.left_by_others() if task.goes_on else []
        task.close(status)
        for number in numbers:
            self._background.run("stop a line", self._requests.cancelled(task.batch, number))
        self._stop_lines(task.batch, left)

    def _stop_lines(self, batch: Batch, numbers: Sequence[int]) -> None:
        """Stop what goes on for lines that an earlier ingress has started, one after another."""

        async def stop() -> None:
            for number in numbers:
                await self._requests.cancelled(batch, number)

        if numbers:
            self._background.run("stop lines of an earlier ingress", stop())

    # --- lines --------------------------------------------------------------------------------------------------------

    async def _start_lines_for_ever(self) -> NoReturn:
        while True:
            self._wake.clear()
            now_s = self._clock.now_s()
            while (found := self._next(now_s)) is not None:
                self._start_line(*found)
            opens_s = [self._tasks[name].window.opens_s(now_s) or IDLE_S for name in self._working]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(opens_s, default=IDLE_S)):
                    await self._wake.wait()

    def _next(self, now_s: float) -> tuple[BatchTask, InputLine] | None:
        """Return the next line of the tenant whose turn it is, or of the next tenant that has one and may start it."""
        full = len(self._lines) >= self._config.max_concurrent
        in_flight = Counter(task.batch.tenant for task, _ in self._lines.values()) if full else Counter[str]()
        own = min(OWN_LINES, self._config.max_concurrent)
        tasks = sorted((self._tasks[name] for name in self._working), key=lambda task: task.batch.created_s)
        self._turns = [tenant for tenant in self._turns if any(task.batch.tenant == tenant for task in tasks)]
        for place, tenant in enumerate(self._turns):
            if full and in_flight[tenant] >= own:
                continue
            ready = [task for task in tasks if task.batch.tenant == tenant and task.may_start(now_s)]
            missing = [task for task in ready if not task.is_loaded]
            if missing and not any(task.is_loading for task in ready):
                self._load(min(missing, key=lambda task: task.loaded_s), now_s)
            for task in ready:
                if task.is_loaded and (line := task.take()) is not None:
                    self._turns = [*self._turns[:place], *self._turns[place + 1 :], tenant]
                    return task, line
        return None

    def _load(self, task: BatchTask, now_s: float) -> None:
        loaded = [one for one in self._tasks.values() if one.is_loaded or one.is_loading]
        if len(loaded) >= MAX_LOADED:
            if (least := _least_needed(loaded, task, now_s)) is None:
                return
            least.unload()
        task.is_loading = True
        self._background.run("load a batch", self._loaded(task))

    async def _loaded(self, task: BatchTask) -> None:
        try:
            await task.load()
        except RunLeaseLost:
            pass
        finally:
            task.is_loading = False
            task.loaded_s = self._clock.now_s()
            self._wake.set()

    def _start_line(self, task: BatchTask, line: InputLine) -> None:
        work = asyncio.create_task(self._run_line(task, line))
        self._lines[work] = task, line
        task.in_flight[line.number] = work
        work.add_done_callback(self._line_ended)

    def _line_ended(self, work: asyncio.Task[None]) -> None:
        task, line = self._lines.pop(work)
        # A line that is cancelled although its batch goes on has awaited something that was cancelled elsewhere.
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is not None and task.goes_on:
            logger.error("line %d of batch %s is started again", line.number, task.batch.id, exc_info=error)
            now_s = self._clock.now_s()
            task.window.refused(now_s, now_s, RETRY_AFTER_S)
            task.put_back(line, counts=False)
        task.line_ended(line.number)
        self._wake.set()

    async def _run_line(self, task: BatchTask, line: InputLine) -> None:
        request, started_s = line.request, self._clock.now_s()
        tenant, attempt = task.batch.tenant, task.attempt(line)
        answer = await self._requests.answer(task.batch, line.number, request)
        if answer.is_final(attempt):
            if answer.is_ok:
                task.window.served()
            task.answered(line, request.custom_id, answer)
            try:
                await task.journal.flush()
            except RunLeaseLost:
                self._lose(task)  # the ingress that has the batch starts the line again
                return
            self.lines[tenant, "completed" if answer.is_ok else "failed"] += 1
            await self._requests.recorded(task.batch, line.number, request)
            return
        task.window.refused(started_s, self._clock.now_s(), answer.retry_after_s)
        task.put_back(line, counts=answer.status not in RETRIED)
        self.lines[tenant, "put_back"] += 1


def _least_needed(loaded: Sequence[BatchTask], wanted: BatchTask, now_s: float) -> BatchTask | None:
    """Return the loaded batch that leaves the memory to a wanted one; None: the wanted one has to wait.

    A batch whose window is closed comes first. Otherwise tenants share the memory, and take turns if there are more of
    them than places.
    """
    before_s = now_s if wanted.loaded_s == -math.inf else now_s - LOADED_S
    places = Counter(one.batch.tenant for one in loaded)
    idle = [one for one in loaded if one.is_idle(now_s) and (one.progress.paused or one.loaded_s <= before_s)]
    if idle:
        return min(idle, key=lambda one: (-places[one.batch.tenant], one.loaded_s))
    others = [one for one in loaded if one.can_unload and places[one.batch.tenant] > places[wanted.batch.tenant] + 1]
    if others:
        return max(others, key=lambda one: (places[one.batch.tenant], one.batch.created_s))
    if not places[wanted.batch.tenant]:
        others = [one for one in loaded if one.can_unload and one.loaded_s <= before_s]
    return min(others, key=lambda one: one.loaded_s, default=None)


@contextlib.contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except RunStoreUnavailable as error:
        raise _store_gone() from error


def _shown(head: RunHead) -> tuple[Batch, Progress]:
    batch, progress = batch_of(head.labels[BATCH_LABEL]), progress_of(head.status)
    if head.open and head.cancel_asked and progress.closing is None:
        progress = msgspec.structs.replace(progress, status="cancelling")
    return batch, progress


def _store_gone() -> Overloaded:
    return Overloaded(f"{STORE_GONE}; retry later", retry_after_s=RETRY_AFTER_S, code="store_unavailable")
