"""A pause of all generation, and an update of the weights, while contexts are moved between the host and the disk."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from cluster.config.schema import PolicyConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import UpstreamFailed
from cluster.core.program import Hints, ProgramIdentity
from cluster.store.weights import WeightsTarget
from replicas.control import dispatch
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.virtual_disk import VirtualDisk, VirtualVolume
from replicas.virtual_engine import Shape, VirtualEngine, VirtualLink
from replicas.weights import ReplicaWeights

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
            link=VirtualLink(self.clock, lambda tokens: 0.0, 16),
            transfer_config=disk.transfer_config,
        )
        self.scheduler: Any = self.engine.scheduler
        self.scheduler.clock = self.clock
        self.drive = self.scheduler.swapping.disk.disk
        self.drive._disk = VirtualDisk(disk.volume, 0, self.clock, 1000, 1 << 20, 1e-9, WRITE_S)

    def turn(self, program: str) -> None:
        """A whole turn, whose program then pauses."""
        hints = Hints(expected_tool="ls", expected_pause_s=1000.0)
        self.engine.submit(program, CONTEXT, 5, ProgramIdentity(program_id=program, hints=hints))
        self.step_until(lambda: program not in self.scheduler.requests)

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


def update(tiers: Tiers, monkeypatch: pytest.MonkeyPatch, wait_s: float) -> tuple[ReplicaWeights, PausingEngine]:
    """An update, each of whose waits takes so long."""
    engine, weights = PausingEngine(tiers), ReplicaWeights("model", 60.0, lambda: None)

    async def call(operation: str, **payload: Any) -> dict[str, Any]:
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
