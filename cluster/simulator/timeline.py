"""Virtual time: what happens when, in one order that is the same at every run."""

import heapq
import itertools
from collections.abc import Callable

from cluster.clock import ManualClock


class Timeline:
    """Events on one clock. Those of the same time happen in the order in which they were planned.

    Args:
        clock: moved to each event's time before it happens; never backwards.
        settled: called after all events of one time, before the next time.
    """

    def __init__(self, clock: ManualClock, settled: Callable[[], None]) -> None:
        self._clock = clock
        self._settled = settled
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, at_s: float, event: Callable[[], None]) -> None:
        """Plan ``event``.

        Raises:
            ValueError: ``at_s`` is in the past.
        """
        if at_s < self._clock.now_s():
            raise ValueError(f"an event at {at_s}, but it is {self._clock.now_s()}")
        heapq.heappush(self._events, (at_s, next(self._numbers), event))

    def run(self, until_s: float) -> None:
        """Let everything happen up to ``until_s``, that included; ends earlier when nothing is planned any more."""
        events = self._events
        while events and events[0][0] <= until_s:
            now_s = events[0][0]
            self._clock.move_to(now_s)
            while events and events[0][0] == now_s:
                heapq.heappop(events)[2]()
            self._settled()
