"""Whatever happens on a replica, what it says of itself agrees with its scheduler, and to say it changes nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.schema import PolicyConfig, SloConfig
from cluster.core.clock import ManualClock
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.replica_snapshot import ReplicaSnapshot, program_name, unpack_names
from replicas.control import dispatch
from replicas.presets import DEFAULT, preset
from replicas.routing_view import MOSTLY, routing_snapshot
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import Shape
from replicas.virtual_replica import VirtualReplica

PROGRAMS = tuple("abcdef")

Event = tuple[str, str, int, bool]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("arrive", "arrive", "arrive", "alone", "step", "step", "step", "wait", "finished", "moved")),
        st.sampled_from(PROGRAMS),
        st.integers(1, 300),
        st.booleans(),
    ),
    min_size=5,
    max_size=60,
)


class Life:
    """A replica of 63 blocks of 16 tokens, and a host tier of as many."""

    def __init__(self, model: Path, policy: str, host_blocks: int) -> None:
        self.clock = ManualClock()
        shape = Shape(num_blocks=64, max_num_batched_tokens=256, max_num_seqs=4, host_blocks=host_blocks)
        cost = preset(DEFAULT)
        self.replica = VirtualReplica.build(PolicyConfig(name=policy), cost, SloConfig(), shape, model, self.clock)
        scheduler = self.replica.engine.scheduler
        assert isinstance(scheduler, AgentScheduler)
        self.scheduler = scheduler
        self.contexts: dict[str, list[int]] = {}
        self.number = 0

    def do(self, event: Event) -> None:
        name, program, size, flag = event
        match name:
            case "arrive" | "alone":
                self.arrive(program if name == "arrive" else None, size, flag and size > 200)
            case "step":
                self.step()
            case "wait":
                self.clock.advance(size / 20)
            case "finished":
                dispatch(self.scheduler, "tool_finished", {"key": f"default/{program}"})
            case "moved":
                dispatch(self.scheduler, "moved", {"key": f"default/{program}"})

    def arrive(self, program: str | None, size: int, last: bool) -> None:
        self.number += 1
        context = self.contexts.setdefault(program or f"alone-{self.number}", [1000 + self.number])
        context.extend(2000 + self.number for _ in range(min(size, 700 - len(context))))
        tool = ("ls", "make")[size % 2]
        identity = ProgramIdentity(program_id=program, last_turn=last, hints=Hints(expected_tool=tool))
        turn = self.replica.submit(f"t{self.number}", list(context), 1 + size % 9, identity, 0)
        context[:] = turn.request.all_token_ids

    def step(self) -> None:
        seconds = self.replica.begin_step()
        if seconds is not None:
            self.clock.advance(seconds)
            self.replica.end_step()

    def snapshot(self) -> ReplicaSnapshot:
        return routing_snapshot(self.scheduler, "r", "m", 1, False)


def check(life: Life) -> None:
    told, scheduler = life.snapshot(), life.scheduler
    assert told == life.snapshot()
    assert ReplicaSnapshot.decode(told.encode()) == told  # so all numbers are finite and not negative
    held = {item.key: item for item in scheduler.holds}
    programs = {state.key: state for state in scheduler.programs.recent()}
    queues = scheduler.waiting_queues
    waiting = [request for queue in queues for request in queue]
    in_flight = [*scheduler.running, *waiting]
    assert told.held_tokens == scheduler.holds.num_tokens + scheduler.swapping.fetching_tokens
    assert told.free_tokens == life.replica.engine.free_blocks() * 16 <= told.kv_tokens
    assert (told.running, told.waiting + told.put_off) == (len(scheduler.running), len(waiting))
    assert told.put_off == sum(queue.late for queue in queues)
    assert told.host_used_tokens <= told.host_tokens
    assert told.running_tokens == sum(request.num_computed_tokens for request in scheduler.running)
    assert told.waiting <= told.waiting_tokens + len(scheduler.running)
    assert told.running_tokens + told.waiting_tokens <= sum(request.num_tokens for request in in_flight)
    residents, on_device, on_host = map(unpack_names, (told.residents, told.on_device, told.on_host))
    assert residents == {program_name(key) for key in programs}
    assert on_device | on_host <= residents and not on_device & on_host
    paused = {key: item for key, item in held.items() if not programs[key].active}  # of some, the end is evicted
    mostly = (key for key, item in paused.items() if item.tokens >= MOSTLY * programs[key].context_tokens)
    assert {program_name(key) for key in mostly} <= on_device
    active = sum(state.active > 0 for state in programs.values())
    alone = sum(turn.key is None for turn in scheduler.turns.values())
    assert active + alone <= told.programs <= len(programs) + alone
    put_off = {one.request_id for one in waiting for queue in queues if queue.puts_off(one.request_id)}
    pressing = [scheduler.turns[one.request_id].key for one in in_flight if one.request_id not in put_off]
    counted = len({key for key in pressing if key is not None}) + pressing.count(None)
    assert counted <= told.working_set_programs <= counted + len(programs) - active
    assert counted <= told.active_programs <= counted + len(programs) - active
    tokens = [amount for _, amount in told.resume_tokens]
    assert tokens == sorted(tokens)
    most = sum(state.context_tokens for state in programs.values()) + told.output_tokens
    most += sum(request.num_tokens for request in in_flight) + len(programs)
    assert told.working_set_tokens <= most and told.active_tokens <= most


@pytest.mark.parametrize(("policy", "host_blocks"), [("caesura", 0), ("caesura", 63), ("continuum", 0), ("vllm", 63)])
@settings(max_examples=25, deadline=None)
@given(events=EVENTS)
def test_a_snapshot_agrees_with_its_scheduler(
    tiny_config: Path, policy: str, host_blocks: int, events: Sequence[Event]
) -> None:
    life = Life(tiny_config, policy, host_blocks)
    for event in events:
        life.do(event)
        check(life)
    while life.replica.busy or life.scheduler.has_unfinished_requests():
        life.step()
    check(life)
    life.scheduler.check_integrity()
