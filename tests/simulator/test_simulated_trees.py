"""Trees of programs in the simulator: children run in their parent's pause, and it lasts until they have ended."""

from dataclasses import replace

import pytest

from cluster.core.slo import Outcome
from cluster.offline.bench.workload import PlannedProgram
from cluster.offline.simulator.bounds import FluidBound, HoldingBound
from cluster.offline.simulator.foresight import Foresight
from replicas.scheduler import AgentScheduler
from tests.simulator.simulated import COST, Bench, program, turn


def tree(*children: PlannedProgram) -> PlannedProgram:
    return program(replace(turn(200, 10, "task", 60.0), children=children), turn(30, 5))


SHORT, LONG = program(turn(64, 4)), program(turn(64, 8, "ls", 0.5), turn(16, 8))


@pytest.mark.parametrize("policy", ["vllm", "caesura", "augserve"])
def test_a_parent_resumes_when_its_last_child_has_ended(bench: Bench, policy: str) -> None:
    parent, short, long = bench.run((0.0, tree(SHORT, LONG)), policy=policy)
    assert [record.program_id for record in (parent, short, long)] == ["p0", "p0.0.0", "p0.0.1"]
    assert all(record.outcome is Outcome.OK for record in (parent, short, long))
    began_s, ended_s = parent.turns[0].last_token_s, max(r.turns[-1].last_token_s or 0.0 for r in (short, long))
    assert short.arrival_s == long.arrival_s == began_s
    assert parent.turns[1].intended_start_s == ended_s
    [replica] = bench.replicas
    replica.check_integrity()


def test_children_of_children_hold_up_the_whole_line(bench: Bench) -> None:
    middle = program(replace(turn(64, 4, "task", 9.0), children=(LONG,)), turn(16, 4))
    parent, child, below = bench.run((0.0, tree(middle)), policy="caesura")
    assert below.program_id == "p0.0.0.0.0"
    assert child.turns[1].intended_start_s == below.turns[-1].last_token_s
    assert parent.turns[1].intended_start_s == child.turns[-1].last_token_s


def test_a_tree_that_is_cut_off_is_unfinished(bench: Bench) -> None:
    parent, child = bench.run((0.0, tree(LONG)), policy="vllm", until_s=0.3)
    assert (parent.outcome, child.outcome) == (Outcome.UNFINISHED, Outcome.UNFINISHED)


def test_the_scheduler_learns_the_parent_from_the_identity(bench: Bench) -> None:
    simulation = bench.prepare([(0.0, tree(LONG, SHORT))], policy="caesura")
    simulation.run(0.4)
    scheduler = bench.replicas[0].engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    assert scheduler.trees.children_s("default/p0", scheduler.load_now()) is not None
    identities = Foresight().identities("c", SHORT, (1,), "p")
    assert [identity.parent_key for identity in identities] == ["default/p"]


def test_the_bounds_count_the_work_of_a_whole_tree() -> None:
    alone, whole = [program(turn(200, 10, "task", 60.0), turn(30, 5))], [tree(SHORT, LONG)]
    limits = (COST, 512, 64)
    parts = [*alone, SHORT, LONG]
    third = pytest.approx(FluidBound.of(parts, *limits).capacity_per_s / 3)
    assert FluidBound.of(whole, *limits).capacity_per_s == third
    # To hold the parent may cost nothing, since it is not known how long the children take.
    parts[0] = program(turn(200, 10, "task", 0.0), turn(30, 5))
    third = pytest.approx(HoldingBound(parts, *limits).capacity_per_s / 3)
    assert HoldingBound(whole, *limits).capacity_per_s == third
