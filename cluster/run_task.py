"""One run at work: asks what comes next, does it, and records what became of it, until the run has ended.

Nothing is acted on before its intent is in the log. What a turn or a tool costs in time is bounded by the run's own
limits; what fails is retried where that is harmless, and else becomes the run's outcome.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from cluster.clock import Clock
from cluster.errors import HttpError, Overloaded, RunLeaseLost
from cluster.observing.logs import bind
from cluster.program import ProgramIdentity
from cluster.run import AskTurn, AwaitLate, CallTools, Finish, Refuse, RunState, next_step, step
from cluster.run_events import (
    MAX_WALL_TIME,
    Call,
    Ended,
    Fault,
    LateAnswer,
    RunEvent,
    ToolAnswer,
    ToolIntent,
    TurnIntent,
)
from cluster.run_journal import Journal
from cluster.run_turn import TurnText, turn_body, turn_identity
from cluster.run_watch import RunWatch
from cluster.tools import Outcome, ToolCall, ToolResult
from cluster.turn import Continuation, TurnPiece

logger = logging.getLogger("ray.serve")

RETRY_S = 0.5
"""Wait before a turn is asked for again."""

TELL_AFTER_S = 0.03
"""Seconds that a tool works before the scheduler is told that it does."""

END_S = 5.0
"""Seconds that a run whose time is up has to stop its tools and write its end."""


class Replicas(Protocol):
    """Where turns run."""

    def turn(
        self, key: str, body: Mapping[str, Any], identity: ProgramIdentity, continuation: Continuation | None
    ) -> AsyncIterator[TurnPiece | HttpError]:
        """The pieces of a turn on the replica that has the program; closing the iterator stops it."""
        ...

    async def tell(self, key: str, operation: str, payload: Mapping[str, Any]) -> None:
        """Run an operation of the side channel on the replica that has the program."""
        ...


class Tools(Protocol):
    """Where tools run: `tools_runtime.actor.ToolActors`."""

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """The call's one outcome."""
        ...

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """The answer of an asynchronous call, when it is there."""
        ...

    async def cancel(self, program: str, call_id: str) -> bool:
        """End a call."""
        ...


class RunTask:
    """A run at work.

    Args:
        state: what the log says so far.
        journal: where events go.
        replicas: run turns.
        tools: run tools.
        clock: for durations and the run's bound in time.
        left_s: seconds until its bound in time.
        definitions: the tools that the request brought, with their secrets.
        known_as: the name under which a call's duration is learnt.
        observe: told of each tool's result.
        watch: told of its turns.
    """

    def __init__(
        self,
        state: RunState,
        journal: Journal,
        replicas: Replicas,
        tools: Tools,
        clock: Clock,
        *,
        left_s: float,
        definitions: Mapping[str, Any],
        known_as: Callable[[Call], str],
        observe: Callable[[ToolResult], object],
        watch: RunWatch,
    ) -> None:
        self.state = state
        self.journal = journal
        self._replicas = replicas
        self._tools = tools
        self._clock = clock
        self._definitions = definitions
        self._known_as = known_as
        self._observe = observe
        self._watched = watch
        self._began_s = clock.now_s()
        self._deadline_s = self._began_s + left_s
        self._key = f"{state.spec.tenant}/{state.spec.program}"
        self._traceparent = ProgramIdentity.decode(state.spec.identity).traceparent
        self._late: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._tale: asyncio.Task[None] | None = None
        """What the replica is being told; each waits for the one before."""
        self._work: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Work until the run has ended, or is somebody else's.

        Raises:
            RunLeaseLost: it is somebody else's.
        """
        bind(program=self._key, run=self.state.spec.id)
        self._work = asyncio.create_task(self._until_done())
        try:
            done, _ = await asyncio.wait((self._work,), timeout=self._left_s)
            if not done:
                await self._stop_work()
                self._end(Finish("incomplete", MAX_WALL_TIME))
            elif self._work.cancelled():
                self._end(Finish("cancelled"))
            elif isinstance(error := self._work.exception(), RunLeaseLost):
                raise error
            elif error is not None:
                self._end(Finish("failed", fault=_fault(error)))
            await self.journal.flush()
            if self.state.spec.last:
                self._tell("end")
            elif self.state.ended is not None and self.state.ended.status == "cancelled":
                self._tell("release")  # most likely nobody comes back for what is held for its next turn
        finally:
            self._watched.ended(self.state.ended)
            await self._stop_work()
            await self._stop_late()

    def cancel(self) -> None:
        """End the run: the turn and the tools under way are stopped."""
        if self._work is not None:
            self._work.cancel()

    def abandon(self) -> None:
        """Stop: the run is somebody else's. Nothing more is written, and no end is recorded."""
        self._watched.ended(None)
        self.journal.abandon()
        self.cancel()

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - self._clock.now_s())

    # --- the loop -----------------------------------------------------------------------------------------------------

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
            # Counted from its beginning: the wall clock may have been set back since.
            spec = self.state.spec
            took_s = spec.limits.wall_s - (self._deadline_s - self._clock.now_s())
            self._record(Ended(finish.status, finish.reason, finish.fault, spec.created_s + took_s))

    # --- turns --------------------------------------------------------------------------------------------------------

    async def _turn(self, todo: AskTurn) -> None:
        self._record(TurnIntent(todo.turn, todo.attempt))
        self._watched.turn()
        await self.journal.flush()
        while True:
            try:
                await self._ask(todo)
                return
            except Overloaded as error:
                # Nothing was begun: it is not the turn's fault, and an accepted program is not given up for it.
                await asyncio.sleep(error.retry_after_s or RETRY_S)
            except HttpError as error:
                if error.status < 500:
                    raise
                logger.warning("turn %d of run %s failed: %s", todo.turn, self.state.spec.id, error.message)
                await asyncio.sleep(RETRY_S)
                return

    async def _ask(self, todo: AskTurn) -> None:
        bind(turn=todo.turn)
        state, began_s = self.state, self._clock.now_s()
        prior = Continuation(state.token_ids, state.covered) if state.token_ids else None
        turn = TurnText(todo.turn)
        pieces = self._replicas.turn(
            self._key, turn_body(state, todo), turn_identity(state, todo, self._known_as), prior
        )
        async with aclosing(pieces):  # type: ignore[type-var]
            async for piece in pieces:
                if isinstance(piece, HttpError):
                    raise piece
                if (news := turn.take(piece)) is not None:
                    self._record(news)
                self._watched.received(turn.tokens)
        self._record(turn.result(began_s - self._began_s, self._clock.now_s() - self._began_s))
        self._watched.answered()

    # --- tools --------------------------------------------------------------------------------------------------------

    async def _call_tools(self, todo: CallTools) -> None:
        if not todo.resumed:
            self._record(ToolIntent(tuple(call.place for call in todo.calls)))
        await self.journal.flush()
        telling = asyncio.create_task(self._tell_later(todo.calls))
        try:
            await _all([self._run_tool(call, resumed=todo.resumed) for call in todo.calls])
        finally:
            untold = telling.cancel()
        if not untold:
            self._tell("tool_finished")

    async def _run_tool(self, call: Call, *, resumed: bool) -> None:
        result = await self._tools.run(self._tool_call(call), self._definitions, resumed=resumed)
        self._record(_answer(call, result))
        if result.outcome is Outcome.STARTED:
            self._watch(call, resumed=False)
        else:
            self._observe(result)

    def _watch(self, call: Call, *, resumed: bool) -> None:
        task = asyncio.create_task(self._until_late(call, resumed))
        self._late[call.place] = task
        task.add_done_callback(lambda _: self._late.pop(call.place, None))

    async def _until_late(self, call: Call, resumed: bool) -> None:
        tool_call = self._tool_call(call)
        if resumed:
            result = await self._tools.run(tool_call, self._definitions, resumed=True)
            if result.outcome is Outcome.STARTED:
                result = await self._tools.completion(tool_call.program, tool_call.id)
        else:
            result = await self._tools.completion(tool_call.program, tool_call.id)
        self._record(LateAnswer(_answer(call, result)))
        self._observe(result)

    def _call(self, place: tuple[int, int]) -> Call:
        calls = (*self.state.spec.approved, *(call for turn in self.state.turns for call in turn.calls))
        return next(call for call in calls if call.place == place)

    def _tool_call(self, call: Call) -> ToolCall:
        """As the tool runtime knows it; the same whoever's turn it is to run it."""
        own = f"{self.state.spec.id}/{call.turn}.{call.index}"
        return ToolCall(
            own,
            call.name,
            call.arguments,
            program=self._key,
            idempotency_key=own,
            deadline_s=self._left_s,
            traceparent=self._traceparent,
        )

    async def _stop_work(self) -> None:
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait((self._work,), timeout=END_S)

    async def _stop_late(self) -> None:
        for place, task in list(self._late.items()):
            task.cancel()
            call = self._tool_call(self._call(place))
            await self._tools.cancel(call.program, call.id)

    # --- what the scheduler is told -----------------------------------------------------------------------------------

    async def _tell_later(self, calls: Sequence[Call]) -> None:
        """A tool that answers at once is not worth two messages: its next turn says the same as soon."""
        await asyncio.sleep(TELL_AFTER_S)
        self._tell("tool_started", tools=[self._known_as(call) for call in calls])

    def _tell(self, operation: str, **payload: Any) -> None:
        self._tale = asyncio.create_task(self._after(self._tale, operation, payload))

    async def _after(self, before: "asyncio.Task[None] | None", operation: str, payload: Mapping[str, Any]) -> None:
        if before is not None:
            await asyncio.wait((before,))
        try:
            await self._replicas.tell(self._key, operation, payload)
        except Exception as error:  # noqa: BLE001 - knowledge, not duty: the scheduler goes by what it sees itself
            logger.debug("%s of %s: %s", operation, self._key, error)


def _answer(call: Call, result: ToolResult) -> ToolAnswer:
    return ToolAnswer(
        call.turn,
        call.index,
        result.outcome,
        result.text,
        truncated=result.truncated,
        queue_s=result.queue_s,
        run_s=result.run_s,
        attempts=result.attempts,
    )


def _fault(error: BaseException) -> Fault:
    if isinstance(error, HttpError):
        code = "invalid_prompt" if error.status < 500 else "server_error"
        return Fault(code, error.message, error.status, error.param)
    logger.error("a run failed", exc_info=error)
    return Fault("server_error", "internal error")


async def _all(work: Sequence[Awaitable[None]]) -> None:
    """All of it together; where one fails, the others are stopped."""
    async with asyncio.TaskGroup() as group:
        for each in work:
            group.create_task(_awaited(each))


async def _awaited(work: Awaitable[None]) -> None:
    await work
