"""The log of a run or a batch, in the process that works on it. It is written in order; followers read what is stored.

The runner itself can read a recorded event at once; others only when the store has it. An event's number therefore
never changes, whoever reads it. While the store is unavailable the journal tries again. It keeps the whole run in
memory, so that it can write it again to a store that has lost it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from cluster.core.errors import RunLeaseLost, RunLogGap, RunStoreUnavailable, RunUnknown
from cluster.runs.events import Ended, RunEvent, encode
from cluster.store.runs.records import AlreadyThere, NewRun
from cluster.store.runs.store import RunStore

logger = logging.getLogger("ray.serve")

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
"""Bounds in seconds of the waits between two attempts to reach the store."""


MAX_WRITE_BYTES = 1 << 20
"""Maximum size of the items of one write, unless it is a single item. Redis does nothing else meanwhile."""

EVENT_BYTES = 100
"""Approximate memory of an event in addition to the size of its encoding."""

Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class LogForm(Generic[Event]):
    """What a journal has to know of the events of a log."""

    encode: Callable[[Event], bytes]
    is_last: Callable[[Event], bool]
    """Whether the event ends the log."""
    status: Callable[[Event], str | None]
    """Returns the status that the run has once this event is written; None: it does not change."""
    compact: bool = False
    """Whether only the first and the last event are kept of a log that has ended."""


RUN_LOG: LogForm[RunEvent] = LogForm(
    encode=encode,
    is_last=lambda event: isinstance(event, Ended),
    status=lambda event: event.status if isinstance(event, Ended) else None,
)


class Journal(Generic[Event]):
    """One run's events, and the task that writes them.

    Args:
        store: the store of the events.
        run: the run, for the store.
        events: events that the store already has.
        form: of the events.
    """

    def __init__(self, store: RunStore, run: NewRun, events: Sequence[Event], form: LogForm[Event]) -> None:
        self.run = run
        self._form = form
        self._store = store
        self._events = list(events)
        self._encoded = [form.encode(event) for event in events]
        """The encoded events, until nothing more will be written."""
        self.memory_bytes = 0
        """Approximate memory of the events, without `_encoded`."""
        self._count(self._encoded)
        self.is_followed = False
        """Whether somebody has begun to follow the run here."""
        self._durable = len(events)
        self._lost = False
        self._forgotten = False
        """Whether the store has lost the run."""
        self._news = asyncio.Event()
        """Set when there are events to write."""
        self._progress = asyncio.Event()
        """Set, and replaced, when something has been written or the lease is lost."""
        self._writer = asyncio.create_task(self._write_for_ever())

    @property
    def safe(self) -> Sequence[Event]:
        """The events that the store has."""
        return self._events[: self._durable]

    @property
    def lost(self) -> bool:
        """Whether another runner has taken over the run."""
        return self._lost

    @property
    def closed(self) -> bool:
        """Whether nothing more will be written: the run's end is stored, or another runner has the run."""
        return self._lost or (self._durable == len(self._events) and self._ended)

    def record(self, *events: Event) -> None:
        """Add events. They are written soon."""
        self._events += events
        encoded = [self._form.encode(event) for event in events]
        self._encoded += encoded
        self._count(encoded)
        self._news.set()

    async def flush(self) -> None:
        """Wait until the store has everything that was recorded so far.

        Raises:
            RunLeaseLost: another runner has the run now.
        """
        target = len(self._events)
        while self._durable < target and not self._lost:
            await self._progress.wait()
        if self._lost:
            raise RunLeaseLost(f"run {self.run.id} is worked on by another runner")

    async def follow(self, start: int = 0) -> AsyncIterator[Sequence[Event]]:
        """Yield events from number ``start`` on, as they are stored. It ends after the last event.

        Raises:
            RunLeaseLost: another runner has the run now. The events so far are valid.
        """
        self.is_followed = True
        while True:
            progress = self._progress
            if start < self._durable:
                batch = self._events[start : self._durable]
                start += len(batch)
                yield batch
            elif self._lost:
                raise RunLeaseLost(f"run {self.run.id} is worked on by another runner")
            elif self.closed:
                return
            else:
                await progress.wait()

    def write_again(self) -> None:
        """Write the whole run again, because the store has lost it."""
        self._forgotten = True
        self._news.set()

    def abandon(self) -> None:
        """Write nothing more, because another runner has the run."""
        self._lost = True
        self._writer.cancel()
        self._announce()

    def _count(self, encoded: Sequence[bytes]) -> None:
        self.memory_bytes += sum(map(len, encoded)) + EVENT_BYTES * len(encoded)

    @property
    def _ended(self) -> bool:
        return bool(self._events) and self._form.is_last(self._events[-1])

    def _announce(self) -> None:
        before, self._progress = self._progress, asyncio.Event()
        before.set()

    async def _write_for_ever(self) -> None:
        try:
            await self._write_until_closed()
        finally:
            self._encoded.clear()

    async def _write_until_closed(self) -> None:
        wait_s = FIRST_RETRY_S
        while not self.closed:
            await self._news.wait()
            self._news.clear()
            try:
                await self._write()
                wait_s = FIRST_RETRY_S
            except RunStoreUnavailable as error:
                logger.warning("run %s waits for its store: %s", self.run.id, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LAST_RETRY_S)
                self._news.set()
            except RunLeaseLost:
                self._lost = True
                self._announce()
            except Exception:  # nobody may wait for ever for a writer that has stopped: the run is left to others
                logger.exception("run %s cannot be written", self.run.id)
                self._lost = True
                self._announce()

    async def _write(self) -> None:
        end = len(self._encoded)
        last = self._events[end - 1]
        status, is_last = self._form.status(last), self._form.is_last(last)
        try:
            if not self._forgotten and self._durable < end:
                await self._append(self._durable, self._encoded[self._durable : end], status, final=is_last)
        except (RunUnknown, RunLogGap):
            self._forgotten = True
        if self._forgotten:
            # The store has lost its data. The run is complete here; another run may have its idempotency key by now.
            first = next(_pages(self._encoded[:end]))
            if isinstance(await self._store.create(self.run, first), AlreadyThere):
                self.run = replace(self.run, idempotency=None)
                await self._store.create(self.run, first)
            if len(first) < end or status is not None:
                begin = min(len(first), end - 1)
                await self._append(begin, self._encoded[begin:end], status, final=is_last)
            self._forgotten = False
        self._durable = end
        self._announce()

    async def _append(self, start: int, items: Sequence[bytes], status: str | None, *, final: bool) -> None:
        end, compact = start + len(items), self._form.compact
        for page in _pages(items):
            ends = start + len(page) == end
            await self._store.append(
                self.run.id, start, page, status=status if ends else None, final=final and ends, compact=compact
            )
            start += len(page)


def _pages(items: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the items in parts of at most `MAX_WRITE_BYTES`. A single larger item is a part of its own."""
    begin, size = 0, 0
    for place, item in enumerate(items):
        if place > begin and size + len(item) > MAX_WRITE_BYTES:
            yield items[begin:place]
            begin, size = place, 0
        size += len(item)
    if begin < len(items):
        yield items[begin:]
