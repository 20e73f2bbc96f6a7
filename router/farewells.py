"""Tells replicas which programs have left them, so that they refuse turns of whoever has not heard of it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container

from cluster.clock import Clock

logger = logging.getLogger("ray.serve")

TELL_S = 60.0
"""A replica that is not there is given up for good after so long."""
MAX_UNTOLD = 10_000

MovedAway = Callable[[str, str, int], Awaitable[object]]
"""Tells a replica (its unique id) that a program (its key) has gone elsewhere with this epoch."""


class Farewells:
    """What is to be told, and what is being told.

    A replica that cannot be reached may be new to this ingress only: others may still send it the program's turns. So
    it is told when it appears.
    """

    def __init__(self, moved_away: MovedAway, clock: Clock) -> None:
        self._moved_away = moved_away
        self._clock = clock
        self._untold: dict[tuple[str, str], tuple[int, float]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def say(self, replica: str, key: str, epoch: int, reached: Container[str]) -> None:
        """The program has left the replica; ``reached`` are those that can be told now."""
        self._untold[replica, key] = (epoch, self._clock.now_s())
        self.tell(reached)

    def tell(self, reached: Container[str]) -> None:
        """Tell these replicas what they have not been told."""
        now_s = self._clock.now_s()
        for (replica, key), (epoch, since_s) in list(self._untold.items()):
            if replica in reached:
                self._telling.add(task := asyncio.create_task(self._quietly(replica, key, epoch)))
                task.add_done_callback(self._telling.discard)
            elif now_s - since_s < TELL_S and len(self._untold) <= MAX_UNTOLD:
                continue
            del self._untold[replica, key]

    def stop(self) -> None:
        """Nobody is told any more."""
        self._untold.clear()
        for task in self._telling:
            task.cancel()

    async def _quietly(self, replica: str, key: str, epoch: int) -> None:
        try:
            await self._moved_away(replica, key, epoch)
        except Exception as error:  # noqa: BLE001 - who is told may be gone by now, and nobody waits for it
            logger.debug("telling replica %s that a program has left: %s", replica, error)
