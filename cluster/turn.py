"""The words between a program runner and a replica: what a turn goes on from, and what it says piece by piece."""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_WIDTH = "I"  # four bytes everywhere that CPython runs; checked below

ID_BYTES = 4
"""Of a packed id."""


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


class Rendering(StrEnum):
    """How a turn's prompt was made."""

    FIRST = "first"
    """From its messages; there was nothing to go on from."""
    CONTINUED = "continued"
    """The exact ids so far, and those of the new messages."""
    RENDERED_AGAIN = "rendered_again"
    """From its messages, although there were ids: the template does not extend what it wrote before."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a turn goes on from."""

    token_ids: bytes
    """All ids so far, prompts and outputs, as `pack_ids` writes them."""
    messages: int
    """How many of the turn's messages they stand for, from the first; the last of these is the assistant's."""


@dataclass(frozen=True, slots=True)
class TurnBegan:
    """The prompt is made. It is the continuation's ids (none if it was rendered from messages), then ``added_ids``."""

    rendering: Rendering
    added_ids: bytes


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call. ``id`` and ``name`` come once, with its first piece."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """What was generated since the last piece, parsed, and its ids."""

    token_ids: bytes = b""
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnDone:
    """The turn is over."""

    finish_reason: str
    """vLLM's: stop, length, tool_calls, ..."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


TurnPiece = TurnBegan | TurnDelta | TurnDone

if array(_WIDTH).itemsize != 4:  # pragma: no cover
    raise ImportError("this platform's unsigned int is not four bytes wide")
