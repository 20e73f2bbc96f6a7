"""Followers of the logs of runs. All followers of a process share one blocking read, and none of them polls.

A slow follower gets no new items until it has taken its waiting ones, so that its memory is bounded.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cluster.core.errors import RunStoreUnavailable

MAX_WAITING_BYTES = 1 << 20
"""Maximum size of the items that wait for a follower (bytes). A follower with more gets no new items."""
RETRY_S = 0.1
"""Seconds between reads while the store does not answer."""


@dataclass(frozen=True, slots=True)
class LogUpdate:
    """The items of a log from one number on."""

    start: int
    """Number of the first item."""
    items: Sequence[bytes]
    ended: bool
    """Whether the log is closed and these are its last items."""


Read = Callable[[Mapping[str, int]], Awaitable[Mapping[str, LogUpdate]]]
"""A function that reads the logs of runs, given the first item to read by run id. It waits for a short time until one
of them has new items. It raises RunStoreUnavailable."""
Interrupt = Callable[[], Awaitable[None]]
"""A function that makes the read in progress return soon, or the next one if none is in progress. It raises
RunStoreUnavailable."""


class Follower:
    """A reader of one log, with its position."""

    def __init__(self, run_id: str, start: int) -> None:
        self.run_id = run_id
        self.position = start
        """Number of the next item to read."""
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._ended = False
        self._woken = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether it can get new items."""
        return not self._ended and self._bytes <= MAX_WAITING_BYTES

    def offer(self, news: LogUpdate) -> None:
        """Add those items of ``news`` that the follower has not seen."""
        fresh = list(news.items[max(0, self.position - news.start) :]) if news.start <= self.position else []
        self._waiting.extend(fresh)
        self._bytes += sum(map(len, fresh))
        self.position += len(fresh)
        self._ended = self._ended or (news.ended and news.start + len(news.items) <= self.position)
        if fresh or self._ended:
            self._woken.set()

    async def take(self, timeout_s: float) -> LogUpdate | None:
        """Return the new items; None: there were none for ``timeout_s`` seconds."""
        if not self._waiting and not self._ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), timeout_s)
        items = list(self._waiting)
        self._waiting.clear()
        self._bytes = 0
        self._woken.clear()
        return LogUpdate(self.position - len(items), items, self._ended) if items or self._ended else None


class RunFollowers:
    """The followers of a process.

    Args:
        read: the shared read, of which only one is in progress at a time.
        interrupt: interrupts the read, so that it begins again with other followers.
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
        """Add a follower that begins at item ``start``, for the duration of the context."""
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
        """Return the new items for this follower; None: there were none for ``timeout_s`` seconds."""
        self._changed.set()
        if self._reading and self._reading.get(follower.run_id, follower.position + 1) > follower.position:
            with suppress(RunStoreUnavailable):
                await self._interrupt()
        return await follower.take(timeout_s)

    async def close(self) -> None:
        """End the read. Followers get no further items."""
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
