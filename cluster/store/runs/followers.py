"""Followers of runs: all those of a process share one blocking read, and none polls.

A follower that reads slowly is left out until it has taken what it was given, so that its memory is bounded.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cluster.core.errors import RunStoreUnavailable

MAX_WAITING_BYTES = 1 << 20
"""A follower that has not taken more than this yet is given nothing."""
RETRY_S = 0.1
"""Between reads while the store does not answer."""


@dataclass(frozen=True, slots=True)
class LogUpdate:
    """What a log has from some item on."""

    start: int
    """Number of the first item."""
    items: Sequence[bytes]
    ended: bool
    """Nothing follows these."""


Read = Callable[[Mapping[str, int]], Awaitable[Mapping[str, LogUpdate]]]
"""Run ids and the items they are read from; waits a while for news of any. Raises RunStoreUnavailable."""
Interrupt = Callable[[], Awaitable[None]]
"""Makes the read that is under way return soon, or the next one if none is. Raises RunStoreUnavailable."""


class Follower:
    """One follower's way through one log."""

    def __init__(self, run_id: str, start: int) -> None:
        self.run_id = run_id
        self.position = start
        """Number of the next item to be read."""
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._ended = False
        self._woken = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """It can be given more."""
        return not self._ended and self._bytes <= MAX_WAITING_BYTES

    def offer(self, news: LogUpdate) -> None:
        """Give it what it has not seen of ``news``."""
        fresh = list(news.items[max(0, self.position - news.start) :]) if news.start <= self.position else []
        self._waiting.extend(fresh)
        self._bytes += sum(map(len, fresh))
        self.position += len(fresh)
        self._ended = self._ended or (news.ended and news.start + len(news.items) <= self.position)
        if fresh or self._ended:
            self._woken.set()

    async def take(self, timeout_s: float) -> LogUpdate | None:
        """What has come; None if nothing did for ``timeout_s``."""
        if not self._waiting and not self._ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), timeout_s)
        items = list(self._waiting)
        self._waiting.clear()
        self._bytes = 0
        self._woken.clear()
        return LogUpdate(self.position - len(items), items, self._ended) if items or self._ended else None


class RunFollowers:
    """All followers of a process.

    Args:
        read: the shared read; there is one at a time.
        interrupt: lets it begin anew, with other followers.
    """

    def __init__(self, read: Read, interrupt: Interrupt) -> None:
        self._read = read
        self._interrupt = interrupt
        self._followers: dict[str, set[Follower]] = {}
        self._changed = asyncio.Event()
        self._reading: Mapping[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def follower(self, run_id: str, start: int) -> Iterator[Follower]:
        """A follower from item ``start`` on, as long as the context lasts."""
        follower = Follower(run_id, start)
        self._followers.setdefault(run_id, set()).add(follower)
        if self._task is None:
            self._task = asyncio.create_task(self._serve())
        try:
            yield follower
        finally:
            self._followers[run_id].discard(follower)
            if not self._followers[run_id]:
                del self._followers[run_id]

    async def take(self, follower: Follower, timeout_s: float) -> LogUpdate | None:
        """What has come for this follower; None if nothing did for ``timeout_s``."""
        self._changed.set()
        if self._reading and self._reading.get(follower.run_id, follower.position + 1) > follower.position:
            with suppress(RunStoreUnavailable):
                await self._interrupt()
        return await follower.take(timeout_s)

    async def close(self) -> None:
        """End the read. Followers get nothing more."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _serve(self) -> None:
        while True:
            self._changed.clear()
            wanted = {
                run_id: min(follower.position for follower in open_followers)
                for run_id, followers in self._followers.items()
                if (open_followers := [follower for follower in followers if follower.has_room])
            }
            if not wanted:
                await self._changed.wait()
                continue
            self._reading = wanted
            try:
                found = await self._read(wanted)
            except RunStoreUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            finally:
                self._reading = {}
            for run_id, news in found.items():
                for follower in self._followers.get(run_id, ()):
                    follower.offer(news)
