"""Jain's index of the programs' slowdowns, on examples computed by hand."""

import pytest

from cluster.core.slo import Outcome, ProgramRecord, TurnRecord
from cluster.offline.simulator.fairness import alone_s, jain, slowdown
from tests.simulator.simulated import COST


def record(*turns: TurnRecord, outcome: Outcome = Outcome.OK, until_s: float | None = None) -> ProgramRecord:
    return ProgramRecord("p", 0.0, outcome, turns, len(turns), until_s=until_s)


FIRST = TurnRecord("p", 0, 0.0, Outcome.OK, 1.0, 3.0, prompt_tokens=100, output_tokens=3)
# 90 of its 110 tokens are known.
NEXT = TurnRecord("p", 1, 5.0, Outcome.OK, 6.0, 7.0, prompt_tokens=110, output_tokens=1, previous_context_tokens=90)


def test_alone_a_program_computes_only_what_is_new_to_it() -> None:
    decodes = COST.decode_step_s(1, 101) + COST.decode_step_s(1, 102)
    first = COST.prefill_s(100) + decodes
    assert alone_s(record(FIRST), COST, 2048) == pytest.approx(first, rel=1e-3)
    assert alone_s(record(FIRST, NEXT), COST, 2048) == pytest.approx(first + COST.prefill_s(20, 90), rel=1e-3)
    # In smaller steps the prompt takes longer.
    assert alone_s(record(FIRST), COST, 10) > 1.5 * first


def test_what_has_not_ended_counts_with_its_time_so_far() -> None:
    alone = alone_s(record(FIRST), COST, 2048)
    assert slowdown(record(FIRST), COST, 2048) == pytest.approx(3.0 / alone)
    waits = TurnRecord("p", 0, 2.0, Outcome.UNFINISHED, prompt_tokens=100)
    cut = record(waits, outcome=Outcome.UNFINISHED, until_s=10.0)
    assert slowdown(cut, COST, 2048) == pytest.approx(8.0 / COST.prefill_s(100))
    assert slowdown(record(outcome=Outcome.UNFINISHED, until_s=10.0), COST, 2048) is None


def test_jain_is_one_if_all_are_equal_and_a_share_if_one_has_everything() -> None:
    assert jain([2.0, 2.0, 2.0, None]) == pytest.approx(1.0)
    assert jain([4.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([1.0, 2.0, 3.0]) == pytest.approx(36 / (3 * 14))
    assert jain([]) is jain([None]) is None
