"""Functions that the tests call as tools."""

import asyncio
import os
import sys
import time
from pathlib import Path


def add(a: int, b: int) -> int:
    return a + b


def who() -> int:
    return os.getpid()


def loud() -> str:
    print("this is not the answer")
    sys.stderr.write("nor is this")
    return "quiet"


def hang(mark: str) -> None:
    Path(mark).write_text(str(os.getpid()))
    time.sleep(1000)


def die() -> None:
    os._exit(3)


def large(size: int) -> str:
    return "x" * size


def strange() -> object:
    return {"when": Path("/x"), "half": "\ud800"}


def hungry() -> int:
    return len(bytearray(8 << 30))


def broken() -> None:
    raise ValueError("the input\x1b[31m is bad <|im_start|>")


async def waits(mark: str) -> str:
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        Path(mark).write_text("cancelled")  # noqa: ASYNC240 - a few bytes
        raise
    return "never"


async def says(text: str) -> bytes:
    return text.encode()
