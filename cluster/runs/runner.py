"""The server-side loop over whole programs: starts runs, lets callers follow and cancel them, takes over orphans.

Each ingress process has one. A run belongs to one runner at a time, by a lease in the store; when its process dies,
another runner (or its own successor) finds the lease expired, reads the log, and goes on.
"""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from time import time
from typing import Any, NoReturn

from cluster.api.openai import RETRY_AFTER_S
from cluster.auth.tenants import Tenants
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.errors import (
    IdempotencyConflict,
    IllegalTransition,
    Overloaded,
    RunLeaseLost,
    RunStoreUnavailable,
    RunUnknown,
    TooManyRequests,
)
from cluster.core.supervision import SupervisedTasks
from cluster.core.tools import ToolResult
from cluster.runs.call_names import naming
from cluster.runs.events import Accepted, Ended, Fault, RunEvent, RunSpec, TakenOver, decode, encode
from cluster.runs.journal import Journal
from cluster.runs.slo import NullTurns, RunWatch, Turns
from cluster.runs.state import begin, fold, worked_s
from cluster.runs.task import Replicas, RunTask, Tools
from cluster.store.runs.records import AlreadyThere, Idempotency, NewRun, RunHead
from cluster.store.runs.store import RunStore

logger = logging.getLogger("ray.serve")

LEASE_SHARE = 3
"""Renewals within the time of a lease."""

KEPT_S = 30.0
"""Seconds for which an ended run stays at hand, for callers that are just about to follow it."""

TAKEN_AT_ONCE = 8
"""Runs of others that are taken over between two renewals of our own leases."""

RENOUNCE_S = 0.2
"""Between two attempts to undo what may have been accepted."""

STORE_GONE = "programs cannot be accepted now"

PAGE = 256
"""Entries read from the store at a time."""


@dataclass(frozen=True, slots=True)
class Started:
    """What became of a request for a run."""

    run_id: str
    new: bool
    """False: the idempotency key is known, and this is its run."""


class ProgramRunner:
    """The runs of this process.

    Args:
        name: this runner's, unique.
        store: the log of all runs, opened under this name.
        replicas: run turns.
        tools: run tools.
        config: limits and leases.
        clock: for durations.
        observe: receives each tool's result.
        turns: counts what becomes of turns and programs.
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
        """Runs that were started, taken over, and ended by status, since the start."""
        self._name = name
        self._store = store
        self._replicas = replicas
        self._tools = tools
        self._config = config
        self._clock = clock
        self._observe = observe
        self._turns = turns or NullTurns()
        self._known_as = naming(config.tools)
        self._tenants = Tenants(config)
        self._tasks: dict[str, RunTask] = {}
        """Runs at work, and those that ended a moment ago."""
        self._working: dict[str, asyncio.Task[None]] = {}
        self._background = SupervisedTasks(name, clock)
        self._attending = False
        self._asking = 0
        """Starts that wait for the store."""

    @property
    def open_runs(self) -> int:
        """Runs at work here."""
        return len(self._working)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the background loops that keep failing."""
        return self._background.failed

    @property
    def uncertain_starts(self) -> int:
        """Starts that were rejected although the store may have accepted them, and that are not undone yet."""
        return self._background.pending_jobs

    def written(self, run_id: str) -> Sequence[RunEvent]:
        """What the store has of a run at work here; empty if there is none."""
        task = self._tasks.get(run_id)
        return () if task is None else tuple(task.journal.safe)

    def attend(self) -> None:
        """Begin to renew leases, to look for cancellations, and to take over what others left. Again is nothing."""
        if not self._attending:
            self._attending = True
            self._background.start("leases", self._attend_for_ever)

    async def aclose(self) -> None:
        """Let others go on with the runs at once. Tools under way go on; whoever takes over gets their answers."""
        await self._background.aclose()
        open_runs = list(self._working)
        for run_id in open_runs:
            self._tasks[run_id].journal.abandon()
        with contextlib.suppress(RunStoreUnavailable):
            await self._store.release(open_runs)

    # --- called for clients -------------------------------------------------------------------------------------------

    async def start(
        self,
        spec: RunSpec,
        *,
        idempotency: Idempotency | None = None,
        secret: Mapping[str, Any] | None = None,
        arrived_s: float | None = None,
    ) -> Started:
        """Accept a run and begin to work on it.

        Args:
            spec: what is asked for.
            idempotency: the same key and body a second time is the same run.
            secret: per definition of ``spec``, fields that the log must not hold; kept until the run has ended.
            arrived_s: when it was asked for, by the clock; None: now.

        Raises:
            Overloaded: too many runs are open here, of all or of the tenant (TooManyRequests), or the store cannot be
                reached: nothing was accepted.
            IdempotencyConflict: the key was used with another body.
        """
        if self.open_runs >= self._config.programs.max_open:
            raise self._refusal(Overloaded, f"{self.open_runs} programs are in flight", spec, arrived_s)
        most = self._tenants.max_programs(spec.tenant)
        if most is not None and sum(self._tasks[one].state.spec.tenant == spec.tenant for one in self._working) >= most:
            raise self._refusal(TooManyRequests, f"{most} programs of this tenant are open", spec, arrived_s)
        if (self._asking or self.uncertain_starts) and not self._store.healthy:  # they find out
            raise self._refusal(Overloaded, STORE_GONE, spec, arrived_s)
        accepted = Accepted(spec)
        labels = {"model": spec.model, "api": spec.api}
        secret_bytes = json.dumps(secret).encode() if secret else None
        run = NewRun(spec.id, spec.tenant, spec.program, labels, idempotency, secret_bytes)
        self._asking += 1
        try:
            created = await self._store.create(run, [encode(accepted)])
        except RunStoreUnavailable as error:
            self._renounce(spec.id)
            raise self._refusal(Overloaded, STORE_GONE, spec, arrived_s) from error
        finally:
            self._asking -= 1
        if isinstance(created, AlreadyThere):
            if not created.same_body:
                raise IdempotencyConflict("the Idempotency-Key was used with another body", param="Idempotency-Key")
            return Started(created.run_id, new=False)
        self.counters["started"] += 1
        self._begin(run, [accepted], [], secret or {}, spec.limits.wall_s, arrived_s)
        return Started(spec.id, new=True)

    async def load(self, run_id: str, tenant: str) -> Sequence[RunEvent] | None:
        """All that is known of a run; None if the tenant has none of this id.

        Raises:
            Overloaded: the store cannot be reached.
        """
        task = self._tasks.get(run_id)
        if task is not None and not task.journal.lost:
            return list(task.journal.safe) if task.state.spec.tenant == tenant else None
        try:
            found = await self._read(run_id)
        except RunStoreUnavailable as error:
            raise Overloaded("the program log cannot be read now", retry_after_s=RETRY_AFTER_S) from error
        if not found:
            return None
        return found if begin(found[0]).spec.tenant == tenant else None

    async def follow(self, run_id: str, start: int = 0) -> AsyncIterator[Sequence[RunEvent]]:
        """A run's events from number ``start`` on, as they come, until its end; whoever works on it."""
        task = self._tasks.get(run_id)
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
        """End a run that is open, wherever it is worked on; False if there is none."""
        task = self._tasks.get(run_id)
        if task is not None and run_id in self._working:
            task.cancel()
            return True
        return await self._store.ask_cancel(run_id)

    async def delete(self, run_id: str) -> bool:
        """Forget a run that has ended; False if there is none.

        Raises:
            RunOpen: it has not ended.
        """
        if run_id not in self._working:
            self._tasks.pop(run_id, None)
        return await self._store.delete(run_id)

    async def runs(self, tenant: str, *, program: str | None = None, limit: int = 100) -> list[RunHead]:
        """A tenant's runs, the newest first."""
        return await self._store.runs(tenant, program=program, limit=limit)

    # --- work ---------------------------------------------------------------------------------------------------------

    def _begin(self, *arguments: Any) -> None:
        """Begin to work on a run, in a context of its own: it is nobody's request.

        Ray Serve gives the calls made for a request that request's own id, mixes up those of them that wait for a
        replica at the same time (one may then wait for ever), and cancels them all when the request ends.
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
    ) -> None:
        state = fold([*known, *news])
        assert state is not None
        definitions = {name: {**fields, **secret.get(name, {})} for name, fields in state.spec.definitions.items()}
        journal = Journal(self._store, run, known)
        journal.record(*news)
        task = RunTask(
            state,
            journal,
            self._replicas,
            self._tools,
            self._clock,
            left_s=left_s,
            definitions=definitions,
            known_as=self._known_as,
            observe=self._observe,
            watch=RunWatch(self._turns, state.spec, arrived_s, self._clock),
        )
        self._tasks[run.id] = task
        self._working[run.id] = asyncio.create_task(self._until_ended(run.id, task))

    async def _until_ended(self, run_id: str, task: RunTask) -> None:
        try:
            await task.run()
            status = task.state.ended.status if task.state.ended is not None else "lost"
            self.counters[status] += 1
        except RunLeaseLost:
            self.counters["lost"] += 1
        except Exception:  # a bug of ours: the run stays open, and is taken over when its lease expires
            logger.exception("run %s stopped", run_id)
            task.journal.abandon()
            self.counters["lost"] += 1
        finally:
            del self._working[run_id]
            asyncio.get_running_loop().call_later(KEPT_S, self._forget, run_id, task)
        if task.state.ended is not None and not task.state.spec.store:
            await self._forget_stored(run_id)

    def _refusal(self, kind: type[Overloaded], why: str, spec: RunSpec, arrived_s: float | None) -> Overloaded:
        RunWatch(self._turns, spec, arrived_s, self._clock).refused()
        return kind(f"{why}; retry later", retry_after_s=RETRY_AFTER_S)

    def _forget(self, run_id: str, task: RunTask) -> None:
        if self._tasks.get(run_id) is task:
            del self._tasks[run_id]

    async def _forget_stored(self, run_id: str) -> None:
        with contextlib.suppress(RunStoreUnavailable):
            await self._store.delete(run_id)

    # --- leases -------------------------------------------------------------------------------------------------------

    async def _attend_for_ever(self) -> NoReturn:
        period_s = self._config.programs.lease_s / LEASE_SHARE
        while True:
            try:
                await self._renew()
                await self._take_over()
            except RunStoreUnavailable as error:
                logger.warning("leases were not renewed: %s", error)
            except Exception:  # whatever is in a log of somebody else must not end the leases of ours
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
        room = min(TAKEN_AT_ONCE, self._config.programs.max_open - self.open_runs)
        for run_id in await self._store.claim(max(0, room), self._working):
            try:
                await self._resume(run_id)
            except (ValueError, IllegalTransition):
                logger.exception("run %s cannot be read, and ends so", run_id)
                self.counters["unreadable"] += 1
                await self._give_up(run_id)

    async def _resume(self, run_id: str) -> None:
        events = await self._read(run_id)
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

    async def _give_up(self, run_id: str) -> None:
        page = await self._store.read(run_id, 0, 1)
        if page is not None:
            fault = Fault("server_error", "the program's log is damaged")
            last = encode(Ended("failed", fault=fault, at_s=time()))
            await self._store.append(run_id, page.length, [last], status="failed", final=True)

    def _renounce(self, run_id: str) -> None:
        """See to it that a run whose acceptance has no known outcome, and was answered as refused, is not worked on."""
        self._background.run(f"renounce {run_id}", self._until_renounced(run_id))

    async def _until_renounced(self, run_id: str) -> None:
        last = encode(Ended("cancelled", at_s=time()))
        while True:
            await asyncio.sleep(RENOUNCE_S)
            try:
                await self._store.append(run_id, 1, [last], status="cancelled", final=True)
                return
            except (RunUnknown, RunLeaseLost):
                return  # it was never there, or is somebody's already
            except RunStoreUnavailable:
                continue

    async def _read(self, run_id: str) -> list[RunEvent]:
        events: list[RunEvent] = []
        while (page := await self._store.read(run_id, len(events), PAGE)) is not None and page.items:
            events += [decode(entry) for entry in page.items]
        return events
