"""What every policy of the papers must do, whatever it sees."""

from dataclasses import replace
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.durations.table import DurationTable
from replicas.policies import waste
from replicas.policies.infercept import MinWaste
from replicas.policies.waste import LeastWaste, Predicted
from replicas.policy import Claimant, Forecast, Hold, HoldView, KvPlace, LoadView, PauseView, Release, Swap, TurnView
from tests.replica.policy_views import hold, load, observed, pause, policy, turn

PAPERS = ("plas", "infercept", "lamps", "mars", "augserve", "continuum2")
EVERY_PAPER = pytest.mark.parametrize("name", PAPERS)

TOKENS = st.integers(0, 10**9)
SECONDS = st.floats(0, 1e9, allow_nan=False)
LOADS = st.builds(
    load,
    host_tokens=TOKENS,
    max_tokens=st.integers(1, 10**6),
    now_s=SECONDS,
    step=TOKENS,
    running=st.integers(0, 10**5),
    running_tokens=TOKENS,
    waiting=st.integers(0, 10**5),
    held_tokens=TOKENS,
    free_tokens=TOKENS,
)
NOISY = st.floats(-1e9, 1e9, allow_nan=False)
"""Injected noise can make a forecast negative."""
FORECASTS = st.builds(Forecast, NOISY, NOISY, NOISY, NOISY, NOISY)
TURNS = st.builds(
    turn,
    LOADS,
    context_tokens=TOKENS,
    last_served_s=st.none() | SECONDS,
    forecast=FORECASTS,
    arrived_s=SECONDS,
    queued_step=TOKENS,
    tokens=st.integers(1, 10**9),
    cached_tokens=TOKENS,
    preempted=st.booleans(),
    kv=st.sampled_from(KvPlace),
)
TABLES = st.lists(st.floats(0, 1e6), max_size=9).map(lambda seconds: DurationTable.of({"ls": observed(*seconds)}))
PAUSES = st.builds(
    lambda at, context, table, expected: replace(pause(at, context, table), forecast=expected),
    LOADS,
    TOKENS,
    TABLES,
    FORECASTS,
)
HOLDS = st.builds(
    hold,
    LOADS,
    since_s=SECONDS,
    until_s=SECONDS,
    context_tokens=TOKENS,
    forecast=FORECASTS,
    owner_waits=st.booleans(),
)


@EVERY_PAPER
@given(view=TURNS, other=TURNS)
def test_every_turn_has_a_rank_that_compares(name: str, view: TurnView, other: TurnView) -> None:
    key = policy(name).order.key
    assert len(key(view)) == len(key(other))
    assert not any(isnan(part) for part in key(view))


@EVERY_PAPER
@given(view=PAUSES)
def test_every_pause_is_decided_and_no_hold_ends_before_it_begins(name: str, view: PauseView) -> None:
    decision = policy(name).pause.decide(view)
    assert not isinstance(decision, Hold) or view.now_s <= decision.until_s < float("inf")
    assert not isinstance(decision, Swap) or view.context_tokens <= view.load.facts.host_tokens


@EVERY_PAPER
@given(view=HOLDS)
def test_every_hold_can_be_reviewed_ranked_and_broken(name: str, view: HoldView) -> None:
    pause_policy = policy(name).pause
    assert isinstance(pause_policy.review(view), Hold | Swap | Release)
    assert not any(isnan(part) for part in pause_policy.victim_key(view))
    assert pause_policy.yields(view, Claimant.STARVED)
    assert pause_policy.yields(view, Claimant.RUNNING)


@EVERY_PAPER
@given(view=LOADS)
def test_every_budget_is_within_bounds(name: str, view: LoadView) -> None:
    assert 1 <= policy(name).budget.tokens(view) <= view.facts.max_tokens


@pytest.mark.parametrize("judge", [Predicted(), MinWaste(False, 0.5, True)], ids=["predicted", "min waste"])
@given(at=LOADS, context=TOKENS, shorter=SECONDS, longer=SECONDS)
def test_a_longer_pause_never_makes_holding_better(
    judge: waste.Judge, at: LoadView, context: int, shorter: float, longer: float
) -> None:
    shorter, longer = sorted((shorter, longer))
    decide = LeastWaste(judge).decide
    held_longer = isinstance(decide(pause(at, context, pause_s=longer)), Hold)
    assert not held_longer or isinstance(decide(pause(at, context, pause_s=shorter)), Hold)
