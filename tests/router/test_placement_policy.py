"""Contracts of every registered filter and scorer, and of rendezvous hashing."""

from dataclasses import replace
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.registry import FILTERS, SCORERS
from router.candidate import (
    Arrival,
    Candidate,
    Gap,
    ReplicaLoad,
    Sent,
    WorkloadEstimate,
    candidate_of,
    expected_work,
    gap,
)
from router.placement_policy import PlacementPolicy, ranked
from router.settings import EngineSettings
from tests.router.router_views import COSTS, request

TOKENS = st.floats(0, 1e9)
SECONDS = st.floats(0, 1e5)
SMALL = st.floats(0, 1.0)
NAMES = st.frozensets(st.integers(0, 3))
BEGINNINGS = st.integers(0, 5).map(lambda blocks: frozenset(range(blocks)))
"""Of one long prompt: names are chained, so nobody has a block without those before it."""
LOADS = st.builds(
    ReplicaLoad,
    overhead_s=SMALL,
    sequence_s=SMALL,
    weights_s=SMALL,
    token_s=SMALL,
    context_s=SMALL,
    swap_token_s=SMALL,
    kv_tokens=TOKENS,
    free_tokens=TOKENS,
    host_tokens=TOKENS,
    running=st.floats(0, 1e4),
    waiting=st.floats(0, 1e4),
    running_tokens=TOKENS,
    waiting_tokens=TOKENS,
    output_tokens=TOKENS,
    programs=st.floats(0, 1e4),
    working_set_tokens=TOKENS,
    resume_tokens=st.lists(st.tuples(SECONDS, TOKENS), max_size=3).map(tuple),
)
WORKLOADS = st.builds(WorkloadEstimate, TOKENS, TOKENS, st.floats(1, 1e4), SECONDS)
SENT = st.builds(Sent, st.integers(0, 50), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(-9, 9), TOKENS)


@st.composite
def candidates(draw: st.DrawFn, replica: str = "r0", cached: st.SearchStrategy[frozenset[int]] = NAMES) -> Candidate:
    load = draw(LOADS)
    return candidate_of(
        replica,
        load,
        draw(SENT),
        bound_tokens=load.kv_tokens,
        model=draw(st.sampled_from([None, "m", "other"])),
        draining=draw(st.booleans()),
        suspect=draw(st.booleans()),
        residents=draw(NAMES),
        on_device=draw(NAMES),
        on_host=draw(NAMES),
        prefixes=draw(cached),
        sent_prefixes=draw(cached),
    )


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    hints = request("p", expected_output_tokens=draw(st.none() | st.integers(0, 10**6))).hints
    expected = expected_work(
        draw(WORKLOADS), hints, draw(st.integers(0, 10**6)), draw(st.integers(0, 99)), draw(st.booleans())
    )
    return Arrival(
        key=draw(st.text(max_size=3)),
        name=draw(st.integers(0, 3)),
        tenant=draw(st.text(max_size=2)),
        prefix=tuple(draw(st.lists(st.integers(0, 5), max_size=5))),
        expected=expected,
        home=draw(st.sampled_from([None, "r0", "r1"])),
        home_tokens=draw(st.integers(0, 10**6)),
        just_ended=draw(st.booleans()),
    )


@pytest.mark.parametrize("name", SCORERS)
@given(turn=arrivals(), candidate=candidates())
def test_every_score_is_a_number_of_seconds_and_the_same_again(name: str, turn: Arrival, candidate: Candidate) -> None:
    scorer = SCORERS.load(name)()
    seconds = scorer.seconds(turn, candidate, gap(turn, candidate))
    assert isfinite(seconds) and seconds >= 0
    assert SCORERS.load(name)().seconds(turn, candidate, gap(turn, candidate)) == seconds


@pytest.mark.parametrize("name", SCORERS)
@given(turn=arrivals(), candidate=candidates(), missing=st.integers(0, 10**6), more=st.integers(0, 10**6))
def test_nothing_gets_cheaper_by_missing_more(
    name: str, turn: Arrival, candidate: Candidate, missing: int, more: int
) -> None:
    scorer = SCORERS.load(name)()
    less = scorer.seconds(turn, candidate, Gap(missing, 0))
    assert scorer.seconds(turn, candidate, Gap(missing + more, 0)) >= less


@pytest.mark.parametrize("name", FILTERS)
@given(turn=arrivals(), first=candidates("r0"), second=candidates("r1"), spread=st.floats(0.01, 1))
def test_every_filter_keeps_a_part_in_its_order_and_the_same_again(
    name: str, turn: Arrival, first: Candidate, second: Candidate, spread: float
) -> None:
    settings = EngineSettings(tenant_spread=spread)
    each = FILTERS.load(name)(settings, "m")
    kept = each.keep(turn, [first, second])
    assert kept in ([], [first], [second], [first, second])
    assert FILTERS.load(name)(settings, "m").keep(turn, [first, second]) == kept
    assert each.keep(turn, []) == []


@given(
    turn=arrivals(),
    blocks=st.integers(0, 5),
    first=candidates("r0", cached=BEGINNINGS),
    second=candidates("r1", cached=BEGINNINGS),
)
def test_the_scorers_add_up_to_the_score_and_the_best_is_the_least(
    turn: Arrival, blocks: int, first: Candidate, second: Candidate
) -> None:
    turn = replace(turn, prefix=tuple(range(blocks)))
    policy = PlacementPolicy.of(EngineSettings())
    alone = [PlacementPolicy.of(EngineSettings(scorers={name: 1.0})) for name in SCORERS]
    scores = [policy.score(turn, one) for one in (first, second)]
    for score in scores:
        parts = [one.score(turn, score.candidate).seconds for one in alone]
        assert sum(parts) == pytest.approx(score.seconds)
    best = policy.best(turn, [first, second])
    assert best is not None and best.seconds == min(score.seconds for score in scores)


@given(first=candidates("r0"), second=candidates("r1"), turn=arrivals())
def test_never_a_replica_that_drains_serves_another_model_or_has_failed_the_turn(
    first: Candidate, second: Candidate, turn: Arrival
) -> None:
    policy = PlacementPolicy.of(EngineSettings(), model="m")
    avoiding = replace(turn, avoid=frozenset({"r0"}))
    for one in policy.eligible(avoiding, [first, second]):
        assert one.replica == "r1" and not one.draining and one.model != "other"


@pytest.mark.parametrize("filters", [tuple(FILTERS), tuple(FILTERS)[::-1]])
@pytest.mark.parametrize(
    ("draining", "serving"),
    [({}, {"suspect": True}), ({}, {"kv_tokens": 500.0}), ({"model": "other"}, {"suspect": True, "kv_tokens": 500.0})],
)
def test_a_replica_that_serves_is_used_where_only_one_that_may_not_be_used_is_better(
    filters: tuple[str, ...], draining: dict[str, object], serving: dict[str, object]
) -> None:
    """One replica drains. The other serves, but is suspect or too small for the turn, as no better one is there."""
    policy = PlacementPolicy.of(EngineSettings(filters=filters), model="m")
    leaves, serves = some("r0", draining=True, **draining), some("r1", **serving)
    assert policy.eligible(TURN, [leaves, serves]) == [serves]


def test_a_tenants_part_is_of_the_replicas_that_serve() -> None:
    policy = PlacementPolicy.of(EngineSettings(tenant_spread=0.5))
    replicas = [some(name, draining=name in ranked(TURN.tenant, REPLICAS)[:4]) for name in REPLICAS]
    assert len(policy.eligible(TURN, replicas)) == 2


def some(replica: str, **fields: object) -> Candidate:
    """An idle replica; of its fields, those of `Candidate` by their names, and others as those of its load."""
    own = {name: fields.pop(name) for name in ("draining", "suspect", "model") if name in fields}
    return replace(idle(replica, **fields), **own)  # type: ignore[arg-type]


def idle(replica: str, **fields: object) -> Candidate:
    costs = {name: getattr(COSTS, name) for name in COSTS.__struct_fields__}
    load = ReplicaLoad(**{**costs, "kv_tokens": 1e5, "free_tokens": 1e5, **fields})  # type: ignore[arg-type]
    return candidate_of(replica, load, Sent(), bound_tokens=1e5)


TURN = Arrival("p", 1, "a", (), expected_work(WorkloadEstimate(), request("p").hints, 1000, 0, final=False))


@pytest.mark.parametrize(
    ("name", "worse"),
    [
        ("start", {"waiting_tokens": 50_000.0}),
        ("start", {"waiting_tokens": 50_000.0, "resume_tokens": ((1.0, 1e4),)}),
        ("start", {"free_tokens": 0.0, "running_tokens": 9e4, "running": 9.0, "output_tokens": 900.0}),
        ("missing", {"token_s": 1e-3}),
        ("pace", {"active_programs": 50.0, "active_tokens": 9e4}),
        ("memory", {"working_set_tokens": 2e5}),
    ],
)
def test_what_each_scorer_is_for_counts(name: str, worse: dict[str, object]) -> None:
    policy = PlacementPolicy.of(EngineSettings(scorers={name: 1.0}))
    better, busy = idle("r1"), idle("r0", **worse)
    assert policy.score(TURN, busy).seconds > policy.score(TURN, better).seconds


def test_a_full_replica_that_runs_few_turns_is_not_taken_for_a_fast_one() -> None:
    policy = PlacementPolicy.of(EngineSettings(scorers={"pace": 1.0}))
    few, many = idle("r0", active_programs=50.0, running=2.0), idle("r1", active_programs=10.0, running=8.0)
    assert policy.score(TURN, few).seconds > policy.score(TURN, many).seconds


def test_programs_that_pause_for_minutes_do_not_make_a_replica_slow() -> None:
    policy = PlacementPolicy.of(EngineSettings(scorers={"pace": 1.0}))
    asleep = idle("r0", programs=200.0, working_set_tokens=9e4, active_programs=2.0, active_tokens=4e3)
    awake = idle("r1", programs=20.0, working_set_tokens=2e4, active_programs=20.0, active_tokens=2e4)
    assert policy.score(TURN, asleep).seconds < policy.score(TURN, awake).seconds


def test_a_long_context_lives_where_few_wait_for_its_reading() -> None:
    policy = PlacementPolicy.of(EngineSettings(scorers={"pace": 1.0}))
    # Iterations of one length: many short contexts here, few long ones there.
    many, few = (
        idle(name, active_programs=n, active_tokens=5e4, sequence_s=0.0) for name, n in (("r0", 20.0), ("r1", 2.0))
    )
    assert many.active_step_s == few.active_step_s
    short, long = (replace(TURN, expected=replace(TURN.expected, context_tokens=n)) for n in (0.0, 4e4))
    assert policy.score(short, many).seconds == policy.score(short, few).seconds
    assert policy.score(long, many).seconds > policy.score(long, few).seconds
    at_home = replace(long, home="r1")
    assert policy.score(at_home, few).seconds < policy.score(long, few).seconds, "it is one of the two"


def test_of_equals_the_one_with_fewer_programs() -> None:
    policy = PlacementPolicy.of(EngineSettings(scorers={}))
    best = policy.best(TURN, [idle("r0", programs=3.0), idle("r1", programs=2.0), idle("r2", programs=5.0)])
    assert best is not None and best.candidate.replica == "r1"


@given(known=st.integers(0, 9), length=st.integers(0, 9), guess=st.integers(0, 12), split=st.integers(0, 9))
def test_a_prefix_is_found_by_its_longest_known_beginning(known: int, length: int, guess: int, split: int) -> None:
    published, sent = frozenset(range(min(split, known))), frozenset(range(min(split, known), known))
    candidate = replace(idle("r0"), prefixes=published, sent_prefixes=sent)
    assert candidate.shared_blocks(tuple(range(length)), guess) == min(known, length)


# --- rendezvous hashing -----------------------------------------------------------------------------------------------

KEYS = [f"tenant/program{number}" for number in range(400)]
REPLICAS = [f"replica{number}" for number in range(8)]


def test_only_the_keys_of_a_replica_that_goes_are_placed_elsewhere() -> None:
    before = {key: ranked(key, REPLICAS)[0] for key in KEYS}
    after = {key: ranked(key, REPLICAS[1:])[0] for key in KEYS}
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == REPLICAS[0]}


def test_keys_spread() -> None:
    firsts = [ranked(key, REPLICAS)[0] for key in KEYS]
    assert all(25 <= firsts.count(replica) <= 75 for replica in REPLICAS)
