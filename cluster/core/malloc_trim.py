"""Pages of C's heap in which nothing is any more go back to the system.

glibc gives back what is free at the heap's end. What long-lived objects hold in its middle it keeps: under load the
free pieces lie a little elsewhere every minute, until all of the heap's largest extent has been written to once. (What
Python's own allocator has is no part of this.)
"""

import ctypes
import time
from threading import Lock, Thread
from typing import Protocol

EVERY_S = 30.0
"""It takes a millisecond."""


class _Trim(Protocol):
    def __call__(self, pad: int, /) -> object: ...


_trim: _Trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
"""Only glibc has it."""
_lock = Lock()
_trimming: Thread | None = None


def trim() -> None:
    """Once, now. Other threads go on."""
    _trim(0)


def keep_trimmed(every_s: float = EVERY_S) -> None:
    """From now on, as long as this process lives. Again is harmless."""
    global _trimming
    with _lock:
        if _trimming is None:
            _trimming = Thread(target=_keep_trimmed, args=(every_s,), name="heap", daemon=True)
            _trimming.start()


def _keep_trimmed(every_s: float) -> None:
    while True:
        time.sleep(every_s)
        trim()
