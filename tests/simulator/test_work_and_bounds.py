"""What programs ask for, what their clients tell, when they arrive, and what no scheduler can exceed."""

from dataclasses import replace

import pytest

from cluster.core.errors import ConfigError
from cluster.core.slo import Outcome, ProgramRecord, Slo, TurnRecord
from cluster.offline.bench.arrivals import Arrivals
from cluster.offline.bench.workload import PlannedTurn, TurnWork, tokens_of, turns_of
from cluster.offline.simulator.bounds import FluidBound
from cluster.offline.simulator.foresight import Foresight, Reports
from cluster.offline.simulator.load import Burst, Recovery, Window, plan
from tests.simulator.simulated import COST, program, turn

HIDDEN = replace(turn(64, 32, "think", 1.0), kept_tokens=16)
RESET = replace(turn(80, 4), reset=True)


def test_new_tokens_are_those_that_were_never_at_their_place() -> None:
    works = turns_of(program(HIDDEN, turn(10, 3, "ls", 2.0), RESET, prefix=("system", 32)))
    assert works == [
        TurnWork(prompt_tokens=64, new_tokens=64, output_tokens=32, returned_tokens=0),
        TurnWork(prompt_tokens=90, new_tokens=26, output_tokens=3, returned_tokens=0),
        TurnWork(prompt_tokens=80, new_tokens=48, output_tokens=4, returned_tokens=0),
    ]
    assert tokens_of(works[1:]) == 26 + 3 + 48 + 4
    assert [w.returned_tokens for w in turns_of(program(turn(50, 5, "ls"), turn(7, 1)))] == [7, 0]


def test_a_turn_is_sent_alike_whatever_follows_it() -> None:
    first, second = turn(50, 5, "ls", 2.5), turn(7, 3)
    ends = Foresight().identities("p", program(first, second), (0,))
    goes_on = Foresight().identities("p", program(first, replace(second, tool="make"), turn(9, 1)), (0,))
    assert ends == goes_on[:2]
    assert [(i.hints.expected_tool, i.hints.last_tool, i.last_turn) for i in goes_on] == [
        (None, None, False),
        (None, "ls", False),
        (None, "make", False),
    ]
    assert Foresight(reports=Reports.ENDS).identities("p", program(first, second), (0,)) == ends


def test_a_client_may_report_tools_and_ends_ahead_and_an_oracle_reports_the_rest() -> None:
    planned = program(turn(50, 5, "ls", 2.5), turn(7, 3, "make", 0.5), turn(9, 1))
    live = Foresight(reports=Reports.AHEAD).identities("p", planned, (0,))
    assert [(i.hints.expected_tool, i.hints.last_tool, i.last_turn) for i in live] == [
        ("ls", None, False),
        ("make", "ls", False),
        (None, "make", True),
    ]
    assert all(i.hints.expected_output_tokens is None and i.hints.expected_pause_s is None for i in live)
    told = [i.hints for i in Foresight(oracle=True).identities("p", planned, (0,))]
    assert [(h.expected_output_tokens, h.expected_pause_s, h.expected_returned_tokens) for h in told] == [
        (5, 2.5, 7),
        (3, 0.5, 9),
        (1, 0.0, 0),
    ]
    assert [(h.expected_later_tokens, h.expected_later_turns) for h in told] == [(7 + 3 + 9 + 1, 2), (10, 1), (0, 0)]


def test_noise_is_normal_in_proportion_never_negative_and_the_same_for_all_policies() -> None:
    planned = program(*[turn(50, 1000, "ls", 10.0)] * 400, turn(1, 1))
    noisy = Foresight(oracle=True, noise=0.5).identities("p", planned, (3, 0, 7))
    assert noisy == Foresight(oracle=True, noise=0.5).identities("p", planned, (3, 0, 7))
    assert noisy != Foresight(oracle=True, noise=0.5).identities("p", planned, (3, 0, 8))
    lengths = [i.hints.expected_output_tokens or 0 for i in noisy[:-1]]
    mean = sum(lengths) / 400
    deviation = (sum((length - mean) ** 2 for length in lengths) / 400) ** 0.5
    assert (mean, deviation) == (pytest.approx(1000, rel=0.1), pytest.approx(500, rel=0.1))
    assert min(lengths) >= 0
    assert (noisy[-1].hints.expected_pause_s, noisy[-1].hints.expected_later_tokens) == (0.0, 0)


def test_a_burst_changes_the_rate_within_it_only() -> None:
    pool = [program(turn(10, 1))]
    burst = Burst.parse("9:60:30")
    usual = [job.arrival_s for job in plan(pool, Arrivals(1.0), 300.0, seed=5)]
    bursting = [job.arrival_s for job in plan(pool, Arrivals(1.0), 300.0, seed=5, burst=burst)]
    assert [t for t in bursting if not 60 <= t < 90] == [t for t in usual if not 60 <= t < 90]
    assert 200 < sum(60 <= t < 90 for t in bursting) < 340
    assert bursting == sorted(bursting)
    lull = [job.arrival_s for job in plan(pool, Arrivals(1.0), 300.0, seed=5, burst=Burst(1e-9, 60.0, 30.0))]
    assert lull == [t for t in usual if not 60 <= t < 90]
    for bad in ("9:60", "9:60:x", "0:1:1", "9:-1:3", "9:1:inf"):
        with pytest.raises(ConfigError, match="--burst"):
            Burst.parse(bad)


def test_recovery_is_the_first_good_window_after_the_burst() -> None:
    def record(at_s: float, ttft_s: float) -> ProgramRecord:
        only = TurnRecord("p", 0, at_s, Outcome.OK, at_s + ttft_s, at_s + ttft_s, output_tokens=1)
        return ProgramRecord("p", at_s, Outcome.OK, (only,), 1)

    slow_until_s = 100.0
    records = [record(float(t), 9.0 if 45 <= t < slow_until_s else 0.1) for t in range(165)]
    found = Recovery.of(records, Slo(ttft_s=1.0), Burst(9.0, 45.0, 30.0), until_s=165.0)
    assert found.windows[0] == Window(15.0, 30, 30)
    assert [window.attainment for window in found.windows] == [1.0, 0.0, pytest.approx(5 / 30), 1.0, 1.0]
    assert found.recovered_s == 30.0
    never = Recovery.of(records, Slo(ttft_s=0.01), Burst(9.0, 45.0, 30.0), until_s=165.0)
    assert never.recovered_s is None
    unhurt = Recovery.of(records, Slo(ttft_s=10.0), Burst(9.0, 45.0, 30.0), until_s=165.0)
    assert unhurt.recovered_s == 0.0


def test_the_fluid_bound_by_hand() -> None:
    # One program: 200 prompt tokens, 101 outputs, so 100 decodes at contexts 201 to 300.
    contexts, pairs = sum(range(201, 301)), sum(range(1, 201))
    steps = contexts / 4096  # memory lets 4096 / 250.5 of such decodes share a step
    seconds = steps * 0.001 + 100 * 0.0002 + max(steps * 0.005, 300 * 0.0001)
    seconds += contexts * (2e-6 + 1e-7) + pairs * 1e-7
    bound = FluidBound.of([program(turn(200, 101))], COST, max_batched_tokens=10**6, max_num_seqs=10**6)
    assert bound.capacity_per_s == pytest.approx(1 / seconds)
    assert FluidBound.of([program(turn(200, 101))], COST, 10**6, 10**6, replicas=3).capacity_per_s == pytest.approx(
        3 / seconds
    )
    assert bound.goodput_per_s(0.5 / seconds) == 0.5 / seconds
    assert bound.goodput_per_s(2 / seconds) == pytest.approx(1 / seconds)


def test_past_capacity_the_bound_serves_the_least_work_first() -> None:
    bound = FluidBound((0.1, 0.1, 0.4, 0.4), replicas=1)
    assert bound.capacity_per_s == 4.0
    # Of 8 programs/s the two kinds of 2/s each at 0.1 s take 0.4 s; the rest of a second is 1.5 of those at 0.4 s.
    assert bound.goodput_per_s(8.0) == pytest.approx(4 + 1.5)
    assert bound.goodput_per_s(100.0) == pytest.approx(10.0)


def test_the_bound_counts_neither_a_shared_prefix_nor_a_token_twice() -> None:
    def bound(*turns: PlannedTurn, prefix: tuple[str, int] | None = None) -> float:
        return FluidBound.of([program(*turns, prefix=prefix)], COST, 10**6, 10**6).capacity_per_s

    # 64 and 10 + 1 prompt tokens, 31 and 2 decodes: what was sampled last is computed in the next prompt.
    tokens_s = (64 + 11 + 31 + 2) * COST.token_s
    contexts = sum(range(65, 96)) + sum(range(107, 109))
    pairs = contexts + sum(range(1, 65)) + sum(range(96, 107))
    attention_s = contexts * COST.context_s + pairs * COST.pair_s
    others_s = contexts / 4096 * COST.overhead_s + 33 * COST.sequence_s
    assert bound(turn(64, 32, "ls"), turn(10, 3)) == pytest.approx(1 / (tokens_s + attention_s + others_s))
    shared = bound(turn(64, 32, "ls"), turn(10, 3), prefix=("system", 64))
    own_contexts = contexts - 64 * 33
    assert shared == pytest.approx(
        1
        / (
            (11 + 31 + 2) * COST.token_s
            + contexts * COST.context_s
            + (contexts + sum(range(96, 107))) * COST.pair_s
            + own_contexts / 4096 * COST.overhead_s
            + 33 * COST.sequence_s
        )
    )
