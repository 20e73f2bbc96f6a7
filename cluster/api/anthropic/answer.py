"""Folds the pieces of a turn into Anthropic's events and into a whole message.

A tool call appears only when it is complete, see `cluster.core.tools.split_complete`: many clients run each `tool_use`
that they get, whatever the stop reason is. Its `input_json_delta` therefore comes in one piece.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster.core.tools import ENDED_WITH_CALLS, is_object, split_complete
from cluster.core.turn import ID_BYTES, CallDelta, TurnBegan, TurnDelta, TurnDone, TurnPiece

UNPARSED = "unparsed_arguments"
"""The only key of the `input` of a call whose arguments are no JSON object. The client's own check then rejects it."""

Event = dict[str, Any]

PING: Event = {"type": "ping"}


def signature(thinking: str) -> str:
    """Return the signature of a thinking block: a digest of its text, because clients reject an empty one."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def block(self) -> dict[str, Any]:
        text = "".join(self.arguments)
        if not text.strip():
            arguments: dict[str, Any] = {}
        else:
            arguments = json.loads(text) if is_object(text) else {UNPARSED: text}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": arguments}


class MessageFold:
    """Builds the answer to a Messages request from the pieces of its turn.

    Args:
        message_id: the id of the message.
        model: the model's name.
    """

    def __init__(self, message_id: str, model: str) -> None:
        self._id = message_id
        self._model = model
        self._blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The text or thinking block that is being generated."""
        self._calls: dict[int, _Call] = {}
        self._usage = _usage(0, 0, 0)
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        self.output_tokens = 0
        """Number of tokens generated so far."""
        self.done = False
        """Whether the turn has ended."""

    def message(self) -> dict[str, Any]:
        """Return the message as it is now."""
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": list(self._blocks), **self._stop, "usage": self._usage}

    def take(self, piece: TurnPiece) -> list[Event]:
        """Process a piece. Return the events that it makes."""
        match piece:
            case TurnBegan():
                # A prompt that vLLM has rendered reports all its ids. How many were cached is known at the end.
                self._usage = _usage(len(piece.added_ids) // ID_BYTES, 0, 0)
                return [{"type": "message_start", "message": self.message()}]
            case TurnDelta():
                self.output_tokens += len(piece.token_ids) // ID_BYTES
                return list(self._delta(piece))
            case TurnDone():
                return list(self._done(piece))

    def _delta(self, piece: TurnDelta) -> Iterator[Event]:
        if piece.reasoning:
            yield from self._grow("thinking", piece.reasoning)
        if piece.content:
            yield from self._grow("text", piece.content)
        for part in piece.calls:
            self._take_call(part)

    def _take_call(self, part: CallDelta) -> None:
        call = self._calls.setdefault(part.index, _Call())
        call.id = call.id or part.id or ""
        call.name = call.name or part.name or ""
        call.arguments.append(part.arguments)

    def _grow(self, kind: str, piece: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            self._open = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            self._blocks.append(self._open)
            yield {"type": "content_block_start", "index": self._last, "content_block": dict(self._open)}
        self._open[kind] += piece
        yield self._changed({"type": f"{kind}_delta", kind: piece})

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open["type"] == "thinking":
            self._open["signature"] = signature(self._open["thinking"])
            yield self._changed({"type": "signature_delta", "signature": self._open["signature"]})
        self._open = None
        yield {"type": "content_block_stop", "index": self._last}

    def _done(self, piece: TurnDone) -> Iterator[Event]:
        self.done, self.output_tokens = True, piece.output_tokens
        yield from self._close()
        calls = [call for _, call in sorted(self._calls.items())]
        complete, _ = split_complete(calls, piece.finish_reason)
        for place, call in enumerate(complete):
            call.id = call.id or f"toolu_{self._id.removeprefix('msg_')}_{place}"
            yield from self._call(call.block())
        self._usage = _usage(piece.prompt_tokens, piece.cached_tokens, piece.output_tokens)
        self._stop = {"stop_reason": _stop_reason(piece), "stop_sequence": piece.stop_sequence}
        yield {"type": "message_delta", "delta": dict(self._stop), "usage": self._usage}
        yield {"type": "message_stop"}

    def _call(self, block: dict[str, Any]) -> Iterator[Event]:
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": self._last, "content_block": {**block, "input": {}}}
        arguments = json.dumps(block["input"], ensure_ascii=False)
        yield self._changed({"type": "input_json_delta", "partial_json": arguments})
        yield {"type": "content_block_stop", "index": self._last}

    @property
    def _last(self) -> int:
        return len(self._blocks) - 1

    def _changed(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._last, "delta": delta}


def _stop_reason(piece: TurnDone) -> str:
    if piece.stop_sequence is not None:
        return "stop_sequence"
    if piece.finish_reason == ENDED_WITH_CALLS:
        return "tool_use"
    return "end_turn" if piece.finish_reason == "stop" else "max_tokens"


def _usage(prompt: int, cached: int, output: int) -> dict[str, int]:
    """Return Anthropic's usage, in which `input_tokens` are those that were not cached."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
