"""The content of a message that is being made: its blocks, and the events with which they begin, grow and end."""

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from cluster.core.tools import is_object

UNPARSED = "unparsed_arguments"
"""The only key of the `input` of a call whose arguments are no JSON object. The client's own check then rejects it."""

Event = dict[str, Any]
Block = dict[str, Any]


def signature(thinking: str) -> str:
    """Return the signature of a thinking block: a digest of its text, because clients reject an empty one."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def input_of(arguments: str) -> dict[str, Any]:
    """Return the `input` of a call with these arguments, which should be the text of a JSON object."""
    if not arguments.strip():
        return {}
    parsed: dict[str, Any] = json.loads(arguments) if is_object(arguments) else {UNPARSED: arguments}
    return parsed


def usage(prompt: int, cached: int, output: int) -> dict[str, int]:
    """Return Anthropic's usage, in which `input_tokens` are those that were not cached."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


class Content:
    """The blocks so far. Only the last one may be growing."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        """The text or thinking block that is being generated."""

    def grow(self, kind: str, piece: str) -> Iterator[Event]:
        """Add generated text.

        Args:
            kind: `text` or `thinking`. If the last block is another one, a block begins.
            piece: the text.
        """
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            self._open = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            self.blocks.append(self._open)
            yield self._start(dict(self._open))
        self._open[kind] += piece
        yield self._changed({"type": f"{kind}_delta", kind: piece})

    def close(self) -> Iterator[Event]:
        """End the block that is being generated, if there is one."""
        if self._open is None:
            return
        if self._open["type"] == "thinking":
            self._open["signature"] = signature(self._open["thinking"])
            yield self._changed({"type": "signature_delta", "signature": self._open["signature"]})
        self._open = None
        yield self._stop()

    def call(self, block: Block) -> Iterator[Event]:
        """Add a complete call, whose input arrives in one piece."""
        yield from self.close()
        self.blocks.append(block)
        yield self._start({**block, "input": {}})
        arguments = json.dumps(block["input"], ensure_ascii=False)
        yield self._changed({"type": "input_json_delta", "partial_json": arguments})
        yield self._stop()

    def whole(self, block: Block) -> Iterator[Event]:
        """Add a block that its first event has whole."""
        yield from self.close()
        self.blocks.append(block)
        yield self._start(block)
        yield self._stop()

    @property
    def _last(self) -> int:
        return len(self.blocks) - 1

    def _start(self, block: Block) -> Event:
        return {"type": "content_block_start", "index": self._last, "content_block": block}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": self._last}

    def _changed(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._last, "delta": delta}
