"""The end of a replica: its programs' contexts are written to disk, where the replicas that they go to find them.

The usage of its programs is written to the store.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from cluster.core.errors import ControlError

logger = logging.getLogger("ray.serve")

LEAVE_S = 20.0
"""Longest time for which the end of a replica waits for writes. What is not written then is computed again."""
USAGE_S = 5.0
"""The same for the usage of programs."""
CHECK_S = 0.1
"""Seconds between two questions whether all is written."""

Leave = Callable[[str], Awaitable[dict[str, Any]]]
"""Calls an operation of `replicas.control`."""


async def begin_leaving(call: Leave) -> None:
    """Let the scheduler write the contexts of programs that have paused, and of those that will pause."""
    try:
        await call("leave")
    except ControlError as error:
        logger.warning("contexts are not written to disk before this replica ends: %s", error)


async def written(call: Leave, limit_s: float = LEAVE_S) -> bool:
    """Wait until all contexts are on disk, for ``limit_s`` at most. Return whether they are."""

    async def is_written() -> bool:
        return not (await call("leave"))["leaves"]

    return await until_written(is_written, "all contexts are on disk", limit_s)


async def until_written(is_written: Callable[[], Awaitable[bool]], what: str, limit_s: float) -> bool:
    """Wait until something is written, for ``limit_s`` at most. Return whether it is. ``what`` is for the log."""
    try:
        async with asyncio.timeout(limit_s):
            while True:
                if await is_written():
                    return True
                await asyncio.sleep(CHECK_S)
    except (ControlError, TimeoutError) as error:
        logger.warning("this replica ends before %s: %r", what, error)
        return False
