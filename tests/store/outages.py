"""What a Redis may do to those who need it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from cluster.local.embedded_redis import EmbeddedRedis

Answer = TypeVar("Answer")
SHORT_S = 0.5
"""The time limit of calls that are to run into it."""
FAR_MORE = 100
"""Times the limit: what comes back within that did not hang, also on a busy machine."""


async def eventually(call: Callable[[], Awaitable[Answer | None]]) -> Answer:
    """The first answer that is one."""
    async with asyncio.timeout(60):
        while (answer := await call()) is None:
            pass
    return answer


def commands_in(sent: bytes) -> int:
    """How many there are in what was sent at once: a client's first two, who it is and of which version, or one."""
    return max(1, sent.count(b"SETINFO"))


def kill(server: EmbeddedRedis) -> None:
    os.kill(server.pid, signal.SIGKILL)
    while server.pid is not None:
        pass


@asynccontextmanager
async def frozen(pid: int) -> AsyncIterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
