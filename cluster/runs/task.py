"""Works on one run: it determines the next step, does it, and records the result, until the run has ended.

No step is taken before its intent is in the log. The run's limits bound the time of turns and tools. A failure is
retried where that is harmless, and otherwise becomes the run's outcome.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from cluster.core.clock import Clock
from cluster.core.errors import CONTEXT_LENGTH_EXCEEDED, STORE_FULL, HttpError, Overloaded, RunLeaseLost
from cluster.core.program import ProgramIdentity
from cluster.core.supervision import run_all
from cluster.core.tools import Outcome, ToolCall, ToolId, ToolResult
from cluster.core.turn import (
    Continuation,
    TurnPiece,
)
from cluster.observing.logs import bind
from cluster.runs.call_names import CallNaming
from cluster.runs.early_output import EarlyOutput
from cluster.runs.events import (
    MAX_WALL_TIME,
    Call,
    EarlyEnd,
    EarlyIntent,
    Ended,
    Fault,
    LateAnswer,
    RunEvent,
    ToolAnswer,
    ToolIntent,
    Truncated,
    TurnIntent,
    TurnResult,
)
from cluster.runs.journal import Journal
from cluster.runs.slo import RunWatch
from cluster.runs.state import (
    AskTurn,
    AwaitLate,
    CallTools,
    Finish,
    Refuse,
    RunState,
    cut_answers,
    next_step,
    starts_early,
    step,
)
from cluster.runs.tool_images import kept_images
from cluster.runs.truncation import droppable
from cluster.runs.turn_request import body_place, continuation_of, turn_body, turn_identity
from cluster.runs.turn_text import TurnText

logger = logging.getLogger("ray.serve")

RETRY_S = 0.5
"""Seconds to wait before a turn is requested again."""

NOTIFY_AFTER_S = 0.03
"""Seconds that a tool runs before the scheduler is notified of it."""

NOTIFY_TIMEOUT_S = 10.0
"""Seconds after which a notification of the scheduler is given up."""

MAX_REFUSED_NAME = 200
"""Largest number of characters of a tool's name in a refusal."""

END_S = 5.0
"""Seconds that a run at its time limit has to stop its tools and write its end."""


_left_running: "set[asyncio.Task[ToolResult]]" = set()
"""Calls of runs that other runners have now. The event loop itself holds no references to tasks."""


class Replicas(Protocol):
    """The replicas, on which turns run."""

    def turn(
        self,
        key: str,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        continuation: Continuation | None,
        *,
        answers: Sequence[int] = (),
    ) -> AsyncIterator[TurnPiece | HttpError]:
        """Yield the pieces of a turn on the program's replica. Closing the iterator stops the turn.

        ``answers`` are the places of the messages that may be shortened if the prompt does not fit.
        """
        ...

    async def tell(self, key: str, operation: str, payload: Mapping[str, Any]) -> None:
        """Run an operation of the side channel on the program's replica."""
        ...

    async def extend(self, key: str, body: Mapping[str, Any], continuation: Continuation | None) -> str | None:
        """Let the program's replica compute the next prompt as far as it is known.

        Return why nothing more is computed in this pause, or None.
        """
        ...


class Tools(Protocol):
    """Runs tools: `tools_runtime.actor.ToolActors`."""

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """Run a call and return its one outcome."""
        ...

    async def output(self, program: str, call_id: str, known: int) -> str | None:
        """Wait for more output of a running call than ``known`` characters, and return all of it.

        None: it has ended, or is not known.
        """
        ...

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """Wait for the result of an asynchronous call."""
        ...

    async def cancel(self, program: str, call_id: str) -> bool:
        """End a call. Return False if no such call is in progress."""
        ...


class RunTask:
    """Works on one run.

    Args:
        state: the run's state, from its log.
        journal: records events.
        replicas: run turns.
        tools: run tools.
        clock: the clock of durations and of the run's time limit.
        left_s: seconds until the run's time limit.
        definitions: the tools that the request brought, with their secrets.
        may_call: whether the run's tenant may call a tool now.
        known_as: returns the name under which a call's duration is learnt.
        observe: receives each tool's result.
        watch: receives the progress of its turns.
        on_cut: called with the number of answers that were shortened because a turn's prompt did not fit.
    """

    def __init__(
        self,
        state: RunState,
        journal: Journal[RunEvent],
        replicas: Replicas,
        tools: Tools,
        clock: Clock,
        *,
        left_s: float,
        definitions: Mapping[str, Any],
        may_call: Callable[[ToolId | None], bool],
        known_as: CallNaming,
        observe: Callable[[ToolResult], object],
        watch: RunWatch,
        on_cut: Callable[[int], None],
    ) -> None:
        self.state = state
        self.journal = journal
        self._replicas = replicas
        self._tools = tools
        self._clock = clock
        self._definitions = definitions
        self._may_call = may_call
        self._known_as = known_as
        self._observe = observe
        self._watched = watch
        self._on_cut = on_cut
        self._began_s = clock.now_s()
        self._deadline_s = self._began_s + left_s
        self._key = f"{state.spec.tenant}/{state.spec.program}"
        identity = ProgramIdentity.decode(state.spec.identity)
        self._traceparent = identity.traceparent
        self._ends_program = state.spec.last or identity.last_turn
        """Whether the program ends with the run: nobody can continue it, or the request says that nobody will."""
        self._late: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._notifications: set[asyncio.Task[None]] = set()
        """Tasks of notifications that are being sent to the replica."""
        self._early: dict[tuple[int, int], asyncio.Task[ToolResult]] = {}
        """Calls that were started early, until their turn's calls are run."""
        self._ending: set[asyncio.Task[ToolResult]] = set()
        """Early calls that are being stopped."""
        self._work: asyncio.Task[None] | None = None
        self.cancel_asked = False
        """Whether `cancel` was called."""

    async def run(self) -> None:
        """Work until the run has ended, or another runner has it.

        Raises:
            RunLeaseLost: another runner has it.
        """
        bind(program=self._key, run=self.state.spec.id)
        sent_before: list[ToolCall] = []
        try:
            if self.cancel_asked:
                sent_before = self._sent_before()
                self._record(*self._early_ends(Outcome.UNKNOWN))
                self._end(Finish("cancelled"))
            else:
                self._work = asyncio.create_task(self._until_done())
                await self._until_stopped(self._work)
            await self.journal.flush()
            if self._ends_program:
                self._notify("end")
            elif self.state.ended is not None and self.state.ended.status == "cancelled":
                self._notify("release")  # the next turn, for which its KV is held, will probably never come
        finally:
            self._watched.ended(self.state.ended)
            await self._stop_work()
            await self._stop_early()
            await self._stop_calls(sent_before)

    def cancel(self) -> None:
        """End the run. The turn and the tools in progress are stopped.

        If `run` has not begun yet, it asks no turn and runs no tool.
        """
        self.cancel_asked = True
        if self._work is not None:
            self._work.cancel()

    def abandon(self) -> None:
        """Stop, because another runner has the run. Nothing more is written, and no end is recorded."""
        self._watched.ended(None)
        self.journal.abandon()
        if self._work is not None:
            self._work.cancel()

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - self._clock.now_s())

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _until_stopped(self, work: "asyncio.Task[None]") -> None:
        """Wait until the work is done, is cancelled or has no more time, and record the end."""
        done, _ = await asyncio.wait((work,), timeout=self._left_s)
        if not done:
            await self._stop_work()
            self._end(Finish("incomplete", MAX_WALL_TIME))
        elif work.cancelled():
            self._end(Finish("cancelled"))
        elif isinstance(error := work.exception(), RunLeaseLost):
            raise error
        elif error is not None:
            self._end(Finish("failed", fault=_fault(error)))

    async def _until_done(self) -> None:
        for place in self.state.late:
            self._watch(self._call(place), resumed=True)
        while (todo := next_step(self.state)) is not None:
            match todo:
                case AskTurn():
                    await self._turn(todo)
                case CallTools():
                    await self._call_tools(todo)
                case Refuse():
                    self._record(*todo.answers)
                case AwaitLate():
                    await asyncio.wait(self._late.values(), return_when=asyncio.FIRST_COMPLETED)
                case Finish():
                    self._end(todo)

    def _record(self, *events: RunEvent) -> None:
        for event in events:
            self.state = step(self.state, event)
        self.journal.record(*events)

    def _end(self, finish: Finish) -> None:
        if self.state.ended is None:
            self._record(*self._early_ends(Outcome.CANCELLED))
            # Counted from its beginning, because the wall clock may have been set back since.
            spec = self.state.spec
            took_s = spec.limits.wall_s - (self._deadline_s - self._clock.now_s())
            self._record(Ended(finish.status, finish.reason, finish.fault, spec.created_s + took_s))

    # --- turns --------------------------------------------------------------------------------------------------------

    async def _turn(self, todo: AskTurn) -> None:
        await self._explain_early(Outcome.UNKNOWN)
        self._record(TurnIntent(todo.turn, todo.attempt, todo.summary))
        self._watched.turn()
        await self.journal.flush()
        while True:
            try:
                await self._ask(todo)
                return
            except Overloaded as error:
                if error.code == STORE_FULL:
                    raise  # the record of the turns has no room, which does not pass by waiting
                # Nothing was begun: it is not the turn's fault, and an accepted program is not given up for it.
                await asyncio.sleep(error.retry_after_s or RETRY_S)
            except HttpError as error:
                if error.code == CONTEXT_LENGTH_EXCEEDED and self._drop_oldest():
                    return
                if error.status < 500:
                    raise
                logger.warning("turn %d of run %s failed: %s", todo.turn, self.state.spec.id, error.message)
                await asyncio.sleep(RETRY_S)
                return

    def _drop_oldest(self) -> bool:
        """Drop the older half of what may be dropped, if the caller wants it. Return whether something was dropped."""
        groups = droppable(self.state.messages) if self.state.spec.truncate else []
        if not groups:
            return False
        dropped = (len(groups) + 1) // 2
        logger.warning("run %s: %d groups of old messages are dropped to fit", self.state.spec.id, dropped)
        self._record(Truncated(dropped))
        return True

    async def _ask(self, todo: AskTurn) -> None:
        bind(turn=todo.turn)
        state, began_s = self.state, self._clock.now_s()
        turn = TurnText(todo.turn, todo.summary)
        identity = turn_identity(state, todo, self._known_as)
        prior, body = continuation_of(state), turn_body(state, todo)
        answers = tuple(body_place(state, place) for place in state.unread)
        pieces = self._replicas.turn(self._key, body, identity, prior, answers=answers)
        async with aclosing(pieces):  # type: ignore[type-var]
            async for piece in pieces:
                if isinstance(piece, HttpError):
                    raise piece
                if (news := turn.take(piece)) is not None:
                    self._record(news)
                for call in turn.new_calls():
                    self._start_early(call, todo.attempt)
                self._watched.received(turn.tokens)
        result = turn.result(began_s - self._began_s, self._clock.now_s() - self._began_s)
        self._count_cut(result)
        self._record(result)
        await self._explain_early(Outcome.CANCELLED)
        self._watched.answered(turn.alone_s)

    def _count_cut(self, result: TurnResult) -> None:
        if cut := len(cut_answers(self.state, result.answer_chars)):
            self._on_cut(cut)
            place, chars = f"turn {result.turn} of run {self.state.spec.id}", result.answer_chars
            logger.warning("%s: %d tool answers were cut to %s characters to fit in the context", place, cut, chars)

    # --- calls that start early ---------------------------------------------------------------------------------------

    def _start_early(self, call: Call, attempt: int) -> None:
        """Run a call of the turn that goes on, if its tool may be run although the turn may still fail."""
        if starts_early(self.state, call):
            self._record(EarlyIntent(call, attempt))
            self._early[call.place] = asyncio.create_task(self._run_early(self._tool_call(call)))

    async def _run_early(self, call: ToolCall) -> ToolResult:
        await self.journal.flush()
        return await self._result(call, resumed=False)

    def _early_ends(self, outcome: Outcome) -> list[EarlyEnd]:
        """Return the ends of the early calls whose answers are not used, and stop them.

        ``outcome`` is that of a call without a result.
        """
        ends = []
        for early in self.state.unexplained:
            task = self._early.pop(early.call.place, None)
            known = outcome if task is None else Outcome.CANCELLED
            if task is not None and task.done() and not task.cancelled() and task.exception() is None:
                known = task.result().outcome
            elif task is not None:
                task.cancel()
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
            ends.append(EarlyEnd(*early.call.place, early.attempt, known))
        return ends

    async def _explain_early(self, outcome: Outcome) -> None:
        """Record why early calls are not used, and wait until these have stopped."""
        self._record(*self._early_ends(outcome))
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_S)

    # --- tools --------------------------------------------------------------------------------------------------------

    async def _call_tools(self, todo: CallTools) -> None:
        if not todo.resumed:
            self._record(ToolIntent(tuple(call.place for call in todo.calls)))
        await self.journal.flush()
        finished = asyncio.Event()
        notification = self._background(self._notify_round(todo.calls, finished))
        try:
            await run_all([self._run_tool(call, resumed=todo.resumed) for call in todo.calls])
        except BaseException:
            notification.cancel()
            raise
        finished.set()

    async def _run_tool(self, call: Call, *, resumed: bool) -> None:
        if (early := self._early.pop(call.place, None)) is not None:
            result = await early
        else:
            result = await self._result(self._tool_call(call), resumed=resumed)
        self._record(self._answer(call, result))
        if result.outcome is Outcome.STARTED:
            self._watch(call, resumed=False)
        else:
            self._observe(result)

    async def _result(self, call: ToolCall, *, resumed: bool) -> ToolResult:
        """Run a call, if the tenant may call the tool now: its log may be older than the configuration."""
        if self._may_call(call.tool):
            return await self._finished(asyncio.create_task(self._tools.run(call, self._definitions, resumed=resumed)))
        outcome = Outcome.UNKNOWN if resumed else Outcome.REFUSED  # REFUSED would mean that nothing was run
        text = f"{outcome}: this tenant may not use the tool {call.name[:MAX_REFUSED_NAME]!r}"
        return ToolResult(call.id, call.name, outcome, text, statistics_name=call.name)

    async def _finished(self, running: "asyncio.Task[ToolResult]") -> ToolResult:
        """Return the result of a call, which ends with its caller unless another runner has the run.

        The other runner waits for the same call, and may not have asked for it yet. Its deadline bounds it.
        """
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if self.journal.lost:
                _left_running.add(running)
                running.add_done_callback(_left_running.discard)
            else:
                running.cancel()
                await asyncio.wait((running,))
            raise

    def _watch(self, call: Call, *, resumed: bool) -> None:
        task = asyncio.create_task(self._until_late(call, resumed))
        self._late[call.place] = task
        task.add_done_callback(lambda _: self._late.pop(call.place, None))

    async def _until_late(self, call: Call, resumed: bool) -> None:
        tool_call = self._tool_call(call)
        try:
            result = await self._late_result(tool_call, resumed)
        except Exception:  # a bug of the tool runtime is this call's outcome, and does not end the run
            logger.exception("the asynchronous call %s has no known outcome", tool_call.id)
            text = f"{Outcome.UNKNOWN}: what became of {call.name} is not known; it may have taken effect"
            result = ToolResult(tool_call.id, call.name, Outcome.UNKNOWN, text, statistics_name=call.name)
        self._record(LateAnswer(self._answer(call, result)))
        self._observe(result)

    async def _late_result(self, call: ToolCall, resumed: bool) -> ToolResult:
        if resumed:
            result = await self._result(call, resumed=True)
            if result.outcome is not Outcome.STARTED:
                return result
        return await self._tools.completion(call.program, call.id)

    def _call(self, place: tuple[int, int]) -> Call:
        calls = (*self.state.spec.approved, *(call for turn in self.state.turns for call in turn.calls))
        return next(call for call in calls if call.place == place)

    def _tool_call(self, call: Call) -> ToolCall:
        """Return the call for the tool runtime. It is the same for every runner of the run."""
        own = f"{self.state.spec.id}/{call.turn}.{call.index}"
        if (early := self.state.early.get(call.place)) is not None:
            own = f"{own}/early-{early.attempt}"  # the turn may fail, and its next attempt have another call there
        offer = self.state.offer(call.name)
        return ToolCall(
            own,
            call.name,
            call.arguments,
            program=self._key,
            idempotency_key=own,
            deadline_s=self._left_s,
            traceparent=self._traceparent,
            tool=call.tool if offer is None or call.tool is not None else offer.tool,
            consent=call.consent and f"{self.state.spec.tenant}/{call.consent}",
            images=self.state.spec.sees,
        )

    def _answer(self, call: Call, result: ToolResult) -> ToolAnswer:
        text, images = kept_images(self.state.images, result)
        return ToolAnswer(
            call.turn,
            call.index,
            result.outcome,
            text,
            truncated=result.truncated,
            queue_s=result.queue_s,
            run_s=result.run_s,
            attempts=result.attempts,
            images=images,
        )

    async def _stop_work(self) -> None:
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait((self._work,), timeout=END_S)

    async def _stop_early(self) -> None:
        tasks = {*self._early.values(), *self._ending}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)

    def _sent_before(self) -> list[ToolCall]:
        """Return the calls that an earlier runner may have sent and that have no answer, not even STARTED."""
        sent = [call for call in self.state.waiting if call.place in self.state.sent]
        return [self._tool_call(call) for call in (*sent, *(early.call for early in self.state.unexplained))]

    async def _stop_calls(self, sent_before: Sequence[ToolCall]) -> None:
        """Stop waiting for asynchronous calls. End them, and those that an earlier runner has sent.

        All of them go on if another runner has the run, because it waits for calls with the same ids.
        """
        for task in self._late.values():
            task.cancel()
        late = [self._tool_call(self._call(place)) for place in self.state.late]
        for call in (*sent_before, *late):
            if not self.journal.lost:
                await self._tools.cancel(call.program, call.id)

    # --- notifications of the scheduler ------------------------------------------------------------------------------

    def _notify(self, operation: str, **payload: Any) -> None:
        self._background(self._notified(operation, payload))

    async def _notify_round(self, calls: Sequence[Call], finished: asyncio.Event) -> None:
        """Notify the replica of the start and the end of a round of tools, in order.

        Other notifications do not wait for it.

        A tool that answers at once is not reported, because the next turn reports the same just as early.
        """
        try:
            await asyncio.wait_for(finished.wait(), NOTIFY_AFTER_S)
        except TimeoutError:
            early = asyncio.create_task(self._early_output(calls).run())
            try:
                tools = [self.state.known_as(call, self._known_as) for call in calls]
                await self._notified("tool_started", {"tools": tools})
                await finished.wait()
            finally:
                early.cancel()
            await self._notified("tool_finished", {})

    def _early_output(self, calls: Sequence[Call]) -> EarlyOutput:
        return EarlyOutput(
            [(call, self._tool_call(call).id) for call in calls],
            lambda: self.state,
            lambda call_id, known: self._tools.output(self._key, call_id, known),
            lambda body: self._replicas.extend(self._key, body, continuation_of(self.state)),
            self._clock,
        )

    async def _notified(self, operation: str, payload: Mapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(NOTIFY_TIMEOUT_S):
                await self._replicas.tell(self._key, operation, payload)
        except Exception as error:  # noqa: BLE001 - knowledge, not duty: the scheduler goes by what it sees itself
            logger.debug("%s of %s: %r", operation, self._key, error)

    def _background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._notifications.add(task)
        task.add_done_callback(self._notifications.discard)
        return task


def _fault(error: BaseException) -> Fault:
    if isinstance(error, HttpError):
        code = "invalid_prompt" if error.status < 500 else "server_error"
        code = error.code if error.code in (CONTEXT_LENGTH_EXCEEDED, STORE_FULL) else code
        return Fault(code, error.message, error.status, error.param)
    logger.error("a run failed", exc_info=error)
    return Fault("server_error", "internal error")
