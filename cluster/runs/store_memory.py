"""Keeps the memory of the store bounded: it deletes the oldest ended runs early, and then lets new runs be rejected."""

import asyncio
import logging
from typing import NoReturn

from cluster.core.errors import RunStoreUnavailable
from cluster.store.client import StoreMemory
from cluster.store.runs.store import RunStore

logger = logging.getLogger("ray.serve")

EVICT_SHARE = 0.75
"""Share of Redis's `maxmemory` from which on ended runs are deleted before `programs.retention_s`."""
STORING_SHARE = 0.6
"""Share of Redis's `maxmemory` from which on nothing is accepted that clients only store: no file, no batch and no item
of a conversation. No line of a batch is started. It is below `EVICT_SHARE`, so that these never push ended runs out."""
FULL_SHARE = 0.9
"""Share of Redis's `maxmemory` from which on no new run is accepted. The rest is for the runs that were accepted."""
EVICTED_AT_ONCE = 64
"""Largest number of runs that one call deletes. Redis does nothing else meanwhile."""
PERIOD_S = 1.0
"""Seconds between two looks at the memory."""


class StoreMemoryWatch:
    """The memory of the store as of the last look.

    Args:
        store: the log of runs.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self.memory = StoreMemory(0, 0)
        self.evicted = 0
        """Number of runs that were deleted before their time since the start."""

    @property
    def is_full(self) -> bool:
        """Whether no new run should be accepted."""
        return self.memory.share >= FULL_SHARE

    @property
    def is_full_for_storing(self) -> bool:
        """Whether nothing should be accepted that clients only store."""
        return self.memory.share >= STORING_SHARE

    async def watch(self) -> NoReturn:
        """Look for ever. What fails is tried again."""
        while True:
            try:
                await self.look()
            except RunStoreUnavailable as error:
                logger.debug("the memory of the store is not known: %s", error)
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Read the memory, and delete ended runs until it suffices or there are none.

        Raises:
            RunStoreUnavailable: the store did not answer.
        """
        was_full, before = self.is_full, self.evicted
        self.memory = await self._store.memory()
        while self.memory.share >= EVICT_SHARE and (evicted := await self._store.evict(EVICTED_AT_ONCE)):
            self.evicted += evicted
            self.memory = await self._store.memory()
        if self.evicted > before:
            logger.warning(
                "Redis is short of memory: %d ended programs were deleted before programs.retention_s",
                self.evicted - before,
            )
        if self.is_full and not was_full:
            logger.warning("Redis uses %.0f%% of its memory: new programs are rejected", 100 * self.memory.share)
