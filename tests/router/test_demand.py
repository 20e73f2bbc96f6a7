"""The demand that an ingress sees: the work of turns and programs, what waits, and what misses its SLO."""

import pytest

from cluster.core.scaling_report import Demand, ReplicaLoadReport, ReplicaReport, turn_work_s
from router.demand import PROGRAMS_WITHIN_S, TURNS_WITHIN_S, DemandMeter
from router.placement_engine import PlacementEngine
from router.settings import EngineSettings
from tests.router.router_views import COSTS, request, snapshot


def test_the_work_of_a_token_is_its_share_of_a_full_batch() -> None:
    """100,000 tokens hold 100 contexts of 1,000. A step of them takes 1.5 + 1 + 6 + 5 ms, so a token 0.135 ms."""
    replica = snapshot("r")
    assert turn_work_s(replica, 0, 1, 1000) == pytest.approx(0.135e-3)
    assert turn_work_s(replica, 1000, 0, 1000) == pytest.approx(0.030)
    slow = snapshot("r", step_time_ratio=2.0, max_sequences=2)
    assert turn_work_s(slow, 0, 1, 1000) == pytest.approx(2 * (1.5e-3 + 2e-5 + 6e-3 + 2000 * 5e-8) / 2)
    alone = turn_work_s(replica, 0, 1, 200_000)
    assert alone == pytest.approx(1.5e-3 + 1e-5 + 6e-3 + 200_000 * 5e-8), "a context beyond the memory runs alone"


def test_rates_are_over_the_last_seconds_only() -> None:
    meter = DemandMeter()
    for step in range(1000):
        meter.turn(step / 10, 0.05)
    meter.program(99.0, 30.0, 100.0)
    demand = meter.demand(99.9, 0.0, 0.0)
    assert demand.turn_work == pytest.approx(0.5, rel=0.02)
    assert (demand.program_work, demand.program_s) == (30.0 / PROGRAMS_WITHIN_S, 100.0)
    later = meter.demand(200.0, 0.0, 0.0)
    assert later == Demand(at_s=200.0)
    assert len(meter._turn_work._amounts) == 0


def test_a_meter_that_nobody_reads_stays_small() -> None:
    meter = DemandMeter()
    for step in range(100_000):
        meter.turn(step / 1000, 0.001)
    assert len(meter._turn_work._amounts) <= 102


def test_misses_are_differences_of_counts() -> None:
    meter = DemandMeter()
    meter.ended(1.0, 100, 10)
    meter.ended(2.0, 130, 11)
    assert meter.demand(2.0, 0.0, 0.0).turns == 130
    assert meter.demand(21.5, 0.0, 0.0) == Demand(turns=30, missed=1, at_s=21.5)


def test_the_engine_counts_what_it_sends_and_what_waits() -> None:
    """A first turn has all of its prompt to compute, a later one only its growth. A program that does not fit waits."""
    engine = PlacementEngine(EngineSettings(guarded_working_set=1.0))
    engine.observe({"r": snapshot("r", guards_memory=True)}, 0.0)
    engine.turn("1", request("a", 40_000, expected_output_tokens=100, expected_later_turns=3), 0.0)
    first = engine.demand(0.0, 0, 0)
    outputs_s = turn_work_s(snapshot("r"), 0, 100, 40_050)
    assert first.turn_work * TURNS_WITHIN_S == pytest.approx(40_000 * COSTS.token_s + outputs_s)
    assert first.program_work * PROGRAMS_WITHIN_S > first.turn_work * TURNS_WITHIN_S
    assert first.program_s > 3.0, "three pauses of a second"
    engine.ended("1", 1.0, context_tokens=40_100)
    engine.turn("2", request("a", 40_300, expected_output_tokens=100), 1.0)
    second = engine.demand(1.0, 1, 0)
    assert (second.turn_work - first.turn_work) * TURNS_WITHIN_S < 0.01 + 1.1 * outputs_s
    assert second.program_work == first.program_work, "no new program"
    engine.turn("3", request("b", 80_000), 1.0)
    waiting = engine.demand(1.0, 1, 0)
    assert engine.waiting == 1
    assert waiting.queued_work_s > 80_000 * COSTS.token_s and waiting.queued_tokens > 80_000


def test_a_report_survives_the_way_through_ray() -> None:
    load = ReplicaLoadReport(100.0, 50.0, 1.5, 3.0, 20.0)
    report = ReplicaReport(load, {"a": Demand(turn_work=1.0, missed=2.0, at_s=7.0), "b:c": Demand(turns=1.0)})
    assert ReplicaReport.of(report.numbers()) == report
    assert all(isinstance(number, float) for number in report.numbers().values())
    broken = {"kv_tokens": float("nan"), "turns": -1.0, "demand_turns:a": float("inf"), "other": 1.0}
    assert ReplicaReport.of(broken) == ReplicaReport(ReplicaLoadReport(), {"a": Demand()})


def test_demands_of_ingresses_are_added() -> None:
    one = Demand(turn_work=1.0, program_work=2.0, program_s=100.0, turns=10, missed=1)
    other = Demand(turn_work=0.5, program_work=0.5, program_s=5.0, turns=20, missed=3, queued_work_s=4.0)
    both = Demand(turn_work=1.5, program_work=2.5, program_s=100.0, turns=30, missed=4, queued_work_s=4.0)
    assert Demand.sum([one, other]) == both == Demand.sum([other, one])


def test_a_replicas_load_is_that_of_its_snapshot() -> None:
    """Of two turns one waits: half of the expected output. Half of the host tier counts."""
    seen = snapshot("r", running=1, waiting=1, waiting_tokens=1000, output_tokens=200.0, host_tokens=50_000)
    load = ReplicaLoadReport.of_snapshot(seen, 12.0)
    assert (load.kv_tokens, load.turns, load.start_s) == (125_000, 2.0, 12.0)
    assert load.waiting_work_s == pytest.approx(turn_work_s(seen, 1000, 100, 500))
