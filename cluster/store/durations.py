"""Durations of tool calls, shared through Redis, and how long tools run and wait, learnt from their results."""

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

LIMITS = PartLimits(writers=256, fields=MAX_TOOLS + 1, value_bytes=MAX_STATISTICS_BYTES, read_bytes=8 << 20)

RUN_SPACE = "tool-run"
QUEUE_SPACE = "tool-queue"
"""What follows a model's id in the names under which its statistics are shared."""

LEARNT = (Outcome.OK, Outcome.ERROR)
"""Of all others only a bound is known, or nothing: a timeout's tool would have run for longer."""


class DurationStore(SharedParts):
    """One writer's access to the durations that the writers of one ``model`` have observed."""

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
        """By writer and field."""
        self._merged: dict[str, tuple[list[DurationStatistics], DurationStatistics]] = {}
        """Per tool: the parts, and all of them merged."""

    async def exchange(self, own: Mapping[str, DurationStatistics]) -> Mapping[str, DurationStatistics] | None:
        """Write this writer's part and read the others', one call at a time.

        Args:
            own: all that this writer has observed, as ``DurationTable.own`` gives it. Only what changed is written.

        Returns:
            What all other writers have observed, merged, to be read only; None if it came to nothing, within about
            ``timeout_s``: ``failures`` has the reason.
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
        """All valid values of ``parts``, per tool. What has not changed is not parsed and merged again."""
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
    """Some durations, in seconds."""

    count: int
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, durations: Durations | None) -> Self | None:
        """None where nothing was observed."""
        if durations is None or not durations.count:
            return None
        p50_s, p90_s, p99_s = map(durations.quantile, (0.5, 0.9, 0.99))
        return cls(durations.count, p50_s, p90_s, p99_s)


@dataclass(frozen=True, slots=True)
class ToolDuration:
    """One tool, or one class of its calls (`bash:grep`); OVERALL stands for all tools."""

    name: str
    run: Spread | None
    """Retries and the waits between them included."""
    queue: Spread | None
    """From the call's arrival to the tool's first start."""


class ToolDurations:
    """Run times and queue times by tool and by class of arguments. Pure."""

    def __init__(self) -> None:
        self.run = DurationTable()
        self.queue = DurationTable()

    def observe(self, result: ToolResult) -> bool:
        """Learn from a result; False if there is nothing to learn: the tool did not run, or did not end by itself."""
        durations_s = (result.run_s, result.queue_s)
        valid = all(0 <= seconds <= LONGEST_S for seconds in durations_s)
        if result.outcome not in LEARNT or result.attempts == 0 or not valid:
            return False
        name = result.statistics_name or result.name
        self.run.observe(name, result.run_s)
        self.queue.observe(name, result.queue_s)
        return True

    def read(self) -> list[ToolDuration]:
        """What all writers know: all tools together first, if any was observed, then by name."""
        names: Iterable[str] = dict.fromkeys((*self.run.names(), *self.queue.names()))
        read = [ToolDuration(OVERALL, Spread.of(self.run.overall), Spread.of(self.queue.overall))]
        read += [
            ToolDuration(name, Spread.of(self.run.tool(name)), Spread.of(self.queue.tool(name)))
            for name in sorted(names)
        ]
        return [tool for tool in read if tool.run or tool.queue]


class SharedToolDurations(ToolDurations):
    """One writer's ToolDurations, shared with other writers. An asynchronous context: it closes its connections.

    Args:
        store: where they are shared; its URL is Redis's own, not `embedded`.
        model: the model's id.
        writer: this writer's name, unique among them and never used again.
        clock: see `DurationStore`.

    Raises:
        ConfigError: the URL cannot be used.
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
        """Write what was learnt here and read what the others learnt; False if something of it came to nothing."""
        everything = True
        for table, store in self._stores:
            others = await store.exchange(table.own())
            if others is None:
                everything = False
            else:
                table.replace_others(others)
        return everything

    async def exchange_for_ever(self) -> None:
        """Exchange once in `redis.refresh_s`, until it is cancelled; an exchange that fails is only late."""
        while True:
            await self.exchange()
            await asyncio.sleep(self._period_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for _, store in self._stores:
            await store.close()
