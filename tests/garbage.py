"""What is freed when nobody has it any more, and what has to wait for the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

TIMES = 50
"""What is done so often leaves less than one object each time to the collector, or leaves something each time."""


@contextmanager
def none_of(times: int = TIMES) -> Iterator[None]:
    """What is done so often in this context leaves no reference cycles behind."""
    gc.collect()
    gc.disable()
    try:
        yield
        found = gc.collect()
    finally:
        gc.enable()
    assert found < times, f"{found} objects were left to the garbage collector by {times} calls"
