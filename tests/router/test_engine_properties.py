"""Whatever comes, the engine decides, keeps count, and gives no program two homes."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.config.schema import SloConfig
from cluster.core.replica_snapshot import ReplicaSnapshot, StepCosts
from router.candidate import ReplicaLoad, Sent
from router.decisions import Decision, Go, Home, Placed, Refuse, Wait
from router.placement_engine import PlacementEngine
from router.settings import EngineSettings
from tests.router.router_views import COSTS, request, snapshot

REPLICAS = [f"r{i}" for i in range(4)]
KEYS = [f"t/p{i}" for i in range(8)]
TURNS = [f"turn{i}" for i in range(12)]
NUMBERS = st.one_of(st.integers(-(10**18), 10**18), st.integers(0, 200_000))
FLOATS = st.one_of(st.floats(), st.floats(0, 1e6))
NAMES = st.one_of(st.binary(max_size=9), st.lists(st.sampled_from(KEYS), max_size=8))


@st.composite
def junk(draw: st.DrawFn, replica: str = "r0") -> ReplicaSnapshot:
    """A snapshot whose fields are of the right kind, and mean anything."""
    integers = ("kv_tokens", "free_tokens", "held_tokens", "host_tokens", "host_used_tokens", "running", "waiting",
                "running_tokens", "waiting_tokens", "programs")  # fmt: skip
    floats = (
        "output_tokens",
        "working_set_tokens",
        "working_set_programs",
        "active_tokens",
        "active_programs",
        "turn_output_tokens",
        "turn_new_tokens",
        "program_turns",
        "pause_s",
    )
    fields: dict[str, Any] = {name: draw(NUMBERS) for name in integers if draw(st.booleans())}
    fields |= {name: draw(FLOATS) for name in floats if draw(st.booleans())}
    fields |= {name: draw(NAMES) for name in ("residents", "on_device", "on_host")}
    fields["prefixes"] = draw(st.sampled_from([b"", b"x" * 8, b"x" * 7]))
    fields["resume_tokens"] = tuple(draw(st.lists(st.tuples(FLOATS, FLOATS), max_size=4)))
    fields["draining"] = draw(st.booleans())
    fields["model"] = draw(st.sampled_from(["m", "other", ""]))
    fields["costs"] = draw(st.one_of(st.just(COSTS), st.builds(StepCosts, *[FLOATS] * 6)))
    return snapshot(replica, draw(st.integers(-5, 50)), **fields)


class AnyEvents(RuleBasedStateMachine):
    """Turns, snapshots and the store's answers in any order, on a clock that also stands still or goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = EngineSettings(max_waiting=6, max_wait_s=30.0, max_moves=2, max_programs=6, program_ttl_s=50)
        self.engine = PlacementEngine(self.settings, SloConfig(), model="m")
        self.now_s = 0.0
        self.waiting: set[str] = set()
        self.flying: dict[str, str] = {}
        self.moves: dict[str, int] = {}
        self.reachable: set[str] = set()

    def told(self, turn_id: str, key: str, decision: Decision) -> None:
        self.waiting.discard(turn_id)
        self.flying.pop(turn_id, None)
        if isinstance(decision, Wait):
            self.waiting.add(turn_id)
        elif isinstance(decision, Refuse):
            assert 0 < decision.retry_after_s < float("inf")
        else:
            self.flying[turn_id] = key
            assert decision.home == self.engine.home_of(key)

    @rule(shown=st.dictionaries(st.sampled_from(REPLICAS), st.none() | junk(), max_size=4))
    def see(self, shown: dict[str, ReplicaSnapshot | None]) -> None:
        self.engine.observe(shown, self.now_s)
        self.reachable = set(shown)

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0, 20.0, -3.0, float("nan"), float("inf")]))
    def pass_time(self, seconds: float) -> None:
        self.engine.admitted(self.now_s + seconds) if not self.waiting else None
        if abs(seconds) < 100:
            self.now_s += seconds

    @rule(
        turn_id=st.sampled_from(TURNS),
        key=st.sampled_from(KEYS),
        tokens=st.integers(-5, 300_000),
        store_available=st.booleans(),
        last=st.booleans(),
        parent=st.none() | st.sampled_from(KEYS),
        tenant=st.sampled_from("ab"),
        avoid=st.frozensets(st.sampled_from(REPLICAS), max_size=1),
        deadline_s=st.none() | st.floats(-1, 100),
        priority=st.integers(0, 1),
    )
    def come(
        self,
        turn_id: str,
        key: str,
        tokens: int,
        store_available: bool,
        last: bool,
        parent: str | None,
        tenant: str,
        avoid: frozenset[str],
        deadline_s: float | None,
        priority: int,
    ) -> None:
        self.waiting.discard(turn_id)
        self.flying.pop(turn_id, None)
        self.engine.ended(turn_id, self.now_s)
        before, busy = self.engine.home_of(key), key in self.flying.values()
        hints = {"deadline_s": deadline_s, "priority": priority}
        turn = request(key, tokens, tenant, last=last, parent_key=parent, avoid=avoid, **hints)
        decision = self.engine.turn(turn_id, turn, self.now_s, store_available=store_available)
        if isinstance(decision, Go) and before is not None:
            moved = decision.home.replica != before.replica
            assert decision.home.epoch == before.epoch + moved
            if busy and before.replica in self.reachable - avoid:
                assert not moved, "a program with a turn in flight got a second home"
            if decision.reason is Placed.MOVED_FOR_LOAD:
                self.moves[key] = self.moves.get(key, 0) + 1
                assert self.moves[key] <= self.settings.max_moves
        if isinstance(decision, Go):
            assert decision.home.replica in self.reachable
        self.told(turn_id, key, decision)
        self.forget_moves()

    @rule(key=st.sampled_from(KEYS), replica=st.sampled_from(REPLICAS), epoch=st.integers(0, 3))
    def store_says(self, key: str, replica: str, epoch: int) -> None:
        self.engine.settle(key, Home(replica, epoch), self.now_s)
        self.forget_moves()

    @rule(turn_id=st.sampled_from(TURNS), context=st.none() | st.integers(-10, 10**6))
    def end(self, turn_id: str, context: int | None) -> None:
        self.engine.ended(turn_id, self.now_s, context_tokens=context)
        self.waiting.discard(turn_id)
        self.flying.pop(turn_id, None)
        self.forget_moves()

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key: str) -> None:
        self.engine.forget(key, self.now_s)
        self.forget_moves()

    @rule()
    def admit(self) -> None:
        for turn_id, decision in self.engine.admitted(self.now_s):
            assert turn_id in self.waiting, "told twice, or of a turn that did not wait"
            self.waiting.discard(turn_id)
            if isinstance(decision, Go):
                self.flying[turn_id] = "?"

    @precondition(lambda self: self.waiting)
    @rule()
    def wait_long(self) -> None:
        self.now_s += self.settings.max_wait_s
        self.admit()
        assert not self.waiting, "nobody waits for ever"

    @invariant()
    def counts_fit(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        for turn_id in TURNS:
            self.engine.ended(turn_id, self.now_s)
        for key in KEYS:
            self.engine.forget(key, self.now_s)
        for number in (100, 101, 102):
            self.engine.observe({replica: snapshot(replica, number) for replica in REPLICAS}, self.now_s)
        self.engine.check_integrity()
        assert not self.engine.admitted(self.now_s) and not self.engine.waiting
        for replica in REPLICAS:
            state = self.engine._state.replica(replica)
            assert state is None or state.sent(ReplicaLoad()) == Sent()

    def forget_moves(self) -> None:
        """A program that is gone may come again."""
        for key in list(self.moves):
            if self.engine.home_of(key) is None:
                del self.moves[key]


AnyEvents.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_events = AnyEvents.TestCase


@settings(max_examples=50, deadline=None)
@given(
    shown=st.dictionaries(st.sampled_from(REPLICAS), st.none() | junk(), min_size=1, max_size=4),
    keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=20, unique=True),
    data=st.data(),
)
def test_two_fronts_agree_without_the_store_whatever_each_has_done_before(
    shown: dict[str, ReplicaSnapshot | None], keys: list[str], data: st.DataObject
) -> None:
    one, other = PlacementEngine(), PlacementEngine()
    one.observe(shown, 1.0)
    other.observe(dict(reversed(shown.items())), 1.0)
    for number in range(data.draw(st.integers(0, 5))):
        one.turn(f"mine{number}", request(f"mine{number}", avoid=frozenset({"r0"})), 1.0)
    answers = [
        [engine.turn(key, request(key), 1.0, store_available=False) for key in order]
        for engine, order in ((one, keys), (other, keys[::-1]))
    ]
    assert answers[0] == answers[1][::-1]


@settings(max_examples=50, deadline=None)
@given(loads=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=4))
def test_two_ingresses_agree_without_the_store_on_loads_of_different_moments(loads: list[tuple[int, int]]) -> None:
    engines = PlacementEngine(), PlacementEngine()
    for moment, engine in enumerate(engines):
        engine.observe({f"r{i}": snapshot(f"r{i}", programs=two[moment]) for i, two in enumerate(loads)}, 0.0)
    homes = [
        [engine.turn(f"t{i}", request(f"p{i}"), 0.0, store_available=False) for i in range(20)] for engine in engines
    ]
    assert homes[0] == homes[1]
    assert all(isinstance(go, Go) for go in homes[0])
