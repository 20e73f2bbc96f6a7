"""Finds how much of the tools' answers fits into the context window, beside the rest of a turn's prompt.

An answer may be longer than the whole window. A program would then end with an error that neither the model nor the
caller can do anything about. Instead, the longest answers that the turn brings are shortened to a common length.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MIN_CHARS = 200
"""Characters that are left of an answer at least. The model can see from it what the answer is about."""

RESERVE_SHARE = 8
"""Where the prompt takes more than all but one part in this number of the window, answers are shortened: the model
needs room for its own answer, and for the next tool's."""

SEARCH_STEPS = 8
"""Number of prompts that are tried. The length that is found is within half a percent of the longest that fits."""


class Sized(Protocol):
    """A prompt that was made."""

    @property
    def tokens(self) -> int:
        """Its length in tokens. 0: it was not counted, because it is certainly short."""
        ...


Prompt = TypeVar("Prompt", bound=Sized)


@dataclass(frozen=True, slots=True)
class Fitted(Generic[Prompt]):
    """A prompt that fits."""

    prompt: Prompt
    chars: int | None = None
    """Characters that are left of each longer answer. None: no answer was shortened."""


async def fitted(
    make: Callable[[int | None], Awaitable[Prompt | None]], longest: int, window: int, wanted: int | None
) -> Fitted[Prompt] | None:
    """Return the prompt with as much of the answers as fits. None: it does not fit even with the shortest answers.

    Args:
        make: returns the prompt with each answer shortened to a number of characters; None: as they are. Its result is
            None if the prompt does not leave room for one token of output.
        longest: characters of the longest answer.
        window: the model's context window in tokens.
        wanted: output tokens that the turn may generate. None: no limit.
    """
    reserve = window // RESERVE_SHARE if wanted is None else min(wanted, window // RESERVE_SHARE)
    whole = await make(None)
    if whole is not None and whole.tokens + reserve <= window:
        return Fitted(whole)
    best = await make(MIN_CHARS) if longest > MIN_CHARS else None
    if best is None:
        return None if whole is None else Fitted(whole)
    # Where the conversation itself leaves little, the answers get half of it.
    room = window - min(reserve, (window - best.tokens) // 2)
    if whole is not None and whole.tokens <= room:
        return Fitted(whole)
    low, high = MIN_CHARS, longest
    for _ in range(SEARCH_STEPS):
        middle = (low + high) // 2
        tried = await make(middle)
        if tried is not None and tried.tokens <= room:
            low, best = middle, tried
        else:
            high = middle
    return Fitted(best, low)
