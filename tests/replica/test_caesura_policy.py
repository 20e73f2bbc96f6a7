"""The policy `caesura`: each rule by numbers worked out by hand (see ``policy_views``), and what holds of any view."""

from dataclasses import replace
from math import isfinite, isnan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.schema import SloConfig
from cluster.core.kv_price import Place
from cluster.core.lifecycle.machine import begin
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.slo import Slo
from cluster.durations.table import DurationTable
from replicas.policies.caesura import (
    IN_TIME,
    LATE,
    LONGEST_S,
    CaesuraParameters,
    has_missed_slo,
    is_late,
    pressure,
)
from replicas.policy import Claimant, Forecast, Hold, HoldView, KvPlace, LoadView, PauseView, Release, Swap, TurnView
from replicas.presets import preset
from replicas.turns import Turn
from replicas.waiting_queue import EQUAL, LOADED
from tests.replica.policy_views import COST, hold, load, observed, pause, turn

REFILL_S = 1.0
"""Of the replica by hand: 10,000 tokens at 0.1 ms."""


def bounded(slo: SloConfig, **changes: float) -> LoadView:
    view = load(**changes)  # type: ignore[arg-type]
    return replace(view, facts=replace(view.facts, slo=slo))


def crowded(**changes: float) -> LoadView:
    """Turns wait, and there is room for none of them: memory is worth its full price."""
    return bounded(SloConfig(), **{"waiting": 10, "free_tokens": 0, **changes})


def changed(part: Any, **constants: float) -> Any:
    """An axis of the policy with other constants."""
    return replace(part, **constants)


def key(view: TurnView, **parameters: float) -> tuple[float, ...]:
    return changed(CaesuraParameters().build().order, **parameters).key(view)  # type: ignore[arg-type]


STOPPING = CaesuraParameters().build().pause

# --- order ------------------------------------------------------------------------------------------------------------


def test_value_per_work_ranks_turns_and_a_late_one_waits_behind_those_of_nineteen_times_its_work() -> None:
    """A turn in time of a program in time has the value 1 + 2 + 16, a late one 1."""
    at = bounded(SloConfig(ttft_s=10.0))
    in_time = turn(at, forecast=LAST)
    late = replace(in_time, bounds=Slo(0.1))
    assert key(in_time) == pytest.approx((0.0, (0.1 + 1.0 / 11) / 19, IN_TIME))
    assert key(late) == pytest.approx((0.0, 0.1 + 1.0 / 11, LATE))
    # Weights are settings.
    assert key(in_time, turn_value=0.0, program_value=0.0) == pytest.approx((0.0, 0.1 + 1.0 / 11, IN_TIME))
    more = turn(at, tokens=9000, forecast=Forecast(1000.0, 0.0, 0.0, 0.0, 0.0))  # 1.8 s of work
    assert key(more) < key(late) < key(replace(more, bounds=Slo(0.1)))


def test_a_program_that_was_late_once_keeps_the_value_of_its_later_turns() -> None:
    in_time = turn(bounded(SloConfig(ttft_s=10.0)), forecast=LAST)
    late_once = replace(in_time, program=replace(in_time.program, on_time=False))
    assert key(late_once) == pytest.approx((0.0, (0.1 + 1.0 / 11) / 3, IN_TIME))
    assert key(in_time) < key(late_once) < key(replace(late_once, bounds=Slo(0.1)))


def test_a_turn_is_late_once_its_prefill_no_longer_fits_the_bound() -> None:
    """1,000 tokens take 0.1 s and the steps around them 0.02 s: of a bound of 1 s, the last moment is at 0.88 s."""
    at = bounded(SloConfig(ttft_s=1.0))
    assert key(turn(at, arrived_s=at.now_s - 0.87))[-1] == IN_TIME
    assert key(turn(at, arrived_s=at.now_s - 0.89))[-1] == LATE
    held = turn(at, arrived_s=at.now_s - 0.89, cached_tokens=1000, kv=KvPlace.HELD)
    assert key(held)[-1] == IN_TIME


def test_the_bounds_are_the_turns_own() -> None:
    """A bound relative to the prompt is longer than the bound in seconds where the prompt takes long alone."""

    def bound(slo: Slo, tokens: int, context_tokens: int) -> Slo:
        turn = Turn(ProgramIdentity(), None, arrived_s=0.0, queued_step=0)
        turn.bind(slo, load().facts.alone_s(tokens, context_tokens))
        return turn.bounds

    assert bound(Slo(1.0, e2e_s=5.0), 5000, 0) == Slo(1.0, e2e_s=5.0)
    with_x = Slo(1.0, slowdown=3.0)
    assert bound(with_x, 5000, 0).ttft_s == pytest.approx(3 * 0.5)
    assert bound(with_x, 5000, 4000).ttft_s == pytest.approx(3 * 0.5), "attention costs nothing here"
    assert bound(with_x, 1000, 9000).ttft_s == 1.0
    assert bound(Slo(slowdown=3.0), 1000, 0).ttft_s == pytest.approx(0.3)
    assert bound(Slo(), 1000, 0).ttft_s is None


def test_a_lower_priority_value_comes_first_whatever_the_work() -> None:
    at = bounded(SloConfig(ttft_s=1.0))
    long, short = turn(at, tokens=9000), turn(at, tokens=10, forecast=LAST)
    assert key(short) < key(long)
    assert key(replace(long, hints=Hints(priority=-1))) < key(short) < key(replace(short, hints=Hints(priority=1)))
    assert key(replace(short, hints=Hints(priority=0))) == key(short)


def test_a_preempted_turn_that_was_on_time_waits_for_no_first_token() -> None:
    at = bounded(SloConfig(ttft_s=1.0))
    view = turn(at, arrived_s=at.now_s - 9.0, preempted=True, generated_tokens=10, first_token_s=at.now_s - 8.5)
    assert key(view)[-1] == IN_TIME
    assert key(replace(view, first_token_s=at.now_s - 7.5))[-1] == LATE


def test_a_program_too_slow_for_its_tokens_has_the_value_of_one_that_was_late() -> None:
    """100 tokens of 10 ms after 0.12 s to the first and 2 s of waiting, no turn after it: 31.2 ms a token."""
    for bound_s, value in ((0.0313, 19), (0.0311, 3)):
        at = bounded(SloConfig(ttft_s=None, normalized_latency_s=bound_s))
        view = turn(at, arrived_s=at.now_s - 2.0, forecast=LAST)
        assert key(view) == pytest.approx((0.0, (0.1 + 1.0 / 11) / value, IN_TIME))


def test_time_that_earlier_turns_saved_counts() -> None:
    at = bounded(SloConfig(ttft_s=None, normalized_latency_s=0.030))
    view = turn(at, arrived_s=at.now_s - 2.0, forecast=LAST)
    quick = replace(view, program=replace(view.program, busy_s=1.0, generated_tokens=100))
    assert key(quick)[1] * 19 == pytest.approx(key(view)[1] * 3)


def test_a_turn_too_long_for_the_bound_on_turns_is_late() -> None:
    """2 s of waiting, 0.12 s to the first token, 1 s of output."""
    for bound_s, late in ((3.13, IN_TIME), (3.11, LATE)):
        at = bounded(SloConfig(ttft_s=None, e2e_s=bound_s))
        assert key(turn(at, arrived_s=at.now_s - 2.0))[-1] == late


LAST = Forecast(100.0, 0.0, 0.0, 0.0, 0.0)


def work_s(view: TurnView) -> float:
    """The work by which a turn ranks, in seconds."""
    return key(view, turn_value=0.0, program_value=0.0)[1]


def test_the_work_is_that_of_the_turn_and_of_all_later_ones() -> None:
    """1,000 tokens of prompt take 0.1 s; 100 of output a share of 1/11 of 100 iterations of 10 ms.

    Three later turns of 100 tokens of output each and 200 of prompts together: 3/11 s and 0.02 s.
    """
    at = bounded(SloConfig(ttft_s=10.0))
    assert work_s(turn(at, forecast=LAST)) == pytest.approx(0.1 + 1.0 / 11)
    held = turn(at, forecast=LAST, cached_tokens=900, kv=KvPlace.HELD)
    assert work_s(held) == pytest.approx(0.01 + 1.0 / 11)
    assert work_s(turn(at, forecast=Forecast(100.0, 2.0, 50.0, 500.0, 3.0))) == pytest.approx(0.12 + 4.0 / 11)


def test_a_token_after_a_long_context_is_more_work() -> None:
    """1 ms to read 1,000 tokens of KV: 100 tokens at 1,050 in the mean take 0.105 s more."""
    at = bounded(SloConfig(ttft_s=10.0))
    slow = replace(at, facts=replace(at.facts, cost=replace(COST, context_s=1e-6)))
    assert work_s(turn(slow, forecast=LAST)) - work_s(turn(at, forecast=LAST)) == pytest.approx(0.105, rel=0.05)


def test_late_turns_rank_by_what_their_programs_have_left() -> None:
    at = bounded(SloConfig(ttft_s=0.1))
    little = turn(at, forecast=Forecast(100.0, 1.0, 10.0, 110.0, 1.0))
    much = turn(at, tokens=900, forecast=Forecast(100.0, 1.0, 10.0, 1100.0, 10.0))
    assert key(little) < key(much)
    assert is_late(key(little)) and is_late(key(much))


def test_a_turn_that_has_waited_for_a_half_of_the_longest_wait_comes_before_all_others() -> None:
    at = bounded(SloConfig(ttft_s=1.0))
    due = turn(at, tokens=9000, arrived_s=at.now_s - 61.0)
    assert not is_late(key(due))
    assert key(replace(due, arrived_s=at.now_s - 62.0)) < key(due) < key(turn(at, tokens=1, forecast=LAST))
    assert is_late(key(replace(due, arrived_s=at.now_s - 59.0)))
    assert key(due, max_wait_s=200.0) > key(turn(at, tokens=1, forecast=LAST))
    batch = replace(due, hints=Hints(priority=1))
    assert key(batch) > key(turn(at, tokens=1, forecast=LAST)), "work that can wait waits for all others"
    assert key(replace(batch, arrived_s=at.now_s - 239.0)) > key(turn(at, tokens=1, forecast=LAST))
    assert key(replace(batch, arrived_s=at.now_s - 241.0)) < key(turn(at, tokens=1, forecast=LAST)), "but not for ever"
    # After the first token, only the waits count.
    after = replace(due, first_token_s=at.now_s - 1.0, waited_s=59.0)
    assert key(after) > key(turn(at, tokens=1, forecast=LAST)) > key(replace(after, waited_s=61.0))
    assert CaesuraParameters(max_wait_s=7.0).build().max_wait_s == 7.0


def test_ranks_that_the_scheduler_gives_are_not_late() -> None:
    assert not is_late(LOADED)
    assert not is_late(EQUAL)


def test_without_a_bound_the_least_work_goes_first() -> None:
    at = bounded(SloConfig(ttft_s=None))
    short, long = turn(at, tokens=100), turn(at, tokens=2000)
    assert key(short) < key(replace(long, arrived_s=at.now_s - 40.0))
    assert key(short)[1] / key(long)[1] == pytest.approx(work_s(short) / work_s(long))


def test_a_hold_has_missed_the_bounds_of_its_own_turns() -> None:
    at = bounded(SloConfig(ttft_s=1.0))
    back = hold(at, owner_waits=True, program=replace(begin("p", 0.0), last_event_s=at.now_s - 2.0))
    assert has_missed_slo(back)
    assert not has_missed_slo(replace(back, bounds=Slo(3.0)))
    assert has_missed_slo(replace(back, bounds=Slo(3.0, e2e_s=1.5)))
    assert not has_missed_slo(replace(back, bounds=Slo(slowdown=3.0)))
    late = replace(back, program=replace(back.program, on_time=False))
    assert has_missed_slo(replace(late, bounds=Slo(slowdown=3.0)))
    assert not has_missed_slo(replace(late, bounds=Slo()))


# --- pause ------------------------------------------------------------------------------------------------------------


def table(*seconds: float) -> DurationTable:
    return DurationTable.of({"ls": observed(*seconds)})


def test_memory_is_free_where_nobody_waits_or_all_who_wait_find_room() -> None:
    assert pressure(load(waiting=0, free_tokens=0)) == pressure(load(waiting=3, waiting_late=3, free_tokens=0)) == 0
    assert pressure(load(waiting=3, running=10, running_tokens=5000, free_tokens=1500)) == 0
    assert pressure(load(waiting=3, running=10, running_tokens=5000, free_tokens=750)) == 0.5
    assert pressure(crowded()) == 1


def test_what_costs_nothing_is_held_on() -> None:
    at = load(waiting=0)
    assert STOPPING.decide(pause(at, durations=table(*[500.0] * 9))) == Hold(at.now_s + LONGEST_S, "free")
    held = hold(at, since_s=0.0, durations=table(*[500.0] * 9))
    assert STOPPING.review(held) == Hold(at.now_s + LONGEST_S, "free")


@pytest.mark.parametrize(("seconds", "stop_s"), [(0.2, REFILL_S / 4), (0.9, REFILL_S), (1.1, None), (60.0, None)])
def test_at_full_pressure_a_hold_ends_at_the_refill_time_at_the_latest(seconds: float, stop_s: float | None) -> None:
    decision = STOPPING.decide(pause(crowded(), durations=table(*[seconds] * 9)))
    assert decision == (Release("does not pay") if stop_s is None else Hold(100.0 + stop_s, "pays"))


def test_half_the_pressure_doubles_the_time_that_a_hold_may_take() -> None:
    half = crowded(waiting=2, running=10, running_tokens=5000, free_tokens=500)
    assert pressure(half) == 0.5
    assert isinstance(STOPPING.decide(pause(crowded(), durations=table(*[1.5] * 9))), Release)
    assert isinstance(STOPPING.decide(pause(half, durations=table(*[1.5] * 9))), Hold)


def test_a_hold_goes_on_while_the_tool_is_about_to_end_and_stops_where_only_a_long_rest_is_left() -> None:
    """Half of the calls take 0.2 s, half 60 s: past 0.2 s only the long ones are left."""
    durations = table(*[0.2] * 10, *[60.0] * 10)
    assert isinstance(STOPPING.decide(pause(crowded(), durations=durations)), Hold)
    at = crowded()
    early = hold(at, since_s=at.now_s - 0.1, durations=durations, program=replace(begin("p", 0.0), tools=("ls",)))
    assert isinstance(STOPPING.review(early), Hold)
    assert isinstance(STOPPING.review(replace(early, since_s=at.now_s - 0.5)), Release)


def test_the_clients_word_on_a_pause_counts_more_than_what_was_seen() -> None:
    view = pause(crowded(), durations=table(*[60.0] * 9))
    told = replace(view, forecast=replace(view.forecast, pause_s=0.1, pause_hinted=True))
    assert isinstance(STOPPING.decide(view), Release)
    assert isinstance(STOPPING.decide(told), Hold)


def test_with_a_host_tier_holds_are_as_much_shorter_as_fetching_is_cheaper_than_computing() -> None:
    """1,000 tokens: 10 ms to fetch, 100 ms to compute. What does not fit the tier is computed."""
    durations = table(*[0.2] * 9)
    at = replace(crowded(), facts=replace(crowded().facts, host_tokens=1000))
    assert STOPPING.decide(pause(at, durations=durations)) == Swap("does not pay")
    assert isinstance(STOPPING.decide(pause(at, durations=table(*[0.02] * 9))), Hold)
    assert isinstance(STOPPING.decide(pause(at, context=1001, durations=durations)), Hold)


def test_each_context_goes_to_the_cheapest_place_that_has_it() -> None:
    """1,000 tokens, which are 10 ms away on the host, and 30 ms on disk, and take 100 ms to compute.

    A hold that costs as much as the place below would save ends: after 0.1, 0.3 and 1 s of such a crowd.
    """
    tiers = replace(crowded(), facts=replace(crowded().facts, host_tokens=1000), disk_read_s=2e-5)
    view = pause(tiers, durations=table(*[60.0] * 9))
    on_host, on_disk, nowhere = (
        replace(view, host_room=host, on_disk=disk) for host, disk in ((True, True), (False, True), (False, False))
    )
    assert STOPPING.decide(on_host) == Swap("does not pay", Place.HOST)
    assert STOPPING.decide(on_disk) == Swap("does not pay", Place.DISK)
    assert STOPPING.decide(nowhere) == Release("does not pay")
    slow = replace(tiers, disk_read_s=1e-3)
    assert STOPPING.decide(replace(on_disk, load=slow)) == Release("does not pay"), (
        "reading takes longer than computing"
    )

    short = table(*[0.2] * 9)
    decisions = [STOPPING.decide(replace(one, durations=short)) for one in (on_host, on_disk, nowhere)]
    assert [isinstance(one, Hold) for one in decisions] == [False, True, True]

    held = hold(
        tiers, since_s=tiers.now_s, durations=table(*[60.0] * 9), program=replace(begin("p", 99.0), tools=("ls",))
    )
    assert STOPPING.review(replace(held, host_room=False, on_disk=True)) == Swap("does not pay", Place.DISK)


def test_what_is_swapped_is_fetched_not_computed() -> None:
    at = bounded(SloConfig(ttft_s=10.0))
    swapped = turn(at, forecast=LAST, cached_tokens=1000, kv=KvPlace.SWAPPED)
    assert work_s(swapped) == pytest.approx(0.01 + 1.0 / 11)


def test_victims_are_programs_past_the_slo_then_what_is_least_worth_its_memory() -> None:
    at = crowded()
    durations = DurationTable.of({"fast": observed(*[0.2] * 9), "slow": observed(*[60.0] * 9)})
    fast = hold(at, durations=durations, since_s=at.now_s, program=replace(begin("t/f", 99.0), tools=("fast",)))
    slow = replace(fast, program=replace(fast.program, tools=("slow",)))
    late = replace(fast, program=replace(fast.program, on_time=False))
    back = replace(fast, owner_waits=True, program=replace(fast.program, last_event_s=at.now_s))
    assert sorted([back, fast, slow, late], key=STOPPING.victim_key) == [late, slow, fast, back]


def test_a_running_turn_and_a_starved_one_take_any_hold_and_a_waiting_one_what_does_not_pay() -> None:
    at = crowded()
    pays = hold(at, durations=table(*[0.2] * 9), since_s=at.now_s, program=replace(begin("p", 99.0), tools=("ls",)))
    long = replace(pays, durations=table(*[60.0] * 9))
    missed = replace(pays, program=replace(pays.program, on_time=False))
    for view in (pays, long, missed):
        assert STOPPING.yields(view, Claimant.RUNNING)
        assert STOPPING.yields(view, Claimant.STARVED)
    assert [STOPPING.yields(view, Claimant.WAITING) for view in (pays, long, missed)] == [False, True, False]


def test_a_program_that_is_back_yields_to_a_waiting_turn_once_it_is_past_the_slo() -> None:
    at = bounded(SloConfig(ttft_s=1.0))
    back = hold(at, owner_waits=True, program=replace(begin("p", 0.0), last_event_s=at.now_s - 0.5))
    assert not STOPPING.yields(back, Claimant.WAITING)
    for late in (replace(back.program, last_event_s=at.now_s - 1.5), replace(back.program, on_time=False)):
        assert STOPPING.yields(replace(back, program=late), Claimant.WAITING)


# --- budget -----------------------------------------------------------------------------------------------------------


def test_the_budget_is_the_inverse_of_the_step_time() -> None:
    """0.1 ms a token: a bound of 50 ms is 500 tokens, if that many fit a step."""
    tokens = changed(CaesuraParameters().build().budget, prompt_slowdown=1.001).tokens
    assert tokens(bounded(SloConfig(tpot_s=0.05))) == 500
    assert tokens(bounded(SloConfig(tpot_s=0.2))) == 1000
    assert tokens(bounded(SloConfig(tpot_s=0.05), running=0)) == 1000
    assert tokens(bounded(SloConfig())) == 1000


def test_prompts_are_spread_over_steps_that_read_the_weights_anyway() -> None:
    """100 tokens are computed in the time in which the weights are read."""
    tokens = CaesuraParameters(min_prefill_tokens=30).build().budget.tokens
    assert tokens(bounded(SloConfig(), waiting=10)) == 100
    assert tokens(bounded(SloConfig(), waiting=0, running=180)) == 210
    assert tokens(bounded(SloConfig(), running=0)) == 1000


def test_steps_are_large_enough_where_their_constant_time_dominates() -> None:
    """On a CPU the weights are read in the time of 17 tokens, and a step takes 1 ms without any."""
    view = bounded(SloConfig(), waiting=0, running=10)
    cost = replace(view.facts.cost, overhead_s=1e-3, weights_s=2.5e-5, token_s=1.5e-6)
    assert cost.saturation_tokens == 17
    tokens = CaesuraParameters().build().budget.tokens(replace(view, facts=replace(view.facts, cost=cost)))
    alone_s = 6000 * cost.token_s
    assert 6000 / tokens * (cost.overhead_s + cost.weights_s) + alone_s == pytest.approx(3 * alone_s, rel=0.01)


@pytest.mark.parametrize("name", ["opt-13b/h800", "llama-3.1-8b/h100", "llama-3.1-70b/a100-80", "qwen3-32b/b200"])
def test_on_a_gpu_the_saturation_point_is_large_enough(name: str) -> None:
    view, cost = bounded(SloConfig(), waiting=0, running=10), preset(name)
    tokens = CaesuraParameters().build().budget.tokens(replace(view, facts=replace(view.facts, cost=cost)))
    assert tokens == cost.saturation_tokens


def test_however_slow_the_steps_prompts_are_computed() -> None:
    budget = CaesuraParameters(min_prefill_tokens=30).build().budget
    assert budget.tokens(bounded(SloConfig(tpot_s=0.001), running=10)) == 40


# --- any view ---------------------------------------------------------------------------------------------------------

TOKENS = st.integers(0, 10**9)
SECONDS = st.floats(0, 1e9, allow_nan=False)
BOUND = st.none() | st.floats(1e-6, 1e6)
LOADS = st.builds(
    lambda slo, **changes: bounded(slo, **changes),
    st.builds(SloConfig, ttft_s=BOUND, tpot_s=BOUND, e2e_s=BOUND, normalized_latency_s=BOUND),
    host_tokens=TOKENS,
    max_tokens=st.integers(1, 10**6),
    now_s=SECONDS,
    running=st.integers(0, 10**5),
    running_tokens=TOKENS,
    waiting=st.integers(0, 10**5),
    held_tokens=TOKENS,
    free_tokens=TOKENS,
    waiting_tokens=TOKENS,
    prefill_tokens=TOKENS,
)
NOISY = st.floats(-1e9, 1e9, allow_nan=False)
"""Injected noise can make a forecast negative."""
FORECASTS = st.builds(Forecast, NOISY, NOISY, NOISY, NOISY, NOISY, st.booleans())
PROGRAMS = st.builds(
    lambda busy_s, on_time, event_s, started_s: replace(
        begin("t/\ud800", 0.0), busy_s=busy_s, on_time=on_time, last_event_s=event_s, tool_started_s=started_s
    ),
    SECONDS,
    st.booleans(),
    SECONDS,
    st.none() | SECONDS,
)
TABLES = st.lists(st.floats(0, 1e6), max_size=9).map(lambda seconds: table(*seconds) if seconds else DurationTable())
TURNS = st.builds(
    turn,
    LOADS,
    program=PROGRAMS,
    forecast=FORECASTS,
    arrived_s=SECONDS,
    tokens=st.integers(1, 10**9),
    cached_tokens=TOKENS,
    generated_tokens=TOKENS,
    first_token_s=st.none() | SECONDS,
    kv=st.sampled_from(KvPlace),
    bounds=st.builds(Slo, ttft_s=BOUND, e2e_s=BOUND, normalized_latency_s=BOUND),
    hints=st.builds(Hints, priority=st.none() | st.integers(-(2**62), 2**62)),
)
PAUSES = st.builds(
    lambda at, context, known, expected: replace(pause(at, context, known), forecast=expected),
    LOADS,
    TOKENS,
    TABLES,
    FORECASTS,
)
HOLDS = st.builds(
    hold,
    LOADS,
    program=PROGRAMS,
    since_s=SECONDS,
    until_s=SECONDS,
    context_tokens=TOKENS,
    durations=TABLES,
    forecast=FORECASTS,
    owner_waits=st.booleans(),
)


@given(view=TURNS)
def test_every_turn_has_a_rank_that_compares(view: TurnView) -> None:
    rank = key(view)
    assert len(rank) == 3
    assert not any(isnan(part) for part in rank)


@given(view=PAUSES)
def test_every_pause_is_decided(view: PauseView) -> None:
    decision = STOPPING.decide(view)
    assert not isinstance(decision, Hold) or (isfinite(decision.until_s) and decision.until_s >= view.now_s)


@given(view=HOLDS, claimant=st.sampled_from(Claimant))
def test_every_hold_can_be_reviewed_ranked_and_broken(view: HoldView, claimant: Claimant) -> None:
    assert isinstance(STOPPING.review(view), Hold | Swap | Release)
    assert not any(isnan(part) for part in STOPPING.victim_key(view))
    assert STOPPING.yields(view, claimant) or claimant is Claimant.WAITING


@given(view=LOADS)
def test_every_budget_is_within_bounds(view: LoadView) -> None:
    assert 1 <= CaesuraParameters().build().budget.tokens(view) <= view.facts.max_tokens


@given(view=PAUSES)
def test_whatever_the_pause_it_is_held_where_nobody_waits(view: PauseView) -> None:
    assert isinstance(STOPPING.decide(replace(view, load=replace(view.load, waiting=0))), Hold)
