"""The engine as timelines: given these replicas and turns, expect these homes."""

from collections import Counter
from typing import Any

import pytest

from cluster.config.schema import SloConfig
from router.decisions import Decision, Go, Home, Placed, Refuse, Refused, Wait
from router.placement_engine import PlacementEngine
from router.settings import EngineSettings
from tests.router.router_views import request, snapshot


def went(decision: Decision) -> tuple[str, Placed]:
    assert isinstance(decision, Go), decision
    return decision.home.replica, decision.reason


def test_a_burst_between_two_snapshots_spreads() -> None:
    engine = PlacementEngine()
    engine.observe({f"r{i}": snapshot(f"r{i}") for i in range(4)}, 0.0)
    homes = Counter(went(engine.turn(f"t{i}", request(f"p{i}"), 0.1))[0] for i in range(40))
    assert set(homes.values()) == {10}


def test_a_program_stays_where_it_lives_and_its_turns_at_once_land_together() -> None:
    engine = PlacementEngine()
    engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1")}, 0.0)
    home, reason = went(engine.turn("t0", request("p"), 0.1))
    assert reason is Placed.NEW
    assert [went(engine.turn(f"t{i}", request("p"), 0.1)) for i in (1, 2)] == [(home, Placed.STAYED)] * 2


def test_without_replicas_turns_are_refused_with_a_time_to_come_again() -> None:
    engine = PlacementEngine()
    decision = engine.turn("t0", request("p"), 0.0)
    assert isinstance(decision, Refuse) and decision.reason is Refused.NO_REPLICA and decision.retry_after_s > 0


def test_a_program_whose_replica_is_gone_is_placed_anew_with_a_later_epoch() -> None:
    engine = PlacementEngine()
    engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1")}, 0.0)
    home, _ = went(engine.turn("t0", request("p"), 0.1))
    other = {"r0": "r1", "r1": "r0"}[home]
    engine.ended("t0", 1.0, context_tokens=1100)
    engine.observe({other: snapshot(other, 2)}, 1.5)
    decision = engine.turn("t1", request("p", 1300), 2.0)
    assert decision == Go(Home(other, 2), Placed.MOVED_FROM_LOST, moved_from=home)


def test_what_fits_nowhere_waits_and_goes_when_another_program_ends() -> None:
    engine = PlacementEngine(EngineSettings(working_set=1.0))
    engine.observe({"r0": snapshot("r0")}, 0.0)
    big = {"expected_later_turns": 0, "expected_later_tokens": 0, "expected_output_tokens": 0}
    assert went(engine.turn("t0", request("p0", 60_000, **big), 0.1))[0] == "r0"
    assert engine.turn("t1", request("p1", 60_000, **big), 0.2) == Wait()
    assert went(engine.turn("t2", request("p0", 60_000, **big), 0.3)) == ("r0", Placed.STAYED)
    assert engine.admitted(0.4) == []
    for turn in ("t0", "t2"):
        engine.ended(turn, 1.0)
    engine.forget("p0", 1.0)
    ((turn_id, decision),) = engine.admitted(1.1)
    assert turn_id == "t1" and isinstance(decision, Go) and decision.reason is Placed.NEW
    engine.ended("t1", 2.0)
    engine.check_integrity()


@pytest.mark.parametrize("engine", [PlacementEngine(), PlacementEngine(EngineSettings(max_moves=0))])
def test_a_resumed_program_leaves_an_overloaded_replica_unless_it_may_not(engine: PlacementEngine) -> None:
    engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1")}, 0.0)
    home, _ = went(engine.turn("t0", request("p"), 0.1))
    other = {"r0": "r1", "r1": "r0"}[home]
    engine.ended("t0", 0.5, context_tokens=1100)
    crowd = {"running": 60, "programs": 80, "running_tokens": 70_000, "waiting_tokens": 300_000, "residents": ["p"]}
    engine.observe({home: snapshot(home, 2, **crowd), other: snapshot(other, 2)}, 1.0)
    decision = engine.turn("t1", request("p", 1300), 1.1)
    if engine._settings.max_moves:
        assert decision == Go(Home(other, 2), Placed.MOVED_FOR_LOAD, moved_from=home)
    else:
        assert decision == Go(Home(home, 1), Placed.STAYED)


@pytest.mark.parametrize("fields", [{"draining": True}, {"running": 60, "programs": 80, "waiting_tokens": 300_000}])
def test_while_a_turn_is_in_flight_no_other_goes_elsewhere_and_after_it_the_next_does(fields: dict[str, Any]) -> None:
    engine = PlacementEngine()
    engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1")}, 0.0)
    home, _ = went(engine.turn("t0", request("p"), 0.1))
    other = {"r0": "r1", "r1": "r0"}[home]
    engine.observe({home: snapshot(home, 2, **fields), other: snapshot(other, 2)}, 1.0)
    assert went(engine.turn("t1", request("p"), 1.1)) == (home, Placed.STAYED)
    engine.ended("t0", 1.2)
    assert went(engine.turn("t2", request("p"), 1.3)) == (home, Placed.STAYED)
    for turn in ("t1", "t2"):
        engine.ended(turn, 1.4)
    assert went(engine.turn("t3", request("p"), 1.5))[0] == other


def test_a_replica_that_tells_nothing_counts_as_the_median_and_those_that_all_fall_silent_are_hashed() -> None:
    engine = PlacementEngine(EngineSettings(stale_s=5.0))
    busy = {"running": 30, "programs": 40, "waiting_tokens": 90_000}
    engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1", **busy), "r2": None}, 0.0)
    engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1", 2, **busy), "r2": None}, 6.0)
    homes = {went(engine.turn(f"t{i}", request(f"p{i}"), 6.0)) for i in range(6)}
    assert homes == {("r1", Placed.NEW), ("r2", Placed.NEW)}  # the engine of r0 may be frozen; r2 has just started
    assert went(engine.turn("t", request("p"), 12.0))[1] is Placed.HASHED


def test_new_programs_avoid_a_replica_whose_engine_may_be_frozen() -> None:
    """Only r1 publishes from second 1 on, although it is the busier one."""
    engine = PlacementEngine()
    busy = {"running": 10, "programs": 10}
    engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1", **busy)}, 0.0)
    assert went(engine.turn("before", request("before"), 0.5))[0] == "r0"
    for second in (1.0, 2.0):
        engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1", 2 + int(second), **busy)}, second)
    homes = {went(engine.turn(f"t{i}", request(f"p{i}"), 2.1))[0] for i in range(6)}
    assert homes == {"r1"}
    engine.observe({"r0": snapshot("r0", 2), "r1": snapshot("r1", 5, **busy)}, 3.0)  # it answers again
    assert went(engine.turn("after", request("after"), 3.1))[0] == "r0"


def test_replicas_that_are_all_silent_are_used() -> None:
    engine = PlacementEngine()
    engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1")}, 0.0)
    homes = {went(engine.turn(f"t{i}", request(f"p{i}"), 3.0))[0] for i in range(6)}
    assert homes == {"r0", "r1"}


@pytest.mark.parametrize(("there", "moves"), [(["p"], False), ([], True)])
def test_a_program_that_finds_nothing_at_home_leaves_it_for_less(there: list[str], moves: bool) -> None:
    engine = PlacementEngine()
    engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1")}, 0.0)
    home, _ = went(engine.turn("t0", request("p", 2000), 0.1))
    other = {"r0": "r1", "r1": "r0"}[home]
    engine.ended("t0", 0.5, context_tokens=2100)
    fuller = {"running": 30, "programs": 40, "working_set_tokens": 80_000.0, "residents": ["p"], "on_device": there}
    emptier = {"running": 20, "programs": 25, "working_set_tokens": 40_000.0}
    engine.observe({home: snapshot(home, 2, **fuller), other: snapshot(other, 2, **emptier)}, 1.0)
    turn = request("p", 2300, expected_output_tokens=600, expected_later_turns=4, expected_later_tokens=3000)
    assert went(engine.turn("t1", turn, 1.1))[0] == (other if moves else home)


@pytest.mark.parametrize(("ttft_s", "waiting_tokens", "moves"), [(None, 0, True), (1.0, 0, False), (1.0, 40_000, True)])
def test_what_is_in_time_at_home_does_not_move_to_where_it_would_be_late(
    ttft_s: float | None, waiting_tokens: int, moves: bool
) -> None:
    """40,000 tokens are computed again elsewhere in 1.2 s; 40,000 that wait at home before them take as long."""
    engine = PlacementEngine(slo=SloConfig(ttft_s=ttft_s))
    engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1")}, 0.0)
    home, _ = went(engine.turn("t0", request("p", 40_000), 0.1))
    other = {"r0": "r1", "r1": "r0"}[home]
    engine.ended("t0", 0.5, context_tokens=40_100)
    there = {"residents": ["p"], "on_device": ["p"], "waiting_tokens": waiting_tokens}
    crowd = {"running": 60, "programs": 80, "kv_tokens": 400_000, "working_set_tokens": 400_000.0}
    engine.observe({home: snapshot(home, 2, **crowd, **there), other: snapshot(other, 2)}, 1.0)
    turn = request("p", 40_300, expected_output_tokens=2000, expected_later_turns=9, expected_later_tokens=30_000)
    assert went(engine.turn("t1", turn, 1.1))[0] == (other if moves else home)
