"""Clocks. Every duration, deadline and expiry in Caesura comes from a Clock, so that the simulator can replace it."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock. Its readings can be compared only with readings of the same clock."""

    def now_s(self) -> float:
        """Return the seconds since an arbitrary origin. The value never decreases."""
        ...


class MonotonicClock:
    """The monotonic clock that all processes of a machine share. Changes of the wall clock do not move it."""

    def now_s(self) -> float:
        """Return the seconds since the machine started."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when its owner moves it, for tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the seconds to which the clock was last moved."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds``.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now_s += seconds

    def move_to(self, at_s: float) -> None:
        """Move forward to ``at_s`` exactly.

        Raises:
            ValueError: ``at_s`` is in the past.
        """
        if at_s < self._now_s:
            raise ValueError(f"a clock cannot go back: from {self._now_s} to {at_s}")
        self._now_s = at_s
