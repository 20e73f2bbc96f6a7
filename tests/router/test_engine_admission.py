"""Who waits at the engine, for how long, and who goes first."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.schema import SloConfig
from router.admission_queue import LOOKAHEAD
from router.decisions import Go, Home, Placed, Refuse, Refused, Wait
from router.placement_engine import CHILD_TRIES, PlacementEngine
from router.placement_policy import PlacementPolicy
from router.settings import EngineSettings
from tests.router.router_views import request, snapshot

PLAIN = {"expected_later_turns": 0, "expected_later_tokens": 0, "expected_output_tokens": 0}
"""A program of one turn that needs its prompt and no more."""
HALF = 50_000


class Site:
    """A replica that takes two programs of HALF, and a engine; programs end when told to."""

    def __init__(
        self,
        slo: SloConfig | None = None,
        replicas: int = 1,
        *,
        guards_memory: bool = False,
        tenant_slos: dict[str, SloConfig] | None = None,
        **settings: Any,
    ) -> None:
        self.engine = PlacementEngine(EngineSettings(working_set=1.0, **settings), slo, tenant_slos=tenant_slos)
        self.guards_memory = guards_memory
        self.replicas, self.number, self.now_s = replicas, 0, 0.0
        self.living: dict[str, str] = {}
        self.refused: dict[str, Refuse] = {}
        self.order: list[str] = []
        self.look()

    def look(self) -> None:
        """A snapshot that knows no program but by the engine's own counting."""
        self.number += 1
        shown = {
            f"r{i}": snapshot(f"r{i}", self.number, guards_memory=self.guards_memory) for i in range(self.replicas)
        }
        if self.number == 1:
            self.engine.observe(shown, self.now_s)

    def come(self, key: str, tokens: int = HALF, tenant: str = "a", **fields: Any) -> Go | Wait | Refuse:
        turn = request(key, tokens, tenant, **{**PLAIN, **fields})
        decision = self.engine.turn(f"turn of {key}", turn, self.now_s)
        if isinstance(decision, Go):
            self.living[key] = decision.home.replica
        return decision

    def end(self, key: str) -> None:
        self.engine.ended(f"turn of {key}", self.now_s, context_tokens=0)
        self.engine.forget(key, self.now_s)
        del self.living[key]

    def admit(self) -> list[str]:
        """Who goes now."""
        went = []
        for turn_id, decision in self.engine.admitted(self.now_s):
            key = turn_id.removeprefix("turn of ")
            if isinstance(decision, Go):
                went.append(key)
                self.living[key] = decision.home.replica
            else:
                self.refused[key] = decision
        self.order += went
        self.engine.check_integrity()
        return went

    def serve_all(self, step_s: float = 1.0) -> list[str]:
        """End the programs one by one until nobody waits; the order of admission."""
        while self.engine.waiting and self.living:
            self.now_s += step_s
            self.end(next(iter(self.living)))
            self.admit()
        return self.order


def test_a_replica_that_guards_its_memory_takes_more() -> None:
    site = Site(guards_memory=True, guarded_working_set=2.0)
    assert all(isinstance(site.come(key), Go) for key in "abcd")
    assert isinstance(site.come("e"), Wait)


def test_the_least_work_goes_first_among_those_of_a_tenant() -> None:
    site = Site(aged_share=1e-9, stale_s=1e6)
    site.come("x"), site.come("y")
    assert [site.come(f"p{n}", n) for n in (40_000, 30_000, 45_000)] == [Wait()] * 3
    site.end("x")
    assert site.admit() == ["p30000"]
    site.end("y")
    assert site.admit() == ["p40000"]


def test_whoever_waits_longest_goes_too_however_many_small_ones_come() -> None:
    site = Site(aged_share=0.25, stale_s=1e6)
    site.come("x"), site.come("y")
    site.come("large", HALF)
    for number in range(40):
        site.come(f"small{number}", 26_000)
    for _ in range(12):
        site.now_s += 1.0
        site.end(next(iter(site.living)))
        site.admit()
    assert "large" in site.order[:6]


def test_one_larger_than_any_replica_is_admitted_to_an_empty_one_and_blocks_the_others_meanwhile_on_one_only() -> None:
    site = Site(aged_share=0.5, stale_s=1e6, replicas=2)
    for key in ("v", "w", "x", "y"):
        site.come(key)
    assert site.come("huge", 150_000) == Wait()
    for number in range(30):
        site.come(f"p{number}", HALF)
    order = site.serve_all()
    assert "huge" in order[:8]
    assert sorted(order) == sorted(["huge", *(f"p{n}" for n in range(30))])


def test_on_an_empty_replica_one_larger_than_it_goes_at_once() -> None:
    assert isinstance(Site().come("huge", 10**7), Go)


def test_tenants_take_turns_by_weight_whoever_came_first() -> None:
    site = Site(tenant_weights={"b": 3.0}, stale_s=1e6, aged_share=0.125)
    site.come("x"), site.come("y")
    for number in range(40):
        site.come(f"a{number}", tenant="a")
    for number in range(40):
        site.come(f"b{number}", tenant="b")
    first = Counter(key[0] for key in site.serve_all()[:40])
    assert 8 <= first["a"] <= 12 and 28 <= first["b"] <= 32


def test_a_tenant_that_comes_later_does_not_have_to_wait_for_anothers_whole_queue_nor_gets_everything() -> None:
    site = Site(stale_s=1e6)
    site.come("x"), site.come("y")
    for number in range(60):
        site.come(f"a{number}", tenant="a")
    for _ in range(30):
        site.now_s += 1.0
        site.end(next(iter(site.living)))
        site.admit()
    for number in range(10):
        site.come(f"b{number}", tenant="b")
    order = site.serve_all()[30:]
    assert Counter(key[0] for key in order[:10]) == {"a": 5, "b": 5}


def test_those_that_can_still_be_in_time_go_before_those_that_cannot() -> None:
    site = Site(SloConfig(ttft_s=3.0), stale_s=1e6, aged_share=1e-9)
    site.come("x"), site.come("y")
    site.come("late", 40_000)
    site.now_s = 10.0
    site.come("timely", HALF)
    site.end("x")
    assert site.admit() == ["timely"]


def test_the_bounds_of_a_tenant_and_the_deadline_of_a_request_count() -> None:
    for late, timely in (
        ({"tenant": "quick"}, {}),
        ({"deadline_s": 10.5}, {"deadline_s": 50.0}),
    ):
        slos = {"quick": SloConfig(ttft_s=3.0)}
        site = Site(SloConfig(ttft_s=60.0), tenant_slos=slos, stale_s=1e6, aged_share=1e-9)
        site.come("x"), site.come("y")
        site.come("late", 30_000, **late)
        site.now_s = 10.0
        site.come("timely", HALF, **({"tenant": "quick"} | timely if "tenant" in late else timely))
        site.end("x")
        assert site.admit() == ["timely"]


def test_a_bound_that_grows_with_the_prompt_counts() -> None:
    """Without it both are late from the start, and the least work goes first."""
    for slowdown, first in ((None, "small"), (3.0, "timely")):
        site = Site(SloConfig(ttft_s=0.1, slowdown=slowdown), stale_s=1e6, aged_share=1e-9)
        site.come("x"), site.come("y")
        site.come("small", 30_000)
        site.now_s = 50.0
        site.come("timely", HALF)
        site.end("x")
        assert site.admit() == [first]


def test_the_lowest_priority_of_a_tenant_goes_first() -> None:
    site = Site(stale_s=1e6, aged_share=1e-9)
    site.come("x"), site.come("y")
    for key, tokens, priority in (("plain", 30_000, 0), ("urgent", HALF, -3), ("batch", 26_000, 2)):
        assert site.come(key, tokens, priority=priority) == Wait()
    assert site.serve_all() == ["urgent", "plain", "batch"]


@pytest.mark.parametrize("tenant", ["a", "idle"])
def test_batch_work_comes_after_the_programs_of_all_tenants_the_oldest_included(tenant: str) -> None:
    site = Site(stale_s=1e6, aged_share=1.0)
    site.come("x"), site.come("y")
    for number in range(4):
        site.come(f"batch{number}", tenant=tenant, priority=1)
    for number in range(6):
        site.come(f"agent{number}")
    assert [key[:5] for key in site.serve_all()] == ["agent"] * 6 + ["batch"] * 4


@pytest.mark.parametrize("tenant", ["a", "another"])
def test_batch_work_for_which_a_replica_is_kept_keeps_it_from_no_agent(tenant: str) -> None:
    site = Site(stale_s=1e6, max_wait_s=1e6)
    for key in "xyz":
        site.come(key, 30_000)
    site.come("large", 95_000, priority=1)
    for number in range(40):
        site.come(f"batch{number}", 30_000, priority=1)
    for _ in range(8):  # with these, an admission is due to the oldest
        site.now_s += 1.0
        site.end(next(iter(site.living)))
        assert len(site.admit()) == 1
    site.end(next(iter(site.living)))
    assert site.admit() == [], "the replica is kept for the large one"
    assert site.come("agent", 30_000, tenant) == Wait()
    for key in list(site.living):
        site.end(key)
    assert site.admit()[0] == "agent"
    assert sorted(site.serve_all()) == sorted(["agent", "large", *(f"batch{n}" for n in range(40))])


@settings(max_examples=200, deadline=None)
@given(
    aged_share=st.sampled_from([0.125, 1.0]),
    steps=st.lists(
        st.tuples(
            st.integers(0, 12), st.sampled_from([10_000, 95_000]), st.sampled_from("abcdefgh"), st.integers(0, 1),
            st.integers(0, 3),
        ),
        max_size=12,
    ),
)  # fmt: skip
def test_an_empty_replica_admits_someone_whoever_waits(
    aged_share: float, steps: list[tuple[int, int, str, int, int]]
) -> None:
    site = Site(stale_s=1e6, max_wait_s=1e9, aged_share=aged_share)
    for number, (programs, tokens, tenant, priority, ends) in enumerate(steps):
        for each in range(programs):
            site.come(f"{number}.{each}", tokens, tenant, priority=priority)
        for key in list(site.living)[:ends]:
            site.end(key)
        site.now_s += 1.0
        site.admit()
        assert site.living or not site.engine.waiting
    site.serve_all()
    assert not site.engine.waiting


def test_batch_work_makes_room_in_a_full_queue() -> None:
    site = Site(max_waiting=3, max_wait_s=1e6, stale_s=1e6)
    site.come("x"), site.come("y")
    site.come("agent0"), site.come("batch0", priority=1), site.come("batch1", priority=1)
    assert site.come("agent1") == Wait()
    full = site.come("batch2", priority=1)
    assert isinstance(full, Refuse) and full.reason is Refused.QUEUE_FULL
    site.admit()
    assert {key: one.reason for key, one in site.refused.items()} == {"batch1": Refused.QUEUE_FULL}


def test_batch_work_is_refused_at_once_where_the_programs_of_others_take_too_long() -> None:
    site = Site(max_wait_s=100.0, stale_s=1e6)
    site.come("x"), site.come("y")
    assert Wait() not in [site.come(f"p{number}") for number in range(1000)][-10:], "its queue is full of agents"
    assert site.come("agent", tenant="b") == Wait()
    batch = site.come("batch", tenant="c", priority=1)
    assert isinstance(batch, Refuse) and batch.reason is Refused.QUEUE_TIMEOUT


def test_a_replica_may_refuse_batch_work_only() -> None:
    engine = shedding_engine(r0={"shed_sheddable_from_s": 0.0, "shed_retry_after_s": 9.0})
    assert isinstance(engine.turn("1", request("agent", 1000), 0.1), Go)
    assert engine.turn("2", request("batch", 1000, priority=1), 0.1) == Refuse(Refused.LOAD_SHED, 9.0)


def test_nobody_waits_longer_than_allowed_and_a_deadline_counts() -> None:
    site = Site(max_wait_s=60.0, stale_s=1e6)
    site.come("x"), site.come("y")
    assert site.come("patient") == Wait()
    assert site.come("urgent", deadline_s=20.0) == Wait()
    site.now_s = 21.0
    assert site.admit() == [] and set(site.refused) == {"urgent"}
    site.now_s = 60.0
    assert site.admit() == [] and set(site.refused) == {"urgent", "patient"}
    assert {refuse.reason for refuse in site.refused.values()} == {Refused.QUEUE_TIMEOUT}
    assert all(refuse.retry_after_s >= 1 for refuse in site.refused.values())


def test_where_nothing_was_admitted_for_long_more_are_refused_at_once() -> None:
    site = Site(max_wait_s=100.0, stale_s=1e6)
    site.come("x"), site.come("y"), site.come("first")
    site.now_s = 99.0
    decisions = [site.come(f"p{number}") for number in range(30)]
    refused = [one for one in decisions if isinstance(one, Refuse)]
    assert refused and {one.reason for one in refused} == {Refused.QUEUE_TIMEOUT}
    assert refused[-1].retry_after_s > 100


def test_a_full_queue_refuses_and_makes_room_for_a_tenant_that_has_less_than_its_share() -> None:
    site = Site(max_waiting=10, max_wait_s=1e6, stale_s=1e6)
    site.come("x"), site.come("y")
    assert [site.come(f"a{number}") for number in range(10)] == [Wait()] * 10
    full = site.come("a10")
    assert isinstance(full, Refuse) and full.reason is Refused.QUEUE_FULL
    assert [site.come(f"b{number}", tenant="b") for number in range(5)] == [Wait()] * 5
    over = site.come("b5", tenant="b")
    assert isinstance(over, Refuse) and over.reason is Refused.TENANT_SHARE
    site.admit()
    assert {key: one.reason for key, one in site.refused.items()} == {
        f"a{number}": Refused.TENANT_SHARE for number in range(5, 10)
    }


def test_a_turn_that_is_gone_waits_no_longer_and_its_program_goes_with_its_last() -> None:
    site = Site(stale_s=1e6)
    site.come("x"), site.come("y")
    site.come("p")
    site.engine.turn("another", request("p", HALF, **PLAIN), 0.0)
    assert site.engine.waiting == 1
    site.engine.ended("another", 0.1)
    assert site.engine.waiting == 1
    site.engine.ended("turn of p", 0.1)
    assert site.engine.waiting == 0


def test_all_turns_of_a_waiting_program_go_together() -> None:
    site = Site(stale_s=1e6)
    site.come("x"), site.come("y")
    site.come("p")
    assert site.engine.turn("another", request("p", HALF, **PLAIN), 0.0) == Wait()
    site.end("x")
    assert dict(site.engine.admitted(0.1)) == {turn: Go(Home("r0", 1), Placed.NEW) for turn in ("turn of p", "another")}


def test_turns_wait_no_longer_for_a_program_that_another_ingress_has_admitted() -> None:
    site = Site(stale_s=1e6)
    site.come("x"), site.come("y")
    assert site.come("p") == Wait()
    site.engine.settle("p", Home("r0", 4), 0.5)
    assert site.engine.admitted(0.5) == [("turn of p", Go(Home("r0", 4), Placed.JOINED))]
    site.engine.check_integrity()


def test_a_child_of_a_program_that_waits_for_it_does_not_wait_one_at_a_time() -> None:
    site = Site(stale_s=1e6)
    site.come("x"), site.come("y")
    assert isinstance(site.come("x/child1", parent_key="x"), Go)
    assert site.come("x/child2", parent_key="x") == Wait()
    site.end("x/child1")
    assert site.admit() == ["x/child2"]


@pytest.mark.parametrize("resident", [True, False])
def test_a_program_that_a_replica_already_has_is_admitted(resident: bool) -> None:
    engine = PlacementEngine()
    full = {"working_set_tokens": 1e6, "residents": ["p"] if resident else []}
    engine.observe({"r0": snapshot("r0", **full)}, 0.0)
    decision = engine.turn("t", request("p"), 0.1)
    assert isinstance(decision, Go if resident else Wait)


def test_programs_that_were_thought_longer_and_never_came_back_make_room_though_nobody_said_so() -> None:
    engine = PlacementEngine(EngineSettings(working_set=1.0))
    engine.observe({"r": snapshot("r", 1, kv_tokens=20_000)}, 0.0)
    keys = []
    for number in range(50):
        key = f"p{number}"
        if not isinstance(engine.turn(key, request(key), number / 100), Go):
            break
        engine.ended(key, number / 100, context_tokens=10)
        keys.append(key)
    else:
        raise AssertionError("nobody ever waits")
    there = {"programs": len(keys), "working_set_tokens": 10.0 * len(keys), "residents": [f"a/{k}" for k in keys]}
    for number in (2, 3, 4):
        engine.observe({"r": snapshot("r", number, kv_tokens=20_000, **there)}, 60.0 + number)
    assert not engine.admitted(64.0)
    # Their replica gives them up: hardly one of them still counts.
    for number in (5, 6, 7):
        engine.observe({"r": snapshot("r", number, kv_tokens=20_000)}, 120.0 + number)
    ((admitted, decision),) = engine.admitted(128.0)
    assert isinstance(decision, Go) and admitted not in keys
    engine.check_integrity()


@pytest.mark.parametrize("later_tokens", [14_000, 34_000], ids=["of half the memory", "as large as the memory"])
@pytest.mark.parametrize(
    ("alive", "soon", "waits"),
    [(10, 10.0, True), (10, 6.0, True), (10, 0.1, False), (8, 8.0, True), (2, 0.1, False), (0, 0.0, False)],
)
def test_nobody_waits_for_growth_of_programs_that_come_back_late_if_at_all(
    later_tokens: int, alive: int, soon: float, waits: bool
) -> None:
    engine = PlacementEngine(EngineSettings(working_set=1.0))
    engine.observe({"r": snapshot("r", 1, kv_tokens=200_000)}, 0.0)
    size = {"expected_later_turns": 10, "expected_output_tokens": 100}
    keys = [f"p{number}" for number in range(10)]
    for key in keys:
        turn = request(key, expected_later_tokens=34_000, **size)
        assert isinstance(engine.turn(key, turn, 0.1), Go)
        engine.ended(key, 1.0, context_tokens=10_000)
    # Their replica has become small, or they are thought longer than they are; it expects so many of them back.
    there = {"programs": alive, "working_set_tokens": 20.0, "working_set_programs": soon}
    there["residents"] = [f"a/{key}" for key in keys]
    for number in (2, 3, 4):
        engine.observe({"r": snapshot("r", number, kv_tokens=20_000, **there)}, 60.0 + number)
    decision = engine.turn("t", request("late", expected_later_tokens=later_tokens, **size), 64.0)
    assert isinstance(decision, Wait if waits else Go)
    engine.check_integrity()


# --- load shedding ----------------------------------------------------------------------------------------------------


def shedding_engine(**by_replica: dict[str, float]) -> PlacementEngine:
    """An engine that knows replicas with these fields in their snapshots."""
    engine = PlacementEngine(EngineSettings(working_set=1.0))
    engine.observe({name: snapshot(name, **fields) for name, fields in by_replica.items()}, 0.0)
    return engine


def test_a_program_of_as_much_work_as_starves_is_refused_at_once_and_a_smaller_one_is_not() -> None:
    work_s = 1000 * snapshot("r0").costs.token_s
    engine = shedding_engine(r0={"shed_from_s": work_s, "shed_retry_after_s": 17.0})
    assert engine.turn("t1", request("large", 1001, "a", **PLAIN), 0.0) == Refuse(Refused.LOAD_SHED, 17.0)
    assert isinstance(engine.turn("t2", request("small", 999, "a", **PLAIN), 0.0), Go)
    assert engine.waiting == 0, "nobody waits to be refused later"


def test_a_program_goes_where_it_is_taken() -> None:
    engine = shedding_engine(r0={"shed_from_s": 0.0, "shed_retry_after_s": 9.0}, r1={"waiting": 5, "running": 5})
    for number in range(8):
        go = engine.turn(f"t{number}", request(f"p{number}", 100, "a", **PLAIN), 0.0)
        assert isinstance(go, Go) and go.home.replica == "r1"


def test_the_shortest_wait_is_when_to_come_back() -> None:
    engine = shedding_engine(r0={"shed_from_s": 0.0, "shed_retry_after_s": 9.0}, r1={"shed_from_s": 0.0})
    assert engine.turn("t", request("p", 100, "a", **PLAIN), 0.0) == Refuse(Refused.LOAD_SHED, 1.0)


def test_a_program_that_was_admitted_is_not_refused_later() -> None:
    engine = shedding_engine(r0={})
    assert isinstance(engine.turn("t1", request("p", 100, "a", **PLAIN), 0.0), Go)
    engine.ended("t1", 1.0, context_tokens=100)
    engine.observe({"r0": snapshot("r0", 2, shed_from_s=0.0, shed_retry_after_s=9.0)}, 1.0)
    assert isinstance(engine.turn("t2", request("p", 200, "a", **PLAIN), 2.0), Go)
    # Another ingress has admitted this one.
    engine.observe({"r0": snapshot("r0", 3, shed_from_s=0.0, residents=["q"])}, 3.0)
    assert isinstance(engine.turn("t3", request("q", 200, "a", **PLAIN), 3.0), Go)


def test_a_fan_out_is_admitted_as_one_working_set() -> None:
    """Of three children one is needed at once. The others come before all programs that waited longer or have less
    work.
    """
    site = Site(stale_s=1e6)
    site.come("x"), site.come("y")
    assert site.come("other", 10_000) == Wait()
    assert isinstance(site.come("x/1", parent_key="x"), Go)
    assert [site.come(f"x/{n}", parent_key="x") for n in (2, 3)] == [Wait()] * 2
    site.end("y")
    assert site.admit() == [], "y made room for what the first child took beyond the bound"
    site.end("x/1")
    assert site.admit() == ["x/2"]
    site.end("x/2")
    assert site.admit() == ["x/3"]
    site.end("x/3")
    assert site.admit() == ["other"]


def test_the_samples_of_a_group_are_admitted_as_one_without_a_parent() -> None:
    """The first sample is admitted like any program. The others come before all programs that wait."""
    site = Site(stale_s=1e6)
    site.come("y", 60_000)
    assert isinstance(site.come("group/1", 20_000, parent_key="group"), Go)
    assert site.come("other", 25_000) == Wait()
    assert [site.come(f"group/{n}", 30_000, parent_key="group") for n in (2, 3)] == [Wait()] * 2
    site.end("y")
    assert site.admit() == ["group/2", "group/3"]
    site.end("group/2")
    assert site.admit() == ["other"]


def test_load_shedding_refuses_no_sample_of_an_admitted_group() -> None:
    engine = PlacementEngine(EngineSettings(stale_s=1e6))
    engine.observe({"r0": snapshot("r0", 1)}, 0.0)
    assert isinstance(engine.turn("g/1", request("g/1", parent_key="g"), 0.1), Go)
    engine.observe({"r0": snapshot("r0", 2, shed_from_s=0.0, shed_retry_after_s=7.0)}, 0.2)
    assert isinstance(engine.turn("g/2", request("g/2", parent_key="g"), 0.3), Go)
    assert isinstance(engine.turn("h/1", request("h/1", parent_key="h"), 0.3), Refuse)
    engine.check_integrity()


def test_a_child_that_fits_does_not_queue_behind_other_programs() -> None:
    site = Site(stale_s=1e6)
    site.come("x", 20_000)
    site.come("y", 60_000)
    assert site.come("large", 50_000) == Wait()
    assert isinstance(site.come("x/1", 15_000, parent_key="x"), Go)
    assert site.come("small", 1_000) == Wait()
    assert isinstance(site.come("x/2", 1_000, parent_key="x"), Go)
    assert site.come("stranger/1", 1_000, parent_key="stranger") == Wait(), "its parent is not here"


@pytest.mark.parametrize(("parent", "sheds"), [("x", False), (None, True), ("stranger", True)])
def test_load_shedding_refuses_no_child_of_an_admitted_program(parent: str | None, sheds: bool) -> None:
    engine = PlacementEngine(EngineSettings(stale_s=1e6))
    engine.observe({"r0": snapshot("r0", 1)}, 0.0)
    engine.turn("x", request("x"), 0.1)
    engine.turn("x/1", request("x/1", parent_key="x"), 0.1)
    engine.observe({"r0": snapshot("r0", 2, shed_from_s=0.0, shed_retry_after_s=7.0)}, 0.2)
    decision = engine.turn("another", request("another", parent_key=parent), 0.3)
    assert isinstance(decision, Refuse if sheds else Go)


def test_waiting_children_come_before_programs_of_less_work_while_their_siblings_run() -> None:
    site = Site(stale_s=1e6)
    site.come("x", 20_000), site.come("y", 60_000)
    assert isinstance(site.come("x/1", 30_000, parent_key="x"), Go)
    assert [site.come("other", 10_000), site.come("x/2", 30_000, parent_key="x")] == [Wait()] * 2
    site.end("y")
    assert site.admit() == ["x/2", "other"]


@pytest.mark.parametrize("families", [1, 100])
def test_children_that_wait_are_not_all_tried_each_time(families: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those that are tried as programs of their tenant."""
    site, tried = crowd(families, 200 // families), 0
    eligible = PlacementPolicy.eligible

    def count(policy: PlacementPolicy, *arguments: Any, **more: Any) -> list[Any]:
        nonlocal tried
        tried += 1
        return eligible(policy, *arguments, **more)

    monkeypatch.setattr(PlacementPolicy, "eligible", count)
    assert site.admit() == []
    assert tried <= CHILD_TRIES + 2 * LOOKAHEAD


def test_a_child_that_fits_is_found_whichever_parents_children_came_first() -> None:
    site = crowd(100, 1)
    assert site.come("p99/last", 15_000, parent_key="p99") == Wait()
    site.end("filler")
    times = next(times for times in range(100) if site.admit() == ["p99/last"])
    assert 0 < times <= 100 / CHILD_TRIES


def test_children_that_fit_are_admitted_at_once_however_many() -> None:
    site = crowd(1, 20, tokens=1000)
    site.end("filler")
    assert site.admit() == [f"p0/{n}" for n in range(20)]


def crowd(families: int, waiting: int, tokens: int = 60_000) -> Site:
    """A full replica with a program of 20,000 tokens beside parents: each has a child that lives, and some that wait.

    These come before all programs of another priority.
    """
    site = Site(stale_s=1e6, max_wait_s=1e9)
    for n in range(families):
        site.come(f"p{n}", 100)
        assert isinstance(site.come(f"p{n}/lives", 100, parent_key=f"p{n}"), Go)
    site.come("rest", 80_000 - 200 * families)
    assert isinstance(site.come("filler", 20_000), Go)
    for n in range(families * waiting):
        parent = f"p{n % families}"
        assert site.come(f"{parent}/{n // families}", tokens, parent_key=parent, priority=-1) == Wait()
    return site
