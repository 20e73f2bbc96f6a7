"""Runs tool calls: deadlines, queues, retries, idempotency keys, cancellation, asynchronous tools.

A *run* is one tool at work, a task of its own. Callers only wait for it: each with its own deadline, several for one
run where they share an idempotency key. A caller that leaves - its deadline passed, it was cancelled - gets its outcome
at once; a run that nobody waits for any more is cancelled, and keeps its place among its tool's until it has ended.
So neither a tool that is slow to stop nor one that never stops delays anybody but those who call the same tool.
"""

import asyncio
import difflib
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from cluster.config.tools import ToolModel
from cluster.core.errors import IntegrityError, ToolError, ToolFailed, ToolRefused, ToolUnknown
from cluster.core.tools import Outcome, ToolCall, ToolOffer, ToolResult, statistics_name
from tools_runtime.kind import Invocation, Timer, TimerClock, ToolKind, ToolOutput, sleep_until
from tools_runtime.text import bounded, cut_marker

# --- limits of concurrency --------------------------------------------------------------------------------------------


class Slots:
    """A tool's own places, so that a slow tool keeps nobody but its own callers waiting.

    Args:
        count: calls that run at a time.
        max_waiting: calls that wait; more are refused.
    """

    def __init__(self, count: int, max_waiting: int) -> None:
        self._count = count
        self._max_waiting = max_waiting
        self._free = asyncio.Semaphore(count)
        self.waiting = 0
        self.taken = 0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a place, and keep it.

        Raises:
            ToolRefused: too many wait already.
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
        """No place is lost.

        Raises:
            IntegrityError: one is.
        """
        if not (0 <= self.taken <= self._count and self.waiting >= 0):
            raise IntegrityError(f"{self.taken} of {self._count} places taken, {self.waiting} calls wait")
        if self.taken < self._count and self._free.locked() and not self.waiting:
            raise IntegrityError(f"no place is free although only {self.taken} of {self._count} are taken")


# --- tables -----------------------------------------------------------------------------------------------------------

MAX_NAME_LENGTH = 200
"""Characters of a name that a refusal repeats."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the configuration, or of a request: a tool, or a server with several."""

    name: str
    config: ToolModel
    kind: ToolKind
    slots: Slots

    @classmethod
    def of(cls, name: str, config: ToolModel, kind: ToolKind) -> "Entry":
        """With places of its own."""
        return cls(name, config, kind, Slots(config.concurrency, config.max_queued))


class ToolTable:
    """Entries by name; those of a request beside the configuration's, which they cannot replace.

    Args:
        entries: the entries.
        below: tools that are there, too.
    """

    def __init__(self, entries: Iterable[Entry], below: "ToolTable | None" = None) -> None:
        self.own = {entry.name: entry for entry in entries}
        self.entries: Mapping[str, Entry] = {**self.own, **(below.entries if below else {})}

    def entry(self, call: ToolCall) -> Entry:
        """The entry that has a call's tool.

        Raises:
            ToolRefused: there is none; with the names that are near.
        """
        entry = self.entries.get(call.owner or call.name)
        if entry is None:
            raise self.unknown(call.name)
        return entry

    def offers(self) -> list[ToolOffer]:
        """All tools that are known now."""
        return [known.offer for entry in self.entries.values() for known in entry.kind.tools()]

    def unknown(self, tool: str) -> ToolRefused:
        """The refusal of a tool that there is not."""
        names = sorted(offer.name for offer in self.offers())
        near = difflib.get_close_matches(tool[:MAX_NAME_LENGTH], names, n=3) or names[:10]
        there_are = f"; there are: {', '.join(near)}" if near else "; there are none"
        return ToolRefused(f"there is no tool {tool[:MAX_NAME_LENGTH]!r}{there_are}")

    @property
    def busy(self) -> bool:
        """A call of one of its own entries runs or waits."""
        return any(entry.slots.taken or entry.slots.waiting for entry in self.own.values())

    async def open(self) -> None:
        """Open its own entries' kinds.

        Raises:
            ConfigError: one cannot work as configured.
        """
        for entry in self.own.values():
            await entry.kind.open()

    async def aclose(self) -> None:
        """Close its own entries' kinds."""
        for entry in self.own.values():
            await entry.kind.aclose()


# --- kept results -----------------------------------------------------------------------------------------------------

Key = tuple[str, str, str]
"""Program, tool, idempotency key."""

CONSENT = "\0consent"
"""Stands for the program in the key of a call that runs under a consent: no program has this name."""

MAX_RESULTS = 4096
MAX_BYTES = 32 << 20


def key_of(call: ToolCall) -> Key | None:
    """Under which the call's result is kept; None without an idempotency key."""
    if call.consent is not None:
        return (CONSENT, call.name, call.consent)
    return None if call.idempotency_key is None else (call.program, call.name, call.idempotency_key)


@dataclass(frozen=True, slots=True)
class _Kept:
    call: ToolCall
    result: ToolResult
    size: int


class KeptResults:
    """The most recently used results, bounded in number and in characters."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def get(self, key: Key, call: ToolCall) -> ToolResult | None:
        """The result kept under ``key``.

        Raises:
            ToolRefused: it is that of a call with other arguments.
        """
        kept = self._kept.get(key)
        if kept is None:
            return None
        self._kept.move_to_end(key)
        require_same(kept.call, call)
        return kept.result

    def keep(self, key: Key, call: ToolCall, result: ToolResult, *, idempotent: bool) -> None:
        """Keep ``result``, unless running the tool again is what a repeated call should do.

        That is so where nothing was run, and where an idempotent tool gave no answer.
        """
        answered = result.outcome in (Outcome.OK, Outcome.ERROR)
        if result.attempts > 0 and (answered or not idempotent):
            self.settle(key, call, result)

    def settle(self, key: Key, call: ToolCall, result: ToolResult) -> None:
        """Keep ``result`` whatever it is: no call with this key runs the tool any more."""
        kept = _Kept(call, result, len(result.text))
        if kept.size > MAX_BYTES:
            return
        self._forget(key)
        self._kept[key] = kept
        self._bytes += kept.size
        while len(self._kept) > MAX_RESULTS or self._bytes > MAX_BYTES:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        self._bytes -= kept.size if kept else 0


def require_same(first: ToolCall, repeated: ToolCall) -> None:
    """A key stands for one call.

    Raises:
        ToolRefused: the arguments differ.
    """
    if first.arguments != repeated.arguments:
        raise ToolRefused(f"the idempotency key {repeated.idempotency_key!r} was used with other arguments")


# --- the executor -----------------------------------------------------------------------------------------------------

MAX_FINISHED = 4096
"""Results of asynchronous calls that are kept until somebody asks for them."""

LARGE_ARGUMENTS = 16 << 10
"""Characters of arguments from which on they are checked beside the event loop."""

CallKey = tuple[str, str]
"""Program and call id."""

Observer = Callable[[Entry, ToolResult], None]


@dataclass(slots=True)
class _Waiter:
    call: ToolCall
    answer: "asyncio.Future[ToolResult]"
    since_s: float
    deadline_s: float
    """On the clock."""
    timer: Timer
    handed_over: bool = False
    """The caller has a handle, and the answer is kept until somebody asks."""
    asked: int = 0
    """Times that this very call was made: once, and again by each who resumes its caller's work."""


@dataclass(slots=True)
class _Run:
    call: ToolCall
    entry: Entry
    key: Key | None
    accepted: "asyncio.Future[None]"
    """Done when the arguments were found right."""
    statistics_name: str
    since_s: float
    started_s: float | None = None
    attempts: int = 0
    waiters: dict[CallKey, _Waiter] = field(default_factory=dict)
    task: "asyncio.Task[ToolResult] | None" = None


class ToolExecutor:
    """Everything that runs tools in one process.

    Args:
        tools: the tools of the configuration.
        clock: of deadlines and durations.
        special_tokens: chat-template tokens to be escaped in answers.
        max_argument_bytes: larger arguments are refused.
        observe: told of each run that ended, with its result.
        jitter: of the waits between retries.
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
        """The run that each call waits for."""
        self._shared: dict[Key, _Run] = {}
        self._kept = KeptResults()
        self._finished: OrderedDict[CallKey, ToolResult] = OrderedDict()
        self._tasks: set[asyncio.Task[ToolResult]] = set()

    @property
    def under_way(self) -> int:
        """Calls without an answer yet, asynchronous ones included."""
        return len(self._runs)

    async def run(self, call: ToolCall, tools: ToolTable | None = None, *, resumed: bool = False) -> ToolResult:
        """The call's one outcome; for an asynchronous tool that takes its time, STARTED.

        Args:
            call: what to run.
            tools: instead of the configuration's, where a request brings its own.
            resumed: an earlier caller, who has died, may have made this call. If its idempotency key is known here, the
                answer is the first one's; else only an idempotent tool is run, and of any other the outcome is UNKNOWN.

        If the caller is cancelled, so is the tool, unless another caller waits for it or has resumed the call.
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
        """Of a call that may have been made before, where nobody knows what became of it."""
        reason = f"{call.name} may have been run before, and what became of it is lost; it was not run again"
        text = self._told(Outcome.UNKNOWN, ToolUnknown(reason))
        result = ToolResult(call.id, call.name, Outcome.UNKNOWN, text, statistics_name=call.name)
        if key is not None:
            self._kept.settle(key, call, result)
        return result

    def cancel(self, program: str, call_id: str) -> bool:
        """End a call with CANCELLED, and its tool if nobody else waits for it; False if no such call is under way."""
        run = self._runs.get((program, call_id))
        if run is None:
            return False
        self._leave((program, call_id), self._unanswered(run, (program, call_id), Outcome.CANCELLED))
        return True

    def knows(self, call: ToolCall) -> bool:
        """Whether the call, or one with its idempotency key, is under way here, or its answer is kept."""
        key = key_of(call)
        return (
            call.key in self._runs
            or call.key in self._finished
            or (key is not None and (key in self._shared or key in self._kept))
        )

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """The answer of an asynchronous call, when it is there. Waiting for it keeps nothing running.

        The outcome is UNKNOWN if nothing is known of the call.
        """
        key = (program, call_id)
        if key in self._runs:
            await asyncio.wait({self._runs[key].waiters[key].answer})
        nothing = ToolResult(call_id, "", Outcome.UNKNOWN, "unknown: there is no such call here, or no longer")
        return self._finished.get(key, nothing)

    async def aclose(self) -> None:
        """Cancel everything, and wait until it has ended."""
        for key in list(self._runs):
            self.cancel(*key)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def check_integrity(self) -> None:
        """Every call waits for a live run, every live run is waited for or ending.

        Raises:
            IntegrityError: not so.
        """
        for key, run in self._runs.items():
            if key not in run.waiters or run.task is None or run.task not in self._tasks:
                raise IntegrityError(f"the call {key} waits for nothing")
        for run in self._shared.values():
            if not run.waiters:
                raise IntegrityError(f"a run of {run.call.name!r} is shared by nobody")
        for entry in self._tools.entries.values():
            entry.slots.check_integrity()

    def _start(self, call: ToolCall, entry: Entry, key: Key | None) -> _Run:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        run = _Run(call, entry, key, accepted, call.name, self._clock.now_s())
        run.task = asyncio.create_task(self._work(run), name=f"tool {call.name}")
        self._tasks.add(run.task)
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
        """Let a caller have its answer."""
        waiter.timer.cancel()
        if not waiter.answer.done():
            waiter.answer.set_result(result)
        if not waiter.handed_over:
            return
        self._finished[waiter.call.key] = result
        self._finished.move_to_end(waiter.call.key)
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)

    def _expire(self, key: CallKey) -> None:
        run = self._runs.get(key)
        if run is not None:
            self._leave(key, self._unanswered(run, key, Outcome.TIMEOUT))

    def _leave(self, key: CallKey, answer: ToolResult) -> None:
        """Take a caller away from its run, with ``answer`` if it still listens; end a run that nobody waits for."""
        run = self._runs.pop(key)
        self._give(run.waiters.pop(key), answer)
        if run.waiters or run.task is None or run.task.done():
            return
        if run.key is not None:
            del self._shared[run.key]
            self._kept.keep(run.key, run.call, answer, idempotent=run.entry.config.idempotent)
        run.task.cancel()
        if self._observe is not None:
            self._observe(run.entry, answer)

    def _ended(self, run: _Run, task: "asyncio.Task[ToolResult]") -> None:
        self._tasks.discard(task)
        if not run.waiters:
            return  # it was cancelled, and told as that
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
            tool = await run.entry.kind.tool(call.name)
            if tool is None:
                raise self._tools.unknown(call.name)
            check = tool.check.checked
            if len(call.arguments) > LARGE_ARGUMENTS:
                arguments = await asyncio.to_thread(check, call.arguments, self._max_argument_bytes)
            else:
                arguments = check(call.arguments, self._max_argument_bytes)
            if config.argument_class is not None:
                run.statistics_name = statistics_name(call.name, arguments.get(config.argument_class))
            run.accepted.set_result(None)
            invocation = Invocation.of(call, arguments, config.output_cap_bytes)
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
        if isinstance(said, ToolError):
            text, truncated = self._told(outcome, said, run.entry.config.output_cap_bytes), False
        else:
            cap_bytes = run.entry.config.output_cap_bytes
            text, cut = bounded(said.text, cap_bytes, self._special_tokens)
            truncated = cut or said.truncated
            text += cut_marker(cap_bytes) if truncated else ""
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
        )

    def _unanswered(self, run: _Run, key: CallKey, outcome: Outcome) -> ToolResult:
        """Of a caller that leaves before its run has ended."""
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
