"""Statistics of the durations of tool calls, which are shared through Redis.

`DurationStore` shares the pauses that replicas observe. `SharedToolDurations` shares run times and queue times, which
are learnt from the results of tools.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Self

from cluster.config.schema import RedisConfig
from cluster.core.clock import Clock
from cluster.core.tools import Outcome, ToolResult
from cluster.durations.statistics import LONGEST_S, MAX_STATISTICS_BYTES, Durations, DurationStatistics
from cluster.durations.table import MAX_TOOLS, OVERALL, DurationTable, decode_tool, encode_tool
from cluster.store.client import StoreFailure, key_space
from cluster.store.parts import PartLimits, SharedParts

logger = logging.getLogger(__name__)

LIMITS = PartLimits(writers=1024, fields=MAX_TOOLS + 1, value_bytes=MAX_STATISTICS_BYTES, read_bytes=8 << 20)

RUN_SPACE = "tool-run"
QUEUE_SPACE = "tool-queue"
"""Suffixes of a model's id in the keys of the statistics of run times and queue times."""

LEARNT = (Outcome.OK, Outcome.ERROR)
"""Outcomes whose durations are learnt. Of other outcomes, the duration is at most partly known: a tool that timed out
would have run longer."""


class DurationStore(SharedParts):
    """One writer's access to the statistics of all writers of one ``model``."""

    def __init__(self, url: str, *, model: str, writer: str, timeout_s: float, expiry_s: float, clock: Clock) -> None:
        super().__init__(
            url,
            writers=f"{key_space(model)}:writers",
            prefix=f"{key_space(model)}:durations:",
            writer=writer,
            limits=LIMITS,
            expiry_s=expiry_s,
            name="the tool statistics store",
            degraded="tool statistics go on without the store",
            timeout_s=timeout_s,
            clock=clock,
        )
        self._parts: dict[tuple[bytes, bytes], DurationStatistics] = {}
        """The parsed statistics, by writer and field."""
        self._merged: dict[str, tuple[list[DurationStatistics], DurationStatistics]] = {}
        """The parts of each tool, and the result of merging them."""

    async def exchange(self, own: Mapping[str, DurationStatistics]) -> Mapping[str, DurationStatistics] | None:
        """Write this writer's part and read the others'. Only one call may be in progress at a time.

        Args:
            own: this writer's statistics, as ``DurationTable.own`` returns them. Only changes are written.

        Returns:
            The merged statistics of all other writers, which the caller must not change; None: the exchange failed,
            within about ``timeout_s``. ``failures`` has counted the reason.
        """
        damaged = self.failures[StoreFailure.CORRUPT]
        parts = await self.exchange_parts({encode_tool(name): part.to_bytes() for name, part in own.items()})
        if parts is None:
            return None
        merged = self._merge(parts)
        if damaged == 0 and (left_out := self.failures[StoreFailure.CORRUPT]):
            logger.warning("tool statistics: %d values of other writers are damaged or too large", left_out)
        return merged

    def _merge(self, parts: Mapping[bytes, Mapping[bytes, bytes]]) -> Mapping[str, DurationStatistics]:
        """Merge the valid values of ``parts`` by tool. Unchanged values are not parsed or merged again."""
        before, self._parts = self._parts, {}
        by_tool: dict[str, list[DurationStatistics]] = {}
        for writer, fields in parts.items():
            for field, value in fields.items():
                part = before.get((writer, field))
                try:
                    if part is None or part.to_bytes() != value:
                        part = DurationStatistics.from_bytes(value)
                    by_tool.setdefault(decode_tool(field), []).append(part)
                except ValueError as error:
                    self.failures[StoreFailure.CORRUPT] += 1
                    logger.debug("tool statistics of %r, %r: %s", writer, field, error)
                    continue
                self._parts[writer, field] = part
        merged_before, self._merged = self._merged, {}
        for tool, seen in by_tool.items():
            known = merged_before.get(tool)
            together = known[1] if known and known[0] == seen else reduce(DurationStatistics.merge, seen)
            self._merged[tool] = (seen, together)
        return MappingProxyType({tool: together for tool, (_, together) in self._merged.items()})


@dataclass(frozen=True, slots=True)
class Spread:
    """A summary of durations in seconds."""

    count: int
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, durations: Durations | None) -> Self | None:
        """Summarise durations; None: nothing was observed."""
        if durations is None or not durations.count:
            return None
        p50_s, p90_s, p99_s = map(durations.quantile, (0.5, 0.9, 0.99))
        return cls(durations.count, p50_s, p90_s, p99_s)


@dataclass(frozen=True, slots=True)
class ToolDuration:
    """The durations of one tool, or of one class of its calls (`bash:grep`). The name OVERALL means all tools."""

    name: str
    run: Spread | None
    """Run times, including retries and the waits between them; None: nothing was observed."""
    queue: Spread | None
    """Times from a call's arrival to the tool's first start; None: nothing was observed."""


class ToolDurations:
    """Run times and queue times by tool and by class of arguments. It has no I/O and no clock."""

    def __init__(self) -> None:
        self.run = DurationTable()
        self.queue = DurationTable()

    def observe(self, result: ToolResult) -> bool:
        """Learn from a result. Return False if there is nothing to learn: the tool did not run, or did not end by
        itself.
        """
        durations_s = (result.run_s, result.queue_s)
        valid = all(0 <= seconds <= LONGEST_S for seconds in durations_s)
        if result.outcome not in LEARNT or result.attempts == 0 or not valid:
            return False
        name = result.statistics_name or result.name
        self.run.observe(name, result.run_s)
        self.queue.observe(name, result.queue_s)
        return True

    def read(self) -> list[ToolDuration]:
        """Return the durations from all writers: all tools together first, if any was observed, then by name."""
        names: Iterable[str] = dict.fromkeys((*self.run.names(), *self.queue.names()))
        read = [ToolDuration(OVERALL, Spread.of(self.run.overall), Spread.of(self.queue.overall))]
        read += [
            ToolDuration(name, Spread.of(self.run.tool(name)), Spread.of(self.queue.tool(name)))
            for name in sorted(names)
        ]
        return [tool for tool in read if tool.run or tool.queue]


class SharedToolDurations(ToolDurations):
    """One writer's ToolDurations, shared with other writers. It is an async context manager, which closes its
    connections.

    Args:
        store: the Redis through which they are shared. Its URL must not be `embedded`.
        model: the model's id.
        writer: this writer's name, which must be unique and never be used again.
        clock: see `DurationStore`.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(self, store: RedisConfig, *, model: str, writer: str, clock: Clock) -> None:
        super().__init__()
        self._period_s = store.refresh_s
        limits = {"timeout_s": store.timeout_s, "expiry_s": store.expiry_s}
        self._stores: list[tuple[DurationTable, DurationStore]] = [
            (table, DurationStore(store.url, model=f"{model}#{space}", writer=writer, clock=clock, **limits))
            for table, space in ((self.run, RUN_SPACE), (self.queue, QUEUE_SPACE))
        ]

    async def exchange(self) -> bool:
        """Write this writer's statistics and read the others'. Return False if an exchange failed."""
        everything = True
        for table, store in self._stores:
            others = await store.exchange(table.own())
            if others is None:
                everything = False
            else:
                table.replace_others(others)
        return everything

    async def exchange_for_ever(self) -> None:
        """Exchange every `redis.refresh_s` until cancelled, or more rarely if there are many writers; see
        `SharedParts.pause_s`. The next exchange repeats one that failed.
        """
        while True:
            await self.exchange()
            await asyncio.sleep(max(store.pause_s(self._period_s) for _, store in self._stores))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for _, store in self._stores:
            await store.close()
