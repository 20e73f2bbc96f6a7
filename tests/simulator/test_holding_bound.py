"""The fluid bound without a host tier: by hand at its ends, and never below a plan that could be carried out."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.offline.bench.workload import PlannedProgram
from cluster.offline.simulator.bounds import FluidBound, HoldingBound, Work, served_per_s
from tests.simulator.simulated import COST, program, turn

BIG = 10**6
COMPUTING = replace(COST, weights_s=0.0)
"""Of its linear layers only the computation costs anything, so that every token that is computed again does."""


def holding(*pool: PlannedProgram, cost: object = COMPUTING, replicas: int = 1) -> HoldingBound:
    return HoldingBound(pool, cost, BIG, BIG, replicas)  # type: ignore[arg-type]


def free(*pool: PlannedProgram) -> FluidBound:
    return FluidBound.of(pool, COMPUTING, BIG, BIG)


def test_what_is_gone_for_ever_is_computed_again() -> None:
    away = program(turn(400, 2, "sleep", 1e9), turn(10, 2))
    again_s = (400 + 2) * COMPUTING.token_s
    assert holding(away).capacity_per_s == pytest.approx(1 / (1 / free(away).capacity_per_s + again_s), rel=1e-3)


def test_a_moment_is_held_and_costs_nothing() -> None:
    back = program(turn(400, 2, "date", 1e-9), turn(10, 2))
    assert holding(back).capacity_per_s == pytest.approx(free(back).capacity_per_s)


def test_nothing_is_lost_where_nothing_could_be_used_again() -> None:
    reset = program(turn(400, 2, "sleep", 1e9), replace(turn(10, 2), reset=True))
    shared = program(turn(400, 2, "sleep", 1e9), turn(10, 2), prefix=("system", 400))
    hidden = program(replace(turn(400, 200, "sleep", 1e9), kept_tokens=50), turn(10, 2), prefix=("system", 400))
    assert holding(reset).capacity_per_s == pytest.approx(free(reset).capacity_per_s)
    assert holding(hidden).capacity_per_s == pytest.approx(free(hidden).capacity_per_s)
    again_s = 2 * COMPUTING.token_s
    assert holding(shared).capacity_per_s == pytest.approx(1 / (1 / free(shared).capacity_per_s + again_s), rel=1e-3)


def test_replicas_add_up_and_below_capacity_all_are_served() -> None:
    pool = [program(turn(400, 50, "ls", 3.0), turn(10, 2)), program(turn(90, 9))]
    one, three = holding(*pool), holding(*pool, replicas=3)
    assert three.capacity_per_s == pytest.approx(3 * one.capacity_per_s)
    assert one.goodput_per_s(one.capacity_per_s / 2) == one.capacity_per_s / 2
    assert one.capacity_per_s < one.goodput_per_s(2 * one.capacity_per_s) < 2 * one.capacity_per_s


@pytest.mark.parametrize("load", [0.5, 2.0])
def test_a_bound_is_a_plain_number_that_a_record_can_have(load: float) -> None:
    bound = holding(program(turn(400, 50, "ls", 3.0), turn(10, 2)), program(turn(90, 9)))
    assert type(bound.capacity_per_s) is float
    assert type(bound.goodput_per_s(load * bound.capacity_per_s)) is float


def test_served_programs_are_those_of_least_work_within_the_budget() -> None:
    seconds = Work.of([program(turn(100, 2)), program(turn(400, 2))]).seconds(COMPUTING, BIG, BIG, 4096)
    assert served_per_s(seconds, 1e-3) == 1e-3
    most = 1.0 / float(seconds[0])
    assert served_per_s(seconds, 1e9) == pytest.approx(most)
    assert served_per_s(seconds, 1e9, budget_s=2.0) == pytest.approx(2 * most)


TURNS = st.builds(turn, st.integers(1, 900), st.integers(1, 300), st.just("ls"), st.floats(0.0, 100.0))
POOLS = st.lists(
    st.builds(lambda turns: program(*turns, turn(5, 5)), st.lists(TURNS, max_size=4)), min_size=1, max_size=5
)


@settings(max_examples=40, deadline=None)
@given(POOLS, st.floats(0.0, 0.95), st.floats(0.01, 50.0))
def test_no_plan_that_holds_up_to_some_pause_beats_it(
    pool: list[PlannedProgram], held: float, longest_s: float
) -> None:
    """A plan: so much of the memory is for holds; pauses up to a length are held, the others computed again."""
    bound = holding(*pool, cost=COST)
    tokens, pauses_s, _ = bound._pauses
    short = pauses_s <= longest_s
    held_tokens = held * COST.kv_capacity_tokens
    memory_each = float((tokens * pauses_s)[short].sum()) / len(pool)
    again = float(tokens[~short].sum()) / len(pool)
    work = Work.of(pool)
    steps = float((work.own_contexts / (COST.kv_capacity_tokens - held_tokens)).mean())
    computed = float((work.prompts + work.decodes).mean()) + again
    contexts = float(work.contexts.mean())
    attention = contexts * COST.context_s + (contexts + float(work.pairs.mean())) * COST.pair_s
    linear = max(steps * COST.weights_s, computed * COST.token_s)
    each_s = steps * COST.overhead_s + float(work.decodes.mean()) * COST.sequence_s + linear + attention
    rate = 1 / each_s if not memory_each else min(1 / each_s, held_tokens / memory_each)
    assert rate <= bound.capacity_per_s * (1 + 1e-9)
    assert bound.capacity_per_s <= FluidBound.of(pool, COST, BIG, BIG).capacity_per_s * (1 + 1e-9)
