"""Programs between their first turn and their verdict; the examples name what a door sees, in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.goodput import Outcome, ProgramRecord, Slo, TurnRecord, Verdict
from cluster.observing.slo_ledger import Ended, Served, SloLedger, lone

SERVED = Served("m", "t")
SLO = Slo(ttft_s=1.0, normalized_latency_s=0.5)
IDLE_S = 100.0


def turn(start: float, ttft: float = 0.5, outcome: Outcome = Outcome.OK, tokens: int = 11) -> TurnRecord:
    return TurnRecord("", 0, start, outcome, start + ttft, start + ttft + 1.0, output_tokens=tokens)


class Door:
    """A ledger, and what it had judged."""

    def __init__(self, max_programs: int = 100) -> None:
        self.ledger = SloLedger(IDLE_S, max_programs)
        self.judged: list[Ended] = []
        self.firsts = 0

    def one(self, key: str, record: TurnRecord, *, last: bool = False) -> None:
        self.ledger.began(SERVED, SLO, key, record.intended_start_s, record.intended_start_s)
        self.over(key, record, last=last)

    def over(self, key: str, record: TurnRecord, *, last: bool = False) -> None:
        assert record.last_token_s is not None
        over = self.ledger.over(key, record, record.last_token_s, last=last)
        assert over is not None
        self.firsts += over.first
        self.judged += filter(None, [over.ended])

    def sweep(self, now_s: float) -> None:
        self.judged += self.ledger.sweep(now_s)

    @property
    def verdicts(self) -> list[tuple[str | None, Verdict]]:
        return [(ended.key, ended.verdict) for ended in self.judged]


@pytest.fixture
def door() -> Door:
    return Door()


def test_a_program_is_judged_when_its_last_turn_is_over(door: Door) -> None:
    door.one("p", turn(10))
    assert door.verdicts == []
    door.one("p", turn(20), last=True)
    assert door.verdicts == [("p", Verdict.GOOD)]
    assert door.firsts == 1
    assert door.judged[0].wall_s == pytest.approx(11.5)
    assert len(door.ledger) == 0


def test_one_late_turn_makes_the_program_late(door: Door) -> None:
    door.one("p", turn(0, ttft=1.5))
    door.one("p", turn(20), last=True)
    assert door.verdicts == [("p", Verdict.LATE)]


def test_a_program_is_late_by_all_its_tokens_together(door: Door) -> None:
    door.one("p", turn(0, tokens=2))  # 1.5 s for 2 tokens alone would be late
    door.one("p", turn(20, tokens=50), last=True)
    door.one("q", turn(0, tokens=2), last=True)
    assert door.verdicts == [("p", Verdict.GOOD), ("q", Verdict.LATE)]


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REJECTED, Outcome.TIMED_OUT])
def test_a_failed_turn_decides_at_once_and_for_good(door: Door, outcome: Outcome) -> None:
    door.one("p", turn(0, outcome=outcome))
    assert door.verdicts == [("p", Verdict.FAILED)]
    door.one("p", turn(10))
    door.one("p", turn(20), last=True)
    door.sweep(1000)
    assert door.verdicts == [("p", Verdict.FAILED)]
    assert door.firsts == 1


def test_a_client_that_went_away_and_came_back_is_judged_at_the_end(door: Door) -> None:
    door.one("p", turn(0, outcome=Outcome.UNFINISHED))
    assert door.verdicts == []
    door.one("p", turn(10), last=True)
    assert door.verdicts == [("p", Verdict.ABANDONED)]


def test_an_idle_program_is_judged_by_the_turns_that_it_had(door: Door) -> None:
    door.one("good", turn(0))
    door.one("late", turn(1, ttft=3))
    door.sweep(IDLE_S)
    assert door.verdicts == []
    door.sweep(IDLE_S + 60)
    assert door.verdicts == [("good", Verdict.GOOD), ("late", Verdict.LATE)]
    assert all(ended.silent for ended in door.judged)


def test_a_program_with_a_turn_under_way_is_not_idle(door: Door) -> None:
    door.ledger.began(SERVED, SLO, "slow", 0.0, 0.0)
    door.one("other", turn(0))
    door.sweep(5 * IDLE_S)
    assert door.verdicts == [("other", Verdict.GOOD)]
    door.over("slow", turn(0), last=True)
    assert door.verdicts[1:] == [("slow", Verdict.GOOD)]


def test_a_last_turn_waits_for_those_beside_it(door: Door) -> None:
    door.ledger.began(SERVED, SLO, "p", 0.0, 0.0)
    door.one("p", turn(0), last=True)
    assert door.verdicts == []
    door.over("p", turn(0, ttft=9))
    assert door.verdicts == [("p", Verdict.LATE)]


def test_what_was_no_turn_leaves_nothing(door: Door) -> None:
    door.ledger.began(SERVED, SLO, "p", 0.0, 0.0)
    assert door.ledger.taken_back("p", 1.0) is None
    door.sweep(1000)
    assert door.judged == []
    assert len(door.ledger) == 0


def test_a_program_that_fails_outside_of_its_turns(door: Door) -> None:
    for key in ("fine", "failed", "cancelled"):
        door.one(key, turn(0))
    for key, outcome in (("fine", Outcome.OK), ("failed", Outcome.FAILED), ("cancelled", Outcome.UNFINISHED)):
        door.judged += filter(None, [door.ledger.ended(key, outcome)])
    assert [verdict for _, verdict in door.verdicts] == [Verdict.GOOD, Verdict.FAILED, Verdict.ABANDONED]
    assert door.ledger.ended("never seen") is None


def test_memory_is_bounded_and_what_is_forgotten_is_judged() -> None:
    door = Door(max_programs=2)
    for number in range(5):
        door.one(f"p{number}", turn(number))
    assert len(door.ledger) == 2
    door.sweep(10)
    assert [key for key, _ in door.verdicts] == ["p0", "p1", "p2"]


def test_a_lone_turn_is_a_program_of_one() -> None:
    assert lone(SERVED, SLO, turn(0)).verdict is Verdict.GOOD
    assert lone(SERVED, SLO, turn(0, ttft=2)).verdict is Verdict.LATE


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
def test_the_door_judges_as_the_bench_does(turns: list[tuple[Outcome, float, int]]) -> None:
    """A program that ends with its first turn that is not OK, as the bench client's do."""
    door, records = Door(), []
    for number, (outcome, ttft, tokens) in enumerate(turns):
        records.append(turn(10.0 * number, ttft, outcome, tokens))
        door.one("p", records[-1], last=number == len(turns) - 1)
        if outcome is not Outcome.OK:
            break
    door.sweep(10_000)
    program = ProgramRecord("p", 0.0, records[-1].outcome, tuple(records), len(turns))
    assert [verdict is Verdict.GOOD for _, verdict in door.verdicts] == [SLO.program_is_good(program)]
