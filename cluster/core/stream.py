"""The protocol of a replica's stream: its pieces, and the progress from which another replica can continue it.

The events that a client gets are a pure function of the request and of the engine's outputs, as they were grouped. So
another replica that gets the outputs makes the same events again, skips those that were sent, and continues.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

Data = TypeVar("Data")


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known of a stream at the engine's first output."""

    prompt: bytes
    """`prompt_digest`: another replica has to make the same prompt."""
    cached_tokens: int | None
    """Cached tokens of the prompt, for `usage`."""
    stored_tokens: int | None = None
    """Tokens of the prompt that were written to a cache, for `usage`."""
    obstacle: str | None = None
    """Why no other replica can continue it exactly; None: one can."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the engine ended the output, in vLLM's words."""

    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a stream; beside a piece of it, what the piece adds."""

    events: int = 0
    """Server-sent events."""
    token_ids: bytes = b""
    """Token ids of the outputs, packed by `turn.pack_ids`. They may be ahead of the events, never behind."""
    sizes: bytes = b""
    """The number of ids of each output, packed alike."""
    begun: Begun | None = None
    ending: Ending | None = None
    created: str = ""
    """The time in the first event, as its digits."""


@dataclass(frozen=True, slots=True)
class StreamChunk(Generic[Data]):
    """A piece of a stream, and the progress that it adds."""

    progress: Progress
    data: Data


def joined(steps: Iterable[Progress]) -> Progress:
    """The sum of steps, in their order."""
    steps = list(steps)
    return Progress(
        sum(step.events for step in steps),
        b"".join(step.token_ids for step in steps),
        b"".join(step.sizes for step in steps),
        next((step.begun for step in steps if step.begun is not None), None),
        next((step.ending for step in steps if step.ending is not None), None),
        next((step.created for step in steps if step.created), ""),
    )


def prompt_digest(packed_ids: bytes) -> bytes:
    """A digest of a prompt's ids."""
    return blake2b(packed_ids, digest_size=16).digest()
