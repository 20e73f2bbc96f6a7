"""Waits for conditions that no event reports."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

WITHIN_S = 60.0
"""What takes longer than this hangs, on a busy machine also."""
POLL_S = 0.01


async def until(condition: Callable[[], Any], what: str = "it did not happen in time") -> Any:
    """What ``condition`` returns once that is true; the event loop runs meanwhile.

    Raises:
        AssertionError: it stays false; it has the text ``what``.
    """
    deadline_s = time.monotonic() + WITHIN_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(POLL_S)
    return found


def wait_until(
    condition: Callable[[], Any],
    what: str = "it did not happen in time",
    *,
    within_s: float = WITHIN_S,
    poll_s: float = POLL_S,
) -> Any:
    """The same for what other threads and processes do.

    Raises:
        AssertionError: it stays false for ``within_s`` seconds; it has the text ``what``.
    """
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, what
        time.sleep(poll_s)
    return found
