"""The replica's half of the router: what it refuses, gives up and publishes; a real scheduler behind the channel."""

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from cluster.core.clock import ManualClock
from cluster.core.errors import ProgramMoved
from cluster.core.program import ProgramIdentity
from cluster.core.replica_snapshot import (
    ReplicaSnapshot,
    prefix_blocks,
    program_name,
    prompt_of,
    unpack_blocks,
    unpack_names,
)
from cluster.core.scaling_report import Demand, ReplicaReport
from cluster.observing.recorders import Fallback
from replicas.control import ControlChannel, dispatch
from replicas.router_side import DEMAND_STALE_S, Fence, RouterSide
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import VirtualEngine
from router.autoscaling.policy import ScalingView
from router.autoscaling.program_load import ProgramLoad

Replica = Callable[..., VirtualEngine]
KEY = "default/a"
BODY = {"messages": [{"role": "system", "content": "You are careful. " * 40}]}


class EngineClient:
    """vLLM's, as far as the channel needs it: its scheduler answers at once, or never."""

    def __init__(self, scheduler: AgentScheduler) -> None:
        self.errored = False
        self.silent = False
        self.engine_core = self
        self._scheduler = scheduler

    async def call_utility_async(self, utility: str, operation: str, payload: dict[str, Any]) -> dict[str, Any]:
        if self.silent:
            await asyncio.Event().wait()
        return dispatch(self._scheduler, operation, payload)


class Side:
    def __init__(self, engine: VirtualEngine) -> None:
        self.engine = engine
        self.scheduler: AgentScheduler = engine.scheduler  # type: ignore[assignment]
        self.client = EngineClient(self.scheduler)
        self.fallbacks: list[Fallback] = []
        self.clock = ManualClock()
        channel = ControlChannel(self.client, 0.01)
        self.side = RouterSide(channel, "r1", "m", self.fallbacks.append, self.clock)

    def turn(self, program: str, tokens: int) -> None:
        self.engine.submit(f"{program}-{tokens}", range(tokens), 1, ProgramIdentity(program_id=program))
        self.engine.run()

    def published(self) -> ReplicaSnapshot:
        packed = asyncio.run(self.side.publish())
        assert packed is not None
        return ReplicaSnapshot.decode(packed)


@pytest.fixture
def side(replica: Replica) -> Callable[..., Side]:
    return lambda *args, **kwargs: Side(replica(*args, **kwargs))


def test_a_turn_of_an_epoch_that_is_over_is_refused(side: Callable[..., Side]) -> None:
    s = side().side
    s.receive("chat", BODY, KEY, 3)
    s.receive("chat", BODY, KEY, 3)
    s.receive("chat", BODY, KEY, 5)
    with pytest.raises(ProgramMoved) as refused:
        s.receive("chat", BODY, KEY, 4)
    assert (refused.value.status, refused.value.epoch) == (409, 5)
    s.receive("chat", BODY, "default/b", 1)
    s.receive("chat", BODY, KEY, None)  # placed without the store: nobody counts


def test_a_program_that_moved_away_is_refused_and_gives_up_its_hold(side: Callable[..., Side]) -> None:
    s = side("continuum")
    s.side.receive("chat", BODY, KEY, 1)
    s.turn("a", 100)
    assert len(s.scheduler.holds) == 1
    assert asyncio.run(s.side.moved_away(KEY, 2)) == {"moved": True}
    assert len(s.scheduler.holds) == 0 and s.published().residents == b""
    with pytest.raises(ProgramMoved):
        s.side.receive("chat", BODY, KEY, 1)
    s.side.receive("chat", BODY, KEY, 3)  # it has come back


def test_a_notice_that_comes_late_does_not_end_a_program_that_has_come_back(side: Callable[..., Side]) -> None:
    s = side("continuum")
    s.side.receive("chat", BODY, KEY, 3)
    s.turn("a", 100)
    assert asyncio.run(s.side.moved_away(KEY, 2)) == {"moved": False}
    assert len(s.scheduler.holds) == 1
    assert asyncio.run(s.side.moved_away(KEY, 4)) == {"moved": True}
    assert asyncio.run(s.side.moved_away(KEY, 4)) == {"moved": False}, "it is asked again until it is acknowledged"


def test_a_program_with_a_turn_in_flight_is_given_up_when_that_ends(side: Callable[..., Side]) -> None:
    s = side("continuum")
    s.engine.submit("a-1", range(100), 3, ProgramIdentity(program_id="a"))
    s.engine.step()
    assert asyncio.run(s.side.moved_away(KEY, 2)) == {"moved": True}
    assert unpack_names(s.published().residents) == {program_name(KEY)}
    s.engine.run()
    assert len(s.scheduler.holds) == 0 and s.published().residents == b""


def test_a_program_that_is_not_here_moves_away_all_the_same(side: Callable[..., Side]) -> None:
    s = side()
    assert asyncio.run(s.side.moved_away(KEY, 2)) == {"moved": False}
    with pytest.raises(ProgramMoved):
        s.side.receive("chat", BODY, KEY, 1)


def test_what_is_published_names_the_replica_its_prefixes_and_whether_it_drains(side: Callable[..., Side]) -> None:
    s = side()
    s.side.receive("chat", BODY, KEY, 1)
    s.side.receive("tokenize", {"prompt": "y" * 1000}, None, None)  # nothing is computed for it
    s.turn("a", 40)
    told = s.published()
    assert (told.replica, told.model, told.number, told.draining) == ("r1", "m", 1, False)
    assert unpack_blocks(told.prefixes) == frozenset(prefix_blocks(prompt_of(BODY))) != frozenset()
    assert unpack_names(told.residents) == {program_name(KEY)}
    s.side.draining = True
    told = s.published()
    assert (told.number, told.draining) == (2, True)


def test_the_autoscaler_gets_the_load_and_the_demand_of_the_ingresses(side: Callable[..., Side]) -> None:
    """Of each ingress the newest demand counts, and none that is old: the ingress reports elsewhere, or is gone."""
    s = side()
    assert s.side.scaling_report() == {}, "nothing is known before the first snapshot"
    s.side.start_s = 12.0
    s.turn("a", 40)
    assert s.published().start_s == 12.0
    for demand in (Demand(turn_work=9.0), Demand(turn_work=1.0, turns=3.0)):
        s.side.receive_demand("ingress-1", demand.numbers())
    s.clock.advance(DEMAND_STALE_S - 1)
    s.side.receive_demand("ingress-2", Demand(turn_work=0.5, missed=1.0).numbers())
    report = ReplicaReport.of(s.side.scaling_report())
    assert (report.load.start_s, report.load.turns) == (12.0, 0.0)
    assert report.load.kv_tokens > 0 and report.load.working_set_tokens > 0
    ended = {"ingress-1": Demand(turn_work=1.0, turns=3.0), "ingress-2": Demand(turn_work=0.5, missed=1.0)}
    assert report.demands == ended
    s.clock.advance(2.0)
    assert set(ReplicaReport.of(s.side.scaling_report()).demands) == {"ingress-2"}


def test_the_demand_of_an_ingress_that_reports_to_another_replica_counts_once(side: Callable[..., Side]) -> None:
    """Three replicas serve 2 s of work in each second, for which 2.5 are needed. Then another one is the first."""
    sides = [side(), side(), side()]
    for one in sides:
        one.turn("a", 40)
        one.published()

    def wanted() -> int:
        reports = [ReplicaReport.of(one.side.scaling_report()) for one in sides]
        policy = ProgramLoad()
        return policy.decide(ScalingView(1000.0, 3, 3, 1, 8, reports), policy.first()).replicas

    sides[0].side.receive_demand("ingress-1", Demand.of({"turn_work": 1.0, "turns": 50.0, "at_s": 7.0}).numbers())
    sides[2].side.receive_demand("ingress-2", Demand.of({"turn_work": 1.0, "turns": 50.0, "at_s": 1.0}).numbers())
    assert wanted() == 3
    sides[1].side.receive_demand("ingress-1", Demand.of({"turn_work": 1.1, "turns": 50.0, "at_s": 8.0}).numbers())
    assert wanted() == 3
    sides[1].side.receive_demand("ingress-1", Demand.of({"turn_work": 2.0, "turns": 50.0, "at_s": 9.0}).numbers())
    assert wanted() == 4, "the newest counts"


def test_a_scheduler_that_does_not_answer_leaves_the_last_snapshot(side: Callable[..., Side]) -> None:
    s = side()
    s.client.silent = True
    assert asyncio.run(s.side.publish()) is None
    s.client.silent = False
    before = s.published()
    s.client.silent = True
    assert s.published() == before
    assert s.fallbacks == [Fallback.CONTROL_TIMEOUT] * 2
    s.client.errored = True
    assert s.published() == before


def test_the_refusal_survives_the_way_to_the_ingress() -> None:
    moved = pickle.loads(pickle.dumps(ProgramMoved("gone", epoch=4)))
    assert isinstance(moved, ProgramMoved) and (moved.message, moved.epoch) == ("gone", 4)


def test_the_fence_is_bounded_and_forgets_who_was_heard_of_first() -> None:
    fence = Fence(max_programs=2)
    for key in ("a", "b", "c"):
        fence.raise_to(key, 5)
    assert len(fence) == 2
    assert fence.refuses("a", 1) is None
    assert fence.refuses("c", 4) == 5


def test_the_fence_never_goes_back() -> None:
    fence = Fence()
    fence.raise_to("a", 5)
    fence.raise_to("a", 2)
    assert fence.refuses("a", 4) == 5
