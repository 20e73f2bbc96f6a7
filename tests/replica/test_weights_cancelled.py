"""Changes of the weights whose caller has gone, as when the client of the route leaves."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from cluster.core.errors import UpstreamFailed
from cluster.store.weights import WeightsTarget
from replicas import weights as module
from replicas.weights import ReplicaWeights
from tests.waiting import until


class Engine:
    """An engine and its scheduler: what happened, in order. ``gates``: what ends only when the test lets it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}
        self.settled = True
        self.fails = False

    def hold(self, name: str) -> None:
        self.gates[name], self.reached[name] = asyncio.Event(), asyncio.Event()

    async def _at(self, name: str) -> None:
        if name in self.gates:
            self.reached[name].set()
            await self.gates[name].wait()
        self.events.append(name)

    async def pause(self, **_: Any) -> None:
        await self._at("pause")

    async def resume(self, **_: Any) -> None:
        await self._at("resume")

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> None:
        await self._at("load")
        if self.fails:
            raise RuntimeError("the disk is gone")

    async def call(self, operation: str, *, within_s: float, **_: Any) -> dict[str, Any]:
        await self._at(operation)
        if operation == "settle":
            return {"settled": self.settled, "steps": not self.settled}
        return {"tokens": {}}

    def submitted(self) -> frozenset[str]:
        return frozenset()

    def weights_changed(self, version: str, tokens: Mapping[str, int], submitted: Collection[str]) -> None:
        self.events.append(version)


class Replica:
    """The weights of a replica with such an engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.failures = Engine(), 0
        self.weights = ReplicaWeights("model", 60.0, self._failed)
        monkeypatch.setattr(self.weights, "check", lambda path: None)
        monkeypatch.setattr(self.weights, "_salt", lambda path: "salt")
        self.weights.open(self.engine, self.engine.call, self.engine)

    def _failed(self) -> None:
        self.failures += 1


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    return Replica(monkeypatch)


OTHER = WeightsTarget("other", "/other")
UPDATED = ["pause", "settle", "salt_kv", "load", "renew_kv", "other", "resume"]


@pytest.mark.parametrize("where", UPDATED[:5] + UPDATED[6:])
async def test_an_update_is_completed_for_a_caller_that_has_gone(replica: Replica, where: str) -> None:
    engine = replica.engine
    engine.hold(where)
    caller = asyncio.create_task(replica.weights.follow(OTHER))
    await engine.reached[where].wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert engine.events == UPDATED[: UPDATED.index(where)]
    engine.gates.pop(where).set()
    await replica.weights.follow(OTHER)
    assert engine.events == UPDATED
    assert replica.weights.view() == {"version": "other", "path": "/other", "paused": False}
    assert not replica.failures


@pytest.mark.parametrize("paused", [True, False])
async def test_a_pause_is_completed_for_a_caller_that_has_gone(replica: Replica, paused: bool) -> None:
    if not paused:
        await replica.weights.follow(WeightsTarget(paused=True))
    event = "pause" if paused else "resume"
    replica.engine.hold(event)
    caller = asyncio.create_task(replica.weights.follow(WeightsTarget(paused=paused)))
    await replica.engine.reached[event].wait()
    caller.cancel()
    replica.engine.gates.pop(event).set()
    await replica.weights.follow(WeightsTarget(paused=paused))
    assert replica.engine.events[-1] == event
    assert replica.engine.events.count(event) == 1
    assert replica.weights.view()["paused"] is paused


async def test_a_failure_that_nobody_waits_for_is_logged(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    engine = replica.engine
    engine.fails = True
    engine.hold("load")
    caller = asyncio.create_task(replica.weights.follow(OTHER))
    await engine.reached["load"].wait()
    caller.cancel()
    with caplog.at_level(logging.ERROR), pytest.raises(UpstreamFailed, match="disk is gone"):
        engine.gates["load"].set()
        await replica.weights.follow(OTHER)
    assert "nobody waits" in caplog.text
    assert replica.failures == 1


async def test_an_update_that_is_stopped_ends_the_replica(replica: Replica) -> None:
    """It would generate with KV of other weights."""
    engine = replica.engine
    engine.hold("load")
    caller = asyncio.create_task(replica.weights.follow(OTHER))
    await engine.reached["load"].wait()
    [change] = replica.weights._changes
    change.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert replica.failures == 1
    assert "resume" not in engine.events
    with pytest.raises(UpstreamFailed, match="'other' could not be loaded"):
        await replica.weights.follow(OTHER)


async def test_an_update_that_is_stopped_before_it_changes_anything_leaves_the_pause(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 60.0)
    engine = replica.engine
    await replica.weights.follow(WeightsTarget(paused=True))
    engine.settled = False
    engine.hold("resume")
    caller = asyncio.create_task(replica.weights.follow(WeightsTarget("other", "/other", paused=True)))
    await engine.reached["resume"].wait()
    engine.gates["resume"].set()
    await until(lambda: engine.events[-1] == "resume")
    [change] = replica.weights._changes
    change.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert engine.events == ["pause", "settle", "resume", "pause"]
    assert replica.weights.view()["paused"]
    assert not replica.failures


async def test_what_the_store_said_before_a_change_is_not_followed_after_it(replica: Replica) -> None:
    stored = [WeightsTarget("before", "/before"), OTHER]

    class Store:
        async def read(self) -> WeightsTarget:
            return stored[0]

    replica.engine.hold("load")
    told = asyncio.create_task(replica.weights.follow(OTHER))
    await replica.engine.reached["load"].wait()
    # The store still has the target before, as for a replica that reads it just before it changes.
    following = asyncio.create_task(replica.weights.follow_store(Store()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    stored.pop(0)
    replica.engine.gates.pop("load").set()
    await told
    await following
    assert replica.engine.events == UPDATED
    assert replica.weights.view() == {"version": "other", "path": "/other", "paused": False}
