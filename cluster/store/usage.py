"""The usage of programs by day: each replica writes its part, and ingresses add the parts up."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

import msgspec

from cluster.core.clock import Clock
from cluster.core.usage import DayUsage, ProgramUsage
from cluster.store.client import RedisStore, StoreFailure, key_space

SPACE = key_space("usage")
KEPT = timedelta(days=8)
"""How long a day's usage is kept after it was last written: seven whole days and the present one."""
_SEPARATOR = "\n"


class UsageStore(RedisStore):
    """Writes and reads usage.

    Args:
        url: see `RedisStore`.
        timeout_s: timeout of each call in seconds.
        clock: see `RedisStore`.
    """

    def __init__(self, url: str, *, timeout_s: float, clock: Clock) -> None:
        degraded = "usage is kept in the replicas until the store answers again"
        super().__init__(url, name="the usage store", degraded=degraded, timeout_s=timeout_s, clock=clock)

    async def write(self, model: str, replica: str, rows: Iterable[DayUsage]) -> None:
        """Write a replica's usage. A row replaces the one with the same number.

        Raises:
            StoreUnavailable: the call failed. Some rows may have been written.
        """
        by_day: dict[str, dict[str, bytes]] = defaultdict(dict)
        for row in rows:
            by_day[row.day][str(row.number)] = msgspec.msgpack.encode(row.usage)
        if not by_day:
            return
        writer, expiry_s = f"{model}{_SEPARATOR}{replica}", int(KEPT.total_seconds())
        async with self.request():
            pipeline = self.redis.pipeline(transaction=False)
            for day, fields in by_day.items():
                pipeline.hset(_part(day, writer), mapping=cast(dict[Any, Any], fields))
                pipeline.expire(_part(day, writer), expiry_s)
                pipeline.sadd(_writers(day), writer)
                pipeline.expire(_writers(day), expiry_s)
            await pipeline.execute()

    async def read(self, day: str) -> dict[tuple[str, str, str], ProgramUsage]:
        """Return the usage of a day (YYYY-MM-DD) over all replicas, by tenant, model and program.

        Raises:
            StoreUnavailable: the call failed.
        """
        found: dict[tuple[str, str, str], ProgramUsage] = {}
        async with self.request():
            writers = sorted(writer.decode() for writer in await cast(Any, self.redis.smembers(_writers(day))))
        for writer in writers:
            async with self.request():
                values = await cast(Any, self.redis.hvals(_part(day, writer)))
            for value in values:
                try:
                    usage = msgspec.msgpack.decode(value, type=ProgramUsage)
                except (msgspec.DecodeError, msgspec.ValidationError):
                    self.failures[StoreFailure.CORRUPT] += 1
                    continue
                of_program = usage.tenant, writer.partition(_SEPARATOR)[0], usage.program
                if of_program in found:
                    found[of_program].add(usage)
                else:
                    found[of_program] = usage
        return found


def _writers(day: str) -> str:
    return f"{SPACE}:{day}:replicas"


def _part(day: str, writer: str) -> str:
    return f"{SPACE}:{day}:of:{writer}"
