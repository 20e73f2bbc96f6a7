"""Trees of programs: what a replica knows of them, by numbers worked out by hand (see ``policy_views``), and on a
replica, as timelines: a parent's hold lasts as its children do, and the ranks of a tree follow its work.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.schema import SloConfig
from cluster.core.lifecycle.events import (
    CopyLost,
    Event,
    HoldEnded,
    LoadFailure,
    PauseReason,
    ReleaseReason,
    Swapped,
)
from cluster.core.lifecycle.machine import Phase
from cluster.core.program import Hints, ProgramIdentity
from cluster.durations.table import DurationTable
from replicas.policies import trees as tree_times
from replicas.policies.caesura import IN_TIME, LATE, CaesuraParameters
from replicas.policy import Claimant, Forecast, Hold, LoadView, Release, Swap, TreeView, Work
from replicas.program_table import SWEEP_PERIOD_S
from replicas.program_trees import LEAST_S, NOTHING_AHEAD, Ahead, ProgramTrees
from replicas.virtual_engine import VirtualEngine
from tests.replica.policy_views import COST, hold, load, observed, turn
from tests.replica.test_timelines import Programs

Replica = Callable[..., VirtualEngine]

FORECAST = Forecast(output_tokens=100.0, pause_s=2.0, returned_tokens=50.0, later_tokens=500.0, later_turns=3.0)
"""One turn of 100 tokens, and three later ones of 100 generated and 200 / 3 other tokens, each after 2 s."""
LAST = Forecast(50.0, 0.0, 0.0, 0.0, 0.0)
NOW_S = 100.0


def a_turn(tokens: int = 1000, forecast: Forecast = FORECAST, since_s: float = NOW_S) -> Ahead:
    return Ahead.of_turn(since_s, tokens, tokens, forecast)


def fan_out(width: int = 2) -> ProgramTrees:
    """A program `p` pauses, and ``width`` children begin."""
    trees = ProgramTrees()
    trees.turn_arrived("p", "p1", a_turn())
    trees.turn_ended("p", "p1")
    trees.paused("p", Ahead.of_pause(NOW_S, 1100, FORECAST))
    for number in range(width):
        trees.turn_arrived(f"c{number}", f"c{number}.1", a_turn(), parent="p")
    trees.check_integrity()
    return trees


def others(trees: ProgramTrees, key: str) -> Work:
    view = trees.view(key)
    assert view is not None
    return view.others


# --- what is ahead ----------------------------------------------------------------------------------------------------


def test_what_is_ahead_of_a_program_in_a_turn_and_in_a_pause() -> None:
    """A decode iteration takes 10 ms and a prompt token 0.1 ms."""
    at = load(now_s=NOW_S)
    in_turn = a_turn()
    assert in_turn.work == Work(1000 + 200, 100 + 300, 400 * 1300.0)
    assert in_turn.left_s(at) == pytest.approx(0.1 + 100 * 0.01)
    assert in_turn.after_s(at) == pytest.approx(3 * 2.0 + 0.02 + 3.0)
    assert in_turn.left_s(load(now_s=NOW_S + 0.6)) == pytest.approx(0.5)
    assert in_turn.left_s(load(now_s=NOW_S + 60)) == 0.0
    in_pause = Ahead.of_pause(NOW_S, 1100, FORECAST)
    assert in_pause.work == Work(200, 300, 300 * 1350.0)
    assert in_pause.left_s(load(now_s=NOW_S + 0.5)) == pytest.approx(1.5)
    assert in_pause.after_s(at) == pytest.approx(2 * 2.0 + 0.02 + 3.0), "the first of the three pauses has begun"
    assert NOTHING_AHEAD.work == Work()


# --- who belongs to a tree --------------------------------------------------------------------------------------------


def test_a_program_without_parent_and_children_is_alone() -> None:
    trees = ProgramTrees()
    trees.turn_arrived("a", "a1", a_turn())
    assert trees.view("a") is None and trees.children_s("a", load()) is None
    assert trees.view("unknown") is None and trees.children_s("unknown", load()) is None


def test_all_programs_of_a_tree_know_the_work_of_the_others() -> None:
    trees, child, parent = fan_out(2), a_turn().work, Ahead.of_pause(NOW_S, 1100, FORECAST).work
    assert others(trees, "c0").is_close(child + parent)
    assert others(trees, "p").is_close(child + child)
    trees.turn_arrived("g", "g1", a_turn(10, LAST))
    assert trees.view("g") is None
    trees.turn_ended("c0", "c0.1")
    trees.paused("c0", Ahead.of_pause(NOW_S, 1100, FORECAST))
    trees.turn_arrived("below", "below1", a_turn(10, LAST), parent="c0")
    assert others(trees, "c1").is_close(parent + parent + a_turn(10, LAST).work)
    trees.check_integrity()


def test_siblings_know_each_other_though_their_parent_is_on_another_replica() -> None:
    trees = ProgramTrees()
    for name in ("c0", "c1"):
        trees.turn_arrived(name, f"{name}.1", a_turn(), parent="elsewhere")
    assert others(trees, "c0").is_close(a_turn().work)
    for name in ("c0", "c1"):
        assert trees.forget(name, NOW_S) is None, "nothing is to be fetched for a parent that is not here"
    trees.check_integrity()
    assert not len(trees)


def test_a_program_that_begins_while_its_parent_has_a_turn_in_flight_is_no_child() -> None:
    """It is a side call or a fork: no pause waits for it."""
    trees = ProgramTrees()
    trees.turn_arrived("p", "p1", a_turn())
    trees.turn_arrived("title", "t1", a_turn(), parent="p")
    assert trees.view("title") is None and trees.view("p") is None


def test_the_parents_next_turn_waits_for_no_child_any_more() -> None:
    trees = fan_out(2)
    trees.turn_arrived("p", "p2", a_turn())
    assert all(trees.view(name) is None for name in ("p", "c0", "c1"))
    trees.check_integrity()


def test_no_program_is_below_itself_and_no_tree_is_deeper_than_the_bound() -> None:
    trees = ProgramTrees()
    trees.turn_arrived("a", "a1", a_turn(), parent="a")
    assert trees.view("a") is None
    for number in range(40):
        trees.turn_ended(f"d{number - 1}", "t")
        trees.turn_arrived(f"d{number}", "t", a_turn(), parent=f"d{number - 1}")
    trees.check_integrity()
    assert trees.view("d39") is not None
    # A parent that becomes the child of its own child, as clients may claim.
    trees.turn_arrived("x", "x1", a_turn(), parent="y")
    trees.turn_ended("x", "x1")
    trees.turn_arrived("y", "y1", a_turn(), parent="x")
    trees.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde"), st.integers(0, 7)), max_size=40))
def test_sums_and_links_hold_whatever_clients_claim(events: list[tuple[str, str, int]]) -> None:
    trees = ProgramTrees()
    for number, (key, parent, kind) in enumerate(events):
        match kind:
            case 0 | 1:
                trees.turn_arrived(key, f"{key}{number}", a_turn(), parent=parent if kind else None)
            case 2 | 3:
                trees.turn_ended(key, f"{key}{number - 1}")
                trees.paused(key, Ahead.of_pause(NOW_S, 500, FORECAST))
            case 4:
                trees.answered(key, NOW_S)
            case 5:
                trees.forget(key, NOW_S)
            case 6:
                trees.aborted(key, NOW_S)
            case 7:
                trees.turn_arrived(key, f"{key}{number}", a_turn(), parent, starts=False)
        trees.check_integrity()
    for key in "abcde":
        trees.forget(key, NOW_S)
    assert not len(trees)


# --- when children end ------------------------------------------------------------------------------------------------


def test_a_pause_lasts_as_long_as_the_longest_child() -> None:
    trees, at = fan_out(2), load(now_s=NOW_S)
    one_s = 1.1 + 9.02
    assert trees.children_s("p", at) == pytest.approx(one_s)
    trees.turn_arrived("c2", "c2.1", a_turn(2000), parent="p")
    assert trees.children_s("p", at) == pytest.approx(one_s + 0.1)
    assert trees.forget("c2", NOW_S) is None
    assert trees.children_s("p", at) == pytest.approx(one_s)
    later = load(now_s=NOW_S + 0.4)
    assert trees.children_s("p", later) == pytest.approx(one_s - 0.4)


def test_a_child_takes_as_long_as_its_own_children_and_what_follows() -> None:
    trees = fan_out(1)
    trees.turn_ended("c0", "c0.1")
    trees.paused("c0", Ahead.of_pause(NOW_S, 1100, FORECAST))
    trees.turn_arrived("below", "b1", a_turn(1000, LAST), parent="c0")
    assert trees.children_s("p", load(now_s=NOW_S)) == pytest.approx((0.1 + 0.5) + 7.02)


def test_after_the_last_child_the_pause_lasts_as_long_again_as_it_has_since() -> None:
    trees = fan_out(2)
    for name in ("c0", "c1"):
        assert trees.answered(name, NOW_S + 1) is None, "its turn is in flight"
        trees.turn_ended(name, f"{name}.1")
    assert trees.answered("c0", NOW_S + 1) is None
    assert trees.answered("c1", NOW_S + 3) == "p", "the parent's turn will come"
    assert trees.answered("c1", NOW_S + 3) is None
    assert trees.children_s("p", load(now_s=NOW_S + 3)) == LEAST_S
    assert trees.children_s("p", load(now_s=NOW_S + 3.5)) == pytest.approx(0.5)
    trees.turn_arrived("p", "p2", a_turn())
    assert trees.children_s("p", load(now_s=NOW_S + 4)) is None


# --- the policy -------------------------------------------------------------------------------------------------------

POLICY = CaesuraParameters().build()
LONG_TOOL = observed(*[300.0] * 10)


@pytest.mark.parametrize(("children_s", "kept"), [(0.5, True), (0.9, True), (1.1, False), (60.0, False)])
def test_a_hold_pays_if_the_children_end_before_the_break_even_time(children_s: float, kept: bool) -> None:
    """At full pressure it is the time to fill the memory again: 10,000 tokens at 0.1 ms are 1 s. The statistics of the
    tool, whose calls take minutes, say nothing.
    """
    at = load(waiting=10, free_tokens=0)
    view = hold(at, children_s=children_s, durations=DurationTable.of({"": LONG_TOOL}))
    decision = POLICY.pause.review(view)
    assert isinstance(decision, Hold) is kept and isinstance(decision, Hold | Release | Swap)
    assert POLICY.pause.yields(view, Claimant.WAITING) is not kept


def test_of_two_parents_the_one_whose_children_take_longer_is_evicted_first() -> None:
    soon, late = hold(children_s=0.2), hold(children_s=20.0)
    assert POLICY.pause.victim_key(late) < POLICY.pause.victim_key(soon)


def test_the_chance_that_children_take_longer_falls_by_their_expected_time() -> None:
    survival = tree_times.survival(2.0)
    assert survival(0.0) == 1.0 and survival(2.0) == pytest.approx(0.3679, abs=1e-4)


def in_time() -> LoadView:
    at = load()
    return replace(at, facts=replace(at.facts, slo=SloConfig(ttft_s=10.0)))


def key(view: object) -> tuple[float, ...]:
    return POLICY.order.key(view)  # type: ignore[arg-type]


def test_a_turn_of_a_tree_ranks_by_the_work_of_the_tree() -> None:
    alone = turn(in_time(), forecast=LAST)
    in_tree = replace(alone, tree=TreeView(Work(9000.0, 110.0, 0.0)))
    assert key(in_tree)[1] * 19 == pytest.approx(key(alone)[1] * 19 + 0.9 + 110 * 0.01 / 11)
    assert key(in_tree)[0] == key(alone)[0] and key(in_tree)[-1] == IN_TIME
    last_child = replace(alone, tree=TreeView(Work()))
    assert key(alone)[:2] == key(last_child)[:2], "a tree with nothing else ahead is as one program"
    assert key(last_child) < key(in_tree)


def test_of_one_tree_the_longest_way_comes_first() -> None:
    """Both have the same work, and one has pauses."""
    at = load()
    total = Work(5000.0, 500.0, 0.0)
    short, long = (
        replace(turn(at, forecast=forecast), tree=TreeView(total))
        for forecast in (Forecast(50.0, 0.0, 0.0, 100.0, 1.0), Forecast(50.0, 9.0, 0.0, 100.0, 1.0))
    )
    assert key(short)[1] == key(long)[1]
    assert key(long) < key(short)
    assert key(long)[2] == pytest.approx(key(short)[2] - 9.0)


def test_a_late_turn_of_a_tree_ranks_by_the_work_of_the_tree_too() -> None:
    view = replace(turn(in_time(), forecast=LAST), tree=TreeView(Work(1000.0, 0.0, 0.0)))
    too_late = replace(view, arrived_s=view.load.now_s - 60)
    assert key(too_late)[1] == pytest.approx(key(view)[1] * 19)
    assert key(too_late)[-1] == LATE and len(key(too_late)) == 4


# --- on a replica -----------------------------------------------------------------------------------------------------


class Trees(Programs):
    """Programs that name their parents."""

    def child(self, name: str, parent: str, tokens: int = 64, output: int = 4, *, last: bool = True) -> str:
        hints = Hints(expected_tool=None if last else "ls", expected_output_tokens=output)
        identity = ProgramIdentity(name, parent, last_turn=last, hints=hints)
        prompt = [2000 + ord(name[-1])] * tokens
        return self.engine.submit(name, prompt, output, identity).request_id

    def children_s(self, name: str) -> float | None:
        return self.scheduler.trees.children_s(f"default/{name}", self.scheduler.load_now())


@pytest.fixture
def site(replica: Replica) -> Trees:
    p = Trees(replica("caesura", num_blocks=200))
    p.scheduler.facts = replace(p.scheduler.facts, cost=COST, max_tokens=1000)
    return p


def test_a_parent_is_held_while_its_children_run_and_knows_when_they_end(site: Trees) -> None:
    site.turn("p", 320, tool="task")
    assert site.held() == {"p"} and site.children_s("p") is None
    site.child("c1", "p", output=100)
    site.child("c2", "p", output=4)
    before = site.children_s("p")
    assert before is not None
    site.engine.run()
    assert site.children_s("p") == LEAST_S
    site.clock.advance(0.25)
    assert site.children_s("p") == pytest.approx(0.25)
    site.arrive("p", 16)
    assert site.children_s("p") is None
    site.scheduler.check_integrity()


def test_a_child_that_calls_no_tool_has_answered_its_parent(site: Trees) -> None:
    """Clients rarely mark a last turn."""
    site.turn("p", 320, tool="task")
    site.child("c1", "p", last=False)
    site.engine.run()
    assert site.children_s("p") not in (None, LEAST_S), "it has called a tool"
    identity = ProgramIdentity("c2", "p")
    site.engine.submit("c2", [5] * 64, 4, identity)
    site.engine.submit("c1b", [6] * 64, 4, ProgramIdentity("c1", "p"))
    site.engine.run()
    assert site.children_s("p") == LEAST_S


def test_a_child_whose_client_is_gone_holds_nobody_up(site: Trees) -> None:
    site.turn("p", 320, tool="task")
    request_id = site.child("c1", "p", output=1000, last=False)
    site.step()
    site.scheduler.finish_requests(request_id, site.scheduler.requests[request_id].status.FINISHED_ABORTED)
    assert site.children_s("p") == LEAST_S


@pytest.mark.parametrize("last", [False, True])
def test_a_child_that_is_aborted_and_asked_again_is_a_child_still(
    site: Trees, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its abort is no answer: nothing is loaded for the parent, and the length of the parent's pause is not known."""
    fetched: list[str] = []
    site.turn("p", 320, tool="task")
    site.scheduler.apply("default/p", Swapped(0.0, PauseReason.DOES_NOT_PAY))
    monkeypatch.setattr(site.scheduler.swapping, "fetch", fetched.append)
    site.child("c1", "p", output=1000, last=last)
    site.step()
    site.scheduler.finish_requests("c1", site.scheduler.requests["c1"].status.FINISHED_ABORTED)
    assert (site.phase("p"), fetched, site.scheduler.programs["default/p"].observed) == (Phase.SWAPPED, [], False)
    site.clock.advance(1.0)
    identity = ProgramIdentity("c1", "p", hints=Hints(expected_output_tokens=400))
    site.engine.submit("c1 again", [5] * 64, 4, identity)
    left_s = site.children_s("p")
    assert left_s is not None and left_s > 2.0
    site.engine.run()
    assert (site.phase("p"), fetched) == (Phase.FETCHING, ["default/p"])
    site.scheduler.apply("default/p", CopyLost(0.0, LoadFailure.GONE))
    site.scheduler.check_integrity()


def test_a_child_that_is_asked_again_after_its_parent_went_on_is_none() -> None:
    trees = ProgramTrees()
    trees.turn_arrived("c", "c1", NOTHING_AHEAD, "p")
    trees.turn_ended("c", "c1")
    trees.aborted("c", 1.0)
    assert len(trees) == 1, "of the parent nothing is known here"
    trees.turn_arrived("c", "c2", NOTHING_AHEAD, "p", starts=False)
    assert trees.view("c") is not None
    trees.turn_ended("c", "c2")
    trees.aborted("c", 2.0)
    for name in ("p1", "p2"):
        trees.turn_arrived("p", name, NOTHING_AHEAD)
        trees.turn_ended("p", name)
    trees.turn_arrived("c", "c3", NOTHING_AHEAD, "p", starts=False)
    assert trees.view("c") is None
    trees.check_integrity()


def test_a_child_with_another_turn_in_flight_has_not_ended(site: Trees) -> None:
    site.turn("p", 320, tool="task")
    for name, output in (("c1", 1000), ("c1b", 500)):
        identity = ProgramIdentity("c1", "p", hints=Hints(expected_output_tokens=output))
        site.engine.submit(name, [5] * 64, output, identity)
    site.step()
    site.scheduler.finish_requests("c1b", site.scheduler.requests["c1b"].status.FINISHED_ABORTED)
    left_s = site.children_s("p")
    assert left_s is not None and left_s > 1.0
    site.engine.run()
    assert site.children_s("p") == LEAST_S


def test_the_last_child_lets_an_offloaded_parent_be_loaded(site: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    site.turn("p", 320, tool="task")
    site.child("c1", "p", output=2)
    site.child("c2", "p", output=20)
    site.scheduler.apply("default/p", Swapped(0.0, PauseReason.DOES_NOT_PAY))
    monkeypatch.setattr(site.scheduler.swapping, "fetch", fetched.append)
    while "c1" in site.scheduler.requests:
        site.step()
    assert not fetched
    while "c2" in site.scheduler.requests:
        site.step()
    assert fetched == ["default/p"] and site.phase("p") is Phase.FETCHING
    site.scheduler.apply("default/p", CopyLost(0.0, LoadFailure.GONE))


@pytest.mark.parametrize("first", ["p", "c"])
@pytest.mark.parametrize("why", ["idle", "table full"])
def test_a_sweep_ends_a_parent_and_its_child_in_either_order(site: Trees, first: str, why: str) -> None:
    """The program whose last event is older ends first. Nothing is loaded for a parent that ends, too."""
    site.turn("p", 320, tool="task")
    site.child("c", "p", last=False)
    site.engine.run()
    assert site.held() == {"p", "c"}
    events: dict[str, Event] = {"p": Swapped(0.0, PauseReason.DOES_NOT_PAY), "c": HoldEnded(0.0, ReleaseReason.ASKED)}
    for name in sorted(events, reverse=first == "p"):
        site.scheduler.apply(f"default/{name}", events[name])
    if why == "idle":
        site.clock.advance(site.scheduler.settings.limits.program_ttl_s)
    else:
        site.clock.advance(SWEEP_PERIOD_S)
        site.scheduler.programs._max_programs = 0
    site.step()
    assert (len(site.scheduler.programs), site.scheduler.programs.concluded, len(site.scheduler.trees)) == (0, 2, 0)
    assert not site.scheduler.counters["fetch_lost"]


def test_the_last_child_of_a_tree_comes_before_a_program_of_less_work_than_the_tree_had(replica: Replica) -> None:
    """A tree of three children ranks behind a program of the work of two. When two children have ended, it is first."""
    p = Trees(replica("caesura", num_blocks=400))
    p.scheduler.facts = replace(p.scheduler.facts, cost=COST, max_tokens=1000)
    hints = Hints(expected_tool="task", expected_later_turns=1, expected_later_tokens=20)
    p.engine.submit("p1", [9] * 160, 4, ProgramIdentity("p", hints=hints))
    p.engine.run()
    children = [p.child(f"c{number}", "p", 640) for number in range(3)]
    single = p.child("s", "nobody", 2800)
    rank = {name: p.scheduler._rank(p.scheduler.requests[name]) for name in (*children, single)}
    assert rank[single] < min(rank[name] for name in children)
    for name in children[:2]:
        p.scheduler.finish_requests(name, p.scheduler.requests[name].status.FINISHED_ABORTED)
    assert next(iter(p.step())) == children[2], "its rank follows at once"
    p.engine.run()
