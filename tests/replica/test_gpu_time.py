"""What programs cost, on timelines of the real scheduler. A replica has 63 usable blocks of 16 tokens."""

from collections.abc import Callable

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from cluster.core.clock import ManualClock
from cluster.core.program import Hints, ProgramIdentity
from replicas.control import dispatch, snapshot
from replicas.gpu_time import OTHERS, GpuTime, TurnTime
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import VirtualEngine, block_hasher

CAPACITY_TOKENS = 63 * 16
STEP_S = 0.5


class Priced:
    """Programs on one virtual replica, whose steps take `STEP_S`."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.engine = engine
        self.scheduler: AgentScheduler = engine.scheduler
        self.clock: ManualClock = self.scheduler.clock
        self.contexts: dict[str, list[int]] = {}
        self.steps = 0

    def arrive(self, name: str, new_tokens: int, output: int = 1, last: bool = False) -> None:
        tenant, _, program = name.rpartition("/")
        context = list(self.contexts.get(name, []))
        context.extend(1000 + 10 * ord(program[0]) + i % 7 for i in range(new_tokens))
        identity = ProgramIdentity(
            program_id=program, tenant=tenant or "default", last_turn=last, hints=Hints(expected_tool="ls")
        )
        self.contexts[name] = self.engine.submit(f"{name}{len(context)}", context, output, identity)._all_token_ids

    def run(self) -> None:
        while self.scheduler.has_unfinished_requests():
            output = self.scheduler.schedule()
            self.steps += output.total_num_scheduled_tokens > 0
            self.clock.advance(STEP_S)
            self.engine.complete(output)

    def turn(self, name: str, new_tokens: int, output: int = 1, last: bool = False) -> None:
        self.arrive(name, new_tokens, output, last)
        self.run()

    def of(self, name: str) -> GpuTime:
        return self.scheduler.gpu_times.program(name if "/" in name else f"default/{name}")

    def turns_of(self, name: str) -> list[dict[str, object]]:
        found = dispatch(self.scheduler, "program", {"key": name if "/" in name else f"default/{name}"})
        return [turn["gpu"] for turn in found["turns"]]


@pytest.fixture
def priced(replica: Callable[..., VirtualEngine]) -> Callable[..., Priced]:
    return lambda *args, **kwargs: Priced(replica(*args, **kwargs))


Make = Callable[..., Priced]


def test_a_turn_alone_has_the_time_of_all_its_steps(priced: Make) -> None:
    p = priced("vllm")
    p.turn("a", 100, output=5, last=True)
    assert p.steps == 5
    assert p.of("a") == GpuTime(prefill_s=STEP_S, decode_s=4 * STEP_S)


def test_the_times_of_turns_that_share_steps_add_up_to_the_busy_time(priced: Make) -> None:
    p = priced("vllm")
    p.arrive("long", 400, output=10, last=True)
    p.arrive("short", 20, output=10, last=True)
    p.run()
    long, short = p.of("long"), p.of("short")
    assert long.busy_s + short.busy_s == pytest.approx(p.steps * STEP_S) == pytest.approx(p.scheduler.gpu_times.busy_s)
    assert long.prefill_s > 5 * short.prefill_s, "twenty times the tokens, and an equal part of what is fixed"
    assert short.decode_s < long.decode_s < 2 * short.decode_s, "it reads more KV, and nothing else differs"


def test_turns_under_way_are_in_their_tenants_times(priced: Make) -> None:
    p = priced("vllm")
    p.arrive("x/a", 100, output=50)
    for _ in range(10):
        output = p.scheduler.schedule()
        p.clock.advance(STEP_S)
        p.engine.complete(output)
    numbers = snapshot(p.scheduler)
    assert numbers["busy_s"] == 10 * STEP_S
    assert numbers["gpu_s"]["x"] == {**GpuTime(STEP_S, 9 * STEP_S).to_public_dict()}
    assert p.of("x/a") == GpuTime(), "the turn has not ended"


def test_a_hold_costs_its_share_of_the_memory_and_no_busy_time(priced: Make) -> None:
    p = priced("continuum", default_ttl_s=10.0)
    p.turn("a", 100)
    p.clock.advance(3.0)
    p.arrive("a", 20, last=True)
    p.clock.advance(1.0)
    p.run()
    assert p.of("a").held_s == pytest.approx(100 / CAPACITY_TOKENS * 4.0)
    assert p.of("a").busy_s == pytest.approx(2 * STEP_S)


def test_a_session_without_an_identity_is_a_program_of_the_default_tenant(priced: Make) -> None:
    """As on vLLM's own server. The session's id may look like a program's."""
    p = priced("caesura")
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    p.scheduler.add_request(
        Request("r", [7] * 100, params, None, block_hasher=block_hasher(16), session_id="someone/session")
    )
    p.run()
    p.clock.advance(10.0)
    assert dispatch(p.scheduler, "release", {"key": "default/someone/session"}) == {"released": True}
    held_s = p.scheduler.gpu_times.program("default/someone/session").held_s
    assert held_s == pytest.approx(100 / CAPACITY_TOKENS * 10.0)
    assert {name: times["held_s"] for name, times in p.scheduler.gpu_times.tenants().items()} == {
        "default": pytest.approx(held_s, abs=1e-6)
    }


def test_the_parts_of_a_hold_that_is_trimmed_are_counted_each_with_its_time(priced: Make) -> None:
    p = priced("continuum", default_ttl_s=100.0)
    p.turn("a", 159)
    p.clock.advance(2.0)
    p.scheduler.lifecycle.keep("default/a", 4)
    p.clock.advance(5.0)
    p.turn("a", 20, last=True)
    assert p.of("a").held_s == pytest.approx((159 * 2.0 + 64 * 5.0) / CAPACITY_TOKENS)


def evicted(p: Priced, owner: str, other: str) -> None:
    """The program ``other`` grows into the hold of ``owner``, which comes back then and recomputes."""
    p.turn(owner, 480)
    p.turn(other, 500, output=40, last=True)
    p.turn(owner, 20, last=True)


def test_evictions_of_programs_that_never_return_are_forgotten(priced: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.gpu_time.MAX_PROGRAMS", 3)
    times = priced().scheduler.gpu_times
    for number in range(10):
        times.evicted(f"default/{number}", "default/other")
    assert list(times._evicted_for) == ["default/7", "default/8", "default/9"]


def test_who_evicts_a_hold_has_caused_what_is_computed_again(priced: Make) -> None:
    p = priced("continuum", default_ttl_s=1000.0, max_ttl_s=1000.0)
    evicted(p, "b", "c")
    first, again = p.turns_of("b")
    assert (first["recomputed_s"], first["caused_by"]) == (0.0, None)
    assert again["caused_by"] == "c"
    assert 0 < p.of("b").recomputed_s == pytest.approx(again["recomputed_s"], abs=1e-6)
    assert p.of("b").recomputed_s < p.of("b").prefill_s
    assert p.of("c").caused_s == pytest.approx(p.of("b").recomputed_s)
    assert p.of("c").recomputed_s == p.of("b").caused_s == 0.0
    assert sum(p.of(name).busy_s for name in "bc") == pytest.approx(p.steps * STEP_S), "what is caused is no more time"


def test_a_program_of_another_tenant_is_not_named(priced: Make) -> None:
    p = priced("continuum", default_ttl_s=1000.0, max_ttl_s=1000.0)
    evicted(p, "mine/b", "yours/c")
    assert p.turns_of("mine/b")[1]["caused_by"] == OTHERS
    assert p.scheduler.gpu_times.tenants()["yours"]["caused_s"] > 0


def test_a_cause_counts_for_one_turn(priced: Make) -> None:
    p = priced("continuum", default_ttl_s=1000.0, max_ttl_s=1000.0)
    p.turn("b", 480)
    p.turn("c", 500, output=40, last=True)
    p.turn("b", 20)
    dispatch(p.scheduler, "release", {"key": "default/b"})
    p.turn("z", 62 * 16, last=True)
    p.turn("b", 20, last=True)
    assert [turn["caused_by"] for turn in p.turns_of("b")] == [None, "c", None]
    assert p.turns_of("b")[2]["recomputed_s"] > 0  # type: ignore[operator]


def test_what_a_program_loses_for_itself_has_no_cause(priced: Make) -> None:
    p = priced("continuum", default_ttl_s=1.0)
    p.turn("a", 320)
    p.clock.advance(5.0)
    p.turn("z", 62 * 16, last=True)  # the hold has expired; the prefix cache loses a's blocks
    p.turn("a", 20, last=True)
    assert p.of("a").recomputed_s > 0
    assert p.turns_of("a")[1]["caused_by"] is None
    assert p.of("z").caused_s == 0.0


def test_a_step_that_was_in_flight_when_its_turn_was_aborted_counts(priced: Make) -> None:
    p = priced("vllm")
    p.arrive("a", 100, output=50)
    output = p.scheduler.schedule()
    [request_id] = output.num_scheduled_tokens
    p.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
    p.clock.advance(STEP_S)
    p.engine.complete(output)
    assert p.of("a").prefill_s == STEP_S == p.scheduler.gpu_times.tenants()["default"]["prefill_s"]


def test_times_are_added_name_by_name() -> None:
    one = TurnTime(1, 2, 3, 4, 5)
    one.add(GpuTime(10, 20, 30, 40, 50))
    assert one == TurnTime(11, 22, 33, 44, 55)
