"""How long tools run, and how long their calls wait before, apart: learnt from results, shared by all who run programs.

A pause is both together, and that is what the replicas learn. Here the two are told apart, since they ask for different
cures: a tool that is slow, or one with too few places.
"""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from cluster.clock import Clock
from cluster.config import StoreConfig
from cluster.durations import Durations
from cluster.statistics import LONGEST_S, OVERALL, DurationTable
from cluster.store import StatisticsStore
from cluster.tools import Outcome, ToolResult

RUN_SPACE = "tool-run"
QUEUE_SPACE = "tool-queue"
"""What follows a model's id in the names under which its statistics are shared."""

LEARNT = (Outcome.OK, Outcome.ERROR)
"""Of all others only a bound is known, or nothing: a timeout's tool would have run for longer."""


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
        told = all(0 <= seconds <= LONGEST_S for seconds in durations_s)
        if result.outcome not in LEARNT or result.attempts == 0 or not told:
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


class SharedToolDurations:
    """One writer's ToolDurations, and their way to the others'. An asynchronous context: it closes its connections.

    Args:
        store: where they are shared; its URL is Redis's own, not `embedded`.
        model: the model's id.
        writer: this writer's name, unique among them and never used again.
        clock: see `StatisticsStore`.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, store: StoreConfig, *, model: str, writer: str, clock: Clock) -> None:
        self.durations = ToolDurations()
        self._period_s = store.refresh_s
        self._spaces = [
            (
                table,
                StatisticsStore(
                    store.url,
                    model=f"{model}#{space}",
                    writer=writer,
                    timeout_s=store.timeout_s,
                    expiry_s=store.expiry_s,
                    clock=clock,
                ),
            )
            for table, space in ((self.durations.run, RUN_SPACE), (self.durations.queue, QUEUE_SPACE))
        ]
        self._stack = AsyncExitStack()

    def observe(self, result: ToolResult) -> bool:
        """See `ToolDurations.observe`."""
        return self.durations.observe(result)

    def read(self) -> list[ToolDuration]:
        """See `ToolDurations.read`."""
        return self.durations.read()

    async def exchange(self) -> bool:
        """Write what was learnt here and read what the others learnt; False if something of it came to nothing."""
        everything = True
        for table, store in self._spaces:
            others = await store.exchange(table.own())
            if others is None:
                everything = False
            else:
                table.replace_others(others)
        return everything

    async def exchange_for_ever(self) -> None:
        """Once in `store.refresh_s`, until it is cancelled; an exchange that fails is only late."""
        while True:
            await self.exchange()
            await asyncio.sleep(self._period_s)

    async def __aenter__(self) -> Self:
        for _, store in self._spaces:
            self._stack.push_async_callback(store.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
