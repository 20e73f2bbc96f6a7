"""Replicas and tools that follow a script, for the runner's own tests; end-to-end tests use real ones."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.core.errors import HttpError
from cluster.core.program import ProgramIdentity
from cluster.core.tools import Outcome, ToolCall, ToolResult
from cluster.core.turn import (
    CallDelta,
    Continuation,
    PromptMode,
    TurnBegan,
    TurnDelta,
    TurnDone,
    TurnPiece,
    pack_ids,
    unpack_ids,
)

Script = list[TurnPiece | HttpError | asyncio.Event]
"""What a turn yields; an event is waited for."""


def says(
    text: str,
    *calls: tuple[str, str],
    first_id: int = 100,
    finish: str | None = None,
    answer_chars: int | None = None,
) -> Script:
    """A turn that says ``text`` in two pieces, and calls tools by (name, arguments).

    Args:
        text: the content.
        calls: its tool calls.
        first_id: of its tokens.
        finish: why it ended; None: the model ended it.
        answer_chars: to which its prompt's answers were cut.
    """
    pieces = tuple(CallDelta(index, f"call_{first_id}_{index}", name, args) for index, (name, args) in enumerate(calls))
    half = len(text) // 2
    return [
        TurnBegan(PromptMode.CONTINUED, pack_ids([first_id]), answer_chars),
        TurnDelta(pack_ids([first_id + 1]), text[:half]),
        TurnDelta(pack_ids([first_id + 2]), text[half:], calls=pieces),
        TurnDone(finish or ("tool_calls" if calls else "stop"), 10, 8, 2),
    ]


@dataclass
class ScriptedReplicas:
    """Turns in order, whoever asks."""

    turns: list[Script]
    asked: list[dict[str, Any]] = field(default_factory=list)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    prior: list[list[int]] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)
    """Places of the messages that each turn may shorten."""
    identities: list[ProgramIdentity] = field(default_factory=list)
    stuck: frozenset[str] = frozenset()
    """Notifications that never arrive."""
    extended: list[tuple[dict[str, Any], list[int]]] = field(default_factory=list)
    """The bodies of next turns as far as they were known, with the ids from which they continue."""
    extend_ends: list[str | None] = field(default_factory=list)
    """Answers to these, in order; then None."""
    closed: int = 0
    """Turns that were left before their end."""

    async def turn(
        self,
        key: str,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        continuation: Continuation | None,
        *,
        answers: Sequence[int] = (),
    ) -> AsyncIterator[TurnPiece | HttpError]:
        self.asked.append(dict(body))
        self.answers.append(tuple(answers))
        self.prior.append([] if continuation is None else unpack_ids(continuation.token_ids))
        self.identities.append(identity)
        try:
            for piece in self.turns.pop(0):
                if isinstance(piece, asyncio.Event):
                    await piece.wait()
                else:
                    yield piece
        except (GeneratorExit, asyncio.CancelledError):
            self.closed += 1
            raise

    async def extend(self, key: str, body: Mapping[str, Any], continuation: Continuation | None) -> str | None:
        self.extended.append((dict(body), [] if continuation is None else unpack_ids(continuation.token_ids)))
        return self.extend_ends.pop(0) if self.extend_ends else None

    async def tell(self, key: str, operation: str, payload: Mapping[str, Any]) -> None:
        if operation in self.stuck:
            await asyncio.Event().wait()
        self.told.append((operation, dict(payload)))


@dataclass
class ScriptedTools:
    """Each tool is a function of the call; what was run is kept, and a resumed call joins what is under way."""

    functions: dict[str, Callable[[ToolCall], Any]]
    ran: list[ToolCall] = field(default_factory=list)
    resumed: list[ToolCall] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    late: dict[str, "asyncio.Future[ToolResult]"] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    """Output of the running calls, by the name of the tool."""
    ended: set[str] = field(default_factory=set)
    """Names of the tools that have answered."""

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        if resumed:
            self.resumed.append(call)
            if call.name == "once":
                return ToolResult(call.id, call.name, Outcome.UNKNOWN, "unknown: it may have taken effect")
        self.ran.append(call)
        try:
            answer = self.functions[call.name](call)
            text = await answer if asyncio.iscoroutine(answer) else answer
        except asyncio.CancelledError:
            self.cancelled.append(call.id)
            raise
        self.ended.add(call.name)
        if call.name == "slowly":
            self.late.setdefault(call.id, asyncio.get_running_loop().create_future())
            return ToolResult(call.id, call.name, Outcome.STARTED, "started", statistics_name=call.name)
        return ToolResult(call.id, call.name, Outcome.OK, text, statistics_name=call.name)

    async def output(self, program: str, call_id: str, known: int) -> str | None:
        name = next((call.name for call in self.ran if call.id == call_id), "")
        while len(text := self.written.get(name, "")) <= known:
            if name in self.ended or name not in self.written:
                return None
            await asyncio.sleep(0.005)
        return text

    async def completion(self, program: str, call_id: str) -> ToolResult:
        return await asyncio.shield(self.late[call_id])

    async def cancel(self, program: str, call_id: str) -> bool:
        self.cancelled.append(call_id)
        if call_id in self.late and not self.late[call_id].done():
            self.late[call_id].set_result(ToolResult(call_id, "slowly", Outcome.CANCELLED, "cancelled"))
        return True
