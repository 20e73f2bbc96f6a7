"""The protocol of a turn between the program runner and a replica: the turn's continuation and its pieces."""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

_WIDTH = "I"  # four bytes everywhere that CPython runs; checked below

ID_BYTES = 4
"""Size of a packed token id (bytes)."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack token ids, each as four bytes, little-endian."""
    packed = array(_WIDTH, ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Unpack the token ids that :func:`pack_ids` packed.

    Raises:
        ValueError: the length of ``packed`` is not a multiple of `ID_BYTES`.
    """
    ids = array(_WIDTH)
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


class PromptMode(StrEnum):
    """The way in which a turn's prompt was made."""

    FIRST = "first"
    """The prompt was rendered from the turn's messages, as there was no continuation."""
    CONTINUED = "continued"
    """The prompt is the exact ids so far, followed by the ids of the new messages."""
    RENDERED_AGAIN = "rendered_again"
    """The prompt was rendered from all messages, although there were ids, because the chat template's new output does
    not
    extend its earlier output."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The token ids from which a turn continues."""

    token_ids: bytes
    """All ids of prompts and outputs so far, packed by `pack_ids`."""
    messages: int
    """Number of leading messages that the ids represent. The last of them is the assistant's."""


class TurnBegan(msgspec.Struct, frozen=True, tag=True):
    """The turn's prompt was made: the continuation's ids (none if it was rendered from messages) and ``added_ids``."""

    rendering: PromptMode
    added_ids: bytes
    answer_chars: int | None = None
    """Characters that the prompt has of each longer answer of a tool, see `cluster.core.answer_cut`. None: it has all
    answers whole."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call. Only its first piece has ``id`` and ``name``."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class TurnDelta(msgspec.Struct, frozen=True, tag=True):
    """The parsed output since the last piece, and its token ids."""

    token_ids: bytes = b""
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    """Log probabilities of the content's tokens, as the entries of a chat completion. Empty: they are not wanted."""


class TurnDone(msgspec.Struct, frozen=True, tag=True):
    """The turn is over."""

    finish_reason: str
    """The engine's reason (`stop`, `length`, `repetition`), or `tool_calls` if the model itself ended the turn after a
    tool call."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    stop_sequence: str | None = None
    """The stop string that ended the turn, if one did."""
    alone_s: float | None = None
    """See `cluster.core.slo.TurnRecord.alone_s`."""


TurnPiece = TurnBegan | TurnDelta | TurnDone

if array(_WIDTH).itemsize != 4:  # pragma: no cover
    raise ImportError("this platform's unsigned int is not four bytes wide")
