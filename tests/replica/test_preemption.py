"""Timelines of sheddable turns that yield. On the replica of `policy_views`: an iteration takes 10 ms, and 1,000 tokens
of a prompt 0.1 s. Its memory has 63 blocks of 16 tokens, which are 1,008.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from cluster.config.schema import PolicyConfig, SloConfig
from cluster.core.clock import ManualClock
from cluster.core.lifecycle.events import HoldEnded, ReleaseReason
from cluster.core.program import Hints, ProgramIdentity
from replicas.host_tier import kv_transfer_config
from replicas.preemption import ASKED_A_STEP
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.virtual_engine import Shape, VirtualEngine, VirtualLink
from tests.replica.policy_views import COST
from tests.replica.test_timelines import SYNC_AND_ASYNC, Programs

Replica = Callable[..., VirtualEngine]
STEP_S = 0.01


class Yielding(Programs):
    """One replica, on which 10 ms pass with each step."""

    def __init__(self, engine: VirtualEngine, ttft_s: float | None = 1.0) -> None:
        super().__init__(engine)
        self.scheduler.facts = replace(
            self.scheduler.facts, cost=COST, slo=SloConfig(ttft_s=ttft_s), max_tokens=1000, capacity_tokens=1008
        )
        self.scheduler.settings = self.scheduler.settings.model_copy(update={"slo": SloConfig(ttft_s=ttft_s)})

    def submit(self, name: str, prompt: int, output: int, priority: int = 0) -> str:
        hints = Hints(priority=priority, expected_output_tokens=output)
        first = 1000 + 50 * len(self.scheduler.turns)
        identity = ProgramIdentity(name, last_turn=True, hints=hints)
        return self.engine.submit(name, [first + i % 7 for i in range(prompt)], output, identity).request_id

    def batch(self, name: str = "batch", prompt: int = 500, output: int = 400) -> str:
        return self.submit(name, prompt, output, priority=1)

    def pass_s(self, seconds: float) -> set[str]:
        """Step for so long. Return the turns that were scheduled."""
        scheduled: set[str] = set()
        for _ in range(round(seconds / STEP_S)):
            self.clock.advance(STEP_S)
            scheduled |= self.step().keys()
        return scheduled

    def last_turn(self, program: str) -> dict[str, Any]:
        story = self.scheduler.programs.to_public_dict(f"default/{program}")
        assert story is not None
        turn: dict[str, Any] = story["turns"][-1]
        return turn

    def waiting(self) -> set[str]:
        return {request.request_id for queue in self.scheduler.waiting_queues for request in queue}


@pytest.fixture
def yielding(replica: Replica) -> Callable[..., Yielding]:
    return lambda ttft_s=1.0, **kwargs: Yielding(replica("caesura", **kwargs), ttft_s)


Make = Callable[..., Yielding]


@SYNC_AND_ASYNC
def test_a_batch_turn_yields_in_time_and_ends_later(yielding: Make, asynchronous: bool) -> None:
    """A chat turn needs 600 tokens, and 500 are free. The batch turn would run for 4 s more, the bound is 1 s."""
    p = yielding(asynchronous=asynchronous)
    batch = p.batch()
    p.pass_s(0.2)
    chat = p.submit("chat", 600, 20)
    assert chat in p.pass_s(0.05), "the batch turn yields at once: its end is too late"
    assert p.waiting() == {batch}
    assert p.scheduler.requests[batch].num_preemptions == 1
    p.engine.run()
    ended = p.last_turn("batch")
    assert (ended["outcome"], ended["preemptions"], ended["output_tokens"]) == ("length_capped", 1, 400)


def test_a_turn_that_fits_preempts_nobody(yielding: Make) -> None:
    p = yielding()
    batch = p.batch()
    p.pass_s(0.2)
    p.submit("chat", 400, 20)
    assert p.pass_s(0.05) == {batch, "chat"}


def test_without_sheddable_turns_nobody_yields(yielding: Make) -> None:
    p = yielding()
    p.submit("agent", 500, 400)
    p.pass_s(0.2)
    p.submit("chat", 600, 20)
    assert p.pass_s(0.5) == {"agent"}


def test_a_batch_turn_that_ends_soon_is_not_preempted(yielding: Make) -> None:
    """It ends within 0.5 s, and the chat turn may wait for 0.9 s."""
    p = yielding()
    p.batch(output=50)
    p.pass_s(0.05)
    chat = p.submit("chat", 600, 20)
    assert chat in p.pass_s(0.7)
    assert p.last_turn("batch")["preemptions"] == 0


def test_a_late_turn_waits_for_the_batch_turn(yielding: Make) -> None:
    p = yielding()
    p.submit("agent", 400, 300)
    p.batch(prompt=500, output=90)
    p.pass_s(0.05)
    p.submit("chat", 600, 20)
    p.clock.advance(2.0)
    assert "chat" not in p.pass_s(0.2)
    assert p.scheduler.requests["batch"].num_preemptions == 0


def test_a_batch_turn_yields_its_place_in_a_full_batch(yielding: Make) -> None:
    p = yielding()
    for name in ("max_num_running_reqs", "max_num_active_reqs"):  # the latter in newer versions of vLLM
        if hasattr(p.scheduler, name):
            setattr(p.scheduler, name, 1)
    p.batch(prompt=100)
    p.pass_s(0.2)
    assert "chat" in {p.submit("chat", 100, 20)} & p.pass_s(0.03)
    assert p.waiting() == {"batch"}


def test_where_a_running_turn_lacks_memory_a_batch_turn_is_preempted(yielding: Make) -> None:
    """vLLM preempts the last turn of its list, which would be the agent's."""
    p = yielding(ttft_s=None)
    p.batch(prompt=400, output=300)
    p.pass_s(0.02)
    p.submit("agent", 400, 300)
    p.pass_s(2.0)
    assert (p.scheduler.requests["batch"].num_preemptions, p.scheduler.requests["agent"].num_preemptions) == (1, 0)


@pytest.mark.parametrize("first", ["batch", "agent"])
def test_where_a_running_turn_lacks_memory_a_protected_batch_turn_stays(yielding: Make, first: str) -> None:
    """It has waited for more than twice the longest wait. Whether it was admitted first or last does not matter."""
    p = yielding(ttft_s=None)
    for name in sorted(("batch", "agent"), key=first.__ne__):
        p.submit(name, 400, 300, priority=int(name == "batch"))
        p.pass_s(0.02)
    p.scheduler.turns["batch"].waited_s = 2.5 * p.scheduler.policies.max_wait_s
    p.pass_s(2.0)
    assert (p.scheduler.requests["batch"].num_preemptions, p.scheduler.requests["agent"].num_preemptions) == (0, 1)


def test_a_batch_turn_that_yields_is_known_within_some_steps_however_many_run(yielding: Make) -> None:
    p = yielding(num_blocks=640)
    for number in range(3 * ASKED_A_STEP):
        p.batch(f"batch{number}", 20)
    p.submit("agent", 20, 400)
    p.pass_s(0.2)
    running = [one.request_id for one in p.scheduler.running]
    assert len(running) == 3 * ASKED_A_STEP + 1 and running[0] == "agent"
    p.scheduler.turns["batch7"].waited_s = 1e6
    p.pass_s(0.05)
    assert [one.request_id for one in p.scheduler.running][:2] == ["batch7", "agent"]


def test_a_preempted_turn_that_has_waited_for_long_comes_before_all_others(yielding: Make) -> None:
    """Chat turns that fill the memory come all the time. The bound on the waits of batch work is 4 s."""
    p = yielding(max_wait_s=1.6)
    batch = p.batch(output=400)
    p.pass_s(0.2)
    served_s = []
    for number in range(1000):
        if number % 20 == 0:
            p.submit(f"chat{number}", 600, 20)
        if batch in p.pass_s(STEP_S):
            served_s.append(p.clock.now_s())
        if batch not in p.scheduler.requests:
            break
    else:
        pytest.fail("the batch turn starves")
    gaps_s = [later - earlier for earlier, later in pairwise(served_s)]
    assert max(gaps_s) > 0.3, "it has yielded"
    assert sum(gap for gap in gaps_s if gap > 2 * STEP_S) < 4.0


def test_nobody_is_preempted_while_the_engine_admits_nobody(yielding: Make) -> None:
    p = yielding()
    p.batch()
    p.pass_s(0.2)
    p.submit("chat", 600, 20)
    p.step()
    p.scheduler.deferred_frees.append((10**9, []))
    assert p.pass_s(0.1) == {"batch"}, "memory is still to be freed by a step in flight"
    p.scheduler.deferred_frees.clear()
    assert "chat" in p.pass_s(0.03)


def test_a_turn_that_is_preempted_between_two_steps_may_run_in_the_next(yielding: Make) -> None:
    """Its worker has then dropped it, and gets all of its tokens again."""
    p = yielding()
    batch = p.batch()
    p.pass_s(0.2)
    p.scheduler.preempt({batch})
    again = p.engine.step().scheduled_cached_reqs
    assert again.req_ids == [batch]
    assert again.resumed_req_ids == {batch}
    assert len(again.all_token_ids[batch]) == p.scheduler.requests[batch].num_tokens - 1


def with_host(model: Path, asynchronous: bool, policy: str = "caesura") -> tuple[Yielding, list[float]]:
    """A replica with a host tier, and the seconds of a load that begins now, which may be changed."""
    clock, load_s = ManualClock(), [0.0]
    engine = VirtualEngine(
        AgentScheduler,
        model,
        Shape(num_blocks=64, host_blocks=400),
        SchedulerSettings(policy=PolicyConfig(name=policy)),
        asynchronous,
        VirtualLink(clock, lambda tokens: load_s[0], 16),
        kv_transfer_config,
    )
    engine.scheduler.clock = clock  # type: ignore[attr-defined]
    return Yielding(engine), load_s


@SYNC_AND_ASYNC
def test_a_batch_turn_yields_while_another_turn_loads_from_the_host(tiny_config: Path, asynchronous: bool) -> None:
    """The turn that loads comes first, but it lacks nothing."""
    p, load_s = with_host(tiny_config, asynchronous)
    p.turn("a", 100, 5)
    assert p.scheduler.reset_prefix_cache(), "only the host has the context now"
    batch, load_s[0] = p.batch(), 1.0
    p.pass_s(0.2)
    loading = p.scheduler.requests[p.arrive("a", 10)]
    chat = p.submit("chat", 600, 20)
    assert chat in p.pass_s(0.05)
    assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert p.scheduler.requests[batch].num_preemptions == 1
    load_s[0] = 0.0
    while p.scheduler.has_requests():
        p.pass_s(1.0)
    p.scheduler.check_integrity()


@SYNC_AND_ASYNC
def test_what_a_preempted_turn_lacks_is_loaded_in_the_step_after(tiny_config: Path, asynchronous: bool) -> None:
    """In the step itself, vLLM's connector ends the engine at such a load."""
    p, load_s = with_host(tiny_config, asynchronous)
    batch = p.batch()
    p.pass_s(0.2)
    request, cache = p.scheduler.requests[batch], p.scheduler.kv_cache_manager
    [blocks] = cache.get_blocks(batch).get_block_ids()
    load_s[0] = 0.1
    p.scheduler.preempt({batch})
    cache.evict_blocks(set(blocks[20:]))
    assert p.step() == {}
    assert request.status is RequestStatus.PREEMPTED
    p.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert p.pass_s(0.2) == {batch}
    p.engine.run()
    assert p.last_turn("batch")["output_tokens"] == 400


def test_no_hold_is_evicted_as_if_nothing_ran_while_a_turn_loads(tiny_config: Path) -> None:
    """Continuum's pins yield to a waiting turn only if nothing runs, since a turn that runs will free memory."""
    p, load_s = with_host(tiny_config, False, "continuum")
    p.turn("a", 300, 5)
    p.scheduler.apply("default/a", HoldEnded(p.clock.now_s(), ReleaseReason.ASKED))
    assert p.scheduler.reset_prefix_cache(), "only the host has the context now"
    p.turn("b", 300, 5)
    load_s[0] = 1.0
    loading = p.scheduler.requests[p.arrive("a", 10)]
    p.submit("chat", 500, 20)
    p.pass_s(0.5)
    assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert p.held() == {"b"}
    while p.scheduler.has_unfinished_requests():
        p.pass_s(1.0)
    p.scheduler.check_integrity()
