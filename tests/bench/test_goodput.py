"""The definitions of goodput and of the latencies, on examples computed by hand."""

from dataclasses import replace

import pytest

from cluster.core.slo import Goodput, Outcome, ProgramRecord, Slo, TurnRecord
from cluster.offline.bench.results import measures, summarize


def turn(start, first, last, tokens, *, index=0, outcome=Outcome.OK, **more):
    return TurnRecord("p", index, start, outcome, first, last, output_tokens=tokens, **more)


def program(*turns, arrival=0.0, outcome=Outcome.OK, until=None, kind=""):
    return ProgramRecord("p", arrival, outcome, turns, planned_turns=len(turns), kind=kind, until_s=until)


# Arrives at 10; first token 10.5, last 12.5 (11 tokens); tool 3 s; due at 15.5; first token 16.0, last 16.5 (6 tokens).
TWO_TURNS = program(
    turn(10.0, 10.5, 12.5, 11),
    turn(15.5, 16.0, 16.5, 6, index=1, previous_context_tokens=100, cached_tokens=64, queue_s=0.4),
    arrival=10.0,
)


def test_latencies_of_a_turn() -> None:
    first, second = TWO_TURNS.turns
    assert first.ttft_s == pytest.approx(0.5)
    assert first.e2e_s == pytest.approx(2.5)
    assert first.tpot_s == pytest.approx(0.2)
    assert first.normalized_latency_s == pytest.approx(2.5 / 11)
    assert second.tpot_s == pytest.approx(0.1)


def test_latencies_of_a_program() -> None:
    assert TWO_TURNS.jct_wall_s == pytest.approx(6.5)
    assert TWO_TURNS.jct_s == pytest.approx(3.5)
    assert TWO_TURNS.normalized_latency_s == pytest.approx(3.5 / 17)
    assert TWO_TURNS.bubble_s == pytest.approx(0.4)


def test_reused_and_recomputed_tokens() -> None:
    assert (TWO_TURNS.reused_tokens, TWO_TURNS.recomputed_tokens) == (64, 36)
    # A prefix shared with others may be cached beyond what this program had.
    more = turn(0, 1, 2, 3, index=1, previous_context_tokens=100, cached_tokens=160)
    assert (more.reused_tokens, more.recomputed_tokens) == (100, 0)


def test_unknown_is_not_zero() -> None:
    silent = program(turn(0, 1, 2, 3), turn(3, 4, 5, 3, index=1))
    assert silent.bubble_s is silent.reused_tokens is silent.recomputed_tokens is None
    assert program(turn(0, 1, 2, 3)).bubble_s == 0.0


def test_what_has_not_ended_counts_with_its_time_so_far() -> None:
    # Its first turn ends after 2 s; the second is due at 3, has a token at 4, and the record is made at 10.
    cut = program(
        turn(0, 1, 2, 3),
        turn(3, 4, 6, 2, index=1, outcome=Outcome.UNFINISHED),
        outcome=Outcome.UNFINISHED,
        until=10.0,
    )
    assert (cut.spent_s, cut.spent_wall_s) == (2.0 + 7.0, 10.0)
    assert cut.first_tokens_s == (1.0, 1.0)
    refused = program(turn(2, None, None, 0, outcome=Outcome.REJECTED), outcome=Outcome.REJECTED, until=10.0)
    assert (refused.spent_s, refused.first_tokens_s, refused.longest_wait_s) == (8.0, (8.0,), None)
    waits = program(turn(2, None, None, 0, outcome=Outcome.UNFINISHED), outcome=Outcome.UNFINISHED, until=10.0)
    assert (waits.first_tokens_s, waits.longest_wait_s) == ((8.0,), 8.0)
    # A completed program counts as it is, whenever its record was made.
    whole = replace(TWO_TURNS, until_s=100.0)
    assert (whole.spent_s, whole.spent_wall_s) == (pytest.approx(3.5), pytest.approx(6.5))
    assert whole.first_tokens_s == (pytest.approx(0.5), pytest.approx(0.5))
    # Without the time of the record nothing is known about what has not ended.
    assert replace(waits, until_s=None).spent_s is None


def test_an_unfinished_program_has_no_completion_time() -> None:
    cut = program(
        turn(0, 1, 2, 3), turn(3, 4, None, 1, index=1, outcome=Outcome.UNFINISHED), outcome=Outcome.UNFINISHED
    )
    assert cut.jct_s is cut.jct_wall_s is cut.normalized_latency_s is None
    assert cut.turns[1].ttft_s == 1.0
    assert cut.turns[1].e2e_s is None


def test_a_turn_of_one_token_has_no_tpot_and_cannot_miss_it() -> None:
    one = turn(0, 0.5, 0.5, 1)
    assert one.tpot_s is None
    assert Slo(tpot_s=0.001).turn_is_good(one)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), True),
        (Slo(ttft_s=0.5), True),
        (Slo(ttft_s=0.49), False),
        (Slo(tpot_s=0.21), True),
        (Slo(tpot_s=0.19), False),
        (Slo(e2e_s=2.5), True),
        (Slo(e2e_s=2.4), False),
        (Slo(normalized_latency_s=0.23), True),
        (Slo(normalized_latency_s=0.22), False),
        (Slo(ttft_s=0.6, tpot_s=0.3, e2e_s=3, normalized_latency_s=0.3), True),
        (Slo(ttft_s=0.6, tpot_s=0.3, e2e_s=2, normalized_latency_s=0.3), False),
    ],
)
def test_every_given_bound_must_be_met(slo, good) -> None:
    assert slo.turn_is_good(TWO_TURNS.turns[0]) is good


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
def test_only_ok_is_good(outcome) -> None:
    assert not Slo().turn_is_good(turn(0, 0.1, 0.2, 2, outcome=outcome))
    assert not Slo().program_is_good(program(turn(0, 0.1, 0.2, 2), outcome=outcome))


def test_one_bad_turn_makes_a_bad_program() -> None:
    late = turn(15.5, 17.0, 17.1, 6, index=1)
    assert not Slo(ttft_s=1.0).program_is_good(program(TWO_TURNS.turns[0], late, arrival=10.0))
    assert Slo(ttft_s=1.0).program_is_good(TWO_TURNS)


def test_normalised_latency_bounds_the_whole_program() -> None:
    # 0.4 s a token in the second turn, (1 + 0.4) / 11 = 0.127 over the program.
    mixed = program(turn(0, 0.1, 1.0, 10), turn(2, 2.4, 2.4, 1, index=1))
    slo = Slo(normalized_latency_s=0.2)
    assert not slo.turn_is_good(mixed.turns[1])
    assert slo.program_is_good(mixed)
    assert not Slo(normalized_latency_s=0.12).program_is_good(mixed)


def test_goodput_counts_over_all_that_were_offered() -> None:
    failed = program(
        turn(0, 0.1, 0.2, 2), turn(1, None, None, 0, index=1, outcome=Outcome.FAILED), outcome=Outcome.FAILED
    )
    slow = program(turn(0, 5.0, 6.0, 2))
    never_begun = program(outcome=Outcome.UNFINISHED)
    goodput = Goodput.of([TWO_TURNS, failed, slow, never_begun], Slo(ttft_s=1.0), window_s=10.0)
    assert (goodput.offered_programs, goodput.completed_programs, goodput.good_programs) == (4, 2, 1)
    assert goodput.programs_per_s == pytest.approx(0.1)
    assert goodput.attainment == pytest.approx(0.25)
    assert (goodput.offered_requests, goodput.good_requests) == (5, 3)
    assert goodput.requests_per_s == pytest.approx(0.3)
    assert goodput.attainment_requests == pytest.approx(0.6)


def test_nothing_offered_has_no_attainment() -> None:
    empty = Goodput.of([], Slo(), window_s=1.0)
    assert empty.attainment is empty.attainment_requests is None
    assert empty.programs_per_s == 0.0


def test_a_prompt_that_takes_long_alone_has_a_longer_bound() -> None:
    # Its first token takes 3 s, of which its prompt alone takes 1.6 s.
    long = program(turn(0, 3.0, 3.1, 2, alone_s=1.6))
    for slo, is_good in ((Slo(1.0), False), (Slo(1.0, slowdown=1.8), False), (Slo(1.0, slowdown=2.0), True)):
        assert slo.program_is_good(long) is slo.program_begins_in_time(long) is is_good
    # A short prompt keeps the bound in seconds, and so does one of which nobody knows how long it takes alone.
    for alone_s in (0.1, None):
        short = program(turn(0, 0.9, 1.0, 2, alone_s=alone_s))
        assert Slo(1.0, slowdown=2.0).program_is_good(short)
        assert not Slo(0.8, slowdown=2.0).program_is_good(short)
    # Alone, it is the only bound.
    assert not Slo(slowdown=2.0).program_is_good(program(turn(0, 0.9, 1.0, 2, alone_s=0.1)))


def test_what_needs_a_bound_is_null_where_there_is_none() -> None:
    found = measures(summarize("vllm", [TWO_TURNS], Slo(), 10.0, 17))
    needed = [key for key in found if key.startswith(("goodput", "attainment"))]
    assert len(needed) == 7
    assert [found[key] for key in needed] == [None] * 7
    assert found["completion_all_s"]["mean"] == pytest.approx(3.5)


def test_a_window_has_a_length() -> None:
    with pytest.raises(ValueError, match="window"):
        Goodput.of([], Slo(), window_s=0.0)


def test_three_definitions_of_good_side_by_side() -> None:
    # Its second turn has its first token after 3 s. It takes 5 s without tools for 20 tokens: 0.25 s a token.
    late_turn = program(turn(0, 0.5, 1.0, 10), turn(2, 5.0, 6.0, 10, index=1))
    late_begin = program(turn(0, 3.0, 3.5, 10), turn(4, 4.5, 5.0, 10, index=1))
    slow = program(turn(0, 0.5, 9.0, 10), turn(10, 10.5, 11.0, 10, index=1))
    cut = program(turn(0, 0.5, 1.0, 10, outcome=Outcome.UNFINISHED), outcome=Outcome.UNFINISHED)
    slo = Slo(ttft_s=1.0, normalized_latency_s=0.4)
    assert [slo.program_is_good(p) for p in (TWO_TURNS, late_turn, late_begin, slow, cut)] == [True] + [False] * 4
    first = [slo.program_begins_in_time(p) for p in (TWO_TURNS, late_turn, late_begin, slow, cut)]
    assert first == [True, True, False, False, False]
    goodput = Goodput.of([TWO_TURNS, late_turn, late_begin, slow, cut], slo, window_s=10.0)
    assert (goodput.programs_per_s, goodput.programs_first_per_s) == (0.1, 0.2)
    assert (goodput.attainment, goodput.attainment_first) == (0.2, 0.4)
    # Turns in time: both, the first, the second, the second (the first needs 0.9 s a token), none.
    assert goodput.good_requests == 2 + 1 + 1 + 1


def test_a_summary_has_every_program_and_each_kind() -> None:
    quick = program(turn(0, 0.5, 2.0, 10), kind="math", until=30.0)
    stuck = program(
        turn(10, None, None, 0, outcome=Outcome.UNFINISHED), arrival=10.0, outcome=Outcome.UNFINISHED, kind="qa",
        until=30.0,
    )  # fmt: skip
    refused = program(
        turn(20, None, None, 0, outcome=Outcome.REJECTED), arrival=20.0, outcome=Outcome.REJECTED, kind="qa", until=30.0
    )
    found = measures(summarize("p", [quick, stuck, refused], Slo(ttft_s=1.0), 10.0, 10))
    assert found["completion_all_s"]["mean"] == pytest.approx((2 + 20 + 10) / 3)
    assert found["jct_s"]["mean"] == 2.0
    assert found["ttft_all_s"]["mean"] == pytest.approx((0.5 + 20 + 10) / 3)
    assert (found["refused"], found["longest_wait_s"]) == (1, 20.0)
    assert found["kinds"]["math"]["attainment"] == 1.0
    assert found["kinds"]["qa"]["completion_all_s"]["mean"] == 15.0
    assert found["kinds"]["qa"]["offered"] == 2
