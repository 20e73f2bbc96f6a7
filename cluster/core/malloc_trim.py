"""The memory of processes that run for long: garbage collection, and free pages of the C heap (glibc `malloc_trim`).

By itself, glibc returns only the free memory at the end of the heap. Free pages between long-lived objects stay
resident. Under load their positions change, so that the resident memory of a process grows to the largest size that
its heap ever had. Memory of Python's own allocator is not affected.
"""

import ctypes
import gc
import time
from threading import Lock, Thread
from typing import Protocol

EVERY_S = 30.0
"""Seconds between two trims. A trim takes about a millisecond."""


class _Trim(Protocol):
    def __call__(self, pad: int, /) -> object: ...


_trim: _Trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
"""The function of glibc. With another C library it does nothing."""
_lock = Lock()
_trimming: Thread | None = None


def trim() -> None:
    """Return the free pages now. Other threads continue while it runs."""
    _trim(0)


def keep_trimmed(every_s: float = EVERY_S) -> None:
    """Start a thread that trims the heap until the process ends. A second call has no effect.

    Args:
        every_s: seconds between two trims.
    """
    global _trimming
    with _lock:
        if _trimming is None:
            _trimming = Thread(target=_keep_trimmed, args=(every_s,), name="heap", daemon=True)
            _trimming.start()


def _keep_trimmed(every_s: float) -> None:
    while True:
        time.sleep(every_s)
        trim()


def freeze_heap() -> None:
    """Exclude all present objects from garbage collection.

    Called at the end of a start: what a start makes lives as long as the process, and a collection that looks at the
    million objects of vLLM and Ray would delay every stream.
    """
    gc.collect()
    gc.freeze()
