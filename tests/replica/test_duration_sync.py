"""Tool durations between a scheduler and its replica: what changed travels, a bounded part of it at a time."""

from collections.abc import Callable

import pytest

from cluster.durations.statistics import DurationStatistics
from cluster.durations.table import OVERALL, DurationTable
from replicas.control import dispatch
from replicas.duration_sync import MAX_PARTS, DurationSync, unpack_parts
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import VirtualEngine


class Pair:
    """A scheduler and its replica's end."""

    def __init__(self, scheduler: AgentScheduler) -> None:
        self.scheduler = scheduler
        self.sync = DurationSync()
        self.sent: list[int] = []
        self.received: list[int] = []

    def observe(self, tool: str, seconds: float) -> None:
        self.scheduler.durations.observe(tool, seconds)
        self.scheduler.duration_changes.note(tool)

    def exchange(self, *, answer_is_lost: bool = False) -> None:
        payload = self.sync.payload()
        self.sent.append(len(unpack_parts(payload.get("durations", b""))))
        answer = dispatch(self.scheduler, "exchange", payload)
        self.received.append(len(unpack_parts(answer["durations"])))
        if not answer_is_lost:
            self.sync.answered(answer["revision"], answer["durations"])


@pytest.fixture
def pair(replica: Callable[..., VirtualEngine]) -> Pair:
    scheduler = replica().scheduler
    assert isinstance(scheduler, AgentScheduler)
    return Pair(scheduler)


def observed(*seconds: float) -> DurationStatistics:
    statistics = DurationStatistics()
    for duration in seconds:
        statistics.observe(duration)
    return statistics


def test_an_exchange_carries_what_changed_since_the_last_one(pair: Pair) -> None:
    pair.observe("ls", 1.0)
    pair.sync.set_others({"far": observed(3.0), OVERALL: observed(3.0)})
    pair.exchange()
    pair.exchange()
    pair.observe("sh", 2.0)
    pair.exchange()
    assert (pair.sent, pair.received) == ([2, 0, 0], [2, 0, 2])
    assert {name: part.count for name, part in pair.sync.own.items()} == {"ls": 1, "sh": 1, OVERALL: 2}
    far = pair.scheduler.durations.tool("far")
    assert far is not None and far.mean_s == 3.0


def test_an_answer_that_is_lost_loses_nothing(pair: Pair) -> None:
    pair.observe("ls", 1.0)
    pair.sync.set_others({"far": observed(3.0)})
    pair.exchange(answer_is_lost=True)
    pair.exchange()
    assert (pair.sent, pair.received) == ([1, 1], [2, 2])
    assert pair.scheduler.durations.tool("far").count == 1  # type: ignore[union-attr]


def test_many_tools_travel_in_parts_and_all_arrive(pair: Pair) -> None:
    names = [f"tool{n}" for n in range(3 * MAX_PARTS)]
    for name in names:
        pair.observe(name, 1.0)
    pair.sync.set_others({f"far{n}": observed(2.0) for n in range(3 * MAX_PARTS)})
    for _ in range(4):
        pair.exchange()
    assert max(*pair.sent, *pair.received) == MAX_PARTS
    assert set(names) < set(pair.sync.own)
    assert sum(name.startswith("far") for name in pair.scheduler.durations.names()) == 3 * MAX_PARTS


def test_what_the_others_forget_is_forgotten(pair: Pair) -> None:
    pair.sync.set_others({"far": observed(3.0)})
    pair.exchange()
    pair.sync.set_others({})
    pair.exchange()
    assert pair.scheduler.durations.tool("far") is None


def test_the_replicas_part_is_what_the_scheduler_observed(pair: Pair) -> None:
    for n in range(50):
        pair.observe(f"bash:{n % 7}", float(n))
    for _ in range(3):
        pair.exchange()
    assert DurationTable.of(pair.sync.own).to_bytes() == DurationTable.of(pair.scheduler.durations.own()).to_bytes()
