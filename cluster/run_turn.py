"""A run's turn: what a replica is asked for, and its pieces put together."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cluster.errors import HttpError
from cluster.program import ProgramIdentity
from cluster.run import AskTurn, RunState
from cluster.run_events import Call, CallPiece, Generated, TurnResult
from cluster.turn import ID_BYTES, Rendering, TurnBegan, TurnDelta, TurnDone, TurnPiece


def turn_body(state: RunState, todo: AskTurn) -> dict[str, Any]:
    """A chat completions body with the whole conversation."""
    spec = state.spec
    body: dict[str, Any] = {**spec.sampling, "model": spec.model, "messages": list(state.messages)}
    body["max_completion_tokens"] = spec.limits.output_tokens - state.output_tokens
    if spec.offers:
        body["tools"] = [{"type": "function", "function": offer.function} for offer in spec.offers]
        body["parallel_tool_calls"] = spec.parallel
        if todo.tool_choice is not None:
            body["tool_choice"] = todo.tool_choice
    return body


def turn_identity(state: RunState, todo: AskTurn, known_as: Callable[[Call], str]) -> ProgramIdentity:
    """Whose turn it is, with what is known of the tools before and after it."""
    identity = ProgramIdentity.decode(state.spec.identity)
    hints = identity.hints
    if state.calls:
        hints = replace(hints, last_tool="+".join(sorted({known_as(call) for call in state.calls})))
    if isinstance(todo.tool_choice, dict):
        named = todo.tool_choice.get("function", {}).get("name")
        hints = replace(hints, expected_tool=named or hints.expected_tool)
    return replace(identity, tenant=state.spec.tenant, program_id=state.spec.program, hints=hints)


class TurnText:
    """A turn's pieces, put together."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._began: TurnBegan | None = None
        self._done: TurnDone | None = None
        self._ids = bytearray()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[CallPiece]] = {}

    def take(self, piece: TurnPiece) -> Generated | None:
        """What the log is told of it, if anything."""
        match piece:
            case TurnBegan():
                self._began = piece
            case TurnDone():
                self._done = piece
            case TurnDelta():
                return self._take(piece)
        return None

    def _take(self, piece: TurnDelta) -> Generated | None:
        self._ids += piece.token_ids
        self._content.append(piece.content)
        self._reasoning.append(piece.reasoning)
        pieces = tuple(CallPiece(delta.index, delta.id, delta.name, delta.arguments) for delta in piece.calls)
        for said in pieces:
            self._calls.setdefault(said.index, []).append(said)
        if not (piece.content or piece.reasoning or pieces):
            return None
        return Generated(self._number, piece.content, piece.reasoning, pieces)

    @property
    def tokens(self) -> int:
        """That have come."""
        return len(self._ids) // ID_BYTES

    def result(self, began_s: float, ended_s: float) -> TurnResult:
        """The whole turn.

        Raises:
            HttpError: the replica ended before the turn did.
        """
        if self._began is None or self._done is None:
            raise HttpError("the replica ended before the turn was complete", status=502)
        done = self._done
        return TurnResult(
            self._number,
            self._began.rendering is Rendering.CONTINUED,
            self._began.rendering,
            self._began.added_ids,
            bytes(self._ids),
            done.finish_reason,
            done.prompt_tokens,
            done.cached_tokens,
            done.output_tokens,
            began_s,
            ended_s,
            "".join(self._content),
            "".join(self._reasoning),
            tuple(_joined(self._number, index, said) for index, said in sorted(self._calls.items())),
        )


def _joined(turn: int, index: int, pieces: Sequence[CallPiece]) -> Call:
    call_id = next((piece.id for piece in pieces if piece.id), f"call_{turn}_{index}")
    name = "".join(piece.name for piece in pieces if piece.name)
    return Call(turn, index, call_id, name, "".join(piece.arguments for piece in pieces))
