"""The output of a tool that still runs. The model's replica computes it into the context before the tool has ended."""

import asyncio
from collections.abc import Iterable

from tools_runtime.text import bounded, settled

LEAST_CHARS = 256
"""Fewest characters of new output for which a reader is woken."""

MAX_CHARS = 256 << 10
"""Characters of output that are kept before the end. More is not computed early."""


class PartialOutput:
    """The output of one call as far as it has come. The final answer replaces it, whatever it is.

    Args:
        cap_bytes: size of an answer, as in `tools_runtime.text.bounded`.
        special_tokens: tokens of the model that are escaped, likewise.
    """

    def __init__(self, cap_bytes: int, special_tokens: Iterable[str]) -> None:
        self._cap_bytes = cap_bytes
        self._special_tokens = tuple(special_tokens)
        self._pieces: list[str] = []
        """What was written and is not in ``_text``."""
        self._chars = 0
        self._text = ""
        self._room = cap_bytes
        """Bytes that ``_text`` may still grow by."""
        self._cut = False
        """Whether ``_text`` has reached the cap, so that nothing more belongs to it."""
        self._grown = asyncio.Event()
        self._closed = False

    def begin(self) -> None:
        """Begin again, because the tool is started again."""
        self._pieces.clear()
        self._chars = 0
        self._text, self._room, self._cut = "", self._cap_bytes, False

    def write(self, piece: str) -> None:
        """Add a piece of the output."""
        if self._chars < MAX_CHARS and not self._cut:
            self._pieces.append(piece)
            self._chars += len(piece)
            self._grown.set()

    def close(self) -> None:
        """End the output, because the call has ended."""
        self._closed = True
        self._grown.set()

    def text(self) -> str:
        """Return the beginning of the answer that does not depend on what follows. Its special tokens are escaped."""
        if not self._pieces:
            return self._text
        # What is settled is escaped in the same way whatever follows, so that each piece is escaped only once.
        raw = "".join(self._pieces)
        ready = settled(raw, self._special_tokens)
        self._pieces = [raw[len(ready) :]] if len(ready) < len(raw) else []
        more, self._cut = bounded(ready, self._room, self._special_tokens)
        self._text += more
        self._room -= len(more.encode())
        if self._cut:
            self._pieces.clear()
        return self._text

    async def beyond(self, known: int) -> str | None:
        """Wait until there are LEAST_CHARS more characters than ``known``. Return all text, or None after the end."""
        while not self._closed:
            self._grown.clear()
            # Escapes make the text longer, and what is not settled makes it shorter.
            if self._chars >= LEAST_CHARS and len(text := self.text()) >= known + LEAST_CHARS:
                return text
            await self._grown.wait()
        return None
