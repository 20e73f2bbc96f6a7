"""Programs that come back after an answer to their user, and those that never do."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.core.program import USER_REPLY, ProgramIdentity
from cluster.durations.table import DurationTable
from replicas.policy import Claimant, Hold, Release
from replicas.user_returns import MAX_ENDED, MEMORY, PRIOR, REPLY_S, UPDATE_S, UserReturns
from replicas.virtual_engine import VirtualEngine
from tests.replica.policy_views import forecast, hold, load, pause
from tests.replica.policy_views import policy as policy_of
from tests.replica.test_timelines import Programs

NOTHING = DurationTable()
LONG_S = 1e6


def replies(*seconds: float) -> DurationTable:
    table = DurationTable()
    for one in seconds:
        table.observe(USER_REPLY, one)
    return table


def answered(programs: int, at_s: float = 0.0) -> UserReturns:
    returns = UserReturns()
    for number in range(programs):
        returns.answered(f"p{number}", at_s)
    return returns


def test_without_any_answer_every_program_comes_back() -> None:
    assert UserReturns().share(NOTHING, 5.0) == 1.0


def test_silent_programs_count_as_far_as_they_would_be_back() -> None:
    """Without observed replies, a half would be back after REPLY_S."""
    assert answered(90).share(NOTHING, 0.0) == 1.0
    assert answered(90).share(NOTHING, REPLY_S) == pytest.approx(PRIOR / (PRIOR + 45))
    assert answered(90).share(NOTHING, LONG_S) == pytest.approx(PRIOR / (PRIOR + 90))


def test_observed_replies_say_when_a_program_would_be_back() -> None:
    known = replies(30.0, 30.0, 30.0, 30.0, 60.0)
    assert answered(90).share(known, 20.0) == 1.0
    assert answered(90).share(known, 45.0) == pytest.approx(PRIOR / (PRIOR + 0.8 * 90))
    assert answered(90).share(known, 61.0) == pytest.approx(PRIOR / (PRIOR + 90))


def test_those_that_come_back_count_for_the_share_even_late() -> None:
    returns = answered(90)
    for number in range(30):
        returns.returned(f"p{number}")
    assert returns.share(NOTHING, LONG_S) == pytest.approx((PRIOR + 30) / (PRIOR + 90))
    for number in range(30, 60):  # they were given up
        returns.returned(f"p{number}")
    assert returns.share(NOTHING, LONG_S + UPDATE_S) == pytest.approx((PRIOR + 60) / (PRIOR + 90))
    returns.returned("unknown")
    assert returns.share(NOTHING, LONG_S + 2 * UPDATE_S) == pytest.approx((PRIOR + 60) / (PRIOR + 90))


def test_a_reported_end_says_nothing_and_an_unreported_one_is_an_end() -> None:
    returns = answered(20)
    for number in range(10):
        returns.ended(f"p{number}", reported=True)
    assert returns.share(NOTHING, 0.0) == 1.0
    for number in range(10, 20):
        returns.ended(f"p{number}", reported=False)
    assert returns.share(NOTHING, UPDATE_S) == pytest.approx(PRIOR / (PRIOR + 10))


def test_the_estimate_is_made_at_most_twice_a_second() -> None:
    returns = answered(90)
    first = returns.share(NOTHING, REPLY_S)
    for number in range(90):
        returns.returned(f"p{number}")
    assert returns.share(NOTHING, REPLY_S + UPDATE_S / 2) == first
    assert returns.share(NOTHING, REPLY_S + UPDATE_S) == 1.0


def test_earlier_programs_are_forgotten_and_nothing_grows() -> None:
    returns = answered(3 * MAX_ENDED)
    low = returns.share(NOTHING, LONG_S)
    assert low < 0.05
    assert len(returns._given_up) == MAX_ENDED
    assert not returns._silent
    for number in range(round(2 * MEMORY)):
        returns.answered(f"q{number}", LONG_S)
        returns.returned(f"q{number}")
    assert returns.share(NOTHING, 2 * LONG_S) > 0.5, "the clients of today decide"


# --- decisions --------------------------------------------------------------------------------------------------------


def test_a_hold_of_a_program_that_hardly_comes_back_yields_to_waiting_turns() -> None:
    """A pause of 10 ms pays, if it is one."""
    stopping, scarce = policy_of("caesura").pause, load(free_tokens=0)
    short = hold(scarce, since_s=scarce.now_s, forecast=forecast(pause_s=0.01))
    assert not stopping.yields(short, Claimant.WAITING)
    assert stopping.yields(replace(short, returns=0.01), Claimant.WAITING)
    assert stopping.victim_key(replace(short, returns=0.01)) < stopping.victim_key(short)
    assert isinstance(stopping.decide(pause(scarce, pause_s=0.01)), Hold)
    assert isinstance(stopping.decide(replace(pause(scarce, pause_s=0.01), returns=0.01)), Release)


def test_the_longer_a_program_is_silent_the_less_it_is_expected_back() -> None:
    """Bayes: of 0.5 that come back, those that would be back by now do not count."""
    stopping, full = policy_of("caesura").pause, load(free_tokens=0)
    values = [
        stopping.victim_key(hold(full, since_s=full.now_s - elapsed_s, forecast=forecast(pause_s=0.01), returns=0.5))
        for elapsed_s in (0.0, 0.01, 0.1, 1.0)
    ]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


def test_a_client_that_tells_the_length_of_the_pause_is_believed() -> None:
    stopping, full = policy_of("caesura").pause, load(free_tokens=0)
    hinted = replace(forecast(pause_s=0.01), pause_hinted=True)
    told = hold(full, since_s=full.now_s, forecast=hinted)
    assert stopping.victim_key(replace(told, returns=0.01)) == stopping.victim_key(told)


@pytest.fixture
def programs(replica: Callable[..., VirtualEngine]) -> Callable[..., Programs]:
    return lambda *args, **kwargs: Programs(replica(*args, **kwargs))


def chat(p: Programs, number: int) -> None:
    """A program of one turn, whose client does not say that it ends. It needs one block."""
    p.engine.submit(f"c{number}", [number % 1000, number // 1000, *range(3)], 1, ProgramIdentity(f"c{number}"))


def test_chats_that_never_come_back_leave_the_memory_to_those_that_wait(programs: Callable[..., Programs]) -> None:
    """64 clients send one chat after another. The memory holds 4,095 of them."""
    p, begun = programs("caesura", num_blocks=4096), 0
    for _ in range(150):
        while p.scheduler.get_num_unfinished_requests() < 64:
            chat(p, begun)
            begun += 1
        p.clock.advance(0.004)
        p.step()
    assert len(p.scheduler.holds) > 3900, "memory that nobody needs stays held"
    before = begun
    for _ in range(50):
        while p.scheduler.get_num_unfinished_requests() < 64:
            chat(p, begun)
            begun += 1
        p.clock.advance(0.004)
        p.step()
    assert begun - before > 0.9 * 64 * 50, "all of them run together in each step"


def test_chats_that_come_back_keep_their_holds(programs: Callable[..., Programs]) -> None:
    """The same, with users that reply after 50 ms."""
    p = programs("caesura")
    for number in range(40):
        p.engine.submit(f"c0-{number}", range(40 + number), 4, ProgramIdentity("c0"))
        p.engine.run()
        p.clock.advance(0.05)
    assert p.scheduler.programs.user_returns.share(p.scheduler.durations, p.clock.now_s()) > 0.9
    assert p.held() == {"c0"}
