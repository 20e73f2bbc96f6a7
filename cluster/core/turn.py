"""The protocol of a turn between the program runner and a replica: its continuation, and its pieces."""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_WIDTH = "I"  # four bytes everywhere that CPython runs; checked below

ID_BYTES = 4
"""Size of a packed token id."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids, each as four bytes, little end first."""
    packed = array(_WIDTH, ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse of :func:`pack_ids`.

    Raises:
        ValueError: ``packed`` does not hold whole ids.
    """
    ids = array(_WIDTH)
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


class PromptMode(StrEnum):
    """How a turn's prompt was made."""

    FIRST = "first"
    """From its messages; there was no continuation."""
    CONTINUED = "continued"
    """From the exact ids so far, and those of the new messages."""
    RENDERED_AGAIN = "rendered_again"
    """From its messages, although there were ids: the template does not extend its former output."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The ids that a turn continues from."""

    token_ids: bytes
    """All ids so far, prompts and outputs, as `pack_ids` writes them."""
    messages: int
    """The number of leading messages that the ids stand for; the last of these is the assistant's."""


@dataclass(frozen=True, slots=True)
class TurnBegan:
    """The prompt is made: the continuation's ids (none if it was rendered from messages), then ``added_ids``."""

    rendering: PromptMode
    added_ids: bytes


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call. Only its first piece has ``id`` and ``name``."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """The parsed output since the last piece, and its token ids."""

    token_ids: bytes = b""
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnDone:
    """The turn is over."""

    finish_reason: str
    """The engine's: stop, length, repetition; or tool_calls, if the model itself ended the turn after a call."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


TurnPiece = TurnBegan | TurnDelta | TurnDone

if array(_WIDTH).itemsize != 4:  # pragma: no cover
    raise ImportError("this platform's unsigned int is not four bytes wide")
