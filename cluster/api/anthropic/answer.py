"""Folds the pieces of a turn into Anthropic's events and into a whole message.

A tool call appears only when it is complete, see `cluster.core.tools.split_complete`: many clients run each `tool_use`
that they get, whatever the stop reason is. Its `input_json_delta` therefore comes in one piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster.api.anthropic.content import Content, Event, input_of, usage
from cluster.core.tools import ENDED_WITH_CALLS, split_complete
from cluster.core.turn import ID_BYTES, CallDelta, TurnBegan, TurnDelta, TurnDone, TurnPiece

PING: Event = {"type": "ping"}


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def block(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": input_of("".join(self.arguments))}


class MessageFold:
    """Builds the answer to a Messages request from the pieces of its turn.

    Args:
        message_id: the id of the message.
        model: the model's name.
    """

    def __init__(self, message_id: str, model: str) -> None:
        self._id = message_id
        self._model = model
        self._content = Content()
        self._calls: dict[int, _Call] = {}
        self._usage = usage(0, 0, 0)
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        self.output_tokens = 0
        """Number of tokens generated so far."""
        self.done = False
        """Whether the turn has ended."""

    def message(self) -> dict[str, Any]:
        """Return the message as it is now."""
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": list(self._content.blocks), **self._stop, "usage": self._usage}

    def take(self, piece: TurnPiece) -> list[Event]:
        """Process a piece. Return the events that it makes."""
        match piece:
            case TurnBegan():
                # A prompt that vLLM has rendered reports all its ids. How many were cached is known at the end.
                self._usage = usage(len(piece.added_ids) // ID_BYTES, 0, 0)
                return [{"type": "message_start", "message": self.message()}]
            case TurnDelta():
                self.output_tokens += len(piece.token_ids) // ID_BYTES
                return list(self._delta(piece))
            case TurnDone():
                return list(self._done(piece))

    def _delta(self, piece: TurnDelta) -> Iterator[Event]:
        if piece.reasoning:
            yield from self._content.grow("thinking", piece.reasoning)
        if piece.content:
            yield from self._content.grow("text", piece.content)
        for part in piece.calls:
            self._take_call(part)

    def _take_call(self, part: CallDelta) -> None:
        call = self._calls.setdefault(part.index, _Call())
        call.id = call.id or part.id or ""
        call.name = call.name or part.name or ""
        call.arguments.append(part.arguments)

    def _done(self, piece: TurnDone) -> Iterator[Event]:
        self.done, self.output_tokens = True, piece.output_tokens
        yield from self._content.close()
        calls = [call for _, call in sorted(self._calls.items())]
        complete, _ = split_complete(calls, piece.finish_reason)
        for place, call in enumerate(complete):
            call.id = call.id or f"toolu_{self._id.removeprefix('msg_')}_{place}"
            yield from self._content.call(call.block())
        self._usage = usage(piece.prompt_tokens, piece.cached_tokens, piece.output_tokens)
        self._stop = {"stop_reason": _stop_reason(piece), "stop_sequence": piece.stop_sequence}
        yield {"type": "message_delta", "delta": dict(self._stop), "usage": self._usage}
        yield {"type": "message_stop"}


def _stop_reason(piece: TurnDone) -> str:
    if piece.stop_sequence is not None:
        return "stop_sequence"
    if piece.finish_reason == ENDED_WITH_CALLS:
        return "tool_use"
    return "end_turn" if piece.finish_reason == "stop" else "max_tokens"
