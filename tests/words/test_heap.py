"""What is free in the middle of C's heap goes back to the system; tried in processes of their own."""

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context

import psutil
import pytest

from cluster.core import malloc_trim as heap

PIECE_BYTES, PIECES = 2048, 20_000
MOST_OF_IT = 0.9 * PIECE_BYTES * PIECES


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def freed_below_something() -> tuple[int, object]:
    """Resident bytes before forty megabytes are freed; whoever has the rest of the answer has what lies above."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(PIECE_BYTES) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE_BYTES)
    above, before = libc.malloc(PIECE_BYTES), resident()
    for piece in pieces:
        libc.free(piece)
    return before, above


def trimmed_now() -> None:
    before, above = freed_below_something()
    assert above and before - resident() < MOST_OF_IT
    heap.trim()
    assert before - resident() > MOST_OF_IT


def trimmed_again_and_again() -> None:
    for _ in range(3):
        heap.keep_trimmed(0.05)
    assert [thread.name for thread in threading.enumerate()].count("heap") == 1
    for _ in range(2):
        before, above = freed_below_something()
        give_up_s = time.monotonic() + 30
        while before - resident() < MOST_OF_IT:
            assert above and time.monotonic() < give_up_s
            time.sleep(0.02)


def frozen() -> None:
    made = [{} for _ in range(1000)]
    heap.freeze_heap()
    assert gc.get_freeze_count() > len(made)
    assert not any(one is made[0] for one in gc.get_objects())
    later: list[object] = []
    later.append(later)
    del later
    assert gc.collect() > 0, "what is made later is still collected"


@pytest.mark.parametrize("trimmed", [trimmed_now, trimmed_again_and_again, frozen])
def test_what_is_free_goes_back(trimmed: Callable[[], None]) -> None:
    process = get_context("spawn").Process(target=trimmed)
    process.start()
    process.join(60)
    assert process.exitcode == 0
