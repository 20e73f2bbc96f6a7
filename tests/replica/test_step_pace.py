"""Policies reckon with the pace that a replica really has: step times are compared with the cost model's."""

from collections import deque
from collections.abc import Callable

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from cluster.core.clock import ManualClock
from cluster.core.program import ProgramIdentity
from replicas.routing_view import routing_snapshot
from replicas.scheduler import AgentScheduler
from replicas.step_pace import work_of
from replicas.virtual_engine import VirtualEngine

Replica = Callable[..., VirtualEngine]


def run(engine: VirtualEngine, slower: float, steps: int, turn: str = "a") -> AgentScheduler:
    """Steps of a decode and a prompt, each ``slower`` times as long as the model says."""
    scheduler = engine.scheduler
    assert isinstance(scheduler, AgentScheduler) and isinstance(scheduler.clock, ManualClock)
    given = scheduler.settings.cost
    engine.submit(turn, [ord(turn)] * 40, steps, ProgramIdentity(program_id=turn))
    for _ in range(steps):
        output = scheduler.schedule()
        scheduler.clock.advance(slower * given.step_s(*work_of(output, scheduler.requests)))
        engine.complete(output)
    return scheduler


def test_a_replica_that_keeps_the_models_pace_changes_nothing(replica: Replica) -> None:
    engine = replica()
    before = engine.scheduler.facts
    assert run(engine, 1.2, 200).facts is before


@pytest.mark.parametrize("slower", [0.4, 3.0, 20.0])
def test_a_slower_or_faster_replica_is_known_as_one(replica: Replica, slower: float) -> None:
    scheduler = run(replica(), slower, 300)
    given, learnt = scheduler.settings.cost, scheduler.facts.cost
    assert learnt.step_s(64, 640, 3) == pytest.approx(slower * given.step_s(64, 640, 3), rel=0.25)
    assert learnt.swap_s(1000) == given.swap_s(1000)  # the link was not measured


def test_a_pace_that_changes_is_followed(replica: Replica) -> None:
    engine = replica()
    assert run(engine, 3.0, 300, "a").pace.scale == pytest.approx(3.0, rel=0.25)
    assert run(engine, 1.0, 600, "b").pace.scale == pytest.approx(1.0, rel=0.25)


def test_one_step_that_takes_a_minute_is_not_the_pace(replica: Replica) -> None:
    engine = replica()
    scheduler = run(engine, 1.0, 200)
    for _ in range(8):  # one of them is compared
        output = scheduler.schedule() if scheduler.has_requests() else None
        if output is None:
            engine.submit("c", [3] * 20, 100, ProgramIdentity(program_id="c"))
            output = scheduler.schedule()
        scheduler.clock.advance(60.0)  # type: ignore[attr-defined]
        engine.complete(output)
    assert scheduler.pace.scale < 2


def test_idle_time_is_no_step(replica: Replica) -> None:
    engine = replica()
    for turn in "abcdefgh":
        scheduler = run(engine, 1.0, 40, turn)
        scheduler.clock.advance(100.0)  # type: ignore[attr-defined]
    assert scheduler.pace.scale == 1.0


def test_a_step_in_flight_begins_when_the_one_before_it_ends(replica: Replica) -> None:
    engine = replica(asynchronous=True)
    scheduler = engine.scheduler
    assert isinstance(scheduler, AgentScheduler) and isinstance(scheduler.clock, ManualClock)
    engine.submit("a", [1] * 40, 300, ProgramIdentity(program_id="a"))
    under_way = deque([begun(scheduler)])
    for _ in range(290):
        under_way.append(begun(scheduler))  # while the one before it is computed, as vLLM does
        output, seconds = under_way.popleft()
        scheduler.clock.advance(seconds)
        engine.complete(output)
    assert scheduler.pace.scale == 1.0


def begun(scheduler: AgentScheduler) -> tuple[SchedulerOutput, float]:
    """A step, and how long it is to take."""
    output = scheduler.schedule()
    return output, scheduler.settings.cost.step_s(*work_of(output, scheduler.requests))


def test_routers_are_told_the_given_costs(replica: Replica) -> None:
    """Else the replica that is slow for a moment loses every program, and with them what makes it slow."""
    engine = replica()
    assert isinstance(engine.scheduler, AgentScheduler)
    before = routing_snapshot(engine.scheduler, "r", "tiny", 1, False).costs
    scheduler = run(engine, 3.0, 300)
    assert scheduler.pace.scale > 2
    assert routing_snapshot(scheduler, "r", "tiny", 1, False).costs == before
