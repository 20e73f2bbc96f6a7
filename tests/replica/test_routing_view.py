"""What a replica says of itself to the router, from the real scheduler on a clock that stands still.

A replica has 63 usable blocks of 16 tokens, unless said otherwise.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from cluster.core.clock import ManualClock
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.replica_snapshot import ReplicaSnapshot, program_name, unpack_names
from replicas.control import dispatch
from replicas.presets import DEFAULT, preset
from replicas.routing_view import ACTIVE_WITHIN_S, HORIZONS_S, MAX_PAUSED, plain_snapshot, routing_snapshot
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import Shape, VirtualEngine

Replica = Callable[..., VirtualEngine]
CAPACITY = 63 * 16


class Site:
    """Programs on one replica, each a growing list of token ids of its own."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.engine = engine
        self.scheduler: AgentScheduler = engine.scheduler  # type: ignore[assignment]
        self.clock: ManualClock = self.scheduler.clock  # type: ignore[assignment]
        self.contexts: dict[str, list[int]] = {}
        self.count = 0

    def arrive(self, program: str, new_tokens: int, output: int = 1, *, tool: str = "ls", last: bool = False) -> None:
        first = 100_000 * (1 + len(self.contexts))
        context = self.contexts.setdefault(program, [first])
        context.extend(first + i for i in range(len(context), len(context) + new_tokens - (len(context) == 1)))
        self.count += 1
        hints = Hints(expected_tool=tool, expected_output_tokens=output)
        identity = ProgramIdentity(program_id=program, last_turn=last, hints=hints)
        request = self.engine.submit(f"{program}-{self.count}", context, output, identity)
        self.contexts[program] = request._all_token_ids

    def turn(self, program: str, new_tokens: int, output: int = 1, *, tool: str = "ls", last: bool = False) -> None:
        self.arrive(program, new_tokens, output, tool=tool, last=last)
        self.engine.run()

    def snapshot(self) -> ReplicaSnapshot:
        return routing_snapshot(self.scheduler, "r1", "m", 7, False)


Make = Callable[..., Site]


@pytest.fixture
def site(replica: Replica) -> Make:
    return lambda *args, **kwargs: Site(replica(*args, **kwargs))


def names(*programs: str) -> frozenset[int]:
    return frozenset(program_name(f"default/{program}") for program in programs)


def test_an_empty_replica(site: Make) -> None:
    told = site().snapshot()
    assert (told.replica, told.model, told.number, told.draining) == ("r1", "m", 7, False)
    assert (told.kv_tokens, told.free_tokens, told.held_tokens) == (CAPACITY, CAPACITY, 0)
    assert (told.running, told.waiting, told.programs, told.working_set_tokens) == (0, 0, 0, 0.0)
    assert told.resume_tokens == tuple((horizon_s, 0.0) for horizon_s in HORIZONS_S)
    assert told.residents == told.on_device == told.on_host == told.prefixes == b""
    assert told.turn_output_tokens > 0 and told.turn_new_tokens > 0 and told.program_turns >= 1 and told.pause_s > 0


def test_the_costs_are_the_cost_models(site: Make) -> None:
    s = site()
    cost = s.scheduler.facts.cost
    told = s.snapshot().costs
    assert told.decode_step_s(3, 900) == pytest.approx(cost.decode_step_s(3, 900))
    assert told.swap_token_s == cost.swap_token_s


def test_turns_that_wait_and_run_are_added_up(site: Make) -> None:
    s = site()
    s.arrive("a", 100, output=10)
    s.engine.step()
    s.arrive("b", 200, output=20)
    told = s.snapshot()
    assert (told.running, told.waiting, told.programs) == (1, 1, 2)
    assert told.running_tokens == 100  # computed by the step; its first output token has no KV yet
    assert told.waiting_tokens == 200
    assert told.output_tokens == 9 + 20
    assert told.working_set_tokens == pytest.approx(101 + 9 + 200 + 20)
    assert told.working_set_programs == 2
    assert unpack_names(told.residents) == names("a", "b")
    assert unpack_names(told.on_device) == names("a")


def test_a_long_prompt_that_is_half_computed_counts_by_what_is_left(site: Make) -> None:
    s = site(num_blocks=300)
    s.arrive("a", 3000)
    s.engine.step()  # 2048 of them
    told = s.snapshot()
    assert (told.running_tokens, told.waiting_tokens) == (2048, 3000 - 2048)


def test_a_turn_of_no_program_is_a_program_without_a_name(replica: Replica) -> None:
    engine = replica()
    engine.submit("lone", range(50), 5)
    told = routing_snapshot(engine.scheduler, "r1", "m", 1, True)  # type: ignore[arg-type]
    assert (told.programs, told.waiting_tokens, told.draining) == (1, 50, True)
    assert told.residents == b""


def test_a_held_programs_next_turn_needs_only_what_is_new(site: Make) -> None:
    s = site("continuum")
    s.turn("a", 160, output=5)
    told = s.snapshot()
    assert told.held_tokens == 164 and told.programs == 1
    assert unpack_names(told.residents) == unpack_names(told.on_device) == names("a")
    s.arrive("a", 40)
    assert s.snapshot().waiting_tokens == 165 + 40 - 160  # whole blocks are found again


def test_a_released_program_is_on_the_device_until_its_blocks_are_taken(site: Make) -> None:
    s = site("vllm")
    s.turn("a", 160, output=1)
    told = s.snapshot()
    assert told.held_tokens == 0 and told.free_tokens == CAPACITY
    assert unpack_names(told.on_device) == names("a")
    s.turn("b", 1000, output=1, last=True)  # takes nearly all of the memory
    told = s.snapshot()
    assert unpack_names(told.residents) == names("a") and told.on_device == b""
    s.arrive("a", 40)
    waiting = s.snapshot().waiting_tokens
    assert waiting >= 201 - 16


def paused(site: Site, soon_s: float, late_s: float) -> tuple[ReplicaSnapshot, ReplicaSnapshot]:
    """With one program of 800 tokens, whose tool takes so long; the first has ended before the second begins."""
    for _ in range(50):
        site.scheduler.durations.observe("quick", soon_s)
        site.scheduler.durations.observe("slow", late_s)
    site.turn("a", 800, tool="quick")
    quick = site.snapshot()
    site.turn("a", 1, tool="quick", last=True)
    site.turn("b", 800, tool="slow")
    return quick, site.snapshot()


def test_what_returns_soon_counts_for_more_than_what_returns_late(site: Make) -> None:
    s = site("continuum", num_blocks=300)
    refill_s = s.scheduler.facts.cost.refill_s
    quick, slow = paused(s, refill_s / 10, refill_s * 50)
    assert quick.working_set_tokens > 0.9 * 800 and slow.working_set_tokens < 0.1 * 800
    assert quick.working_set_programs > 0.9 and slow.working_set_programs < 0.1


def test_who_pauses_for_minutes_is_not_active_however_large_the_memory(site: Make) -> None:
    s = site("continuum", num_blocks=300)
    s.scheduler.facts = replace(s.scheduler.facts, cost=replace(s.scheduler.facts.cost, kv_capacity_tokens=10**9))
    assert s.scheduler.facts.cost.refill_s > 1000 * ACTIVE_WITHIN_S
    quick, slow = paused(s, ACTIVE_WITHIN_S / 10, ACTIVE_WITHIN_S * 50)
    assert quick.active_tokens > 0.9 * 800 and quick.active_programs > 0.9
    assert slow.active_tokens < 0.1 * 800 and slow.active_programs < 0.1
    assert slow.working_set_tokens > 0.9 * 800 and slow.working_set_programs > 0.9


def test_a_program_that_stays_away_counts_for_less_and_less(site: Make) -> None:
    s = site("vllm", num_blocks=300)
    for _ in range(50):
        s.scheduler.durations.observe("ls", 2.0)
    s.turn("a", 800)
    counts = []
    for away_s in (0.0, 1.0, 10.0, 100.0, 1000.0):
        s.clock.advance(away_s)
        told = s.snapshot()
        counts.append((told.programs, told.resume_tokens[-1][1]))
    assert counts[0][0] == counts[1][0] == 1
    assert counts[-1][0] == 0
    assert counts[0][1] >= counts[2][1] >= counts[3][1] >= counts[4][1]
    assert counts[4][1] < 0.05 * counts[0][1]


def test_the_forecast_of_resumes_is_what_they_will_need_computed(site: Make) -> None:
    s = site("vllm")
    for _ in range(50):
        s.scheduler.durations.observe("ls", 3.0)
    s.turn("a", 160)
    soon, later, latest = (tokens for _, tokens in s.snapshot().resume_tokens)
    assert soon == 0.0 and 0 < later == latest < 160  # nothing is back within 1 s; all of it is still cached
    s.turn("b", 1000, last=True)
    assert s.snapshot().resume_tokens[1][1] > later + 100  # now its context is to be computed again


def test_a_tool_that_has_finished_announces_its_program(site: Make) -> None:
    s = site("continuum")
    for _ in range(50):
        s.scheduler.durations.observe("ls", 500.0)
    s.turn("a", 160)
    before = s.snapshot().resume_tokens[1][1]
    dispatch(s.scheduler, "tool_finished", {"key": "default/a"})
    after = s.snapshot().resume_tokens[1][1]
    assert before == 0.0 < after


def test_programs_that_were_abandoned_teach_that_silence_is_an_end(site: Make) -> None:
    s = site("vllm", num_blocks=300)
    for _ in range(20):
        s.scheduler.durations.observe("ls", 2.0)
    s.turn("a", 100)
    s.clock.advance(20.0)
    before = s.snapshot().resume_tokens[-1][1]
    s.scheduler.programs.abandoned += 100
    assert s.snapshot().resume_tokens[-1][1] < before


def test_new_chats_are_no_working_set_where_the_chats_before_never_came_back(site: Make) -> None:
    """60 chats have been silent for ten times as long as a reply takes. 10 others have just been answered."""
    s = site("vllm", num_blocks=300)
    s.scheduler.facts = replace(s.scheduler.facts, cost=replace(s.scheduler.facts.cost, kv_capacity_tokens=10**9))
    for _ in range(10):
        s.scheduler.durations.observe("chat", 30.0)
    for number in range(60):
        s.turn(f"old{number}", 20, tool="chat")
    assert s.snapshot().working_set_programs > 55
    s.clock.advance(300.0)
    for number in range(10):
        s.turn(f"new{number}", 20, tool="chat")
    assert s.snapshot().working_set_programs < 4
    for number in range(60):  # and if they do come back, they count again
        s.turn(f"old{number}", 20, tool="chat")
    s.clock.advance(1.0)
    assert s.snapshot().working_set_programs > 40


def test_paused_programs_beyond_the_bound_are_left_out(site: Make) -> None:
    s = site("vllm")
    for number in range(MAX_PAUSED + 50):
        s.turn(f"p{number}", 2)
    told = s.snapshot()
    assert len(unpack_names(told.residents)) == MAX_PAUSED
    assert program_name("default/p0") not in unpack_names(told.residents)
    assert len(told.encode()) < 20_000


def test_vllms_own_scheduler_tells_what_it_can(tiny_config: Path) -> None:
    engine = VirtualEngine(AsyncScheduler, tiny_config, Shape(num_blocks=64))
    cost = preset(DEFAULT)
    engine.submit("a", range(100), 10)
    engine.step()
    engine.submit("b", range(100), 10)
    told = plain_snapshot(engine.scheduler, cost, "r2", "m", 3, False)
    assert (told.running, told.waiting, told.programs) == (1, 1, 2)
    assert (told.kv_tokens, told.free_tokens, told.running_tokens) == (CAPACITY, CAPACITY - 7 * 16, 100)
    assert told.waiting_tokens == 100 - 96  # it shares its beginning with the one that runs
    assert told.residents == told.on_device == b""
    assert ReplicaSnapshot.decode(told.encode()) == told
