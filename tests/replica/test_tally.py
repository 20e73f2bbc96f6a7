"""What a scheduler counts, on timelines of the real one. A replica has 63 usable blocks of 16 tokens."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.clock import ManualClock
from cluster.config import ControlConfig, PolicyConfig, SloConfig
from cluster.program import Hints, ProgramIdentity
from cluster.registry import POLICIES
from replicas.control import dispatch, snapshot
from replicas.presets import preset
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.tally import HOLD_ENDS, HoldEnd, Part, Tally
from replicas.virtual_engine import HEAD_SIZE, Shape, VirtualEngine
from replicas.virtual_replica import VirtualReplica

BLOCK = 16


class Counted:
    """Programs on one virtual replica, and what its scheduler counts."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.engine = engine
        self.scheduler: AgentScheduler = engine.scheduler  # type: ignore[assignment]
        self.clock: ManualClock = self.scheduler.clock  # type: ignore[assignment]
        self.tally: Tally = self.scheduler.tally
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
        return {how: count for how, count in self.tally.numbers()["holds_ended"].items() if count}


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
    assert c.tally.numbers()["pauses"]["hold"] == {"ttl": 1}
    assert c.ends() == {"used": 1}
    observed = c.tally.observations(0)
    assert (observed["hold"], observed["queue_first"], observed["queue_resumed"]) == ([3.0], [0.0], [1.0])
    # 100 tokens were held for 3 s; of the 101 that the program had, 96 are whole blocks.
    assert c.tally.waste.held == pytest.approx(300)
    assert c.tally.context_tokens == {Part.NEW: 100 + 20, Part.REUSED: 96, Part.FETCHED: 0, Part.RECOMPUTED: 5}
    assert request not in c.tally._known


def test_every_end_of_a_hold_has_its_name(counted: Make) -> None:
    c = counted("continuum", default_ttl_s=5.0, max_ttl_s=60.0)
    c.turn("a", 100)
    c.clock.advance(6.0)
    c.scheduler.expire(c.clock.now_s())
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


def test_a_reason_that_no_table_knows_is_the_policys_at_a_review() -> None:
    assert set(HOLD_ENDS.values()) == set(HoldEnd) - {HoldEnd.REVIEWED}


def test_a_lost_context_is_recomputed_and_a_changed_one_is_new(counted: Make) -> None:
    c = counted("vllm")
    c.turn("a", 320)
    c.turn("z", 62 * BLOCK, last=True)  # takes all of the memory: two of a's blocks may survive
    before = dict(c.tally.context_tokens)
    c.turn("a", 30)
    grown = {part: count - before.get(part, 0) for part, count in c.tally.context_tokens.items()}
    assert (grown[Part.REUSED] + grown[Part.RECOMPUTED], grown[Part.NEW]) == (321, 30)
    assert grown[Part.RECOMPUTED] > 280
    before = dict(c.tally.context_tokens)
    c.contexts["a"] = [7] * 351  # nothing of what it was
    c.turn("a", 0, last=True)
    grown = {part: count - before.get(part, 0) for part, count in c.tally.context_tokens.items()}
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
    assert c.tally.waste.recomputed > 0
    assert c.tally.context_tokens[Part.RECOMPUTED] == 0, "of turns when they are admitted first"
    assert not c.tally._known and not c.tally._again


def test_who_waits_too_long_for_memory_is_starved(tiny_config: Path) -> None:
    settings = SchedulerSettings(policy=PolicyConfig(name="vllm"), control=ControlConfig(starvation_s=5.0))
    engine = VirtualEngine(AgentScheduler, tiny_config, Shape(), settings)
    engine.scheduler.clock = ManualClock()
    c = Counted(engine)
    c.arrive("a", 600, 20, last=True)
    c.engine.step()
    c.arrive("b", 600, last=True)
    c.engine.step()
    c.clock.advance(4.0)
    numbers = snapshot(c.scheduler)
    assert (numbers["waiting"], numbers["waiting_late"], numbers["oldest_waiting_s"]) == (1, 0, 4.0)
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
    assert sum(count for reasons in numbers["pauses"].values() for count in reasons.values()) == 12
    reasons = {reason for named in numbers["pauses"].values() for reason in named}
    assert "other" not in reasons, "a policy's reason is a member of replicas.policy.Why"
    assert simulated.link is not None
    assert numbers["fetched_tokens"] == simulated.link.loaded_tokens
    assert 0 < numbers["stored_tokens"] <= simulated.link.stored_tokens
    assert numbers["token_bytes"] == 2 * 4 * HEAD_SIZE, "a key and a value of one head in four bytes"
