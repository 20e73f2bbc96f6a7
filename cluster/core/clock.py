"""Time. Every duration, deadline and expiry in Caesura is read from a Clock, so that the simulator can replace it."""

import time
from typing import Protocol


class Clock(Protocol):
    """What time is it? Seconds, monotonic, comparable only with readings of the same clock."""

    def now_s(self) -> float:
        """Seconds since an arbitrary origin; never goes backwards."""
        ...


class MonotonicClock:
    """The machine's monotonic clock: unmoved by wall-clock changes, shared by all processes of one machine."""

    def now_s(self) -> float:
        """Seconds since boot."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is moved: tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Seconds, as last set."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds``.

        Raises:
            ValueError: if ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now_s += seconds

    def move_to(self, at_s: float) -> None:
        """Move forward to ``at_s`` exactly.

        Raises:
            ValueError: if that is in the past.
        """
        if at_s < self._now_s:
            raise ValueError(f"a clock cannot go back: from {self._now_s} to {at_s}")
        self._now_s = at_s
