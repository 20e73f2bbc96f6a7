"""Runs tool calls: deadlines, queues, retries, idempotency keys, cancellation, asynchronous tools.

A *run* is one execution of a tool, in a task of its own. Callers wait for a run, each with its own deadline. Several
callers wait for one run if they share an idempotency key. A caller whose deadline passes or who is cancelled gets its
outcome at once. A run for which nobody waits any more is cancelled, and keeps its slot of the tool until it has ended.
A tool that is slow to stop, or never stops, therefore delays only callers of the same tool.
"""

import asyncio
import difflib
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import msgspec

from cluster.config.tools import ToolModel
from cluster.core.errors import IntegrityError, ToolError, ToolFailed, ToolRefused, ToolUnknown
from cluster.core.tools import (
    IN_NEXT_MESSAGE,
    Outcome,
    ToolCall,
    ToolId,
    ToolOffer,
    ToolResult,
    ToolSource,
    statistics_name,
)
from tools_runtime.kept_results import KeptResults, Key, key_of, require_same
from tools_runtime.kind import Invocation, Timer, TimerClock, ToolKind, ToolOutput, sleep_until
from tools_runtime.partial_output import PartialOutput
from tools_runtime.text import bounded, cut_marker

# --- limits of concurrency --------------------------------------------------------------------------------------------


class Slots:
    """The slots of one tool. A slow tool therefore makes only its own callers wait.

    Args:
        count: number of calls that can run at a time.
        max_waiting: number of calls that can wait. Further calls are rejected.
    """

    def __init__(self, count: int, max_waiting: int) -> None:
        self._count = count
        self._max_waiting = max_waiting
        self._free = asyncio.Semaphore(count)
        self.waiting = 0
        self.taken = 0
        self.users = 0
        """Number of calls that use the tool, with those that have not asked for a slot yet and those that end."""

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a slot, and keep it in the block.

        Raises:
            ToolRefused: too many calls are already waiting.
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
        """Check that no slot is lost.

        Raises:
            IntegrityError: a slot is lost.
        """
        if not (0 <= self.taken <= self._count and self.waiting >= 0):
            raise IntegrityError(f"{self.taken} of {self._count} places taken, {self.waiting} calls wait")
        if self.taken < self._count and self._free.locked() and not self.waiting:
            raise IntegrityError(f"no place is free although only {self.taken} of {self._count} are taken")


# --- tables -----------------------------------------------------------------------------------------------------------

MAX_NAME_LENGTH = 200
"""Largest number of characters of a name in an error message."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the configuration or of a request: a tool, or a server with several tools."""

    name: str
    config: ToolModel
    kind: ToolKind
    slots: Slots
    source: ToolSource

    @classmethod
    def of(cls, name: str, config: ToolModel, kind: ToolKind, source: ToolSource = ToolSource.OPERATOR) -> "Entry":
        """Make an entry with slots of its own."""
        return cls(name, config, kind, Slots(config.concurrency, config.max_queued), source)

    def offers(self) -> list[ToolOffer]:
        """Return its tools that are known now. The entry names them, since a kind does not know whose it is."""
        return self._named(known.offer for known in self.kind.tools())

    def unusable(self) -> list[ToolOffer]:
        """Return its tools that are known but cannot be called, with the reasons."""
        return self._named(self.kind.unusable())

    def _named(self, offers: Iterable[ToolOffer]) -> list[ToolOffer]:
        answers, again = not self.config.asynchronous, self.config.idempotent
        return [
            msgspec.structs.replace(
                offer,
                tool=ToolId(self.source, self.name, offer.own_name),
                starts_early=answers and (again or offer.read_only),
            )
            for offer in offers
        ]


class ToolTable:
    """Entries by their source and name. Those of a request never replace the configuration's.

    Args:
        entries: the entries.
        below: another table, whose tools are included.
    """

    def __init__(self, entries: Iterable[Entry], below: "ToolTable | None" = None) -> None:
        self.own: Sequence[Entry] = tuple(entries)
        self._entries = {(entry.source, entry.name): entry for entry in (*(below.own if below else ()), *self.own)}
        self._users = 0

    def entry(self, call: ToolCall) -> Entry:
        """Return the entry that has a call's tool.

        Raises:
            ToolRefused: there is none. The message has no other names, since the caller may not know all entries.
        """
        target = call.target
        entry = self._entries.get((target.source, target.entry))
        if entry is None:
            raise ToolRefused(f"there is no tool {call.name[:MAX_NAME_LENGTH]!r}")
        return entry

    @property
    def busy(self) -> bool:
        """Whether it is in use, or a call of one of its own entries has not ended."""
        return self._users > 0 or any(entry.slots.users for entry in self.own)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Mark the table as busy in the block."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    async def open(self) -> None:
        """Open the kinds of its own entries, at the same time."""
        await asyncio.gather(*(entry.kind.open() for entry in self.own))

    async def aclose(self) -> None:
        """Close the kinds of its own entries, at the same time."""
        await asyncio.gather(*(entry.kind.aclose() for entry in self.own))


def unknown(name: str, entry: Entry) -> ToolRefused:
    """Return the error for a tool that an entry does not have. It names similar tools of the same entry only."""
    names = sorted(offer.name for offer in entry.offers())
    near = difflib.get_close_matches(name[:MAX_NAME_LENGTH], names, n=3) or names[:10]
    there_are = f"; there are: {', '.join(near)}" if near else "; there are none"
    return ToolRefused(f"there is no tool {name[:MAX_NAME_LENGTH]!r}{there_are}")


# --- the executor -----------------------------------------------------------------------------------------------------

MAX_FINISHED = 4096
"""Largest number of results of asynchronous calls that are kept until they are requested."""
MAX_FINISHED_CHARS = 64 << 20
"""Largest number of characters of these results, with their images."""

LARGE_ARGUMENTS = 16 << 10
"""Characters of arguments above which they are checked in a thread instead of the event loop."""

CallKey = tuple[str, str]
"""Program and call id."""

Observer = Callable[[Entry, ToolResult], None]


@dataclass(slots=True)
class _Waiter:
    call: ToolCall
    answer: "asyncio.Future[ToolResult]"
    since_s: float
    deadline_s: float
    """Deadline in seconds on the executor's clock."""
    timer: Timer
    handed_over: bool = False
    """Whether the caller has a handle. The answer is then kept until it is requested."""
    asked: int = 0
    """Number of times that this call was made. Each caller that resumes it counts once more."""


@dataclass(slots=True)
class _Run:
    call: ToolCall
    entry: Entry
    key: Key | None
    accepted: "asyncio.Future[None]"
    """Done when the arguments have been validated."""
    partial: PartialOutput
    statistics_name: str
    since_s: float
    started_s: float | None = None
    attempts: int = 0
    waiters: dict[CallKey, _Waiter] = field(default_factory=dict)
    task: "asyncio.Task[ToolResult] | None" = None
    given_up: bool = False
    """Whether it was cancelled because nobody waited for it any more. Its result was decided then."""


class ToolExecutor:
    """Runs the tools of one process.

    Args:
        tools: the tools of the configuration.
        clock: the clock of deadlines and durations.
        special_tokens: chat-template tokens that are escaped in answers.
        max_argument_bytes: size above which arguments are rejected.
        observe: called with each run that ended, and its result.
        jitter: random numbers for the waits between retries.
    """

    def __init__(
        self,
        tools: ToolTable,
        clock: TimerClock,
        *,
        special_tokens: Iterable[str] = (),
        max_argument_bytes: int = 256 << 10,
        observe: Observer | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self._tools = tools
        self._clock = clock
        self._special_tokens = tuple(special_tokens)
        self._max_argument_bytes = max_argument_bytes
        self._observe = observe
        self._jitter = jitter or random.Random()
        self._runs: dict[CallKey, _Run] = {}
        """The run for which each call waits."""
        self._shared: dict[Key, _Run] = {}
        self._kept = KeptResults()
        self._finished: OrderedDict[CallKey, ToolResult] = OrderedDict()
        self._finished_chars = 0
        self._tasks: set[asyncio.Task[ToolResult]] = set()

    @property
    def under_way(self) -> int:
        """Number of calls without an answer, asynchronous ones included."""
        return len(self._runs)

    async def run(self, call: ToolCall, tools: ToolTable | None = None, *, resumed: bool = False) -> ToolResult:
        """Run a call and return its one outcome. For an asynchronous tool that takes longer, it is STARTED.

        If the caller is cancelled, so is the tool, unless another caller waits for it or has resumed the call.

        Args:
            call: the call to run.
            tools: the table to use where a request brings tools. None is the configuration's.
            resumed: whether a caller that died may have made this call. If its idempotency key is known here, the
                result is that of the first call. Otherwise only an idempotent tool is run, and any other outcome is
                UNKNOWN.
        """
        try:
            entry = (tools or self._tools).entry(call)
            key = key_of(call)
            run = self._shared.get(key) if key else None
            under_way = self._runs.get(call.key)
            if under_way is not None and not (resumed and under_way is run):
                raise ToolRefused(f"a call with the id {call.id!r} is already under way")
            kept = self._kept.get(key, call) if key else None
            if kept is not None:
                return replace(kept, call_id=call.id)
            if run is not None:
                require_same(run.call, call)
        except ToolRefused as refusal:
            return ToolResult(call.id, call.name, Outcome.REFUSED, self._told(Outcome.REFUSED, refusal))
        if run is None and resumed and not entry.config.idempotent:
            return self._lost(call, key)
        if run is None:
            run = self._start(call, entry, key)
        return await self._answer(run, run.waiters.get(call.key) or self._join(run, call))

    async def _answer(self, run: _Run, waiter: _Waiter) -> ToolResult:
        call = waiter.call
        waiter.asked += 1
        mine = waiter.asked
        try:
            if run.entry.config.asynchronous:
                either: set[asyncio.Future[Any]] = {run.accepted, waiter.answer}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not waiter.answer.done():
                    return self._handed_over(call, run, waiter)
            # One of several who made this call may be cancelled; the answer is for the others, too.
            return await asyncio.shield(waiter.answer)
        except asyncio.CancelledError:
            if run.waiters.get(call.key) is waiter and waiter.asked == mine:
                self._leave(call.key, self._unanswered(run, call.key, Outcome.CANCELLED))
            raise

    def _lost(self, call: ToolCall, key: Key | None) -> ToolResult:
        """Return the result of a call that may have been made before, and whose outcome nobody knows."""
        reason = f"{call.name} may have been run before, and what became of it is lost; it was not run again"
        text = self._told(Outcome.UNKNOWN, ToolUnknown(reason))
        result = ToolResult(call.id, call.name, Outcome.UNKNOWN, text, statistics_name=call.name)
        if key is not None:
            self._kept.settle(key, call, result)
        return result

    def cancel(self, program: str, call_id: str) -> bool:
        """End a call with CANCELLED, and its tool if nobody else waits for it.

        Return False if there is no such call.
        """
        run = self._runs.get((program, call_id))
        if run is None:
            return False
        self._leave((program, call_id), self._unanswered(run, (program, call_id), Outcome.CANCELLED))
        return True

    def knows(self, call: ToolCall) -> bool:
        """Return whether the call, or one with its idempotency key, is in progress here, or its result is kept."""
        key = key_of(call)
        return (
            call.key in self._runs
            or call.key in self._finished
            or (key is not None and (key in self._shared or key in self._kept))
        )

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """Wait for the result of an asynchronous call. Waiting does not keep the call running.

        The outcome is UNKNOWN if the call is not known here.
        """
        key = (program, call_id)
        if key in self._runs:
            await asyncio.wait({self._runs[key].waiters[key].answer})
        nothing = ToolResult(call_id, "", Outcome.UNKNOWN, "unknown: there is no such call here, or no longer")
        return self._finished.get(key, nothing)

    async def output(self, program: str, call_id: str, known: int) -> str | None:
        """Wait for more output of a running call than ``known`` characters; see `PartialOutput.beyond`.

        Return None if the call is not in progress here, or has ended meanwhile.
        """
        run = self._runs.get((program, call_id))
        return None if run is None else await run.partial.beyond(known)

    async def aclose(self) -> None:
        """Cancel all calls, and wait until they have ended."""
        for key in list(self._runs):
            self.cancel(*key)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def check_integrity(self) -> None:
        """Check that every call waits for a live run, and that every live run is waited for or ending.

        Raises:
            IntegrityError: one of these is not so.
        """
        for key, run in self._runs.items():
            if key not in run.waiters or run.task is None or run.task not in self._tasks:
                raise IntegrityError(f"the call {key} waits for nothing")
        for run in self._shared.values():
            if not run.waiters and run.task is not None and not run.task.done():
                raise IntegrityError(f"a run of {run.call.name!r} is shared by nobody")
        for entry in self._tools.own:
            entry.slots.check_integrity()

    def _start(self, call: ToolCall, entry: Entry, key: Key | None) -> _Run:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        partial = PartialOutput(entry.config.output_cap_bytes, self._special_tokens)
        run = _Run(call, entry, key, accepted, partial, call.name, self._clock.now_s())
        run.task = asyncio.create_task(self._work(run), name=f"tool {call.name}")
        self._tasks.add(run.task)
        entry.slots.users += 1
        run.task.add_done_callback(lambda task: self._ended(run, task))
        if key is not None:
            self._shared[key] = run
        return run

    def _join(self, run: _Run, call: ToolCall) -> _Waiter:
        now_s = self._clock.now_s()
        timeout_s = run.entry.config.deadline_s
        if call.deadline_s is not None:
            timeout_s = min(timeout_s, max(0.0, call.deadline_s))
        answer: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_at(now_s + timeout_s, lambda: self._expire(call.key))
        waiter = run.waiters[call.key] = _Waiter(call, answer, now_s, now_s + timeout_s, timer)
        self._runs[call.key] = run
        return waiter

    def _handed_over(self, call: ToolCall, run: _Run, waiter: _Waiter) -> ToolResult:
        waiter.handed_over = True
        text = f"started: {call.name} is running; its answer will follow under the call id {call.id}"
        return ToolResult(call.id, call.name, Outcome.STARTED, text, statistics_name=run.statistics_name)

    def _give(self, waiter: _Waiter, result: ToolResult) -> None:
        """Deliver a caller's answer."""
        waiter.timer.cancel()
        if not waiter.answer.done():
            waiter.answer.set_result(result)
        if not waiter.handed_over:
            return
        self._forget(waiter.call.key)
        self._finished[waiter.call.key] = result
        self._finished_chars += result.chars
        while len(self._finished) > MAX_FINISHED or (
            len(self._finished) > 1 and self._finished_chars > MAX_FINISHED_CHARS
        ):
            self._forget(next(iter(self._finished)))

    def _forget(self, key: CallKey) -> None:
        forgotten = self._finished.pop(key, None)
        self._finished_chars -= 0 if forgotten is None else forgotten.chars

    def _expire(self, key: CallKey) -> None:
        run = self._runs.get(key)
        if run is not None:
            self._leave(key, self._unanswered(run, key, Outcome.TIMEOUT))

    def _leave(self, key: CallKey, answer: ToolResult) -> None:
        """Remove a caller from its run, with ``answer`` if it still waits. Cancel a run for which nobody waits."""
        run = self._runs.pop(key)
        self._give(run.waiters.pop(key), answer)
        if run.waiters or run.task is None or run.task.done():
            return  # `_ended` has the result of a run that has ended by itself
        if run.key is not None:
            del self._shared[run.key]
            self._kept.keep(run.key, run.call, answer, idempotent=run.entry.config.idempotent)
        run.given_up = True
        run.task.cancel()
        if self._observe is not None:
            self._observe(run.entry, answer)

    def _ended(self, run: _Run, task: "asyncio.Task[ToolResult]") -> None:
        self._tasks.discard(task)
        run.entry.slots.users -= 1
        run.partial.close()
        if run.given_up:
            return
        result = self._foreign_cancellation(run) if task.cancelled() else task.result()
        if run.key is not None:
            del self._shared[run.key]
            self._kept.keep(run.key, run.call, result, idempotent=run.entry.config.idempotent)
        for key, waiter in run.waiters.items():
            del self._runs[key]
            self._give(waiter, replace(result, call_id=waiter.call.id))
        run.waiters.clear()
        if self._observe is not None:
            self._observe(run.entry, result)

    async def _work(self, run: _Run) -> ToolResult:
        call, config = run.call, run.entry.config
        try:
            tool = await run.entry.kind.tool(call.target.tool)
            if tool is None:
                raise unknown(call.name, run.entry)
            check = tool.check.checked
            if len(call.arguments) > LARGE_ARGUMENTS:
                arguments = await asyncio.to_thread(check, call.arguments, self._max_argument_bytes)
            else:
                arguments = check(call.arguments, self._max_argument_bytes)
            if config.argument_class is not None:
                run.statistics_name = statistics_name(call.name, arguments.get(config.argument_class))
            run.accepted.set_result(None)
            invocation = Invocation.of(call, arguments, config.output_cap_bytes, run.partial.write)
            async with run.entry.slots.one():
                run.started_s = self._clock.now_s()
                output = await self._attempt(run, invocation)
        except ToolRefused as error:
            return self._result(run, Outcome.REFUSED, error)
        except ToolFailed as error:
            return self._result(run, Outcome.ERROR, error)
        except ToolError as error:
            return self._result(run, Outcome.UNKNOWN, error)
        except Exception as error:  # noqa: BLE001 - a kind's defect is this call's, and nobody else's
            return self._result(run, Outcome.ERROR, ToolFailed(f"{type(error).__name__}: {error}"))
        return self._result(run, Outcome.OK, output)

    async def _attempt(self, run: _Run, invocation: Invocation) -> ToolOutput:
        config = run.entry.config
        for attempt in count(1):
            run.attempts = attempt
            run.partial.begin()
            try:
                return await run.entry.kind.run(invocation)
            except (ToolFailed, ToolUnknown) as error:
                passing = isinstance(error, ToolUnknown) or error.transient
                if not (config.idempotent and passing and attempt <= config.retries):
                    raise
                wait_s = config.retry_backoff_s * 2 ** (attempt - 1) * self._jitter.uniform(0.5, 1.5)
                again_s = self._clock.now_s() + wait_s
                if again_s >= max((waiter.deadline_s for waiter in run.waiters.values()), default=again_s):
                    raise
            await sleep_until(self._clock, again_s)
        raise AssertionError("unreachable")

    def _foreign_cancellation(self, run: _Run) -> ToolResult:
        # Some libraries end a call by cancelling it when what they talk to has died.
        return self._result(run, Outcome.UNKNOWN, ToolUnknown("what ran the tool is gone"))

    def _result(self, run: _Run, outcome: Outcome, said: ToolOutput | ToolError) -> ToolResult:
        now_s = self._clock.now_s()
        started_s = run.started_s if run.attempts and run.started_s is not None else now_s
        images: tuple[str, ...] = ()
        if isinstance(said, ToolError):
            text, truncated = self._told(outcome, said, run.entry.config.output_cap_bytes), False
        else:
            cap_bytes = run.entry.config.output_cap_bytes
            text, cut = bounded(said.text, cap_bytes, self._special_tokens)
            truncated = cut or said.truncated
            text += cut_marker(cap_bytes) if truncated else ""
            images = said.images[: text.count(IN_NEXT_MESSAGE)]
        return ToolResult(
            call_id=run.call.id,
            name=run.call.name,
            outcome=outcome,
            text=text,
            truncated=truncated,
            queue_s=started_s - run.since_s,
            run_s=now_s - started_s,
            attempts=run.attempts,
            statistics_name=run.statistics_name,
            images=images,
        )

    def _unanswered(self, run: _Run, key: CallKey, outcome: Outcome) -> ToolResult:
        """Return the result of a caller that leaves before its run has ended."""
        waiter = run.waiters[key]
        now_s = self._clock.now_s()
        effect = "it was never started" if run.attempts == 0 else "it was stopped and may have taken effect"
        if outcome is Outcome.TIMEOUT:
            reason = f"{run.call.name} did not answer within {waiter.deadline_s - waiter.since_s:g} s; {effect}"
        else:
            reason = f"{run.call.name} was cancelled; {effect}"
        started = run.attempts > 0 and run.started_s is not None
        started_s = max(run.started_s or 0.0, waiter.since_s) if started else now_s
        return ToolResult(
            call_id=waiter.call.id,
            name=run.call.name,
            outcome=outcome,
            text=self._told(outcome, ToolFailed(reason)),
            queue_s=started_s - waiter.since_s,
            run_s=now_s - started_s,
            attempts=run.attempts,
            statistics_name=run.statistics_name,
        )

    def _told(self, outcome: Outcome, error: ToolError, cap_bytes: int = 4096) -> str:
        text, cut = bounded(f"{outcome}: {error}", cap_bytes, self._special_tokens)
        text += cut_marker(cap_bytes) if cut else ""
        note = error.note if isinstance(error, ToolFailed) else ""
        return f"{text.rstrip()}\n[{note}]" if note else text
