"""The host tier over the disk, as a scheduler uses them: what is written, and how long anybody waits for it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key

from cluster.config.schema import PolicyConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import ControlTimeout, UpstreamFailed
from cluster.core.program import Hints, ProgramIdentity
from cluster.store.weights import WeightsTarget
from replicas.control import dispatch, snapshot
from replicas.disk_tier.cache import Pending, TieredCache
from replicas.disk_tier.trouble import Trouble
from replicas.host_tier import UNKNOWN, Account
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.virtual_disk import VirtualDisk, VirtualVolume
from replicas.virtual_engine import Shape, VirtualEngine, VirtualLink
from replicas.weights import ReplicaWeights

BLOCK = 16
STEP_S, WRITE_S = 0.01, 1.0
"""Seconds of a step, and of the write of a chunk."""
CONTEXT = [1000 + i % 7 for i in range(500)]


class Tiers:
    """A replica whose disk writes a chunk in a second."""

    def __init__(self, model: Path) -> None:
        self.clock = ManualClock()
        disk = VirtualDisk(VirtualVolume("v"), 0, self.clock, 1000, 1 << 20, 1e-9, 1e-9)
        self.engine = VirtualEngine(
            AgentScheduler,
            model,
            Shape(num_blocks=64, host_blocks=400),
            SchedulerSettings(policy=PolicyConfig(name="vllm")),
            link=VirtualLink(self.clock, lambda tokens: 0.0, BLOCK),
            transfer_config=disk.transfer_config,
        )
        self.scheduler: Any = self.engine.scheduler
        self.scheduler.clock = self.clock
        self.cache: TieredCache = self.scheduler.swapping.disk
        self.drive: Any = self.cache.disk
        self.drive._disk = replace(disk, write_chunk_s=WRITE_S)

    def turn(self, program: str, name: str = "p1") -> None:
        """A whole turn, whose program then pauses."""
        hints = Hints(expected_tool="ls", expected_pause_s=1000.0)
        self.engine.submit(name, CONTEXT, 5, ProgramIdentity(program_id=program, hints=hints))
        self.step_until(lambda: name not in self.scheduler.requests)

    def step_until(self, holds: Callable[[], bool]) -> None:
        for _ in range(1000):
            if holds():
                return
            self.engine.step()
            self.clock.advance(STEP_S)
        pytest.fail("it does not come")


@pytest.fixture
def tiers(tiny_config: Path) -> Tiers:
    made = Tiers(tiny_config)
    made.turn("p")
    made.step_until(lambda: made.drive.in_use)
    return made


# --- what is written and loaded ---------------------------------------------------------------------------------------


def test_a_context_that_the_host_has_lost_in_part_stays_on_disk(tiers: Tiers) -> None:
    tiers.clock.advance(100.0)
    tiers.step_until(lambda: not tiers.drive.in_use)
    [account] = tiers.drive.chunks.accounts.values()
    keys = list(account.chunks)
    assert len(keys) == len(CONTEXT) // BLOCK
    tiers.cache.host.chunks.remove(keys[20])
    tiers.cache._pending["default/p"] = Pending(account.standing, len(keys), inf)
    tiers.engine.step()
    assert not tiers.cache._pending, "nothing is to be awaited: the disk has it"
    assert list(account.chunks) == keys
    assert tiers.drive.chunks_of("default/p") == len(keys)


def two_groups(tiers: Tiers) -> tuple[Account, list[OffloadKey], list[OffloadKey]]:
    """A program whose context has four chunks in each of two KV cache groups. None is stored yet."""
    tiers.cache.host.update("q", replace(UNKNOWN, saved_s=1.0), tiers.clock.now_s(), "q1")
    account = tiers.cache.host.chunks.accounts["q"]
    groups = [[make_offload_key(f"q{group}{i}".encode().ljust(32), group) for i in range(4)] for group in (0, 1)]
    for keys in groups:
        tiers.cache.host.chunks.extend(account, "q1", keys)
    return account, groups[0], groups[1]


def store(tiers: Tiers, keys: Sequence[OffloadKey]) -> None:
    context = ReqContext("q1")
    assert tiers.cache.host.prepare_store(keys, context)
    tiers.cache.host.complete_store(keys, context)


def test_a_context_in_several_groups_is_written_when_all_of_it_is_on_the_host(tiers: Tiers) -> None:
    account, main, other = two_groups(tiers)
    store(tiers, [*main[:3], *other])
    tiers.cache._pending["q"] = Pending(account.standing, 4, inf)
    tiers.engine.step()
    assert tiers.cache.writes("q")
    store(tiers, main[3:])
    tiers.engine.step()
    assert {*main, *other} <= {*tiers.drive.chunks.blocks}


def test_a_chunk_is_seen_once_while_a_context_is_awaited(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    account, main, _ = two_groups(tiers)
    store(tiers, main[:3])
    tiers.cache._pending["q"] = Pending(account.standing, 4, inf)
    tiers.engine.step()
    asked: list[OffloadKey] = []
    monkeypatch.setattr(tiers.cache, "_is_there", asked.append)
    tiers.engine.step()
    assert asked == main[3:]


def test_tokens_are_those_of_one_group(tiers: Tiers) -> None:
    before, read_s = snapshot(tiers.scheduler), tiers.drive.read_s
    tiers.cache.host.num_groups = 2
    tiers.drive.count_in(0, BLOCK, 2)
    after = snapshot(tiers.scheduler)
    for name in ("stored_tokens", "disk_tokens", "disk_used_tokens"):
        assert after[name] == before[name] // 2 // BLOCK * BLOCK > 0, name
    assert tiers.drive.read_s == pytest.approx(2 * read_s)


def test_a_load_that_came_too_late_is_credited_to_no_turn(tiers: Tiers) -> None:
    tiers.clock.advance(100.0)
    tiers.step_until(lambda: not tiers.drive.in_use)
    assert tiers.scheduler.reset_prefix_cache()
    tiers.cache.host.reset_cache()
    tiers.drive._disk = replace(tiers.drive._disk, read_chunk_s=10.0)
    tiers.turn("p", "p2")
    assert tiers.drive.troubles[Trouble.TOO_LATE] == 1
    tiers.clock.advance(1000.0)
    tiers.step_until(lambda: not tiers.drive.in_use)
    assert not tiers.cache.take_loaded_tokens("default/p")


def test_chunks_are_not_looked_up_again_in_each_step_of_a_load(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers.clock.advance(100.0)
    tiers.step_until(lambda: not tiers.drive.in_use)
    assert tiers.scheduler.reset_prefix_cache()
    tiers.cache.host.reset_cache()
    chunks, steps = len(CONTEXT) // BLOCK, 30
    tiers.drive._disk = replace(tiers.drive._disk, read_chunk_s=steps * STEP_S / chunks)
    lookups: Counter[OffloadKey] = Counter()
    lookup = tiers.cache.lookup

    def counted(key: OffloadKey, context: ReqContext) -> LookupResult:
        lookups[key] += 1
        return lookup(key, context)

    monkeypatch.setattr(tiers.cache, "lookup", counted)
    begun_s = tiers.clock.now_s()
    tiers.turn("p", "p2")
    assert tiers.clock.now_s() - begun_s >= steps * STEP_S
    assert tiers.scheduler.programs.to_public_dict("default/p")["turns"][1]["cached_tokens"] == chunks * BLOCK
    assert len(lookups) == chunks
    assert max(lookups.values()) <= 4


def test_a_context_whose_load_has_failed_is_written_again(tiers: Tiers) -> None:
    """Its chunks are not copied to the host while they are computed, because they are still being loaded then."""
    tiers.clock.advance(100.0)
    tiers.step_until(lambda: not tiers.drive.in_use)
    assert tiers.scheduler.reset_prefix_cache()
    tiers.cache.host.reset_cache()
    tiers.drive._disk = replace(tiers.drive._disk, read_chunk_s=10.0, write_chunk_s=0.001)
    hints = Hints(expected_tool="ls", expected_pause_s=1000.0)
    tiers.engine.submit("p2", CONTEXT, 5, ProgramIdentity(program_id="p", hints=hints))
    tiers.step_until(lambda: tiers.scheduler.requests["p2"].num_output_tokens == 3)
    assert tiers.drive.troubles[Trouble.TOO_LATE] == 1
    tiers.drive._own.clear()
    tiers.drive.chunks.clear()
    tiers.clock.advance(1000.0)
    tiers.step_until(lambda: "p2" not in tiers.scheduler.requests)
    tiers.step_until(lambda: tiers.scheduler.swapping.is_on_disk("default/p"))


# --- pauses of all generation -----------------------------------------------------------------------------------------


def test_a_pause_does_not_wait_for_the_disk(tiers: Tiers) -> None:
    tiers.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not tiers.scheduler.has_requests()
    tiers.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert tiers.scheduler.has_requests(), "otherwise the engine steps until all is written"


def test_a_replica_that_leaves_writes_in_a_pause(tiers: Tiers) -> None:
    tiers.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert dispatch(tiers.scheduler, "leave", {}) == {"leaves": True}
    assert tiers.scheduler.has_requests()


class PausingEngine:
    """The engine of a replica whose pauses are counted."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.resumes = 0
        self.loaded = 0

    async def pause(self, **_: Any) -> None:
        self.tiers.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert not self.tiers.scheduler.has_requests(), "the pause waits"

    async def resume(self, **_: Any) -> None:
        self.resumes += 1
        self.tiers.scheduler.set_pause_state(PauseState.UNPAUSED)

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> None:
        self.loaded += 1


class NoStreams:
    """No request is under way."""

    def submitted(self) -> frozenset[str]:
        return frozenset()

    def weights_changed(self, *_: object) -> None:
        """Nobody is told."""


def update(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, wait_s: float, silent: Sequence[str] = ()
) -> tuple[ReplicaWeights, PausingEngine]:
    """An update, each of whose waits takes so long. ``silent``: operations that are not answered."""
    engine, weights = PausingEngine(tiers), ReplicaWeights("model", 60.0, lambda: None)

    async def call(operation: str, *, within_s: float, **payload: Any) -> dict[str, Any]:
        assert within_s == 60.0, "hashing the tokens of all turns takes longer than other calls"
        if operation in silent:
            raise ControlTimeout(operation)
        return {} if operation == "salt_kv" else dispatch(tiers.scheduler, operation, payload)

    async def wait(_: float) -> None:
        tiers.clock.advance(wait_s)

    monkeypatch.setattr(asyncio, "sleep", wait)
    monkeypatch.setattr(weights, "check", lambda path: None)
    monkeypatch.setattr(weights, "_salt", lambda path: "salt")
    weights.open(engine, call, NoStreams())
    return weights, engine


def test_an_update_waits_for_the_disk_without_steps(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, engine = update(tiers, monkeypatch, WRITE_S)
    monkeypatch.setattr(tiers.drive, "drain_jobs", lambda: None)
    asyncio.run(weights.follow(WeightsTarget("other", "other")))
    assert (weights.version, engine.loaded, engine.resumes) == ("other", 1, 1)
    assert not tiers.drive.chunks.blocks


def test_an_update_is_refused_while_the_disk_hangs(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, engine = update(tiers, monkeypatch, 0.0)
    with pytest.raises(UpstreamFailed, match="do not end"):
        asyncio.run(weights.follow(WeightsTarget("other", "other")))
    assert (engine.loaded, engine.resumes) == (0, 1), "the replica serves on"
    assert tiers.scheduler._pause_state is PauseState.UNPAUSED


def test_a_scheduler_that_does_not_answer_delays_an_update(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica tries again whatever its store says after an `HttpError`."""
    weights, engine = update(tiers, monkeypatch, WRITE_S, silent=["settle"])
    with pytest.raises(UpstreamFailed, match="not changed"):
        asyncio.run(weights.follow(WeightsTarget("other", "other")))
    assert (engine.loaded, engine.resumes) == (0, 1), "the replica serves on"
