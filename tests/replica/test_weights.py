"""What a scheduler does when the model gets other weights: all KV is dropped, and nothing of it is found again."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request, RequestStatus

from cluster.core.lifecycle.machine import Phase
from cluster.core.program import ProgramIdentity
from replicas.control import dispatch
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import VirtualEngine
from replicas.vllm_patches import salt_block_hashes
from tests.replica.test_preemption import with_host
from tests.replica.test_timelines import SYNC_AND_ASYNC

Replica = Callable[..., VirtualEngine]
PROMPT = list(range(1000, 1100))


@pytest.fixture
def _own_hashes() -> Iterator[None]:
    kv_cache_utils.init_none_hash(sha256)
    yield
    salt_block_hashes("")


def scheduler_of(engine: VirtualEngine) -> AgentScheduler:
    assert isinstance(engine.scheduler, AgentScheduler)
    return engine.scheduler


def submit(engine: VirtualEngine, name: str, output: int, *, last: bool = True) -> str:
    identity = ProgramIdentity(name, last_turn=last)
    return engine.submit(name, PROMPT, output, identity).request_id


@SYNC_AND_ASYNC
def test_turns_under_way_keep_their_tokens_and_compute_their_context_again(
    replica: Replica, asynchronous: bool
) -> None:
    engine = replica(asynchronous=asynchronous)
    scheduler = scheduler_of(engine)
    first = submit(engine, "first", 30)
    for _ in range(10):
        engine.step()
    while engine._in_flight:  # a pause waits for it
        engine._finish(*engine._in_flight.pop(0))
    waiting = submit(engine, "second", 5)
    before = scheduler.requests[first].num_output_tokens
    assert before > 0
    assert dispatch(scheduler, "settle", {}) == {"settled": True, "steps": False}
    answer = dispatch(scheduler, "renew_kv", {"version": "other"})
    assert answer == {"tokens": {first: before, waiting: 0}}
    assert engine.free_blocks() == engine.shape.num_blocks - 1
    assert scheduler.requests[first].num_computed_tokens == 0
    scheduler.check_integrity()
    engine.run()
    first_turn, second_turn = (
        scheduler.programs.to_public_dict(f"default/{name}")["turns"][-1]  # type: ignore[index]
        for name in ("first", "second")
    )
    assert (first_turn["output_tokens"], first_turn["weights"]) == (30, ["default", "other"])
    assert (second_turn["output_tokens"], second_turn["weights"]) == (5, ["other"])


def test_no_hold_and_no_cached_prefix_of_other_weights_is_used(replica: Replica) -> None:
    engine = replica()
    scheduler = scheduler_of(engine)
    submit(engine, "held", 5, last=False)
    engine.run()
    assert scheduler.programs["default/held"].phase is Phase.HELD
    dispatch(scheduler, "renew_kv", {"version": "other"})
    assert not len(scheduler.holds)
    submit(engine, "held", 5)
    engine.run()
    turns = scheduler.programs.to_public_dict("default/held")["turns"]  # type: ignore[index]
    assert turns[-1]["cached_tokens"] == 0
    submit(engine, "later", 5)
    engine.run()
    later = scheduler.programs.to_public_dict("default/later")["turns"][-1]  # type: ignore[index]
    assert later["cached_tokens"] > 0


@pytest.mark.parametrize("preempted", [False, True])
def test_a_loaded_turn_that_waits_for_a_place_computes_its_context_again(tiny_config: Path, preempted: bool) -> None:
    """vLLM does not look at it while the batch is full."""
    p, load_s = with_host(tiny_config, False)
    p.turn("a", 300, 5)
    assert p.scheduler.reset_prefix_cache(), "only the host has the context now"
    p.pass_s(0.05)
    load_s[0] = 0.05
    loaded = p.scheduler.requests[p.arrive("a", 10)]
    loaded.num_preemptions = int(preempted)
    p.step()
    for name in ("max_num_running_reqs", "max_num_active_reqs"):
        if hasattr(p.scheduler, name):
            setattr(p.scheduler, name, 1)
    p.submit("chat", 100, 50)
    p.pass_s(0.1)
    assert loaded.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert dispatch(p.scheduler, "settle", {}) == {"settled": True, "steps": False}
    dispatch(p.scheduler, "renew_kv", {"version": "other"})
    assert p.engine.free_blocks() == p.engine.shape.num_blocks - 1
    assert loaded.status is (RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING)
    assert not p.scheduler._inflight_prefills
    p.engine.run()
    p.scheduler.check_integrity()
    assert p.last_turn("a")["weights"] == ["other"]


@pytest.mark.usefixtures("_own_hashes")
def test_the_same_tokens_have_other_hashes_with_other_weights() -> None:
    hasher = kv_cache_utils.get_request_block_hasher(16, sha256)

    def hashes() -> list[bytes]:
        return [bytes(one) for one in Request("one", PROMPT, SamplingParams(), None, block_hasher=hasher).block_hashes]

    own = hashes()
    salt_block_hashes("other")
    other = hashes()
    assert len(own) == len(other) == len(PROMPT) // 16
    assert not set(own) & set(other)
    salt_block_hashes("another")
    assert not set(hashes()) & {*own, *other}
    salt_block_hashes("other")
    assert hashes() == other
    salt_block_hashes("")
    assert hashes() == own
