"""Notifies replicas of the programs that have left them, so that they refuse late turns and give up their KV."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass

from cluster.core.clock import Clock
from cluster.core.supervision import SupervisedTasks

logger = logging.getLogger("ray.serve")

GONE_S = 60.0
"""A replica that cannot be reached for so long is gone for good, and needs no notice."""
MAX_PENDING = 10_000
"""Notices that wait for an acknowledgement; of more, the oldest are given up."""
TIMEOUT_S = 10.0
"""A replica that has not acknowledged a notice after so long is sent it again."""
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 30.0
"""A notice that failed is sent again after this long; the wait doubles up to the maximum."""

MovedAway = Callable[[str, str, int], Awaitable[object]]
"""Notifies a replica (its unique id) that a program (its key) lives elsewhere with this epoch."""


@dataclass(slots=True, eq=False)
class _Notice:
    epoch: int
    reached_s: float
    """When the replica could be reached last."""
    due_s: float
    attempts: int = 0
    sending: bool = False


class MoveNotifier:
    """The notices that no replica has acknowledged yet.

    A replica that cannot be reached may be new to this ingress only: others may still send it the program's turns. So
    its notices wait until it appears, or until it is gone for good.

    Args:
        moved_away: sends one notice; returns when it is acknowledged.
        clock: for retries, and for how long a replica cannot be reached.
        tasks: run the sending.
        failed: called for each notice that was not acknowledged.
    """

    def __init__(self, moved_away: MovedAway, clock: Clock, tasks: SupervisedTasks, failed: Callable[[], None]) -> None:
        self._moved_away = moved_away
        self._clock = clock
        self._tasks = tasks
        self._failed = failed
        self._pending: dict[tuple[str, str], _Notice] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def notify(self, replica: str, key: str, epoch: int, reached: Container[str]) -> None:
        """The program has left the replica; ``reached`` are the replicas that can be reached now."""
        now_s = self._clock.now_s()
        self._pending[replica, key] = _Notice(epoch, reached_s=now_s, due_s=now_s)
        while len(self._pending) > MAX_PENDING:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            logger.warning("too many notices wait: replica %s is not notified of a program that has left it", oldest[0])
            self._failed()
        self.deliver(reached)

    def withdraw(self, replica: str, key: str) -> None:
        """The program lives on the replica again: a notice would make the replica give up its KV."""
        self._pending.pop((replica, key), None)

    def deliver(self, reached: Container[str]) -> None:
        """Send the notices that are due to replicas that can be reached. To be called about once a second."""
        now_s = self._clock.now_s()
        for (replica, key), notice in list(self._pending.items()):
            if replica in reached:
                notice.reached_s = now_s
                if notice.due_s <= now_s and not notice.sending:
                    notice.sending = True
                    self._tasks.run("moved_away", self._send(replica, key, notice))
            elif now_s - notice.reached_s >= GONE_S:
                del self._pending[replica, key]

    async def _send(self, replica: str, key: str, notice: _Notice) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._moved_away(replica, key, notice.epoch)
        except Exception as error:  # noqa: BLE001 - whatever the reason, it is sent again
            self._failed()
            notice.attempts += 1
            log = logger.warning if notice.attempts == 1 else logger.debug
            log("replica %s did not acknowledge that a program has left it; it is notified again: %r", replica, error)
            # The exponent is bounded, since a replica may fail for as long as it lives.
            notice.due_s = self._clock.now_s() + min(MAX_RETRY_S, FIRST_RETRY_S * 2 ** min(16, notice.attempts - 1))
        else:
            if self._pending.get((replica, key)) is notice:
                del self._pending[replica, key]
        finally:
            notice.sending = False
