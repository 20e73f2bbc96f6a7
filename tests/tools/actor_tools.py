"""Functions that the tests of the actors call as tools."""

import asyncio
import os
import time
from pathlib import Path


async def pid() -> int:
    return os.getpid()


async def wait(seconds: float, mark: str = "") -> str:
    try:
        if mark:
            Path(mark).write_text("started")  # noqa: ASYNC240 - a few bytes
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if mark:
            Path(mark).write_text("cancelled")  # noqa: ASYNC240 - a few bytes
        raise
    return "waited"


async def note(seconds: float, file: str) -> str:
    """Take effect, and then time."""
    with Path(file).open("a") as effects:  # noqa: ASYNC230 - a few bytes
        effects.write("x")
    await asyncio.sleep(seconds)
    return "noted"


async def block(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - what a coroutine must not do
