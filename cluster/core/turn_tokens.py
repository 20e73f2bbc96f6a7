"""The token ids of one turn and the log probabilities of its output, as they are recorded on request."""

import sys
from array import array
from collections.abc import Iterable

import msgspec

_FLOAT = "f"  # four bytes everywhere that CPython runs


INITIAL_WEIGHTS = "default"
"""vLLM's name of the version of the weights with which an engine starts."""


class WeightSpan(msgspec.Struct, frozen=True, array_like=True):
    """The version of the model's weights that computed the output from a token on."""

    start: int
    """Number of the first output token, from 0."""
    version: str


class AnswerTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one answer of a turn. A turn has several if the request asks for several (`n`)."""

    index: int
    token_ids: bytes
    """Packed by `turn.pack_ids`."""
    logprobs: bytes
    """Log probability of each token, packed by `pack_logprobs`."""
    finish_reason: str
    """The engine's reason: `stop`, `length`, ..."""
    stop_reason: int | str | None
    """The stop string or the token id that ended it, if one did."""
    weights: tuple[WeightSpan, ...]


class TurnTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one turn that has ended."""

    prompt: bytes
    """Packed by `turn.pack_ids`."""
    answers: tuple[AnswerTokens, ...]


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Pack log probabilities, each as four bytes, little-endian. Engines compute them with this precision."""
    packed = array(_FLOAT, logprobs)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_logprobs(packed: bytes) -> list[float]:
    """Unpack what :func:`pack_logprobs` packed.

    Raises:
        ValueError: the length of ``packed`` is not a multiple of four.
    """
    logprobs: array[float] = array(_FLOAT)
    logprobs.frombytes(packed)
    if sys.byteorder == "big":
        logprobs.byteswap()
    return list(logprobs)
