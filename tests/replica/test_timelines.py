"""Readable timelines of the real scheduler on a clock that stands still: given these arrivals, expect these batches.

A replica has 63 usable blocks of 16 tokens. Prompts are token ids; a program's next turn extends its last one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.config.schema import PolicyConfig, SloConfig
from cluster.core.clock import ManualClock
from cluster.core.lifecycle.events import ReleaseReason
from cluster.core.lifecycle.machine import Phase
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.slo import Slo
from replicas.control import snapshot
from replicas.policy import PauseView
from replicas.scheduler import AgentScheduler
from replicas.settings import build_policy
from replicas.turns import ToolNames
from replicas.virtual_engine import VirtualEngine

Replica = Callable[..., VirtualEngine]
BLOCK = 16
SYNC_AND_ASYNC = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


class NoText:
    """A tokenizer."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return ""


class Programs:
    """Programs on one virtual replica, each a growing list of token ids."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.engine = engine
        self.scheduler: AgentScheduler = engine.scheduler  # type: ignore[assignment]
        self.clock: ManualClock = self.scheduler.clock  # type: ignore[assignment]
        self.contexts: dict[str, list[int]] = {}
        self.turns: dict[str, int] = {}

    def arrive(self, program: str, new_tokens: int, output: int = 1, *, tool: str = "ls", last: bool = False) -> str:
        """A turn of ``program`` arrives; its request id."""
        first = 1000 + 10 * ord(program[0])
        context = self.contexts.setdefault(program, [first])
        context.extend(first + i % 7 for i in range(new_tokens - (0 if program in self.turns else 1)))
        number = self.turns[program] = self.turns.get(program, 0) + 1
        identity = ProgramIdentity(program_id=program, last_turn=last, hints=Hints(expected_tool=tool))
        request = self.engine.submit(f"{program}{number}", context, output, identity)
        self.contexts[program] = request._all_token_ids
        return request.request_id

    def turn(self, program: str, new_tokens: int, output: int = 1, **kwargs: object) -> None:
        """A whole turn, alone on the replica."""
        self.arrive(program, new_tokens, output, **kwargs)  # type: ignore[arg-type]
        self.engine.run()

    def step(self) -> dict[str, int]:
        """One step; tokens scheduled per request."""
        return dict(self.engine.step().num_scheduled_tokens)

    def phase(self, program: str) -> Phase | None:
        state = self.scheduler.programs.get(f"default/{program}")
        return state.phase if state else None

    def held(self) -> set[str]:
        return {held.key.removeprefix("default/") for held in self.scheduler.holds}

    def learn(self, tool: str, *seconds: float) -> None:
        for value in seconds:
            self.scheduler.durations.observe(tool, value)


@pytest.fixture
def programs(replica: Replica) -> Callable[..., Programs]:
    return lambda *args, **kwargs: Programs(replica(*args, **kwargs))


Make = Callable[..., Programs]


@SYNC_AND_ASYNC
def test_a_held_program_resumes_with_all_but_its_last_partial_block(programs: Make, asynchronous: bool) -> None:
    p = programs("continuum", asynchronous)
    p.turn("a", new_tokens=100, output=5)
    assert (p.phase("a"), p.held()) == (Phase.HELD, {"a"})
    p.clock.advance(1.0)
    request = p.arrive("a", new_tokens=10)
    # 104 tokens have KV (the 105th was sampled, not computed): 6 full blocks of 16 are found again.
    assert p.step() == {request: 115 - 6 * BLOCK}
    p.engine.run()
    story = p.scheduler.programs.to_public_dict("default/a")
    assert story is not None
    assert [turn["cached_tokens"] for turn in story["turns"]] == [0, 6 * BLOCK]
    assert story["turns"][0]["decision"] == "held 2.000s (ttl)"
    assert p.scheduler.stats.holds_ended[ReleaseReason.USED] == 1


def test_what_a_step_in_flight_may_write_is_not_freed_with_its_hold(programs: Make) -> None:
    """With a KV store, a freed block may be filled by a load that does not wait for the step."""
    p = programs("continuum")
    p.scheduler.defer_block_free = True
    free = p.engine.free_blocks()
    p.arrive("a", new_tokens=100, output=2)
    p.step()
    p.scheduler.processed_step_seq -= 1  # as if each step ended while another is in flight
    p.engine.run()
    assert p.held() == {"a"}
    p.clock.advance(3.0)
    p.step()
    assert (p.held(), p.engine.free_blocks()) == (set(), free - 2)
    p.scheduler.processed_step_seq += 1
    p.turn("b", new_tokens=16, last=True)
    assert p.engine.free_blocks() == free


def test_a_hold_survives_memory_pressure_that_evicts_the_prefix_cache(programs: Make) -> None:
    for policy, cached in [("continuum", 6 * BLOCK), ("vllm", 0)]:
        p = programs(policy)
        p.turn("a", new_tokens=100, output=5)
        # Others pass through the rest of the memory, one after the other.
        for other in "bcdefg":
            p.turn(other, new_tokens=700, output=1, last=True)
        p.turn("a", new_tokens=10)
        story = p.scheduler.programs.to_public_dict("default/a")
        assert story is not None
        assert story["turns"][1]["cached_tokens"] == cached, policy


def test_the_first_ttl_is_the_default_and_expiry_gives_the_blocks_back(programs: Make) -> None:
    p = programs("continuum", default_ttl_s=2.0)
    free = p.engine.free_blocks()
    p.turn("a", new_tokens=64)
    assert p.engine.free_blocks() == free - 4
    p.clock.advance(1.9)
    p.step()
    assert p.held() == {"a"}
    p.clock.advance(0.1)
    p.step()
    assert (p.phase("a"), p.engine.free_blocks()) == (Phase.RELEASED, free)
    assert p.scheduler.stats.holds_ended[ReleaseReason.EXPIRED] == 1


def test_the_ttl_is_the_tools_bound_scaled_by_turns(programs: Make) -> None:
    p = programs("continuum", delta=0.1, min_observations=5, beta=2.0, max_ttl_s=1e6)
    p.learn("ls", 1.0, 1.0, 1.0, 1.0, 1.0)
    p.learn("pytest", 30.0)
    p.turn("z", 10, last=True)  # one ended program of one turn: the average
    p.turn("a", 10, tool="ls")
    # No variance, no range: the bound is the mean, 1 s; times beta 2, times 1 turn of 1 in the mean.
    assert p.scheduler.holds.get("default/a").until_s == pytest.approx(2.0)  # type: ignore[union-attr]
    p.turn("a", 10, tool="ls")
    # The second turn arrived at once: a pause of 0 s was observed, so the bound has variance and range now.
    bound_s = p.scheduler.durations.tool("ls").bernstein_bound_s(0.1)  # type: ignore[union-attr]
    assert p.scheduler.holds.get("default/a").until_s == pytest.approx(bound_s * 2.0 * 2)  # type: ignore[union-attr]
    p.turn("b", 10, tool="pytest")  # seen once, below K: all tools together count
    overall_s = p.scheduler.durations.overall.bernstein_bound_s(0.1)
    assert p.scheduler.holds.get("default/b").until_s == pytest.approx(overall_s * 2.0)  # type: ignore[union-attr]


def test_a_pause_expected_to_outlast_the_longest_ttl_is_not_pinned_for(programs: Make) -> None:
    p = programs("continuum", max_ttl_s=10.0)
    p.learn("user_reply", 30.0, 31.0, 29.0, 30.0, 30.0)
    p.turn("a", 100, tool="user_reply")
    story = p.scheduler.programs.to_public_dict("default/a")
    assert story is not None
    assert (p.phase("a"), story["turns"][0]["decision"]) == (Phase.RELEASED, "released (long pause)")
    p.turn("b", 100, tool="ls")
    decisions = p.scheduler.stats.numbers()["kv_retention_decisions"]
    assert decisions == {
        "hold": {},
        "swap": {},
        "release": {"long pause": 2},
    }


def test_the_snapshot_counts_what_the_tool_parser_could_not_read(programs: Make) -> None:
    p = programs()
    assert snapshot(p.scheduler)["counters"]["tool_parser_failures"] == 0
    p.scheduler.tool_names = ToolNames(NoText(), "no such parser")
    assert snapshot(p.scheduler)["counters"]["tool_parser_failures"] == 1


def test_no_expiry_while_the_next_turn_waits(programs: Make) -> None:
    p = programs("continuum", default_ttl_s=2.0)
    p.turn("a", new_tokens=200, output=1)
    runner = p.arrive("b", new_tokens=780, output=20, last=True)
    p.step()
    p.arrive("a", new_tokens=300)  # does not fit beside b
    p.clock.advance(60.0)
    assert runner in p.step()
    assert (p.phase("a"), p.held()) == (Phase.RESUMING, {"a"})


def test_waiting_turns_rank_preempted_then_pinned_then_program_arrival(programs: Make) -> None:
    p = programs("continuum", num_blocks=256)
    p.turn("c", 10)
    p.clock.advance(1.0)
    p.turn("a", 10)
    p.clock.advance(1.5)
    p.step()  # c's hold (2 s) has expired, a's has not
    waits = [p.arrive("n", 10, last=True), p.arrive("c", 10, last=True), p.arrive("a", 10, last=True)]
    assert [r.request_id for r in p.scheduler.waiting] == ["a2", "c2", "n1"]
    assert set(p.step()) == set(waits)


def test_a_waiting_turn_does_not_break_holds_while_others_run(programs: Make) -> None:
    p = programs("continuum")
    p.turn("a", new_tokens=400)
    runner = p.arrive("b", new_tokens=200, output=50, last=True)
    p.step()
    p.arrive("c", new_tokens=500, last=True)
    assert list(p.step()) == [runner]
    assert p.held() == {"a"}


def test_when_nothing_runs_the_latest_programs_give_way_until_the_head_fits(programs: Make) -> None:
    p = programs("continuum", default_ttl_s=60.0, max_ttl_s=60.0)
    for name in "abc":
        p.turn(name, new_tokens=300)
        p.clock.advance(1.0)
    head = p.arrive("d", new_tokens=500, last=True)
    assert list(p.step()) == [head]
    assert p.held() == {"a"}  # c went first, then b; a, that came first, kept its memory
    assert p.scheduler.stats.holds_ended[ReleaseReason.BROKEN_STARVED] == 2


def test_a_running_turn_grows_into_holds_before_anything_is_preempted(programs: Make) -> None:
    p = programs("continuum", default_ttl_s=60.0, max_ttl_s=60.0)
    p.turn("a", new_tokens=480)
    p.arrive("b", new_tokens=500, output=40, last=True)
    p.engine.run()
    assert p.scheduler.stats.holds_ended[ReleaseReason.BROKEN_RUNNING] == 1
    story = p.scheduler.programs.to_public_dict("default/b")
    assert story is not None
    assert story["turns"][0]["preemptions"] == 0


def test_everything_held_by_the_one_that_wants_more_is_no_deadlock(programs: Make) -> None:
    p = programs("continuum", default_ttl_s=60.0, max_ttl_s=60.0)
    p.turn("a", new_tokens=900)
    p.turn("a", new_tokens=80, last=True)  # 980 tokens of 1008: its own hold's partial block is in the way
    assert p.held() == set()
    assert p.phase("a") is None


def test_a_turn_that_breaks_its_own_hold_is_admitted_though_another_ranks_first_then(programs: Make) -> None:
    """vLLM looks at the head of the queue, allocates, and takes the head: it must be the same turn."""
    p = programs("continuum", num_blocks=17)
    p.turn("b", new_tokens=20)
    p.clock.advance(60.0)
    p.turn("a", new_tokens=6 * BLOCK + 5)
    assert p.held() == {"a"}
    # The turn needs all 16 blocks. It can use the six full ones that are held, and not the seventh.
    b, a = p.arrive("b", new_tokens=5), p.arrive("a", new_tokens=10 * BLOCK - 11)
    assert p.step() == {a: 10 * BLOCK - 5}
    assert p.scheduler.stats.holds_ended[ReleaseReason.BROKEN_STARVED] == 1
    assert list(p.step()) == [b]


def test_the_last_turn_and_a_nameless_one_hold_nothing(programs: Make) -> None:
    p = programs("continuum")
    p.turn("a", 50, last=True)
    p.engine.submit("nameless", range(2000, 2050), 3)
    p.engine.run()
    assert (p.held(), len(p.scheduler.programs), p.engine.free_blocks()) == (set(), 0, 63)
    assert p.scheduler.programs.average_turns == 1.0


def test_a_disconnected_client_gives_up_its_turn_and_its_hold(programs: Make) -> None:
    from vllm.v1.request import RequestStatus

    p = programs("continuum")
    p.turn("a", 200)
    runner = p.arrive("b", 780, output=30, last=True)
    p.step()
    waiting = p.arrive("a", 300)
    p.scheduler.finish_requests([waiting, runner], RequestStatus.FINISHED_ABORTED)
    assert (p.held(), p.phase("a"), p.engine.free_blocks()) == (set(), Phase.RELEASED, 63)


def test_no_hold_outlasts_the_limit_even_if_the_client_asks(replica: Replica) -> None:
    p = Programs(replica("continuum"))
    identity = ProgramIdentity(program_id="a", hints=Hints(retention_s=1e9, expected_tool="x"))
    p.engine.submit("a1", range(3000, 3040), 1, identity)
    p.engine.run()
    limit_s = p.scheduler.settings.limits.max_pin_s
    assert p.scheduler.holds.get("default/a").until_s == limit_s  # type: ignore[union-attr]
    p.clock.advance(limit_s)
    p.step()
    assert p.held() == set()


@pytest.mark.parametrize(("retention_s", "held"), [(None, set()), (600.0, {"a"})])
def test_what_the_client_asked_to_hold_is_neither_reviewed_nor_broken_for_a_waiting_turn(
    programs: Make, retention_s: float | None, held: set[str]
) -> None:
    """The tool takes fifty times as long as such tools do, and a turn waits for the memory."""
    p = programs("caesura")
    p.learn("ls", 0.1, 0.1, 0.1)
    identity = ProgramIdentity(program_id="a", hints=Hints(retention_s=retention_s, expected_tool="ls"))
    p.engine.submit("a1", range(3000, 3320), 1, identity)
    p.engine.run()
    p.arrive("b", new_tokens=500, output=50)
    p.step()
    p.arrive("c", new_tokens=400)
    p.clock.advance(5.0)
    for _ in range(20):
        p.step()
    assert p.held() - {"c"} == held


def test_the_wait_of_programs_that_had_lost_their_kv_is_known_and_no_other(programs: Make) -> None:
    p = programs("vllm")
    p.turn("a", 100)
    p.turn("b", 100)
    p.arrive("x", 60 * BLOCK, output=3)
    p.step()
    p.arrive("a", 50)
    p.arrive("c", 50)  # its first turn: it had nothing to lose
    p.clock.advance(3.0)
    p.engine.run()
    p.step()
    assert p.scheduler.views.load.lost_queue_s == 3.0
    p.turn("b", 20)
    p.step()
    assert p.scheduler.views.load.lost_queue_s == 1.5
    p.scheduler.use_policy(PolicyConfig(name="continuum"))
    p.turn("h", 100)
    assert p.held() == {"h"}
    p.arrive("h", 20)
    p.clock.advance(9.0)
    p.step()
    p.step()
    assert p.scheduler.views.load.lost_queue_s == 1.5


def test_the_simplified_version_pins_for_short_tools_only(programs: Make) -> None:
    p = programs("continuum", simplified=True, threshold_s=2.0, fixed_ttl_s=3.0)
    p.learn("ls", 0.1, 0.2)
    p.learn("pytest", 20.0, 30.0)
    p.turn("a", 10, tool="ls")
    p.turn("b", 10, tool="pytest")
    assert p.held() == {"a"}
    assert p.scheduler.holds.get("default/a").until_s == 3.0  # type: ignore[union-attr]


def test_axes_of_different_policies_mix(programs: Make) -> None:
    p = programs("mars")
    p.scheduler.use_policy(PolicyConfig(name="mars", pause="continuum", budget="augserve"))
    whole = {name: build_policy(PolicyConfig(name=name)) for name in ("mars", "continuum", "augserve")}
    mixed = p.scheduler.policies
    assert mixed.order == whole["mars"].order
    assert mixed.pause == whole["continuum"].pause
    assert mixed.budget == whole["augserve"].budget
    p.turn("a", 100)
    assert p.held() == {"a"}


def test_what_a_rank_means_goes_with_the_order_when_axes_mix() -> None:
    whole = build_policy(PolicyConfig(name="caesura"))
    other = build_policy(PolicyConfig(name="caesura", order="mars"))
    assert (other.is_late, other.guards_memory) == (None, False)
    mixed = build_policy(PolicyConfig(name="mars", order="caesura"))
    assert (mixed.is_late, mixed.guards_memory) == (whole.is_late, True)


def test_the_load_tells_who_waits_and_can_no_longer_be_in_time(programs: Make) -> None:
    p = programs("caesura")
    p.scheduler.facts = replace(p.scheduler.facts, slo=SloConfig(ttft_s=1.0))
    p.arrive("a", new_tokens=900, output=30)
    p.step()
    p.arrive("b", new_tokens=500)
    p.step()
    load = p.scheduler.views.load
    assert (load.waiting, load.waiting_late, load.waiting_tokens) == (1, 0, 500)
    p.clock.advance(2.0)
    for _ in range(10):  # ranks are taken again every eighth step
        p.step()
    load = p.scheduler.views.load
    assert (load.waiting_late, load.waiting_in_time, load.waiting_tokens) == (1, 0, 0)
    p.scheduler.use_policy(PolicyConfig(name="mars"))
    p.step()
    load = p.scheduler.views.load
    assert (load.waiting_late, load.waiting_tokens) == (0, 500)


def test_the_bounds_of_a_turn_are_those_of_its_tenant_and_its_clients_deadline(programs: Make) -> None:
    p = programs("caesura")
    slos = {"quick": SloConfig(ttft_s=0.2, e2e_s=9.0), "batch": SloConfig(ttft_s=None)}
    p.scheduler.settings = p.scheduler.settings.model_copy(update={"slo": SloConfig(ttft_s=2.0), "tenant_slos": slos})
    for number, (tenant, deadline_s, bounds) in enumerate(
        [
            ("default", None, Slo(2.0)),
            ("quick", None, Slo(0.2, e2e_s=9.0)),
            ("quick", 5.0, Slo(0.2, e2e_s=5.0)),
            ("quick", 50.0, Slo(0.2, e2e_s=9.0)),
            ("batch", 30.0, Slo(None, e2e_s=30.0)),
        ]
    ):
        identity = ProgramIdentity(f"p{number}", tenant=tenant, hints=Hints(deadline_s=deadline_s))
        p.engine.submit(f"r{number}", range(100 * number, 100 * number + 50), 3, identity)
        assert p.scheduler.turns[f"r{number}"].bounds == bounds
    p.engine.run()
    # A second turn has the bounds of its tenant, too.
    p.engine.submit("again", range(100, 160), 3, ProgramIdentity("p1", tenant="quick"))
    assert p.scheduler.turns["again"].bounds == Slo(0.2, e2e_s=9.0)


def test_a_late_turn_of_one_tenant_is_in_time_for_another(programs: Make) -> None:
    p = programs("caesura")
    slos = {"quick": SloConfig(ttft_s=0.5)}
    p.scheduler.settings = p.scheduler.settings.model_copy(update={"slo": SloConfig(ttft_s=60.0), "tenant_slos": slos})
    p.arrive("a", new_tokens=900, output=60)
    p.step()
    for tenant in ("quick", "default"):
        p.engine.submit(tenant, range(5000, 5500), 3, ProgramIdentity("p", tenant=tenant))
    p.clock.advance(2.0)
    for _ in range(10):  # ranks are taken again every eighth step
        p.step()
    load = p.scheduler.views.load
    assert (load.waiting_late, load.waiting_in_time) == (1, 1)


def test_the_bounds_of_a_hold_are_those_of_the_turn_that_waits_or_of_its_tenant(programs: Make) -> None:
    p = programs("caesura")
    slos = {"quick": SloConfig(ttft_s=0.5)}
    p.scheduler.settings = p.scheduler.settings.model_copy(update={"slo": SloConfig(ttft_s=60.0), "tenant_slos": slos})

    def bounds(key: str) -> Slo:
        held = p.scheduler.holds.get(key)
        assert held is not None
        return p.scheduler.views.hold(held).bounds

    for number, tenant in enumerate(("quick", "default")):
        hints = Hints(expected_tool="ls")
        p.engine.submit(
            tenant, range(1000 * number, 1000 * number + 100), 3, ProgramIdentity("p", None, tenant, hints=hints)
        )
    p.engine.run()
    assert (bounds("quick/p"), bounds("default/p")) == (Slo(0.5), Slo(60.0))
    p.arrive("a", new_tokens=780, output=60)
    p.step()
    p.engine.submit("again", range(300), 3, ProgramIdentity("p", None, "quick", hints=Hints(deadline_s=7.0)))
    assert bounds("quick/p") == Slo(0.5, e2e_s=7.0)


def test_a_policy_switch_ends_the_old_policys_holds(programs: Make) -> None:
    p = programs("continuum")
    p.turn("a", 100)
    p.scheduler.use_policy(PolicyConfig(name="vllm"))
    assert (p.held(), p.phase("a")) == (set(), Phase.RELEASED)
    p.turn("a", 10)
    assert p.held() == set()


def test_a_program_that_never_comes_back_is_forgotten(programs: Make) -> None:
    p = programs("continuum")
    p.turn("a", 100)
    p.clock.advance(10.0)
    p.step()  # its hold expires
    p.clock.advance(p.scheduler.settings.limits.program_ttl_s)
    p.step()
    assert (len(p.scheduler.programs), p.scheduler.programs.concluded) == (0, 1)


def test_a_prefix_that_programs_share_hides_no_running_turn(programs: Make) -> None:
    """Six programs hold one system prompt and a little of their own; a running turn has it, too."""
    p = programs("continuum", default_ttl_s=1e6, max_ttl_s=1e6)
    shared = [7] * 320
    for name in "abcdef":
        p.contexts[name] = [*shared, ord(name)]
        p.turns[name] = 0
        p.turn(name, new_tokens=70)
    p.contexts["r"], p.turns["r"] = [*shared, 9], 0
    p.arrive("r", new_tokens=60, output=30)
    p.step()
    load, (running,) = p.scheduler.load_now(), p.scheduler.running
    assert p.scheduler.holds.num_tokens > load.facts.capacity_tokens > load.held_tokens
    assert load.held_tokens == p.scheduler.holds.num_blocks * BLOCK
    assert load.running_tokens == running.num_computed_tokens == 381


def test_at_its_pause_a_context_counts_as_running_and_one_that_ended_before_does_not(
    programs: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = programs("continuum")
    pause, loads = p.scheduler.views.pause, []

    def watched(*arguments: Any) -> PauseView:
        view = pause(*arguments)
        loads.append((view.context_tokens, view.load.running_tokens))
        return view

    monkeypatch.setattr(p.scheduler.views, "pause", watched)
    p.arrive("a", 100)
    p.arrive("b", 50)
    p.engine.run()
    assert loads == [(100, 150), (50, 50)]
