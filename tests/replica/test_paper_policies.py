"""The papers' policies: each equation by numbers worked out by hand for the replica of ``policy_views``."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from cluster.core.lifecycle.machine import begin
from cluster.durations.table import DurationTable
from replicas.policies import augserve, continuum, waste
from replicas.policies.augserve import AugserveParameters, FreeMemoryBudget, TwoStage
from replicas.policies.baselines import AttainedService
from replicas.policies.continuum import ContinuumCostParameters, ContinuumParameters, CostBenefit
from replicas.policies.infercept import InferceptParameters, OriginalArrival, SaturationBudget, chunks_added_s
from replicas.policies.mars import LampsParameters, MarsParameters, MemoryOverTime, growth
from replicas.policies.waste import Handling, Paused, Wastes
from replicas.policy import Claimant, Hold, KvPlace, Policy, Release, Swap
from replicas.program_table import TurnsBeforeAndAfter
from tests.replica.policy_views import COST, forecast, hold, load, observed, pause, policy, turn

# --- waste, InferCept eq. 1-5 -----------------------------------------------------------------------------------------


def test_infercept_eq_1_to_4() -> None:
    assert waste.preserve(2.0, 1000) == 2000
    assert waste.discard(0.1, 1000, 4000) == pytest.approx(100 + 400)
    assert waste.chunked_discard(0.1, 0.12, 1000, 4000) == pytest.approx(50 + 480)
    assert waste.swap(0.01, 5000) == pytest.approx(100)


def test_the_swap_limit_is_what_one_iteration_hides() -> None:
    """T_swap(N) = T_fwd: 10 ms at 10 µs a token."""
    assert waste.swap_limit_tokens(load()) == pytest.approx(1000)


def test_all_that_is_released_is_lost_where_turns_wait_and_else_the_share_in_use() -> None:
    assert waste.lost_share(load(waiting=1, free_tokens=9000)) == 1
    assert waste.lost_share(load(waiting=0, free_tokens=2500)) == pytest.approx(0.75)
    assert waste.lost_share(load(waiting=0, free_tokens=10_000)) == 0


@pytest.mark.parametrize("name", ["infercept", "lamps", "mars", "augserve"])
def test_without_a_prefix_cache_all_of_a_released_context_is_lost(name: str) -> None:
    """As in the papers: 1000 tokens for 0.4 s waste 400, and computing them again 500, however much memory is free."""
    idle = load(waiting=0, free_tokens=10_000)
    without = replace(idle, facts=replace(idle.facts, prefix_cache=False))
    decide = policy(name).pause.decide
    assert isinstance(decide(pause(idle, pause_s=0.4)), Release)
    assert isinstance(decide(pause(without, pause_s=0.4)), Hold)


def test_the_wastes_of_an_expected_pause() -> None:
    """2000 tokens: preserve 2 s · 2000; discard 0.2 s · (2000 + 4000); swap 2 · 0.02 s · 6000, longer than a step."""
    wastes = waste.predicted(load(host_tokens=5000), 2000, 4000, 2.0)
    assert (wastes.preserve, wastes.discard, wastes.swap) == pytest.approx((4000, 1200, 240))
    assert wastes.least is Handling.SWAP


def test_the_batch_waits_for_a_short_swap_too_and_without_a_tier_there_is_none() -> None:
    assert waste.predicted(load(host_tokens=5000), 1000, 4000, 2.0).swap == pytest.approx(2 * 0.01 * 5000)
    assert waste.predicted(load(host_tokens=999), 1000, 4000, 2.0).swap == float("inf")


def test_only_what_the_cache_loses_counts_unless_switched_off() -> None:
    idle = load(waiting=0, free_tokens=7500)
    assert waste.predicted(idle, 1000, 4000, 2.0).discard == pytest.approx(0.25 * 500)
    assert waste.predicted(idle, 1000, 4000, 2.0, cache_aware=False).discard == pytest.approx(500)


def test_the_least_waste_wins_and_of_equals_preserve() -> None:
    assert Wastes(1.0, 2.0, 3.0).least is Handling.PRESERVE
    assert Wastes(2.0, 2.0, 2.0).least is Handling.PRESERVE
    assert Wastes(3.0, 2.0, 2.0).least is Handling.DISCARD
    assert Wastes(3.0, 2.0, 1.0).least is Handling.SWAP


def test_at_its_pause_a_program_counts_as_running_and_once_held_it_does_not() -> None:
    paused, held = Paused.of(pause()), Paused.of(hold())
    assert (paused.other_tokens, paused.elapsed_s) == (4000, 0)
    assert (held.other_tokens, held.elapsed_s) == (5000, 1.0)


# --- InferCept --------------------------------------------------------------------------------------------------------


def test_infercept_holds_until_the_pause_has_cost_a_recomputation() -> None:
    """Chunks of 90 beside 10 decodes add nothing. Waste 0.1 · 1000 / 2 = 50 token-seconds: 0.05 s of 1000 tokens."""
    decision = policy("infercept").pause.decide(pause(load(waiting=1)))
    assert isinstance(decision, Hold)
    assert decision.until_s == pytest.approx(100.05)


@pytest.mark.parametrize(("running", "added_s"), [(0, 0.0), (10, 0.0), (99, 0.0), (100, 0.1), (500, 0.1)])
def test_infercept_eq_4_counts_what_chunks_add_to_iterations(running: int, added_s: float) -> None:
    """Below S = 100 tokens an iteration takes 10 ms anyway; beyond it, each of the 1000 tokens adds 0.1 ms."""
    assert chunks_added_s(COST, 1000, running, COST.saturation_tokens) == pytest.approx(added_s)


def test_infercept_eq_4_never_exceeds_a_recomputation_at_once() -> None:
    """Section 4.2: n · T_fwd(C / n) <= T_fwd(C). Attention makes single tokens expensive: 10 µs for each pair."""
    cost = replace(COST, pair_s=1e-5, context_s=1e-5, sequence_s=0.001)
    for running in (0, 50, 99, 200):
        assert 0 < chunks_added_s(cost, 1000, running, cost.saturation_tokens) <= cost.prefill_s(1000)
    assert chunks_added_s(cost, 1000, 0, cost.saturation_tokens) < cost.prefill_s(1000)


def test_infercept_estimates_a_call_by_the_time_that_it_has_lasted_unless_it_was_told() -> None:
    """50 token-seconds are 0.05 s of holding. The learnt forecast of 2 s is not looked at."""
    review = policy("infercept").pause.review
    young, old = review(hold(since_s=99.96)), review(hold(since_s=99.94))
    assert isinstance(young, Hold)
    assert young.until_s == pytest.approx(99.96 + 0.05)
    assert isinstance(old, Release)
    told = replace(forecast(pause_s=2.0), pause_hinted=True)
    assert isinstance(review(hold(since_s=99.96, forecast=told)), Release)


def test_infercept_knows_at_once_what_it_was_told_or_with_a_forecast_what_was_learnt() -> None:
    told = policy("infercept").pause.decide
    learnt = InferceptParameters(estimate="forecast").build().pause.decide
    for pause_s, decision in ((0.04, Hold), (0.06, Release)):
        hinted = replace(pause(), forecast=replace(forecast(pause_s=pause_s), pause_hinted=True))
        assert isinstance(told(hinted), decision)
        assert isinstance(learnt(pause(pause_s=pause_s)), decision)
    assert isinstance(told(pause(pause_s=0.06)), Hold)


def test_infercept_swaps_once_the_link_has_had_time_for_the_context() -> None:
    """1000 tokens take 10 ms of the link. Half of its time is for swap-out, and the step under way counts 10 ms. So the
    swap has to wait for 10 ms.
    """
    review = policy("infercept").pause.review
    assert isinstance(review(hold(load(host_tokens=5000), since_s=99.995)), Hold)
    assert isinstance(review(hold(load(host_tokens=5000), since_s=99.985)), Swap)
    assert isinstance(review(hold(load(host_tokens=999), since_s=99.985)), Hold)


def test_infercept_holds_a_long_pause_until_it_can_be_swapped() -> None:
    """To wait for the link costs 0.01 · 1000 = 10 token-seconds, a discard 50, and to hold for 20 s 20,000."""
    told = replace(forecast(pause_s=20.0), pause_hinted=True)
    decision = policy("infercept").pause.decide(replace(pause(load(waiting=1, host_tokens=5000)), forecast=told))
    assert isinstance(decision, Hold)
    assert decision.until_s == pytest.approx(120.0)
    without_tier = policy("infercept").pause.decide(replace(pause(load(waiting=1)), forecast=told))
    assert isinstance(without_tier, Release)


def test_infercept_discards_where_to_wait_for_the_link_costs_more() -> None:
    """A share of 1% makes 1000 tokens wait for 0.99 s: 990 token-seconds against 50."""
    told = replace(forecast(pause_s=20.0), pause_hinted=True)
    slow = InferceptParameters(swap_out_share=0.01).build().pause
    assert isinstance(slow.decide(replace(pause(load(waiting=1, host_tokens=5000)), forecast=told)), Release)


def test_infercept_does_not_give_back_what_its_owner_is_about_to_use() -> None:
    back = hold(since_s=0.0, until_s=101.0, owner_waits=True)
    assert policy("infercept").pause.review(back) == Hold(101.0, reason="back")


def test_infercept_releases_where_the_cache_keeps_it_and_the_paper_does_not() -> None:
    idle = load(waiting=0, free_tokens=10_000)
    assert isinstance(policy("infercept").pause.decide(pause(idle)), Release)
    assert isinstance(InferceptParameters(cache_aware=False).build().pause.decide(pause(idle)), Hold)


SHORT, LONG = 2.0, 20.0


@pytest.mark.parametrize(
    ("handling", "kinds"),
    [
        ("discard", {"short": Release, "long": Release, "no tier": Release}),
        ("preserve", {"short": Hold, "long": Hold, "no tier": Hold}),
        ("swap", {"short": Swap, "long": Swap, "no tier": Release}),
        ("limited_swap", {"short": Hold, "long": Hold, "no tier": Release}),
        ("heuristic", {"short": Hold, "long": Hold, "no tier": Release}),
    ],
)
def test_infercepts_baselines_handle_every_pause_alike(handling: str, kinds: dict[str, type]) -> None:
    """The swap of 1000 tokens has to wait for 0.01 s, for which they are held."""
    judge = InferceptParameters(handling=handling).build().pause
    tier = load(waiting=1, host_tokens=5000)
    where = {"short": (tier, SHORT), "long": (tier, LONG), "no tier": (load(waiting=1), LONG)}
    assert {name: type(judge.decide(pause(at, pause_s=s))) for name, (at, s) in where.items()} == kinds
    held = judge.review(hold(tier, since_s=99.9, forecast=forecast(pause_s=LONG)))
    within = {"limited_swap": Swap, "heuristic": Swap}  # 0.1 s later, half of the link's time covers it
    assert type(held) is within.get(handling, kinds["long"])


def test_a_context_that_is_always_preserved_is_held_for_longer_than_any_call() -> None:
    held = InferceptParameters(handling="preserve").build().pause.decide(pause(load(waiting=1), context=1_000_000))
    assert isinstance(held, Hold)
    assert held.until_s - 100.0 > 7 * 24 * 3600


def test_infercept_resumes_preserved_and_then_swapped_programs_first_and_all_by_original_arrival() -> None:
    key = OriginalArrival().key
    old, young = begin("t/old", 1.0), begin("t/young", 2.0)
    assert key(turn(program=old, arrived_s=9.0)) < key(turn(program=young, arrived_s=8.0))
    assert key(turn(program=young, kv=KvPlace.SWAPPED)) < key(turn(program=old))
    assert key(turn(program=young, kv=KvPlace.HELD)) < key(turn(program=old, kv=KvPlace.SWAPPED))


@pytest.mark.parametrize("name", ["infercept", "lamps", "mars", "augserve"])
def test_a_swap_needs_room_in_host_memory(name: str) -> None:
    """InferCept section 4.1. 1000 tokens for 20 s cost 20,000, a discard 500 at most."""
    told = replace(forecast(pause_s=20.0), pause_hinted=True)
    paused = replace(pause(load(waiting=1, host_tokens=5000)), forecast=told)
    assert not isinstance(policy(name).pause.decide(paused), Release)
    assert isinstance(policy(name).pause.decide(replace(paused, host_room=False)), Release)


@pytest.mark.parametrize(("running", "most", "tokens"), [(10, 1000, 100), (150, 1000, 150), (10, 64, 64), (0, 1, 1)])
def test_infercept_schedules_up_to_saturation(running: int, most: int, tokens: int) -> None:
    assert SaturationBudget().tokens(load(running=running, max_tokens=most)) == tokens


def test_a_profiled_saturation_point_replaces_that_of_the_cost_model() -> None:
    budget = InferceptParameters(saturation_tokens=384).build().budget
    assert [budget.tokens(load(running=running, max_tokens=2048)) for running in (10, 500)] == [384, 500]


# --- LAMPS and MARS ---------------------------------------------------------------------------------------------------


def test_growth_is_a_ramp_then_a_token_an_iteration() -> None:
    """0.1 s · 1000 / 2, then 0.01 s · (1000 · 100 + 100² / 2)."""
    assert growth(load(), 0, 1000, 100.0) == pytest.approx(50 + 1050)


def test_growth_of_a_context_that_is_there_begins_with_it() -> None:
    """500 tokens in 0.05 s, from 500 to 1000."""
    assert growth(load(), 500, 1000, 0.0) == pytest.approx(0.05 * 750)


def test_memory_over_time_adds_what_the_handling_costs() -> None:
    """C = 1100, others 5000: preserve 1100 · T; discard 0.11 · 6100 = 671; swap 2 · 0.011 · 6100 = 134.2."""
    order = MemoryOverTime(100, 10, cache_aware=True, remaining=False)

    def area(pause_s: float, host_tokens: int = 0) -> float:
        return order.token_seconds(turn(load(host_tokens), forecast=forecast(pause_s=pause_s)))

    assert area(0.0) == pytest.approx(1100)
    assert area(0.5) == pytest.approx(1100 + 550)
    assert area(5.0) == pytest.approx(1100 + 0.11 * 1100 / 2)
    assert area(5.0, host_tokens=5000) == pytest.approx(1100 + 0.011 * 1100)


def test_mars_counts_what_remains_and_lamps_the_whole_segment() -> None:
    resumed = turn(cached_tokens=900, kv=KvPlace.HELD, forecast=forecast(output=0.0, pause_s=0.0))
    assert MarsParameters().build().order.key(resumed)[1] == pytest.approx(0.01 * 950)
    assert LampsParameters().build().order.key(resumed)[1] == pytest.approx(0.1 * 500)


@pytest.mark.parametrize("name", ["lamps", "mars"])
def test_a_step_has_384_tokens_or_one_for_each_running_turn(name: str) -> None:
    budget = policy(name).budget
    assert [budget.tokens(load(running=running)) for running in (10, 500)] == [384, 500]
    assert budget.tokens(load(max_tokens=64)) == 64
    assert LampsParameters(step_tokens=None).build().budget.tokens(load()) == 1000


@pytest.mark.parametrize("name", ["lamps", "mars"])
def test_the_least_memory_over_time_goes_first(name: str) -> None:
    key = policy(name).order.key
    short = key(turn())
    assert short < key(turn(tokens=1200))
    assert short < key(turn(forecast=forecast(output=200.0)))
    assert key(turn(forecast=forecast(pause_s=0.1))) < key(turn(forecast=forecast(pause_s=0.2)))


@pytest.mark.parametrize("name", ["lamps", "mars"])
def test_after_a_hundred_steps_a_scheduled_program_is_at_the_head(name: str) -> None:
    """LAMPS section 4.4. The view is of step 500."""
    order = policy(name).order
    assert order.refresh_steps == 10
    resumed = turn(tokens=9000, context_tokens=100, last_served_s=90.0, queued_step=400)
    assert order.key(resumed) < order.key(turn(tokens=1))
    assert order.key(replace(resumed, queued_step=401)) > order.key(turn(tokens=1))


@pytest.mark.parametrize("name", ["lamps", "mars"])
def test_a_program_that_was_never_scheduled_does_not_starve(name: str) -> None:
    """Otherwise every new program would be starving after a few seconds of load, and the order would be by waiting."""
    key = policy(name).order.key
    new = turn(tokens=9000, queued_step=0)
    assert key(new) > key(turn(tokens=1))
    assert key(replace(new, preempted=True)) < key(turn(tokens=1))


@pytest.mark.parametrize("name", ["lamps", "mars"])
def test_a_program_that_starved_once_comes_first_until_it_ends(name: str) -> None:
    key = policy(name).order.key
    later = turn(tokens=9000, context_tokens=100, last_served_s=90.0, queued_step=499)
    assert key(replace(later, longest_wait_steps=100)) < key(turn(tokens=1)) < key(later)


@pytest.mark.parametrize("name", ["lamps", "mars", "augserve"])
def test_the_handling_follows_the_forecast(name: str) -> None:
    """1000 tokens, others 4000: a discard wastes 500, half a second of holding; a swap 100."""
    decide = policy(name).pause.decide
    short = decide(pause(pause_s=0.4))
    assert isinstance(short, Hold)
    assert short.until_s == pytest.approx(100.5)
    assert isinstance(decide(pause(pause_s=0.6)), Release)
    assert isinstance(decide(pause(load(host_tokens=5000), pause_s=0.4)), Swap)


def test_a_call_that_outlasts_its_forecast_is_judged_by_the_time_that_it_has_lasted() -> None:
    """Others 5000: a discard wastes 600, 0.6 s of holding; 0.4 s were expected."""
    review = policy("mars").pause.review
    overdue = hold(since_s=99.3, forecast=forecast(pause_s=0.4))
    assert isinstance(review(overdue), Release)
    assert isinstance(review(replace(overdue, since_s=99.5)), Hold)


# --- AugServe ---------------------------------------------------------------------------------------------------------

SECOND = turn(context_tokens=800, last_served_s=95.0)
"""1000 prompt tokens, 200 of them returned by the call."""


def test_augserve_eq_9_to_19() -> None:
    assert augserve.prefill_cost(1000, 500, 0.01) == pytest.approx(10)
    assert augserve.decode_cost(1000, 100, 0.01) == pytest.approx(1050)
    assert augserve.api_cost(1100, 2.0) == 2200
    assert augserve.returned_cost(800, 200, 1000, 0.01) == pytest.approx(1.8)


def test_augserve_reckons_with_the_tokens_that_a_step_has() -> None:
    """N_max of eq. 9 is the budget: half the tokens of a step, so that the prefill of 1000 tokens counts 10, not 5."""
    halved = augserve.FreeMemoryBudget(augserve.AugserveParameters(target_tokens=500))
    turn_now = turn(load(free_tokens=9000), forecast=forecast(pause_s=0.0))
    values = [TwoStage(10.0, True, budget).value(turn_now) for budget in (halved, augserve.FullBudget())]
    assert values == pytest.approx([10 + 1050, 5 + 1050])


@pytest.mark.parametrize(
    ("pause_s", "host", "call"), [(0.0, 0, 0.0), (0.5, 0, 550.0), (5.0, 0, 0.0), (5.0, 5000, 6.05)]
)
def test_augserve_stage_one(pause_s: float, host: int, call: float) -> None:
    """Prefill ½ · 1000² / 1000 · 0.01, decode 1050, and eq. 13, 14 or 15; S_out is 1000."""
    value = TwoStage(10.0, cache_aware=True).value(turn(load(host), forecast=forecast(pause_s=pause_s)))
    assert value == pytest.approx(5 + 1050 + call)


@pytest.mark.parametrize(("kv", "back"), [(KvPlace.HELD, 0.0), (KvPlace.SWAPPED, 3.2), (KvPlace.NONE, 3.2)])
def test_augserve_stage_two(kv: KvPlace, back: float) -> None:
    """Returned 1.8, decode 1050 as before, and ½ · 800² / 1000 · 0.01 to have the context back (eq. 20-22)."""
    value = TwoStage(10.0, cache_aware=True).value(replace(SECOND, kv=kv, forecast=forecast(pause_s=0.0)))
    assert value == pytest.approx(1.8 + 1050 + back)


def test_augserve_counts_of_a_released_context_what_the_cache_has_lost() -> None:
    """Three quarters of the memory are in use, and nothing waits: 0.75 of eq. 17's 3.2."""
    at = load(waiting=0, free_tokens=2500)
    released = turn(at, context_tokens=800, last_served_s=95.0, forecast=forecast(pause_s=0.0))
    assert TwoStage(10.0, cache_aware=True).value(released) == pytest.approx(1.8 + 1050 + 0.75 * 3.2)
    assert TwoStage(10.0, cache_aware=False).value(released) == pytest.approx(1.8 + 1050 + 3.2)


def test_augserve_eq_6_has_the_tokens_of_a_step() -> None:
    """1100 tokens for 0.05 s cost 55. Their transfers of 11 ms cost 22 at 1000 tokens a step, and with 6100 running
    tokens 134, so that the context stays.
    """
    at = load(host_tokens=5000, free_tokens=9000)
    short = turn(at, forecast=forecast(pause_s=0.05))
    orders = [AugserveParameters(swap_waits=waits).build().order for waits in ("step", "running")]  # type: ignore[arg-type]
    assert [order.value(short) - 1055 for order in orders] == pytest.approx([6.05, 55])


def test_augserve_final_value_adds_the_next_pause() -> None:
    """Eq. 24: 1100 tokens for half a second."""
    value = TwoStage(10.0, cache_aware=True).value(replace(SECOND, kv=KvPlace.HELD, forecast=forecast(pause_s=0.5)))
    assert value == pytest.approx(1.8 + 1050 + 550)


def test_augserve_waiting_lowers_the_value() -> None:
    """Alpha 10: whoever was scheduled 5 s earlier ranks 50 token-seconds lower, so that nobody waits for ever."""
    key = policy("augserve").order.key
    fresh, stale = replace(SECOND, arrived_s=100.0), turn(context_tokens=800, last_served_s=90.0)
    assert key(fresh)[1] - key(stale)[1] == pytest.approx(50)


def test_augserve_serves_queue_by_queue() -> None:
    key = policy("augserve").order.key
    new, swapped, held, preempted = (
        turn(tokens=10),
        turn(kv=KvPlace.SWAPPED, context_tokens=900, tokens=2000),
        turn(kv=KvPlace.HELD, context_tokens=900, tokens=3000),
        turn(preempted=True, tokens=3000),
    )
    assert key(held) < key(swapped) < key(new)
    assert key(preempted) < key(swapped)
    assert key(new)[0] == key(turn(context_tokens=900))[0]


def test_augserve_ablations() -> None:
    fcfs = AugserveParameters(two_stage=False).build()
    assert fcfs.order.key(turn(tokens=9)) == fcfs.order.key(turn(tokens=9000))
    patient = AugserveParameters(anti_starvation=False).build().order
    assert patient.key(turn(arrived_s=1.0)) == patient.key(turn(arrived_s=90.0))
    assert AugserveParameters(dynamic_budget=False).build().budget.tokens(load(free_tokens=0, held_tokens=0)) == 1000


@pytest.mark.parametrize(
    ("free", "held", "tokens"), [(300, 200, 400), (100, 50, 250), (9000, 0, 800), (0, 10_000, 800)]
)
def test_augserve_budget_is_free_memory_within_bounds(free: int, held: int, tokens: int) -> None:
    """Free + half of what is held, between 0.25 and 0.8 of 1000."""
    budget = FreeMemoryBudget(AugserveParameters(gamma=0.5, beta_high=0.8))
    assert budget.tokens(load(free_tokens=free, held_tokens=held)) == tokens


def test_augserve_lets_running_turns_take_the_paused_memory_that_its_budget_promises_them() -> None:
    """Section 4.4, eq. 27 and 31: active requests are the running ones."""
    yields = policy("augserve").pause.yields
    assert yields(hold(until_s=101.0), Claimant.RUNNING)
    assert not yields(hold(until_s=101.0), Claimant.WAITING)


def test_augserve_bounds_are_in_order() -> None:
    with pytest.raises(ValueError, match="beta_low"):
        AugserveParameters(beta_low=0.9, beta_high=0.5)


# --- PLAS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("served", "level"), [(0, 0), (999, 0), (1000, 1), (2999, 1), (3000, 2), (10**9, 3)])
def test_plas_levels_double(served: int, level: int) -> None:
    order = AttainedService(quantum_tokens=1000, levels=4)
    assert order.key(turn(program=replace(begin("t/p", 0.0), served_tokens=served))) == (level, 98.0)


def test_plas_serves_the_least_served_first_then_by_arrival() -> None:
    key = policy("plas").order.key
    served = replace(begin("t/p", 0.0), served_tokens=100_000)
    assert key(turn(arrived_s=99.0)) < key(turn(program=served, arrived_s=1.0))
    assert key(turn(arrived_s=1.0)) < key(turn(arrived_s=2.0))


# --- Continuum's later time to live -----------------------------------------------------------------------------------


def test_continuum2_pins_for_as_long_as_it_gains() -> None:
    """Of four calls one takes 8 s, three 1 s: at 4 s of gain 0.75 · 4 - 1 = 2; at 32 s 1 · 32 - 8 = 24 beats 23."""
    durations = observed(1.0, 1.0, 1.0, 8.0)
    assert continuum.best_ttl_s(durations, 4.0) == 1
    assert continuum.best_ttl_s(durations, 32.0) == 8
    assert continuum.best_ttl_s(durations, 1.0) == 0


def test_continuum2_reloads_over_the_link_if_it_may() -> None:
    assert continuum.reload_s(load(), 1000) == pytest.approx(0.1)
    assert continuum.reload_s(load(host_tokens=1000), 1000) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("turns", "correlation"),
    [
        ([], None),
        ([1, 1], None),
        ([2, 2], None),  # one turn before and one after each pause
        ([4], -1.0),
        ([4, 4, 4], -1.0),
        ([2, 3, 6], float(np.corrcoef([1, 1, 2, 1, 2, 3, 4, 5], [1, 2, 1, 5, 4, 3, 2, 1])[0, 1])),
        ([2, 30], float(np.corrcoef([1, *range(1, 30)], [1, *range(29, 0, -1)])[0, 1])),
    ],
)
def test_turns_before_and_after_a_pause_correlate(turns: list[int], correlation: float | None) -> None:
    pauses = TurnsBeforeAndAfter()
    for number in turns:
        pauses.observe(number)
    assert pauses.correlation == (correlation if correlation is None else pytest.approx(correlation))


@pytest.mark.parametrize(
    ("eta", "correlation", "used"),
    [(None, None, 1.0), (None, -0.25, 0.25), (None, 0.5, 0.0), (0.75, -0.25, 0.75)],
)
def test_continuum2_learns_how_much_of_the_queue_a_pin_saves(
    eta: float | None, correlation: float | None, used: float
) -> None:
    judge = ContinuumCostParameters(eta=eta).build().pause
    assert isinstance(judge, CostBenefit)
    assert judge.eta(replace(pause(), turns_correlation=correlation)) == used


@pytest.mark.parametrize(("factor", "seconds"), [("progress", 2.0 * 3 / 12), ("average", 2.0 * 12)])
def test_continuum_changes_the_time_to_live_by_turns(factor: str, seconds: float) -> None:
    """Without observations the bound is 2 s. The program has had 3 turns, of 12 on average."""
    view = replace(pause(), program=replace(begin("t/p", 40.0), turns=3), average_turns=12.0)
    held = ContinuumParameters(turns_factor=factor).build().pause.decide(view)
    assert isinstance(held, Hold)
    assert held.until_s - view.now_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    "judge", [continuum.ContinuumParameters(max_ttl_s=10.0).build(), policy("continuum2"), policy("caesura")]
)
def test_tools_that_never_ran_together_are_judged_by_the_slowest(judge: Policy) -> None:
    """Each alone takes as long as it always did; nearly all other calls take the other time."""
    queued = load(lost_queue_s=0.3, waiting=10, running=1, running_tokens=1000, free_tokens=0)
    pause_policy = judge.pause
    for others_s, slower_s, held in ((60.0, 0.02, True), (0.01, 60.0, False)):
        table = DurationTable()
        for _ in range(50):
            table.observe("bash:cd", 0.01)
            table.observe("search", slower_s)
        for _ in range(1000):
            table.observe("other", others_s)
        view = replace(pause(queued, durations=table), tools=("search", "bash:cd"))
        assert isinstance(pause_policy.decide(view), Hold) is held


@pytest.mark.parametrize("simplified", [False, True])
@pytest.mark.parametrize(("pins_yield", "yields"), [("stuck", False), ("waiting", True)])
def test_continuums_pins_yield_to_a_deadlock_or_to_every_waiting_turn(
    pins_yield: Literal["stuck", "waiting"], yields: bool, simplified: bool
) -> None:
    pins = continuum.ContinuumParameters(pins_yield=pins_yield, simplified=simplified).build().pause
    assert pins.yields(hold(until_s=101.0), Claimant.WAITING) is yields
    assert pins.yields(hold(until_s=101.0), Claimant.STARVED)
    assert pins.yields(hold(until_s=101.0), Claimant.RUNNING)


def test_continuum2_pins_a_tool_by_what_was_seen_of_it() -> None:
    """Gain 0.1 s of recomputation and 0.3 s of queueing; `ls` takes 0.2 s, everything else 60 s."""
    queued = load(lost_queue_s=0.3)
    table = DurationTable()
    for _ in range(5):
        table.observe("ls", 0.2)
    for _ in range(50):
        table.observe("pytest", 60.0)
    pause_policy = policy("continuum2").pause
    decision = pause_policy.decide(pause(queued, durations=table))
    assert isinstance(decision, Hold)
    assert decision.until_s == pytest.approx(100.2)
    assert isinstance(pause_policy.decide(replace(pause(queued, durations=table), tools=("pytest",))), Release)
    assert isinstance(pause_policy.decide(replace(pause(queued, durations=table), tools=("make",))), Release)
    without_queue = ContinuumCostParameters(eta=0.0).build().pause
    assert isinstance(without_queue.decide(pause(queued, durations=table)), Release)
    assert isinstance(pause_policy.decide(pause(durations=table)), Release), "nobody that lost its KV has waited"


def test_continuum2_without_observations_has_a_default() -> None:
    assert policy("continuum2").pause.decide(pause()) == Hold(102.0, reason="default ttl")


# --- whose hold goes --------------------------------------------------------------------------------------------------


def test_a_hold_resists_waiting_turns_until_its_owner_is_back_and_overdue() -> None:
    yields = policy("mars").pause.yields
    assert not yields(hold(until_s=99.0), Claimant.WAITING)
    assert not yields(hold(until_s=101.0, owner_waits=True), Claimant.WAITING)
    assert yields(hold(until_s=99.0, owner_waits=True), Claimant.WAITING)


def test_victims_are_not_back_yet_and_waste_the_most_by_being_held() -> None:
    """Both have lasted 1 s; 1000 tokens of the one are worth 0.1 · 6000 to have, 200 of the other 0.02 · 5200."""
    victim_key = policy("mars").pause.victim_key
    large, small = hold(), hold(context_tokens=200)
    assert victim_key(large)[1] == pytest.approx(600 - 2000)
    assert victim_key(small)[1] == pytest.approx(104 - 400)
    assert victim_key(large) < victim_key(small) < victim_key(hold(owner_waits=True))
