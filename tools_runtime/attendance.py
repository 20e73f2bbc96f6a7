"""Whether anybody still attends to a process that belongs to nobody."""

from cluster.clock import Clock


class Attendance:
    """Over when nobody has attended, and no call has been under way, for a time.

    Args:
        clock: the time.
        unattended_s: that time.
    """

    def __init__(self, clock: Clock, unattended_s: float) -> None:
        self._clock = clock
        self._unattended_s = unattended_s
        self._last_s = clock.now_s()
        self._calls = 0

    def attend(self) -> None:
        """Somebody is there."""
        self._last_s = self._clock.now_s()

    def begin(self) -> None:
        """A call is under way."""
        self._calls += 1

    def end(self) -> None:
        """It has ended; its caller may be gone, and whoever resumes it not there yet."""
        self._calls -= 1
        self.attend()

    def is_over(self, *, busy: bool = False) -> bool:
        """Nobody is there any more.

        Args:
            busy: something else is under way; that counts as a call.
        """
        if busy:
            self.attend()
        return self._calls == 0 and self._clock.now_s() - self._last_s >= self._unattended_s
