"""Programs between their first turn and their verdict; the examples name what an ingress sees, in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.slo import Outcome, ProgramRecord, Slo, TurnRecord, Verdict
from cluster.observing.program_tracker import EndedProgram, ProgramTracker, Served, single_turn_program

SERVED = Served("m", "t")
SLO = Slo(ttft_s=1.0, normalized_latency_s=0.5)
IDLE_S = 100.0


def turn(start: float, ttft: float = 0.5, outcome: Outcome = Outcome.OK, tokens: int = 11) -> TurnRecord:
    return TurnRecord("", 0, start, outcome, start + ttft, start + ttft + 1.0, output_tokens=tokens)


class Ingress:
    """A tracker, and the programs that it gave for their verdict."""

    def __init__(self, max_programs: int = 100) -> None:
        self.tracker = ProgramTracker(IDLE_S, max_programs)
        self.judged: list[EndedProgram] = []
        self.firsts = 0

    def one(self, key: str, record: TurnRecord, *, last: bool = False) -> None:
        self.tracker.turn_began(SERVED, SLO, key, record.intended_start_s, record.intended_start_s)
        self.over(key, record, last=last)

    def over(self, key: str, record: TurnRecord, *, last: bool = False) -> None:
        assert record.last_token_s is not None
        end = self.tracker.turn_ended(key, record, record.last_token_s, last=last)
        assert end is not None
        self.firsts += end.first
        self.judged += filter(None, [end.ended])

    def sweep(self, now_s: float) -> None:
        self.judged += self.tracker.sweep(now_s)

    @property
    def verdicts(self) -> list[tuple[str | None, Verdict]]:
        return [(ended.key, ended.verdict) for ended in self.judged]


@pytest.fixture
def ingress() -> Ingress:
    return Ingress()


def test_a_program_is_judged_when_its_last_turn_is_over(ingress: Ingress) -> None:
    ingress.one("p", turn(10))
    assert ingress.verdicts == []
    ingress.one("p", turn(20), last=True)
    assert ingress.verdicts == [("p", Verdict.GOOD)]
    assert ingress.firsts == 1
    assert ingress.judged[0].wall_s == pytest.approx(11.5)
    assert len(ingress.tracker) == 0


def test_one_late_turn_makes_the_program_late(ingress: Ingress) -> None:
    ingress.one("p", turn(0, ttft=1.5))
    ingress.one("p", turn(20), last=True)
    assert ingress.verdicts == [("p", Verdict.LATE)]


def test_a_program_is_late_by_all_its_tokens_together(ingress: Ingress) -> None:
    ingress.one("p", turn(0, tokens=2))  # 1.5 s for 2 tokens alone would be late
    ingress.one("p", turn(20, tokens=50), last=True)
    ingress.one("q", turn(0, tokens=2), last=True)
    assert ingress.verdicts == [("p", Verdict.GOOD), ("q", Verdict.LATE)]


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REJECTED, Outcome.TIMED_OUT])
def test_a_failed_turn_decides_at_once_and_for_good(ingress: Ingress, outcome: Outcome) -> None:
    ingress.one("p", turn(0, outcome=outcome))
    assert ingress.verdicts == [("p", Verdict.FAILED)]
    ingress.one("p", turn(10))
    ingress.one("p", turn(20), last=True)
    ingress.sweep(1000)
    assert ingress.verdicts == [("p", Verdict.FAILED)]
    assert ingress.firsts == 1


def test_a_client_that_went_away_and_came_back_is_judged_at_the_end(ingress: Ingress) -> None:
    ingress.one("p", turn(0, outcome=Outcome.UNFINISHED))
    assert ingress.verdicts == []
    ingress.one("p", turn(10), last=True)
    assert ingress.verdicts == [("p", Verdict.ABANDONED)]


def test_an_idle_program_is_judged_by_the_turns_that_it_had(ingress: Ingress) -> None:
    ingress.one("good", turn(0))
    ingress.one("late", turn(1, ttft=3))
    ingress.sweep(IDLE_S)
    assert ingress.verdicts == []
    ingress.sweep(IDLE_S + 60)
    assert ingress.verdicts == [("good", Verdict.GOOD), ("late", Verdict.LATE)]
    assert all(ended.idle for ended in ingress.judged)


def test_a_program_with_a_turn_in_flight_is_not_idle(ingress: Ingress) -> None:
    ingress.tracker.turn_began(SERVED, SLO, "slow", 0.0, 0.0)
    ingress.one("other", turn(0))
    ingress.sweep(5 * IDLE_S)
    assert ingress.verdicts == [("other", Verdict.GOOD)]
    ingress.over("slow", turn(0), last=True)
    assert ingress.verdicts[1:] == [("slow", Verdict.GOOD)]


def test_a_last_turn_waits_for_those_beside_it(ingress: Ingress) -> None:
    ingress.tracker.turn_began(SERVED, SLO, "p", 0.0, 0.0)
    ingress.one("p", turn(0), last=True)
    assert ingress.verdicts == []
    ingress.over("p", turn(0, ttft=9))
    assert ingress.verdicts == [("p", Verdict.LATE)]


def test_a_withdrawn_turn_leaves_nothing(ingress: Ingress) -> None:
    ingress.tracker.turn_began(SERVED, SLO, "p", 0.0, 0.0)
    assert ingress.tracker.turn_withdrawn("p", 1.0) is None
    ingress.sweep(1000)
    assert ingress.judged == []
    assert len(ingress.tracker) == 0


def test_a_program_that_fails_outside_of_its_turns(ingress: Ingress) -> None:
    for key in ("fine", "failed", "cancelled"):
        ingress.one(key, turn(0))
    for key, outcome in (("fine", Outcome.OK), ("failed", Outcome.FAILED), ("cancelled", Outcome.UNFINISHED)):
        ingress.judged += filter(None, [ingress.tracker.program_ended(key, outcome)])
    assert [verdict for _, verdict in ingress.verdicts] == [Verdict.GOOD, Verdict.FAILED, Verdict.ABANDONED]
    assert ingress.tracker.program_ended("never seen") is None


def test_memory_is_bounded_and_what_is_evicted_is_judged() -> None:
    ingress = Ingress(max_programs=2)
    for number in range(5):
        ingress.one(f"p{number}", turn(number))
    assert len(ingress.tracker) == 2
    ingress.sweep(10)
    assert [key for key, _ in ingress.verdicts] == ["p0", "p1", "p2"]


def test_a_turn_without_a_program_is_a_program_of_one() -> None:
    assert single_turn_program(SERVED, SLO, turn(0)).verdict is Verdict.GOOD
    assert single_turn_program(SERVED, SLO, turn(0, ttft=2)).verdict is Verdict.LATE


TURNS = st.lists(
    st.tuples(
        st.sampled_from(list(Outcome)),
        st.floats(0, 3),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=6,
)


@given(TURNS)
def test_the_verdict_is_the_benchmark_client_s(turns: list[tuple[Outcome, float, int]]) -> None:
    """A program that ends with its first turn that is not OK, as the bench client's do."""
    ingress, records = Ingress(), []
    for number, (outcome, ttft, tokens) in enumerate(turns):
        records.append(turn(10.0 * number, ttft, outcome, tokens))
        ingress.one("p", records[-1], last=number == len(turns) - 1)
        if outcome is not Outcome.OK:
            break
    ingress.sweep(10_000)
    program = ProgramRecord("p", 0.0, records[-1].outcome, tuple(records), len(turns))
    assert [verdict is Verdict.GOOD for _, verdict in ingress.verdicts] == [SLO.program_is_good(program)]
