"""The words between whoever relays a replica's stream and the replicas: how far it has come, so that another goes on.

What a client has been sent is a pure function of the request and of the outputs of the engine, as they were grouped.
So another replica that is told the outputs makes the same events again, leaves out as many as have been sent, and goes
on from there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

Data = TypeVar("Data")


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known of a stream when the engine's first output is there."""

    prompt: bytes
    """`prompt_digest`: the other replica has to make the same prompt."""
    cached_tokens: int | None
    """Of the prompt; told in `usage`, like the next."""
    stored_tokens: int | None = None
    """Of the prompt, written to a cache."""
    obstacle: str | None = None
    """Why no other replica can go on with it exactly; None: one can."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the engine's last output is the last; vLLM's words."""

    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stream has come; or, beside a piece of it, what that adds."""

    events: int = 0
    """Server-sent events that came of it."""
    token_ids: bytes = b""
    """Of the outputs, as `cluster.turn.pack_ids` writes them. They may be ahead of the events, never behind."""
    sizes: bytes = b""
    """How many each output had; packed alike."""
    begun: Begun | None = None
    ending: Ending | None = None
    created: str = ""
    """The time that the first event tells, in its digits."""


@dataclass(frozen=True, slots=True)
class Told(Generic[Data]):
    """A piece of a stream, and how far it has come with it."""

    progress: Progress
    data: Data


def joined(steps: Iterable[Progress]) -> Progress:
    """All that they add, in their order."""
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
    """A name for a prompt's ids."""
    return blake2b(packed_ids, digest_size=16).digest()
