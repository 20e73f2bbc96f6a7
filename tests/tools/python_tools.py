"""Functions that the tests call as tools."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
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


def exhausted() -> str:
    return str(next(iter(())))


def leaves() -> None:
    sys.exit(3)


async def waits(mark: str) -> str:
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        Path(mark).write_text("cancelled")  # noqa: ASYNC240 - a few bytes
        raise
    return "never"


async def says(text: str) -> bytes:
    return text.encode()


def lines(count: int, mark: str) -> Iterator[str]:
    """Waits for the file ``mark`` before its last line."""
    for number in range(count):
        if number == count - 1:
            while not Path(mark).exists():
                time.sleep(0.01)
        yield f"line {number:04} ☂\n"


async def async_lines(count: int, mark: str) -> AsyncIterator[str]:
    for number in range(count):
        while number == count - 1 and not Path(mark).exists():  # noqa: ASYNC110, ASYNC240 - as the one above
            await asyncio.sleep(0.01)
        yield f"line {number:04} ☂\n"


def breaks_off() -> Iterator[str]:
    yield "x" * 400
    raise ValueError("broken off")
