"""What running a tool costs beside the tool itself, in one process and through Ray actors.

    python -m benchmarks.tool_executor [--calls 2000] [--burst 500]

`burst`: so many calls of a tool that takes one second, asked for at once; the seconds until the last has answered.
`overhead`: calls of a tool that does nothing; milliseconds of each, one after the other. Eight callers at a time, each
with its next call as soon as it has an answer, saturate what runs them: their times are eight over the throughput, and
have no target.
`command` and `process` start a sandbox, and ask a worker process: they cost what processes cost, and have no target.
`lateness`: calls of tools that never end, eight at a time with a deadline of half a second; the milliseconds by which
their answers, timeouts all, are later than that.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.results import save
from cluster.config.tools import ToolsConfig
from cluster.core.tools import Outcome, ToolCall, ToolResult
from tools_runtime.actor import ToolActors
from tools_runtime.host import ToolHost

BURST_LIMIT_S = 2.5
OVERHEAD_LIMITS_MS = (3.0, 15.0)
"""Of the median and the 99th percentile."""

LATENESS_LIMIT_MS = 100.0
DEADLINE_S = 0.5

Run = Callable[[ToolCall], Awaitable[ToolResult]]


async def wait(seconds: float) -> str:
    """A tool that takes its time."""
    await asyncio.sleep(seconds)
    return "done"


async def nothing() -> str:
    """A tool that takes none."""
    return ""


def nothing_apart() -> str:
    """The same, in a process."""
    return ""


def hang() -> None:
    """A tool that never ends, in a process."""
    time.sleep(1000)


def tools(actors: int, burst: int) -> ToolsConfig:
    """The tools that are measured."""
    here = "benchmarks.tool_executor"
    many = {"concurrency": burst, "max_queued": burst}
    return ToolsConfig.model_validate(
        {
            "actors": actors,
            "defined": {
                "wait": {"kind": "python", "entry": f"{here}:wait", **many},
                "nothing": {"kind": "python", "entry": f"{here}:nothing", **many},
                "process": {"kind": "python", "entry": f"{here}:nothing_apart"},
                "command": {"kind": "command", "argv": ["true"]},
                "hang": {"kind": "python", "entry": f"{here}:hang"},
                "sleep": {"kind": "command", "argv": ["sleep", "1000"]},
            },
        }
    )


async def burst(run: Run, calls: int) -> dict[str, Any]:
    """Seconds until ``calls`` calls of one second each, asked for at once, have answered."""
    start = time.perf_counter()
    results = await asyncio.gather(*(run(ToolCall(f"b{i}", "wait", {"seconds": 1.0})) for i in range(calls)))
    elapsed = time.perf_counter() - start
    assert all(result.outcome is Outcome.OK for result in results), results[0]
    return {"measure": "burst", "calls": calls, "seconds": elapsed, "met": elapsed < BURST_LIMIT_S}


async def overhead(run: Run, tool: str, calls: int, at_a_time: int) -> dict[str, Any]:
    """Milliseconds of calls of a tool that does nothing."""
    times: list[float] = []

    async def one_after_the_other(caller: int) -> None:
        for i in range(calls // at_a_time):
            start = time.perf_counter()
            result = await run(ToolCall(f"{caller}.{i}", tool))
            times.append((time.perf_counter() - start) * 1e3)
            assert result.outcome is Outcome.OK, result

    await run(ToolCall("warm", tool))
    await asyncio.gather(*map(one_after_the_other, range(at_a_time)))
    p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
    met = None
    if tool == "nothing" and at_a_time == 1:
        met = p50 <= OVERHEAD_LIMITS_MS[0] and p99 <= OVERHEAD_LIMITS_MS[1]
    return {"measure": "overhead", "tool": tool, "at_a_time": at_a_time, "p50_ms": p50, "p99_ms": p99, "met": met}


async def lateness(run: Run, tool: str, calls: int) -> dict[str, Any]:
    """Milliseconds by which the answers for a tool that never ends are late."""
    late: list[float] = []

    async def one_after_the_other(caller: int) -> None:
        for i in range(calls // 8):
            start = time.perf_counter()
            arguments = {"seconds": 1000} if tool == "wait" else {}
            result = await run(ToolCall(f"{caller}.{i}", tool, arguments, deadline_s=DEADLINE_S))
            late.append((time.perf_counter() - start - DEADLINE_S) * 1e3)
            assert result.outcome is Outcome.TIMEOUT, result

    await asyncio.gather(*map(one_after_the_other, range(8)))
    p50, worst = statistics.median(late), max(late)
    return {"measure": "lateness", "tool": tool, "p50_ms": p50, "max_ms": worst, "met": worst <= LATENESS_LIMIT_MS}


async def measured(through: str, run: Run, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one way to run tools."""
    rows = [await burst(run, arguments.burst)]
    rows += [await overhead(run, "nothing", arguments.calls, at_a_time) for at_a_time in (1, 8)]
    rows += [await overhead(run, tool, arguments.calls // 20, 1) for tool in ("process", "command")]
    rows += [await lateness(run, tool, 40) for tool in ("wait", "hang", "sleep")]
    return [{"through": through, **row} for row in rows]


async def everything(arguments: argparse.Namespace) -> Sequence[dict[str, Any]]:
    """Rows of the executor alone, and of a pool of actors."""
    host = ToolHost(tools(1, arguments.burst))
    await host.open()
    rows = await measured("executor", host.run, arguments)
    await host.aclose()
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    pool = ToolActors(tools(arguments.actors, arguments.burst))
    await pool.ready()
    rows += await measured(f"{arguments.actors} actors", pool.run, arguments)
    await pool.aclose(kill=True)
    ray.shutdown()
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--burst", type=int, default=500)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    rows = asyncio.run(everything(arguments))
    for row in rows:
        print(
            "  ".join(
                f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )
    print(save("tool_executor", rows, arguments.json))
    return 0 if all(row["met"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
