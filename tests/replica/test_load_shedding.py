"""What a replica refuses, by the turns that wait there."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
from vllm.v1.request import RequestStatus

from cluster.core.program import Hints, ProgramIdentity
from cluster.core.replica_snapshot import TAKES_ALL_S, StepCosts, program_work_s
from replicas.load_shedding import TAKES_ALL, Shedding, WaitingTurn, new_work_s, shedding, shedding_of
from replicas.routing_view import routing_snapshot
from replicas.virtual_engine import VirtualEngine
from tests.replica.test_timelines import Programs

MAX_WAIT_S = 80.0


def waiting(waited_s: float, turn_s: float = 1.0, program_s: float = 5.0) -> WaitingTurn:
    return WaitingTurn(waited_s, turn_s, program_s)


def test_a_replica_where_nobody_waits_for_long_takes_all() -> None:
    assert shedding([], MAX_WAIT_S) == TAKES_ALL == Shedding(inf, 0.0, inf)
    assert shedding([waiting(9.9), waiting(0.0, program_s=0.1)], MAX_WAIT_S) == TAKES_ALL
    assert not TAKES_ALL.refuses(1e9)


def test_while_a_turn_starves_programs_with_as_much_work_are_refused_and_smaller_ones_are_not() -> None:
    """10 s are an eighth of the bound. The turn that has just come says nothing."""
    found = shedding([waiting(11.0, 2.0, 7.0), waiting(30.0, 3.0, 5.0), waiting(1.0, 1.0, 0.1)], MAX_WAIT_S)
    assert found == Shedding(from_s=5.0, retry_after_s=6.0, sheddable_from_s=0.0)
    assert [found.refuses(work_s) for work_s in (0.0, 4.9, 5.0, 100.0)] == [False, False, True, True]


def test_with_more_work_than_can_be_served_in_time_all_are_refused() -> None:
    """What waits has to be served in a half of the bound once it is due."""
    assert not shedding([waiting(0.0, 13.0)] * 3, MAX_WAIT_S).refuses(1e9)
    found = shedding([waiting(0.0, 13.0)] * 4, MAX_WAIT_S)
    assert found == Shedding(0.0, 52.0, 0.0)
    assert found.refuses(0.0)


def test_sheddable_programs_are_refused_at_half_of_that_work() -> None:
    assert shedding([waiting(0.0, 20.0)], MAX_WAIT_S) == TAKES_ALL
    for sheddable in (False, True):
        found = shedding([replace(waiting(0.0, 21.0), sheddable=sheddable)], MAX_WAIT_S)
        assert found == Shedding(inf, 21.0, 0.0)
        assert found.refuses(0.1, sheddable=True)
        assert not found.refuses(1e9)


def test_a_sheddable_turn_that_starves_stops_sheddable_programs_of_as_much_work() -> None:
    batch = replace(waiting(11.0, 2.0, 7.0), sheddable=True)
    found = shedding([batch], MAX_WAIT_S)
    assert found == Shedding(inf, 2.0, 7.0)
    assert [found.refuses(work_s, sheddable=True) for work_s in (6.9, 7.0)] == [False, True]
    assert shedding([batch, waiting(11.0, 2.0, 9.0)], MAX_WAIT_S) == Shedding(9.0, 4.0, 0.0)


def test_the_work_of_a_program_by_hand() -> None:
    """2,000 prompt tokens at 0.1 ms, and 100 outputs at 0.1 + 0.2 ms and 1 µs for each of 1,500 tokens before."""
    costs = StepCosts(overhead_s=1.0, sequence_s=2e-4, weights_s=1.0, token_s=1e-4, context_s=1e-6, swap_token_s=1.0)
    assert program_work_s(costs, 2000, 100, 1500) == pytest.approx(0.2 + 100 * (3e-4 + 1.5e-3))


def test_a_replica_refuses_by_the_turns_that_starve_there(
    replica: Callable[..., VirtualEngine],
) -> None:
    """A starving turn has waited for more than 15 s of the 120. The memory holds 1,008 tokens."""
    p = Programs(replica("caesura"))
    p.arrive("a", new_tokens=900, output=60)
    p.step()
    p.engine.submit("b1", range(5000, 5500), 3, ProgramIdentity("b", hints=Hints(priority=1)))
    p.clock.advance(20.0)
    p.step()
    batch = shedding_of(p.scheduler)
    assert batch.from_s == inf, "a turn that can wait stops no others"
    assert 0 < batch.sheddable_from_s < inf
    found = routing_snapshot(p.scheduler, "r", "m", 1, draining=False)
    assert (found.shed_from_s, found.shed_sheddable_from_s) == (TAKES_ALL_S, batch.sheddable_from_s)
    p.engine.submit("c1", range(7000, 7500), 3, ProgramIdentity("c", last_turn=True))
    assert shedding_of(p.scheduler).from_s == inf
    p.clock.advance(16.0)
    found = shedding_of(p.scheduler)
    assert found.refuses(new_work_s(p.scheduler, ProgramIdentity("d", last_turn=True), 500))
    assert not found.refuses(new_work_s(p.scheduler, ProgramIdentity("d", last_turn=True), 400))
    assert routing_snapshot(p.scheduler, "r", "m", 1, draining=False).shed_from_s == found.from_s
    # The router knows the given costs, whatever the measured ones are.
    p.scheduler.facts = replace(p.scheduler.facts, cost=p.scheduler.facts.cost.slowed(3.0))
    assert shedding_of(p.scheduler).from_s == found.from_s
    assert shedding_of(p.scheduler).retry_after_s > found.retry_after_s
    p.engine.run()
    assert shedding_of(p.scheduler) == TAKES_ALL
    assert routing_snapshot(p.scheduler, "r", "m", 2, draining=False).shed_from_s == TAKES_ALL_S


def test_turns_that_will_run_together_are_not_counted_one_after_another(replica: Callable[..., VirtualEngine]) -> None:
    """400 turns of 128 tokens come at once. One after another they would take 330 s, together about 1 s."""
    p = Programs(replica("caesura", num_blocks=40_000))
    for number in range(400):
        p.engine.submit(f"b{number}", range(100 * number, 100 * number + 100), 128, ProgramIdentity(f"b{number}"))
    assert shedding_of(p.scheduler) == TAKES_ALL


def test_turns_that_do_not_fit_together_take_several_rounds(replica: Callable[..., VirtualEngine]) -> None:
    """The same turns in a memory that holds one of a hundred of them."""
    p = Programs(replica("caesura", num_blocks=30))
    for number in range(400):
        p.engine.submit(f"b{number}", range(100 * number, 100 * number + 100), 128, ProgramIdentity(f"b{number}"))
    assert shedding_of(p.scheduler).refuses(0.0)
    for number in range(400):
        p.engine.scheduler.finish_requests(f"b{number}", RequestStatus.FINISHED_ABORTED)


def test_vllms_own_policy_refuses_nothing(replica: Callable[..., VirtualEngine]) -> None:
    p = Programs(replica("vllm"))
    p.arrive("a", new_tokens=900, output=60)
    p.step()
    p.arrive("b", new_tokens=500)
    p.clock.advance(1000.0)
    assert shedding_of(p.scheduler) == TAKES_ALL
