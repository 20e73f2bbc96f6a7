"""Programs that come back after a pause, and those that never do."""

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

import pytest

from cluster.core.lifecycle.events import Ended, ReleaseReason
from cluster.core.program import USER_REPLY, Hints, ProgramIdentity
from cluster.durations.table import DurationTable
from replicas.forecasts import Features
from replicas.policy import Claimant, Hold, Release
from replicas.returns import MAX_ENDED, MAX_TOOLS, MEMORY, PAUSE_S, PRIOR, UPDATE_S, Returns
from replicas.virtual_engine import VirtualEngine
from tests.replica.policy_views import forecast, hold, load, pause
from tests.replica.policy_views import policy as policy_of
from tests.replica.test_timelines import Programs

NOTHING = DurationTable()
LONG_S = 1e9
TOOL = "bash"


def observed(*seconds: float) -> DurationTable:
    table = DurationTable()
    for one in seconds:
        table.observe(TOOL, one)
    return table


def paused(programs: int, tool: str = TOOL) -> Returns:
    """So many programs wait from 0 s on."""
    returns = Returns()
    for number in range(programs):
        returns.paused(f"p{number}", tool, 0.0)
    return returns


def share(returns: Returns, now_s: float, durations: DurationTable = NOTHING) -> float:
    return returns.share(TOOL, durations, now_s)


def about(value: float) -> Any:
    return pytest.approx(value, abs=2**-13)


def test_without_any_pause_every_program_comes_back() -> None:
    assert share(Returns(), 5.0) == 1.0


def test_a_silence_says_nothing_at_its_beginning_and_all_in_the_end() -> None:
    assert share(paused(90), 0.0) == 1.0
    assert share(paused(90), LONG_S) == about(PRIOR / (PRIOR + 90))


def test_the_most_likely_share_by_hand() -> None:
    """A half of the pauses is longer than PAUSE_S: e maximizes 90 log((1 + e) / 2) + 10 log(1 - e)."""
    assert share(paused(90), PAUSE_S) == about(0.2)


def test_observed_pauses_say_when_a_program_would_be_back() -> None:
    known = observed(30.0, 30.0, 30.0, 30.0, 60.0)
    assert share(paused(90), 20.0, known) == 1.0
    # 90 * 0.8 / (0.2 + 0.8 e) = 10 / (1 - e)
    assert share(paused(90), 45.0, known) == about(1 - 0.875)
    assert share(paused(90), LONG_S, known) == about(PRIOR / (PRIOR + 90))


def test_slow_tools_are_not_taken_for_ends() -> None:
    """Pauses of 10 s in the mean, of which one begins every 50 ms. All of them end."""
    chance, returns, table = random.Random(0), Returns(), DurationTable()
    back: list[tuple[float, float, str]] = []
    shares = []
    for number in range(4000):
        now_s = number / 20
        returns.paused(f"p{number}", TOOL, now_s)
        seconds = chance.expovariate(0.1)
        heappush(back, (now_s + seconds, seconds, f"p{number}"))
        while back and back[0][0] <= now_s:
            _, seconds, key = heappop(back)
            table.observe(TOOL, seconds)
            returns.returned(key)
        shares.append(share(returns, now_s, table))
    assert min(shares[1000:]) > 0.9
    assert statistics.fmean(shares[1000:]) > 0.95


def test_a_share_that_comes_back_is_found_among_slow_tools() -> None:
    """The same, but every second program never comes back."""
    chance, returns, table = (
        random.Random(0),
        Returns(),
        observed(*(random.Random(1).expovariate(0.1) for _ in range(50))),
    )
    back: list[tuple[float, str]] = []
    shares = []
    for number in range(4000):
        now_s = number / 20
        returns.paused(f"p{number}", TOOL, now_s)
        if number % 2:
            heappush(back, (now_s + chance.expovariate(0.1), f"p{number}"))
        while back and back[0][0] <= now_s:
            returns.returned(heappop(back)[1])
        shares.append(share(returns, now_s, table))
    assert min(shares[1000:]) > 0.4
    assert max(shares[1000:]) < 0.6


def test_those_that_come_back_count_even_late() -> None:
    returns = paused(90)
    for number in range(30):
        returns.returned(f"p{number}")
    assert share(returns, LONG_S) == about((PRIOR + 30) / (PRIOR + 90))
    for number in range(30, 60):  # they were given up
        returns.returned(f"p{number}")
    assert share(returns, LONG_S + 1) == about((PRIOR + 60) / (PRIOR + 90))
    returns.returned("unknown")
    assert share(returns, LONG_S + 2) == about((PRIOR + 60) / (PRIOR + 90))


def test_a_reported_end_says_nothing_and_an_unreported_one_is_an_end() -> None:
    returns = paused(20)
    for number in range(10):
        returns.ended(f"p{number}", reported=True)
    assert share(returns, 0.0) == 1.0
    for number in range(10, 20):
        returns.ended(f"p{number}", reported=False)
    assert share(returns, 1.0) == about(PRIOR / (PRIOR + 10))


def test_each_tool_has_its_own_share_and_classes_of_arguments_have_that_of_the_tool() -> None:
    returns = paused(90, tool="extract")
    returns.paused("q", "bash:grep", 0.0)
    assert returns.share("extract", NOTHING, LONG_S) < 0.2
    assert returns.share("bash:ls", NOTHING, LONG_S) > 0.9
    assert returns.share("never called", NOTHING, LONG_S) == 1.0


def test_the_estimate_is_made_at_most_twice_a_second() -> None:
    returns = paused(90)
    first = share(returns, PAUSE_S)
    for number in range(90):
        returns.returned(f"p{number}")
    assert share(returns, PAUSE_S + UPDATE_S / 2) == first
    assert share(returns, PAUSE_S + UPDATE_S) == 1.0


def test_earlier_programs_and_tools_are_forgotten_and_nothing_grows() -> None:
    returns = paused(3 * MAX_ENDED)
    assert share(returns, LONG_S) < 0.05
    known = returns._tools[TOOL]
    assert (len(known.given_up), len(known.silent)) == (MAX_ENDED, 0)
    for number in range(round(2 * MEMORY)):
        returns.paused(f"q{number}", TOOL, LONG_S)
        returns.returned(f"q{number}")
    assert share(returns, LONG_S + 1) > 0.5, "the clients of today decide"
    for number in range(2 * MAX_TOOLS):
        returns.paused("one", f"tool{number}", LONG_S)
    assert len(returns._tools) == MAX_TOOLS
    returns.returned("one")
    returns.ended("p0", reported=False)
    assert not [key for key in returns._waits_for if key.startswith("q")]


def test_the_tool_that_was_called_least_recently_is_forgotten() -> None:
    returns = Returns()
    for number in range(2 * MAX_TOOLS):
        returns.paused("one", TOOL, 0.0)
        returns.paused("two", f"tool{number}", 0.0)
    assert returns._tools.keys() == {TOOL, *(f"tool{number}" for number in range(MAX_TOOLS + 1, 2 * MAX_TOOLS))}


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


def chats_served(p: Programs, begun: int, steps: int) -> int:
    """64 clients send one chat after another for so many steps. Returns how many chats have begun, ``begun`` before."""
    for _ in range(steps):
        while p.scheduler.get_num_unfinished_requests() < 64:
            chat(p, begun)
            begun += 1
        p.clock.advance(0.004)
        p.step()
    return begun


def test_chats_that_never_come_back_leave_the_memory_to_those_that_wait(programs: Callable[..., Programs]) -> None:
    """The memory holds 4,095 of them."""
    p = programs("caesura", num_blocks=4096)
    before = chats_served(p, 0, 150)
    assert len(p.scheduler.holds) > 3900, "memory that nobody needs stays held"
    assert chats_served(p, before, 50) - before > 0.9 * 64 * 50, "all of them run together in each step"


def test_programs_that_end_as_announced_are_not_silent(programs: Callable[..., Programs]) -> None:
    p = programs("caesura")
    p.turn("a", new_tokens=20)
    p.turn("a", new_tokens=20, last=True)
    p.turn("b", new_tokens=20)
    returns = p.scheduler.programs.returns
    assert list(returns._waits_for) == ["default/b"]
    assert list(returns._tools["ls"].silent) == ["default/b"]
    p.scheduler.apply("default/b", Ended(p.clock.now_s(), ReleaseReason.ASKED))
    assert not returns._waits_for
    assert not returns._tools["ls"].silent


def test_chats_that_come_back_keep_their_holds(programs: Callable[..., Programs]) -> None:
    """The same, with users that reply after 50 ms."""
    p = programs("caesura")
    for number in range(40):
        p.engine.submit(f"c0-{number}", range(40 + number), 4, ProgramIdentity("c0"))
        p.engine.run()
        p.clock.advance(0.05)
    assert p.scheduler.programs.returns.share(USER_REPLY, p.scheduler.durations, p.clock.now_s()) > 0.9
    assert p.held() == {"c0"}


def test_silent_programs_teach_what_follows_a_turn(programs: Callable[..., Programs]) -> None:
    p = programs("caesura")
    for number in range(25):
        p.turn(f"a{number}", new_tokens=20)
        p.turn(f"a{number}", new_tokens=20, tool=USER_REPLY)
    table, forecaster, before = p.scheduler.programs, p.scheduler.forecaster, Features.of("", 0, 20)
    assert table.average_turns is None
    assert forecaster.of(before, Hints(), NOTHING, last=False).later_turns == 2.0
    p.clock.advance(600.0)
    p.turn("b", new_tokens=20, tool=USER_REPLY)
    p.turn("c", new_tokens=20)
    assert table.average_turns == 2.0
    assert forecaster.of(before, Hints(), NOTHING, last=False).later_turns == pytest.approx(1.0, abs=0.1)
    assert (table.concluded, len(table)) == (0, 27), "they may still come back"
    p.turn("a0", new_tokens=20)  # this one does, and b counts as ended meanwhile
    p.turn("a0", new_tokens=20, last=True)
    assert table.average_turns == pytest.approx((25 * 2 + 1 + 4) / 27)
