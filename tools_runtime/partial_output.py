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
        self._chars = 0
        self._grown = asyncio.Event()
        self._closed = False

    def begin(self) -> None:
        """Begin again, because the tool is started again."""
        self._pieces.clear()
        self._chars = 0

    def write(self, piece: str) -> None:
        """Add a piece of the output."""
        if self._chars < MAX_CHARS:
            self._pieces.append(piece)
            self._chars += len(piece)
            self._grown.set()

    def close(self) -> None:
        """End the output, because the call has ended."""
        self._closed = True
        self._grown.set()

    def text(self) -> str:
        """Return the beginning of the answer that does not depend on what follows. Its special tokens are escaped."""
        self._pieces = ["".join(self._pieces)]
        text, _ = bounded(settled(self._pieces[0], self._special_tokens), self._cap_bytes, self._special_tokens)
        return text

    async def beyond(self, known: int) -> str | None:
        """Wait until there are LEAST_CHARS more characters than ``known``. Return all text, or None after the end."""
        while not self._closed:
            self._grown.clear()
            # Escapes make the text longer, and what is not settled makes it shorter.
            if self._chars >= LEAST_CHARS and len(text := self.text()) >= known + LEAST_CHARS:
                return text
            await self._grown.wait()
        return None
