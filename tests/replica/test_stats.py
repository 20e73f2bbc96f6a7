"""What a scheduler counts, on timelines of the real one. A replica has 63 usable blocks of 16 tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cluster.config.schema import LimitsConfig, PolicyConfig, SloConfig
from cluster.core.clock import ManualClock
from cluster.core.lifecycle.events import PauseReason
from cluster.core.lifecycle.machine import Phase
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.registry import POLICIES
from replicas.control import dispatch, snapshot
from replicas.policies.baselines import NoHold
from replicas.policy import Hold, HoldView, PauseDecision, PauseView, Release
from replicas.presets import preset
from replicas.program_table import KvDecision
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.stats import SAMPLED_BLOCKS, KvUse, Part, Stats, cached_blocks
from replicas.virtual_engine import HEAD_SIZE, Shape, VirtualEngine
from replicas.virtual_replica import VirtualReplica

BLOCK = 16


class Counted:
    """Programs on one virtual replica, and what its scheduler counts."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.engine = engine
        self.scheduler: AgentScheduler = engine.scheduler  # type: ignore[assignment]
        self.clock: ManualClock = self.scheduler.clock  # type: ignore[assignment]
        self.stats: Stats = self.scheduler.stats
        self.contexts: dict[str, list[int]] = {}

    def arrive(self, program: str, new_tokens: int, output: int = 1, last: bool = False) -> str:
        context = list(self.contexts.get(program, []))
        context.extend(1000 + 10 * ord(program) + i % 7 for i in range(new_tokens))
        identity = ProgramIdentity(program_id=program, last_turn=last, hints=Hints(expected_tool="ls"))
        request = self.engine.submit(f"{program}{len(context)}", context, output, identity)
        self.contexts[program] = request._all_token_ids
        return request.request_id

    def turn(self, program: str, new_tokens: int, output: int = 1, last: bool = False) -> None:
        self.arrive(program, new_tokens, output, last)
        self.engine.run()

    def ends(self) -> dict[str, int]:
        return {how: count for how, count in self.stats.numbers()["kv_pins_released"].items() if count}


@pytest.fixture
def counted(replica: Callable[..., VirtualEngine]) -> Callable[..., Counted]:
    return lambda *args, **kwargs: Counted(replica(*args, **kwargs))


Make = Callable[..., Counted]


def test_a_hold_that_is_used_is_counted_with_its_length_and_its_memory(counted: Make) -> None:
    c = counted("continuum", default_ttl_s=10.0)
    c.turn("a", 100)
    c.clock.advance(2.0)
    request = c.arrive("a", 20, last=True)
    c.clock.advance(1.0)
    c.engine.run()
    assert c.stats.numbers()["kv_retention_decisions"]["hold"] == {"ttl": 1}
    assert c.ends() == {"used": 1}
    observed = c.stats.observations(0)
    assert (observed["hold"], observed["queue_first"], observed["queue_resumed"]) == ([3.0], [0.0], [1.0])
    # 100 tokens were held for 3 s; of the 101 that the program had, 96 are whole blocks.
    assert c.stats.waste.held == pytest.approx(300)
    found = {Part.NEW: 100 + 20, Part.REUSED: 96, Part.FETCHED: 0, Part.DISK: 0, Part.RECOMPUTED: 5}
    assert c.stats.context_tokens == found
    assert request not in c.stats._known


def test_the_choices_of_a_first_request_have_waited_as_first_turns(counted: Make) -> None:
    """With n = 4 a request has four turns at once. The program pauses when the last of them has ended."""
    c = counted("continuum2")
    identity = ProgramIdentity("a", hints=Hints(expected_tool="ls"))

    def ask(name: str) -> None:
        for choice in range(4):
            c.engine.submit(f"{choice}_{name}", [1000] * 40, 1, identity)
        c.clock.advance(1.0)
        c.engine.run()

    ask("first")
    observed = c.stats.observations(0)
    assert (observed["queue_first"], observed["queue_resumed"]) == ([1.0] * 4, [])
    assert c.scheduler.lost_queue.count == 0
    dispatch(c.scheduler, "release", {"key": "default/a"})
    ask("second")
    observed = c.stats.observations(observed["number"])
    assert (observed["queue_first"], observed["queue_resumed"]) == ([], [1.0] * 4)
    assert c.scheduler.lost_queue.count == 4


def test_every_end_of_a_hold_has_its_name(counted: Make) -> None:
    c = counted("continuum", default_ttl_s=5.0, max_ttl_s=60.0)
    c.turn("a", 100)
    c.clock.advance(6.0)
    c.scheduler.expire_holds(c.clock.now_s())
    assert c.ends() == {"expired": 1}
    c.turn("b", 480)
    c.turn("c", 500, 40, last=True)  # it grows into b's hold
    assert c.ends() == {"expired": 1, "broken_running": 1}
    c.turn("d", 600)
    c.turn("e", 600, last=True)
    assert c.ends() == {"expired": 1, "broken_running": 1, "broken_starved": 1}
    for program, operation in (("f", "release"), ("g", "moved")):
        c.turn(program, 50)
        dispatch(c.scheduler, operation, {"key": f"default/{program}"})
    c.turn("h", 50)
    dispatch(c.scheduler, "reset", {})
    assert c.ends() == {
        **{"expired": 1, "broken_running": 1, "broken_starved": 1},
        **{"asked": 1, "moved": 1, "reset": 1},
    }


class ReleasesAtTheReview(NoHold):
    review_steps = 1  # type: ignore[assignment]

    def decide(self, pause: PauseView) -> PauseDecision:
        return Hold(pause.now_s + 100.0)

    def review(self, hold: HoldView) -> PauseDecision:
        return Release(PauseReason.DOES_NOT_PAY)


def test_a_hold_that_a_review_ends_is_counted_as_reviewed_and_shown_with_the_policys_reason(counted: Make) -> None:
    c = counted("vllm")
    c.scheduler.policies = replace(c.scheduler.policies, pause=ReleasesAtTheReview())
    c.turn("a", 100)
    assert c.scheduler.programs["default/a"].phase is Phase.HELD
    c.engine.step()
    assert c.ends() == {"reviewed": 1}
    events = (c.scheduler.programs.to_public_dict("default/a") or {})["events"]
    assert events[-1]["event"] == "HoldEnded(does not pay) -> released"
    assert (events[-1]["phase"], events[-1]["reason"]) == ("released", "does not pay")


def test_the_reason_of_a_policy_from_elsewhere_is_one_label(counted: Make) -> None:
    c = counted("vllm")
    c.stats.paused(KvDecision.RELEASE, "because of request 17")  # type: ignore[arg-type]
    c.stats.paused(KvDecision.RELEASE, "because of request 18")  # type: ignore[arg-type]
    assert c.stats.numbers()["kv_retention_decisions"]["release"] == {"other": 2}


def test_a_lost_context_is_recomputed_and_a_changed_one_is_new(counted: Make) -> None:
    c = counted("vllm")
    c.turn("a", 320)
    c.turn("z", 62 * BLOCK, last=True)  # takes all of the memory: two of a's blocks may survive
    before = dict(c.stats.context_tokens)
    c.turn("a", 30)
    grown = {part: count - before.get(part, 0) for part, count in c.stats.context_tokens.items()}
    assert (grown[Part.REUSED] + grown[Part.RECOMPUTED], grown[Part.NEW]) == (321, 30)
    assert grown[Part.RECOMPUTED] > 280
    before = dict(c.stats.context_tokens)
    c.contexts["a"] = [7] * 351  # nothing of what it was
    c.turn("a", 0, last=True)
    grown = {part: count - before.get(part, 0) for part, count in c.stats.context_tokens.items()}
    assert (grown[Part.NEW], grown[Part.RECOMPUTED]) == (351, 0)


def test_a_preempted_turn_recomputes_what_it_had(counted: Make) -> None:
    c = counted("vllm")
    c.arrive("a", 500, 30, last=True)
    c.arrive("b", 480, 30, last=True)
    seconds = 0.5
    while c.scheduler.has_unfinished_requests():
        output = c.scheduler.schedule()
        c.clock.advance(seconds)
        c.engine.complete(output)
    assert c.stats.waste.recomputed > 0
    assert c.stats.context_tokens[Part.RECOMPUTED] == 0, "of turns when they are admitted first"
    assert not c.stats._known and not c.stats._again


def test_a_program_remembers_how_long_it_waited_after_a_preemption_but_not_before_it_was_scheduled(
    counted: Make,
) -> None:
    c = counted("lamps")
    c.arrive("a", 500, 30, last=False)
    c.arrive("b", 480, 30, last=False)
    steps = 0
    preempted_at: dict[str, int] = {}
    while c.scheduler.has_unfinished_requests():
        output = c.scheduler.schedule()
        steps += 1
        preempted_at |= dict.fromkeys(output.preempted_req_ids or (), steps)
        c.engine.complete(output)
    [name] = preempted_at
    waits = {key: c.scheduler.programs.longest_wait_steps(f"default/{key}") for key in "ab"}
    assert waits.pop(name[0]) > 5
    assert list(waits.values()) == [0]


def test_who_waits_too_long_for_memory_is_starved(tiny_config: Path) -> None:
    settings = SchedulerSettings(policy=PolicyConfig(name="vllm"), limits=LimitsConfig(starvation_s=5.0))
    engine = VirtualEngine(AgentScheduler, tiny_config, Shape(), settings)
    engine.scheduler.clock = ManualClock()
    c = Counted(engine)
    c.arrive("a", 600, 20, last=True)
    c.engine.step()
    c.arrive("b", 600, last=True)
    c.engine.step()
    c.clock.advance(4.0)
    numbers = snapshot(c.scheduler)
    assert (numbers["waiting"], numbers["waiting_slo_missed"], numbers["oldest_waiting_s"]) == (1, 0, 4.0)
    c.clock.advance(2.0)
    c.engine.run()
    numbers = snapshot(c.scheduler)
    assert (numbers["starved_turns"], numbers["oldest_waiting_s"]) == (1, 0.0)
    assert numbers["scheduled_tokens"] == 600 + 19 + 600
    assert numbers["steps"] == 21


def test_observations_are_told_until_they_are_taken(counted: Make) -> None:
    c = counted("vllm")
    c.turn("a", 10, last=True)
    first = dispatch(c.scheduler, "exchange", {"observed": 0})["observations"]
    assert (first["number"], first["queue_first"], first["lost"]) == (1, [0.0], 0)
    assert dispatch(c.scheduler, "exchange", {"observed": 0})["observations"] == first
    c.turn("b", 10, last=True)
    assert dispatch(c.scheduler, "exchange", {"observed": 1})["observations"]["number"] == 2
    assert dispatch(c.scheduler, "exchange", {"observed": 2})["observations"]["queue_first"] == []
    # A replica that has more than there are asks a scheduler that began anew.
    assert dispatch(c.scheduler, "exchange", {"observed": 7})["observations"]["queue_first"] == [0.0, 0.0]
    assert dispatch(c.scheduler, "exchange", {})["observations"] == {"number": 2}


@pytest.fixture(params=list(POLICIES))
def simulated(request: pytest.FixtureRequest, tiny_config: Path) -> Iterator[VirtualReplica]:
    """Six programs of three turns that do not fit the memory together, under every policy, in virtual time."""
    clock = ManualClock()
    shape = Shape(37, 32, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, host_blocks=40)
    policy = PolicyConfig(name=request.param)
    replica = VirtualReplica.build(policy, preset("opt-13b/h800"), SloConfig(), shape, tiny_config, clock)
    contexts: dict[int, list[int]] = {n: [] for n in range(6)}
    known: dict[int, int] = dict.fromkeys(range(6), 0)
    due = [(0.01 * n, n, 0) for n in range(6)]
    under_way: dict[str, tuple[int, int]] = {}
    while due or under_way:
        if not under_way:
            clock.move_to(max(clock.now_s(), min(due)[0]))
        for entry in [entry for entry in due if entry[0] <= clock.now_s()]:
            due.remove(entry)
            _, n, turn = entry
            contexts[n] += [300 + n * 10 + i % 9 for i in range(200 if turn == 0 else 60)]
            who = ProgramIdentity(program_id=f"p{n}", last_turn=turn == 2, hints=Hints(expected_tool="ls"))
            replica.submit(f"{n}-{turn}", list(contexts[n]), 12, who, known[n])
            under_way[f"{n}-{turn}"] = (n, turn)
        seconds = replica.begin_step()
        assert seconds is not None
        clock.advance(seconds)
        for ended in replica.end_step():
            n, turn = under_way.pop(ended.request.request_id)
            contexts[n] += ended.generated
            known[n] = len(contexts[n])
            if turn < 2:
                due.append((clock.now_s() + 0.05, n, turn + 1))
    yield replica
    replica.check_integrity()


def test_the_scheduler_counts_the_waste_that_the_simulator_knows(simulated: VirtualReplica) -> None:
    scheduler = simulated.engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    numbers = snapshot(scheduler)
    waste = simulated.settled_waste()
    assert numbers["wasted_token_seconds"]["held"] == pytest.approx(waste.held)
    # Steps that wait for the host tier take longer than they compute: the scheduler sees the whole of it.
    assert numbers["wasted_token_seconds"]["recomputed"] == pytest.approx(waste.recomputed, rel=0.1)
    assert waste.held + waste.recomputed > 0, "memory was never short"
    assert sum(count for reasons in numbers["kv_retention_decisions"].values() for count in reasons.values()) == 12
    reasons = {reason for named in numbers["kv_retention_decisions"].values() for reason in named}
    assert "other" not in reasons, "a policy's reason is a member of cluster.core.lifecycle.events.PauseReason"
    assert simulated.link is not None
    assert numbers["fetched_tokens"] == simulated.link.loaded_tokens
    assert 0 < numbers["stored_tokens"] <= simulated.link.stored_tokens
    assert numbers["token_bytes"] == 2 * 4 * HEAD_SIZE, "a key and a value of one head in four bytes"


@dataclass
class Block:
    ref_cnt: int
    block_hash: bytes | None


def use(engine: VirtualEngine) -> KvUse:
    return KvUse.of(engine.scheduler.kv_cache_manager.block_pool, engine.scheduler.holds.num_blocks)


def identity(program: str) -> ProgramIdentity:
    return ProgramIdentity(program_id=program, hints=Hints(expected_tool="ls"))


def test_every_block_is_of_one_kind(replica: Callable[..., VirtualEngine]) -> None:
    engine = replica("continuum", default_ttl_s=100.0, max_ttl_s=100.0)
    assert use(engine) == KvUse(running=0, held=0, cached=0, empty=63)
    engine.submit("a1", range(1000, 1100), 1, identity("a"))
    engine.run()
    # 100 prompt tokens and one that was generated, whose KV was never computed: 7 blocks, held.
    assert use(engine) == KvUse(running=0, held=7, cached=0, empty=56)
    engine.submit("b1", range(2000, 2060), 50, identity("b"))
    engine.step()
    assert use(engine) == KvUse(running=4, held=7, cached=0, empty=52)


def test_what_is_given_back_stays_cached_until_somebody_needs_it(replica: Callable[..., VirtualEngine]) -> None:
    engine = replica("vllm")
    engine.submit("a1", range(1000, 1100), 1, identity("a"))
    engine.run()
    # Of its seven blocks six were full: only those can be found again.
    assert use(engine) == KvUse(running=0, held=0, cached=6, empty=57)
    assert snapshot(engine.scheduler)["cached_blocks"] == 6  # type: ignore[arg-type]
    engine.submit("b1", range(3000, 3000 + 60 * 16), 5)
    engine.step()
    assert use(engine).cached == 3


def test_of_a_large_pool_a_part_is_looked_at() -> None:
    pool = [Block(n % 2, b"known" if n % 4 < 2 else None) for n in range(3 * SAMPLED_BLOCKS)]
    assert abs(cached_blocks(pool) - len(pool) / 4) / len(pool) < 0.02
