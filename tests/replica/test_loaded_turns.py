"""Turns whose context was loaded from the host own memory while they still wait: they must not be waited behind.

A replica has 63 usable blocks of 16 tokens. Under `LongestFirst` who comes later may go first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from cluster.config.schema import PolicyConfig, SloConfig
from cluster.core.clock import ManualClock
from cluster.core.program import ProgramIdentity
from replicas.control import dispatch, snapshot
from replicas.host_tier import kv_transfer_config
from replicas.policy import RankKey, TurnView
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.virtual_engine import Shape, VirtualEngine, VirtualLink, write_config_only_model
from tests.replica.policy_views import COST

BLOCK, BLOCKS = 16, 64
LOAD_S = 1.0


@dataclass(frozen=True)
class LongestFirst:
    """An order in which who came first may be overtaken."""

    refresh_steps: int | None = 1

    def key(self, turn: TurnView) -> RankKey:
        return (-turn.tokens,)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config_only_model(tmp_path_factory.mktemp("config-only-model"), 32768)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def make_engine(model: Path, is_async: bool, policy: str) -> tuple[VirtualEngine, AgentScheduler]:
    clock = ManualClock()
    made = VirtualEngine(
        AgentScheduler,
        model,
        Shape(num_blocks=BLOCKS, host_blocks=400),
        SchedulerSettings(policy=PolicyConfig(name=policy)),
        is_async,
        VirtualLink(clock, lambda tokens: LOAD_S, BLOCK),
        kv_transfer_config,
    )
    scheduler = made.scheduler
    assert isinstance(scheduler, AgentScheduler)
    scheduler.clock = clock
    return made, scheduler


@pytest.fixture(params=[None, LongestFirst()], ids=["by arrival", "longest first"])
def engine(request: pytest.FixtureRequest, is_async: bool, model: Path) -> Iterator[VirtualEngine]:
    made, scheduler = make_engine(model, is_async, "vllm")
    if request.param is not None:
        scheduler.policies = replace(scheduler.policies, order=request.param)
    yield made
    scheduler.check_integrity()


def submit(engine: VirtualEngine, program: str, number: int, blocks: int, output: int = 1) -> str:
    tokens = [1000 + ord(program)] * (blocks * BLOCK)
    return engine.submit(f"{program}{number}", tokens, output, ProgramIdentity(program_id=program)).request_id


def steps(engine: VirtualEngine, count: int) -> list[str]:
    """The requests that so many steps scheduled, in order, each once."""
    seen: dict[str, None] = {}
    for _ in range(count):
        if engine.scheduler.has_requests():
            engine.scheduler.clock.advance(LOAD_S)  # type: ignore[attr-defined]
            seen |= dict.fromkeys(engine.step().num_scheduled_tokens)
    return list(seen)


def swapped_out(engine: VirtualEngine, program: str, blocks: int) -> None:
    """The host has so much of the program, and the device nothing."""
    submit(engine, program, 1, blocks)
    steps(engine, 20)
    submit(engine, "!", ord(program), 62)
    steps(engine, 20)


def test_a_turn_that_comes_during_a_load_does_not_stop_everything(engine: VirtualEngine) -> None:
    swapped_out(engine, "a", 40)
    resumed = submit(engine, "a", 2, 42)
    engine.step()  # its 40 blocks are allocated, and being loaded
    assert engine.free_blocks() <= 23
    longer = submit(engine, "b", 1, 50)  # ranks before it, and finds too little memory
    assert steps(engine, 40) == [resumed, longer]


def test_one_of_several_loaded_turns_goes_on(engine: VirtualEngine) -> None:
    for program in "ac":
        swapped_out(engine, program, 25)
    waiting = {submit(engine, program, 2, 30) for program in "ac"}
    engine.step()
    waiting.add(submit(engine, "b", 1, 60))
    assert set(steps(engine, 80)) == waiting
    assert not engine.scheduler.has_unfinished_requests()


@pytest.mark.parametrize("alone", [False, True], ids=["beside another turn", "alone"])
def test_a_loaded_turn_lacks_what_it_does_not_own(
    model: Path, is_async: bool, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It owns 25 of its 30 blocks, and 3 are free. The watermark counts only while another turn runs, as in vLLM."""
    engine, scheduler = make_engine(model, is_async, "vllm")
    swapped_out(engine, "a", 25)
    scheduler.kv_cache_manager.watermark_blocks, pool = 2, scheduler.kv_cache_manager.block_pool
    if not alone:
        submit(engine, "d", 1, 10, output=12)
        steps(engine, 2)
    submit(engine, "a", 2, 30)
    engine.step()  # its 25 blocks are allocated, and being loaded
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 3)
    lacking: list[int] = []
    monkeypatch.setattr(scheduler.eviction, "evict", lambda one, lacks, *rest: lacking.append(lacks))
    steps(engine, 3)
    assert set(lacking) == {2 if alone else 4}
    pool.free_blocks(taken)
    steps(engine, 40)
    assert not scheduler.has_unfinished_requests()


def test_a_reset_that_is_refused_changes_nothing(model: Path, is_async: bool) -> None:
    """The host has the context of `a`, and that of `c` is held."""
    engine, scheduler = make_engine(model, is_async, "caesura")
    swapped_out(engine, "a", 20)
    submit(engine, "c", 1, 5)
    steps(engine, 5)
    held, stored = len(scheduler.holds), snapshot(scheduler)["host_used_tokens"]
    assert held and stored
    running = submit(engine, "d", 1, 3, output=10)
    steps(engine, 2)
    assert dispatch(scheduler, "reset", {}) == {"reset": False, "reason": "turns that use the cache: 1"}
    assert (len(scheduler.holds), snapshot(scheduler)["host_used_tokens"] >= stored) == (held, True)
    scheduler.finish_requests(running, RequestStatus.FINISHED_ABORTED)
    steps(engine, 5)
    waiting = submit(engine, "e", 1, 3)
    assert dispatch(scheduler, "reset", {}) == {"reset": True}, "a turn that waits has no memory"
    assert (len(scheduler.holds), snapshot(scheduler)["host_used_tokens"]) == (0, 0)
    assert waiting in steps(engine, 5)


def test_a_reset_while_a_turn_loads_is_refused(model: Path, is_async: bool) -> None:
    engine, scheduler = make_engine(model, is_async, "caesura")
    swapped_out(engine, "a", 20)
    resumed = submit(engine, "a", 2, 22)
    engine.step()
    assert dispatch(scheduler, "reset", {})["reset"] is False
    assert snapshot(scheduler)["host_used_tokens"] > 0
    assert resumed in steps(engine, 20)


def test_no_room_is_made_for_a_turn_while_it_loads(model: Path, is_async: bool) -> None:
    """Steps have 100 tokens, of which a generating turn gets one. A prompt that has begun gets the rest of each."""
    engine, scheduler = make_engine(model, is_async, "caesura")
    scheduler.facts = replace(scheduler.facts, cost=COST, slo=SloConfig(ttft_s=1.0), max_tokens=1000)
    submit(engine, "a", 1, 20)
    steps(engine, 20)
    assert scheduler.reset_prefix_cache(), "only the host has the context now"
    submit(engine, "d", 1, 1, output=50)
    engine.step()
    resumed = scheduler.requests[submit(engine, "a", 2, 22)]
    engine.step()
    begun = submit(engine, "b", 1, 35)
    scheduled = [engine.step().num_scheduled_tokens.get(begun, 0) for _ in range(4)]
    assert resumed.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert scheduled == [99, 99, 99, 99]
    assert resumed.request_id in steps(engine, 80)
    assert not scheduler.has_unfinished_requests()
    scheduler.check_integrity()
