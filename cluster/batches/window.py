"""How many lines of a batch are in flight: as many as the replicas of its model accept. A pure policy.

Replicas refuse batch work first (503), when other work waits. The window then halves and nothing is started for the
time that they ask for. Each line that ends lets it grow, by one line for each window of lines.
"""

FIRST = 4.0
"""Size of the window at the start."""


class BatchWindow:
    """The window of one batch. Each has its own, so that a model that has no room delays no other model's batches.

    Args:
        most: largest size.
    """

    def __init__(self, most: int) -> None:
        self._most = float(most)
        self._size = min(FIRST, self._most)
        self._closed_until_s = 0.0
        self._halved_s = 0.0

    @property
    def size(self) -> int:
        """Largest number of lines in flight now."""
        return int(self._size)

    def may_start(self, in_flight: int, now_s: float) -> bool:
        """Return whether another line may be started."""
        return in_flight < self.size and now_s >= self._closed_until_s

    def opens_s(self, now_s: float) -> float:
        """Return the seconds until lines may be started again."""
        return max(0.0, self._closed_until_s - now_s)

    def served(self) -> None:
        """Record that a line was answered."""
        self._size = min(self._most, self._size + 1 / self._size)

    def refused(self, started_s: float, now_s: float, retry_after_s: float) -> None:
        """Record that a line was refused because the replicas have other work.

        Args:
            started_s: time at which the line was started, in seconds. One that was started before the window was halved
                halves it no more.
            now_s: the time now.
            retry_after_s: seconds after which a retry may succeed.
        """
        self._closed_until_s = max(self._closed_until_s, now_s + retry_after_s)
        if started_s >= self._halved_s:
            self._halved_s = now_s
            self._size = max(1.0, self._size / 2)
