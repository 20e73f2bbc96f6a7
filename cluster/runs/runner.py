"""Runs programs on the server: starts runs, lets callers follow and cancel them, and takes over orphaned runs.

Each ingress process has one runner. A run belongs to one runner at a time, by a lease in the store. When the runner's
process dies, another runner finds the lease expired, reads the log, and continues the run.
"""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from time import time
from typing import Any, NoReturn

from cluster.api.openai import RETRY_AFTER_S
from cluster.auth.tenants import Tenants
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.errors import (
    OVERLOAD,
    IllegalTransition,
    Overloaded,
    RunLeaseLost,
    RunStoreUnavailable,
    TooManyRequests,
)
from cluster.core.supervision import SupervisedTasks
from cluster.core.tools import ToolResult
from cluster.runs.call_names import naming
from cluster.runs.ended_runs import EndedRuns
from cluster.runs.events import Accepted, Ended, Fault, RunEvent, RunSpec, TakenOver, decode, encode
from cluster.runs.journal import RUN_LOG, Journal
from cluster.runs.renouncing import until_renounced
from cluster.runs.slo import NullTurns, RunWatch, Turns
from cluster.runs.state import RunState, begin, fold, worked_s
from cluster.runs.store_memory import StoreMemoryWatch
from cluster.runs.task import Replicas, RunTask, Tools
from cluster.store.runs.records import AlreadyThere, Created, Idempotency, NewRun, RunHead
from cluster.store.runs.store import RunStore

logger = logging.getLogger("ray.serve")

LEASE_SHARE = 3
"""Number of renewals within the time of a lease."""

TAKEN_AT_ONCE = 8
"""Largest number of other runners' runs that are taken over between two renewals of the own leases."""

TENANT_PROGRAMS = "tenant_programs"
"""The error code of a run of a tenant that has too many open programs."""
STORE_GONE = "programs cannot be accepted now"
LOG_GONE = "the program log cannot be read now"
STORE_FULL = "the store of programs (redis) has no memory for a new one"

PAGE = 256
"""Number of entries that are read from the store at a time."""
STOP_S = 5.0
"""Seconds that the turns in progress have to stop when the runner is closed."""
AT_ONCE = 200
"""Largest number of entries that are handled in one step of the event loop."""


@dataclass(frozen=True, slots=True)
class Started:
    """The result of a request for a run."""

    run_id: str
    new: bool
    """Whether the run is new. Otherwise the idempotency key is known, and this is its run."""


class ProgramRunner:
    """The runs of this process.

    Args:
        name: the unique name of this runner.
        store: the log of all runs, opened under this name.
        replicas: run turns.
        tools: run tools.
        config: limits and leases.
        clock: the clock of durations.
        observe: receives each tool's result.
        turns: counts the outcomes of turns and programs. None counts nothing.
    """

    def __init__(
        self,
        *,
        name: str,
        store: RunStore,
        replicas: Replicas,
        tools: Tools,
        config: CaesuraConfig,
        clock: Clock,
        observe: Callable[[ToolResult], object],
        turns: Turns | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        """Numbers of runs that were started, taken over, and ended by status, since the start."""
        self.answers_cut = 0
        """Number of tool answers that were shortened because they did not fit into the model's context."""
        self._name = name
        self._store = store
        self.memory = StoreMemoryWatch(store)
        """The memory of the store."""
        self._replicas = replicas
        self._tools = tools
        self._config = config
        self._clock = clock
        self._observe = observe
        self._turns = turns or NullTurns()
        self._known_as = naming(config.tools)
        self._tenants = Tenants(config)
        self.ended = EndedRuns()
        """The runs that have ended here and are in memory."""
        self._tasks: dict[str, RunTask] = {}
        """The runs in progress."""
        self._working: dict[str, asyncio.Task[None]] = {}
        self._background = SupervisedTasks(name, clock)
        self._attending = False
        self._is_closing = False
        self._leaves_abandoned = False
        """Whether `abandon` does nothing."""
        self._starting: list[str] = []
        """The tenant of each start that waits for the store. Its run counts as open already."""

    @property
    def open_runs(self) -> int:
        """Number of runs in progress here."""
        return len(self._working)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        return self._background.failed

    @property
    def uncertain_starts(self) -> int:
        """Number of rejected starts that the store may have accepted, and that are not undone yet."""
        return self._background.pending_jobs

    def written(self, run_id: str) -> Sequence[RunEvent]:
        """Return the stored events of a run in memory. They are empty if there is no such run."""
        task = self._in_memory(run_id)
        return () if task is None else tuple(task.journal.safe)

    def attend(self) -> None:
        """Begin to renew leases, to look for cancellations, and to take over orphaned runs.

        Further calls do nothing.
        """
        if not self._attending:
            self._attending = True
            self._background.start("leases", self._attend_for_ever)
            self._background.start("memory of the store", self.memory.watch)

    async def aclose(self) -> None:
        """Stop the work on all runs, and then give them up, so that other runners can continue them at once.

        Turns in progress are stopped, since the next runner asks them again. Tools in progress go on for it. No run is
        begun from now on.
        """
        self._is_closing = True
        await self._background.aclose()
        working = dict(self._working)
        for run_id in working:
            self._tasks[run_id].abandon()
        if working:
            await asyncio.wait(working.values(), timeout=STOP_S)
        with contextlib.suppress(RunStoreUnavailable):
            await self._store.release(list(working))

    # --- called for clients -------------------------------------------------------------------------------------------

    async def start(
        self,
        spec: RunSpec,
        *,
        idempotency: Idempotency | None = None,
        secret: Mapping[str, Any] | None = None,
        arrived_s: float | None = None,
        on_end: Callable[[RunState], object] | None = None,
        admit: Callable[[], Awaitable[object]] | None = None,
        is_repeated: bool = False,
    ) -> Started:
        """Accept a run and begin to work on it. One that the store accepts while this runner closes is left to others.

        Args:
            spec: the specification of the run.
            idempotency: key and body of the request. The same key and body again return the same run.
            secret: by definition of ``spec``, fields that the log must not have. They are stored until the run has
                ended.
            arrived_s: time of the request, in seconds on the clock. None is now.
            on_end: called with the last state when this runner stops to work on a run that it has begun here.
            admit: called for a new run that the store has, before work on it begins. If it raises, nothing was
                accepted. None: nothing is called.
            is_repeated: whether the run is requested again if it is not accepted, as a line of a batch is.

        Raises:
            Overloaded: nothing was accepted, because too many runs are open, the store cannot be reached, or this
                runner closes. It is TooManyRequests if too many runs of the tenant are open.
            IdempotencyConflict: the key was used with another body.
        """
        watch = RunWatch(self._turns, spec, arrived_s, self._clock, is_repeated=is_repeated)
        self._require_room(spec, watch)
        accepted = Accepted(spec)
        labels = {"model": spec.model, "api": spec.api}
        secret_bytes = json.dumps(secret).encode() if secret else None
        run = NewRun(spec.id, spec.tenant, spec.program, labels, idempotency, secret_bytes)
        self._starting.append(spec.tenant)
        try:
            created = await self._created(run, accepted, watch, needs_admission=admit is not None)
            if isinstance(created, AlreadyThere):
                return Started(created.of_same_request(), new=False)
            if admit is not None:
                await self._admitted(spec.id, admit)
        finally:
            self._starting.remove(spec.tenant)
        if self._is_closing:
            with contextlib.suppress(RunStoreUnavailable):
                await self._store.release([spec.id])
            return Started(spec.id, new=True)
        self.counters["started"] += 1
        self._begin(run, [accepted], [], secret or {}, spec.limits.wall_s, arrived_s, on_end)
        return Started(spec.id, new=True)

    def _require_room(self, spec: RunSpec, watch: RunWatch) -> None:
        """Check that a run may be started now.

        Raises:
            Overloaded: it may not, see `start`.
        """
        if self._is_closing:
            raise self._refusal(Overloaded, "this ingress is being stopped", watch, OVERLOAD)
        open_runs = self.open_runs + len(self._starting)
        if open_runs >= self._config.programs.max_open:
            raise self._refusal(Overloaded, f"{open_runs} programs are in flight", watch, OVERLOAD)
        most = self._tenants.max_programs(spec.tenant)
        if most is not None and self._open_of(spec.tenant) >= most:
            why = f"{most} programs of this tenant are open"
            raise self._refusal(TooManyRequests, why, watch, TENANT_PROGRAMS)
        if self.memory.is_full:
            raise self._refusal(Overloaded, STORE_FULL, watch, "store_full")
        # The starts that wait, or are being undone, show when the store is back.
        if (self._starting or self.uncertain_starts) and not self._store.healthy:
            raise self._refusal(Overloaded, STORE_GONE, watch, "store_unavailable")

    async def _created(
        self, run: NewRun, accepted: Accepted, watch: RunWatch, *, needs_admission: bool
    ) -> Created | AlreadyThere:
        """Create a run in the store.

        A run that still needs admission never stays without it, although the request came again with its key.
        """
        try:
            return await self._store.create(run, [encode(accepted)])
        except RunStoreUnavailable as error:
            self._renounce(run.id, although_repeated=needs_admission)
            raise self._refusal(Overloaded, STORE_GONE, watch, "store_unavailable") from error
        except asyncio.CancelledError:  # the client has gone, and may come again only with an idempotency key
            if run.idempotency is None or needs_admission:
                self._renounce(run.id, although_repeated=needs_admission)
            raise

    async def _admitted(self, run_id: str, admit: Callable[[], Awaitable[object]]) -> None:
        """Call ``admit``, and undo the creation of the run if it raises.

        That is done before the client has its answer, since the client may then repeat the request with the same
        idempotency key.
        """
        try:
            await admit()
        except BaseException:
            try:
                await self._store.renounce(run_id, although_repeated=True)
            except (RunStoreUnavailable, asyncio.CancelledError):
                self._renounce(run_id, although_repeated=True)
            raise

    def _renounce(self, run_id: str, *, although_repeated: bool = False) -> None:
        job = until_renounced(self._store, run_id, although_repeated=although_repeated)
        self._background.run(f"renounce {run_id}", job)

    async def repeated(self, tenant: str, idempotency: Idempotency | None) -> str | None:
        """Return the run that was started for a request with this key and body before.

        So the request has its run although none can be made of it now: what it refers to may have changed since.

        Args:
            tenant: the tenant of the request.
            idempotency: key and body of the request. None: it has no key, and therefore no earlier run.

        Raises:
            IdempotencyConflict: the key was used with another body.
            Overloaded: the store cannot be reached.
        """
        if idempotency is None:
            return None
        try:
            found = await self._store.repeated(tenant, idempotency)
        except RunStoreUnavailable as error:
            raise Overloaded(LOG_GONE, retry_after_s=RETRY_AFTER_S) from error
        return None if found is None else found.of_same_request()

    async def load(self, run_id: str, tenant: str) -> Sequence[RunEvent] | None:
        """Return the events of a run, or None if the tenant has no run of this id.

        Raises:
            Overloaded: the store cannot be reached.
        """
        task = self._in_memory(run_id)
        try:
            if task is not None and await self._is_current(run_id, task):
                return list(task.journal.safe) if task.state.spec.tenant == tenant else None
            found, _ = await self._read(run_id)
        except RunStoreUnavailable as error:
            raise Overloaded(LOG_GONE, retry_after_s=RETRY_AFTER_S) from error
        if not found:
            return None
        return found if begin(found[0]).spec.tenant == tenant else None

    async def _is_current(self, run_id: str, task: RunTask) -> bool:
        """Return whether the events of a run in memory are those of the run. Another process may have deleted it.

        Raises:
            RunStoreUnavailable: the store cannot be reached.
        """
        if task.journal.lost:
            return False
        # A run that is not stored is not in the store after its end, and nobody can delete it.
        if run_id in self._working or not task.state.spec.store:
            return True
        return await self._store.read(run_id, limit=0) is not None

    async def follow(self, run_id: str, start: int = 0) -> AsyncIterator[Sequence[RunEvent]]:
        """Yield a run's events from number ``start`` to its end, as they are stored, whichever runner works on it.

        Other tasks of the event loop run after every `AT_ONCE` events.
        """
        async with contextlib.aclosing(self._followed(run_id, start)) as batches:
            async for batch in batches:
                yield batch[:AT_ONCE]
                for place in range(AT_ONCE, len(batch), AT_ONCE):
                    await asyncio.sleep(0)
                    yield batch[place : place + AT_ONCE]

    async def _followed(self, run_id: str, start: int) -> AsyncGenerator[Sequence[RunEvent], None]:
        task = self._in_memory(run_id)
        if task is not None:
            try:
                async for batch in task.journal.follow(start):
                    start += len(batch)
                    yield batch
                return
            except RunLeaseLost:
                pass
        async for entries in self._store.follow(run_id, start):
            yield [decode(entry) for entry in entries]

    async def cancel(self, run_id: str) -> bool:
        """End an open run, whichever runner works on it. Return False if there is none."""
        task = self._tasks.get(run_id)
        if task is not None and not task.journal.lost:
            task.cancel()
            return True
        return await self._store.ask_cancel(run_id)

    async def abandon(self, run_id: str) -> None:
        """End an open run whose client has disconnected."""
        if not self._leaves_abandoned:
            await self.cancel(run_id)

    def leave_abandoned(self) -> None:
        """From now on, leave the runs open whose clients disconnect, because this process ends the connections itself.

        Other runners continue these runs after `aclose`, or when their leases expire.
        """
        self._leaves_abandoned = True

    async def delete(self, run_id: str) -> bool:
        """Delete a run that has ended. Return False if there is none.

        Raises:
            RunOpen: it has not ended.
        """
        self.ended.discard(run_id)
        return await self._store.delete(run_id)

    async def prolong(self, tenant: str, run_ids: Sequence[str], share: float = 1.0) -> frozenset[str]:
        """Keep runs that have ended. Arguments and result are those of `RunStore.prolong`."""
        return await self._store.prolong(tenant, run_ids, share)

    async def keyed(self, tenant: str, key: str) -> str | None:
        """Return the id of the run with this idempotency key; None: there is none."""
        return await self._store.keyed(tenant, key)

    async def runs(
        self, tenant: str, *, program: str | None = None, limit: int = 100, before: float | None = None
    ) -> list[RunHead]:
        """Return a tenant's runs, the newest first. The arguments are those of `RunStore.runs`."""
        return await self._store.runs(tenant, program=program, limit=limit, before=before)

    # --- work ---------------------------------------------------------------------------------------------------------

    def _begin(self, *arguments: Any) -> None:
        """Begin to work on a run, in a context that belongs to no request.

        Otherwise Ray Serve would give the run's calls the id of the request in whose context they are made. It confuses
        calls with one id that wait for a replica at the same time, so that one may wait for ever, and it cancels all of
        them when the request ends.
        """
        Context().run(self._work_on, *arguments)

    def _work_on(
        self,
        run: NewRun,
        known: Sequence[RunEvent],
        news: Sequence[RunEvent],
        secret: Mapping[str, Any],
        left_s: float,
        arrived_s: float | None = None,
        on_end: Callable[[RunState], object] | None = None,
    ) -> None:
        state = fold([*known, *news])
        assert state is not None
        definitions = {name: {**fields, **secret.get(name, {})} for name, fields in state.spec.definitions.items()}
        journal = Journal(self._store, run, known, RUN_LOG)
        journal.record(*news)
        task = RunTask(
            state,
            journal,
            self._replicas,
            self._tools,
            self._clock,
            left_s=left_s,
            definitions=definitions,
            may_call=partial(self._tenants.may_call, state.spec.tenant),
            known_as=self._known_as,
            observe=self._observe,
            watch=RunWatch(self._turns, state.spec, arrived_s, self._clock),
            on_cut=self._count_cut,
        )
        self._tasks[run.id] = task
        self._working[run.id] = asyncio.create_task(self._until_ended(run.id, task))
        if on_end is not None:
            self._working[run.id].add_done_callback(lambda _: on_end(task.state))

    def _count_cut(self, answers: int) -> None:
        self.answers_cut += answers

    async def _until_ended(self, run_id: str, task: RunTask) -> None:
        try:
            await task.run()
            status = task.state.ended.status if task.state.ended is not None else "lost"
            self.counters[status] += 1
        except RunLeaseLost:
            self.counters["lost"] += 1
            if task.cancel_asked:
                await self._pass_cancellation_on(run_id)
        except Exception:  # a bug of ours: the run stays open, and is taken over when its lease expires
            logger.exception("run %s stopped", run_id)
            task.journal.abandon()
            self.counters["lost"] += 1
        finally:
            del self._working[run_id], self._tasks[run_id]
            self.ended.add(run_id, task)
        if task.state.ended is not None and not task.state.spec.store and not task.journal.lost:
            await self._forget_stored(run_id)

    def _open_of(self, tenant: str) -> int:
        """Return the number of the tenant's runs in progress here, with its starts that wait for the store."""
        working = sum(self._tasks[one].state.spec.tenant == tenant for one in self._working)
        return working + self._starting.count(tenant)

    @staticmethod
    def _refusal(kind: type[Overloaded], why: str, watch: RunWatch, code: str) -> Overloaded:
        watch.refused(code)
        return kind(f"{why}; retry later", retry_after_s=RETRY_AFTER_S, code=code)

    def _in_memory(self, run_id: str) -> RunTask | None:
        return self._tasks.get(run_id) or self.ended.get(run_id)

    async def _forget_stored(self, run_id: str) -> None:
        with contextlib.suppress(RunStoreUnavailable):
            await self._store.delete(run_id, unless_keyed=True)

    async def _pass_cancellation_on(self, run_id: str) -> None:
        with contextlib.suppress(RunStoreUnavailable):
            await self._store.ask_cancel(run_id)

    # --- leases -------------------------------------------------------------------------------------------------------

    async def _attend_for_ever(self) -> NoReturn:
        period_s = self._config.programs.lease_s / LEASE_SHARE
        while True:
            try:
                await self._renew()
                await self._take_over()
            except RunStoreUnavailable as error:
                logger.warning("leases were not renewed: %s", error)
            except Exception:  # an invalid log of another runner must not end the own leases
                logger.exception("leases")
            await asyncio.sleep(period_s)

    async def _renew(self) -> None:
        if not self._working:
            return
        renewal = await self._store.renew(list(self._working))
        for run_id in renewal.lost:
            if run_id in self._working:
                self._tasks[run_id].abandon()
        for run_id in renewal.unknown:
            if run_id in self._working:
                self._tasks[run_id].journal.write_again()
        for run_id in renewal.cancelled:
            if run_id in self._working:
                self._tasks[run_id].cancel()

    async def _take_over(self) -> None:
        room = min(TAKEN_AT_ONCE, self._config.programs.max_open - self.open_runs - len(self._starting))
        left = await self._store.claim(max(0, room), self._working)
        try:
            while left:
                await self._resume_or_end(left[0])
                left.pop(0)
        finally:
            if left:
                with contextlib.suppress(RunStoreUnavailable):
                    await self._store.release(left)

    async def _resume_or_end(self, run_id: str) -> None:
        try:
            await self._resume(run_id)
        except (ValueError, IllegalTransition):
            logger.exception("run %s cannot be read, and ends so", run_id)
            self.counters["unreadable"] += 1
            await self._give_up(run_id)

    async def _resume(self, run_id: str) -> None:
        events, cancel_asked = await self._read(run_id)
        if not events:
            return
        spec = begin(events[0]).spec
        secret = await self._store.secret(run_id)
        self.counters["taken_over"] += 1
        logger.warning("run %s goes on here: its runner is gone", run_id)
        labels = {"model": spec.model, "api": spec.api}
        run = NewRun(run_id, spec.tenant, spec.program, labels, None, secret)
        after_s = worked_s(events) + self._config.programs.lease_s
        left_s = max(0.0, spec.limits.wall_s - after_s)
        taken = TakenOver(self._name, after_s)
        self._begin(run, events, [taken], {} if secret is None else json.loads(secret), left_s)
        if cancel_asked:
            self._tasks[run_id].cancel()  # it has not begun: no turn is asked, and no tool is run

    async def _give_up(self, run_id: str) -> None:
        page = await self._store.read(run_id, 0, 1)
        if page is not None:
            fault = Fault("server_error", "the program's log is damaged")
            last = encode(Ended("failed", fault=fault, at_s=time()))
            await self._store.append(run_id, page.length, [last], status="failed", final=True)

    async def _read(self, run_id: str) -> tuple[list[RunEvent], bool]:
        """Return the events of a run, and whether somebody asked to cancel it."""
        events: list[RunEvent] = []
        cancel_asked = False
        while (page := await self._store.read(run_id, len(events), PAGE)) is not None:
            cancel_asked = page.head.cancel_asked
            if not page.items:
                break
            events += [decode(entry) for entry in page.items]
        return events, cancel_asked
