"""Run times and queue times of tools, learnt by two who run programs, and shared through a real Redis."""

from dataclasses import replace

import pytest

from cluster.config.schema import RedisConfig
from cluster.core.clock import ManualClock
from cluster.core.tools import Outcome, ToolResult
from cluster.durations.statistics import LONGEST_S
from cluster.durations.table import OVERALL
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.durations import SharedToolDurations, Spread, ToolDuration, ToolDurations

RESULT = ToolResult(
    "a", "bash", Outcome.OK, "", queue_s=0.5, run_s=2.0, attempts=1, statistics_name="bash:grep"
)  # as an executor tells it


def always(seconds: float, count: int = 1) -> Spread:
    return Spread(count, seconds, seconds, seconds)


def shared(server: EmbeddedRedis, writer: str, model: str = "tiny") -> SharedToolDurations:
    store = RedisConfig(url=server.url, timeout_s=10.0)
    return SharedToolDurations(store, model=model, writer=writer, clock=ManualClock())


def test_a_result_counts_for_its_class_its_tool_and_all_tools_apart_in_run_and_queue() -> None:
    durations = ToolDurations()
    assert durations.read() == []
    assert durations.observe(RESULT)
    assert durations.observe(replace(RESULT, outcome=Outcome.ERROR, statistics_name="", name="calc", run_s=1.0))
    assert durations.read() == [
        ToolDuration(OVERALL, Spread(2, 1.0, 2.0, 2.0), always(0.5, 2)),
        ToolDuration("bash", always(2.0), always(0.5)),
        ToolDuration("bash:grep", always(2.0), always(0.5)),
        ToolDuration("calc", always(1.0), always(0.5)),
    ]
    assert [level.count for level in durations.run.levels("bash:sed")] == [1, 2]


def test_quantiles_are_those_of_the_durations() -> None:
    durations = ToolDurations()
    for i in range(1, 101):
        durations.observe(replace(RESULT, run_s=float(i), queue_s=i / 10))
    overall = durations.read()[0]
    assert (overall.run, overall.queue) == (Spread(100, 50.0, 90.0, 99.0), Spread(100, 5.0, 9.0, 9.9))


@pytest.mark.parametrize(
    "nothing",
    [
        *({"outcome": outcome} for outcome in Outcome if outcome not in (Outcome.OK, Outcome.ERROR)),
        {"outcome": Outcome.ERROR, "attempts": 0},
        {"run_s": -1.0},
        {"queue_s": 2 * LONGEST_S},
    ],
)
def test_what_tells_nothing_of_a_tools_duration_is_not_learnt(nothing: dict[str, object]) -> None:
    durations = ToolDurations()
    assert not durations.observe(replace(RESULT, **nothing))
    assert durations.read() == []


async def test_two_writers_see_each_others_and_no_other_models(server: EmbeddedRedis) -> None:
    async with shared(server, "one") as one, shared(server, "two") as two, shared(server, "x", "m") as of_another:
        one.observe(RESULT)
        two.observe(replace(RESULT, run_s=4.0, queue_s=0.0))
        two.observe(replace(RESULT, name="calc", statistics_name="calc"))
        for writer in (one, two, one, of_another):
            assert await writer.exchange()
        assert one.read() == two.read()
        by_name = {tool.name: tool for tool in one.read()}
        assert list(by_name) == [OVERALL, "bash", "bash:grep", "calc"]
        assert by_name["bash:grep"] == ToolDuration("bash:grep", Spread(2, 2.0, 4.0, 4.0), Spread(2, 0.0, 0.5, 0.5))
        assert of_another.read() == []


async def test_without_the_store_a_writer_knows_its_own(server: EmbeddedRedis) -> None:
    store = RedisConfig(url="redis://127.0.0.1:1", timeout_s=0.2)
    async with SharedToolDurations(store, model="tiny", writer="one", clock=ManualClock()) as alone:
        alone.observe(RESULT)
        assert not await alone.exchange()
        assert [tool.name for tool in alone.read()] == [OVERALL, "bash", "bash:grep"]
