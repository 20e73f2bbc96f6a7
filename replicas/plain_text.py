"""Keeps special tokens in a client's text as text.

vLLM encodes a rendered prompt as a whole, so that the text ``<|im_end|>`` in a message would become the token that ends
the message. Here it is escaped as in a tool's answer (`tools_runtime.text`): the sign U+241B and a dot come after its
first character. The chat template's own tokens are not touched. Escaped text is not changed again, so that a program's
messages are rendered the same in every turn.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

BREAK = "\u241b."
"""What is put after the first character of a special token."""

KEPT = frozenset({"role", "type", "id", "tool_call_id", "image_url", "input_audio", "audio_url", "video_url", "file"})
"""Fields of a message that are no text of the prompt."""


class PlainText:
    """Escapes special tokens in the texts of a request.

    Args:
        special: the tokenizer's special tokens. Those of one character cannot be escaped and stay.
    """

    def __init__(self, special: Iterable[str]) -> None:
        tokens = sorted({token for token in special if len(token) > 1}, key=len, reverse=True)
        # One character at a time, each where a token begins: of tokens that overlap, every one is broken.
        self._begin = re.compile(f"(?={'|'.join(map(re.escape, tokens))})(.)", re.DOTALL) if tokens else None

    def text(self, text: str) -> str:
        """Return the text without special tokens."""
        return text if self._begin is None else self._begin.sub(rf"\1{BREAK}", text)

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with each of its texts escaped: content, parts, reasoning and arguments of calls."""
        return {key: part if key in KEPT else self._value(part) for key, part in message.items()}

    def schema(self, schema: Any) -> Any:
        """Return a tool's parameters with their descriptions escaped. Names and values stay, since they are matched."""
        if isinstance(schema, list):
            return [self.schema(part) for part in schema]
        if not isinstance(schema, dict):
            return schema
        return {
            key: self.text(part) if key == "description" and isinstance(part, str) else self.schema(part)
            for key, part in schema.items()
        }

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self._value(part) for part in value]
        return self.message(value) if isinstance(value, Mapping) else value
