"""The protocol of a replica's stream: its pieces, and the progress from which another replica can continue it.

The events that a client receives are a pure function of the request and of the engine's outputs, as they were grouped.
Another replica that receives these outputs makes the same events again, skips those that were sent, and continues.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Generic, TypeVar

import msgspec

from cluster.core.turn_tokens import TurnTokens, WeightSpan

Data = TypeVar("Data")


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """The properties of a stream that are known at the engine's first output."""

    prompt: bytes
    """`prompt_digest` of the prompt. Another replica can continue only if it makes the same prompt."""
    cached_tokens: int | None
    """Cached tokens of the prompt, for `usage`; None: the engine did not report them."""
    stored_tokens: int | None = None
    """Tokens of the prompt that were written to a cache, for `usage`; None: they were not reported."""
    obstacle: str | None = None
    """The reason why no other replica can continue the stream exactly; None: another replica can."""


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """The reason why the engine ended the output, in vLLM's terms."""

    finish_reason: str
    stop_reason: int | str | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one token of an output: the token's own, then those of the alternatives that were wanted."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int | None, ...]
    """The place of each in the vocabulary, from 1."""
    texts: tuple[str | None, ...]


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a stream. In a `StreamChunk` it is the progress that the chunk adds."""

    events: int = 0
    """Number of server-sent events."""
    token_ids: bytes = b""
    """Token ids of the outputs, packed by `turn.pack_ids`. They may be ahead of the events, but never behind them."""
    sizes: bytes = b""
    """Number of ids of each output, packed by `turn.pack_ids`."""
    begun: Begun | None = None
    ending: Ending | None = None
    created: str = ""
    """The field `created` of the first event, as its digits; empty before the first event."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token id, if the request wants them or its tokens are recorded."""
    weights: tuple[WeightSpan, ...] = ()
    """The versions of the weights that computed the output so far; empty: nothing new. A later value replaces it."""
    record: TurnTokens | None = None
    """The tokens of the whole turn, at its end, if they are recorded."""
    alone_s: float | None = None
    """See `cluster.core.slo.TurnRecord.alone_s`. It is known at the end at the latest."""
    output_tokens: int = 0
    """Number of output tokens of all answers. They are counted also where no other replica can continue the stream."""
    prompt_tokens: int | None = None
    """Number of prompt tokens. None: nothing new, or the answer is a stream."""


class StreamChunk(msgspec.Struct, Generic[Data], frozen=True):
    """A piece of a stream, and the progress that it adds."""

    progress: Progress
    data: Data


def joined(steps: Iterable[Progress]) -> Progress:
    """Return the sum of steps of progress, which are given in their order."""
    steps = list(steps)
    return Progress(
        sum(step.events for step in steps),
        b"".join(step.token_ids for step in steps),
        b"".join(step.sizes for step in steps),
        next((step.begun for step in steps if step.begun is not None), None),
        next((step.ending for step in steps if step.ending is not None), None),
        next((step.created for step in steps if step.created), ""),
        tuple(one for step in steps for one in step.logprobs),
        next((step.weights for step in reversed(steps) if step.weights), ()),
        next((step.record for step in reversed(steps) if step.record is not None), None),
        next((step.alone_s for step in steps if step.alone_s is not None), None),
        sum(step.output_tokens for step in steps),
        next((step.prompt_tokens for step in steps if step.prompt_tokens is not None), None),
    )


def prompt_digest(packed_ids: bytes) -> bytes:
    """Return a 16-byte digest of a prompt's packed token ids."""
    return blake2b(packed_ids, digest_size=16).digest()
