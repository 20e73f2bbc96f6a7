"""The disk tier on real CPU engines: a program continues on another replica, from the files of the one that is gone."""

from pathlib import Path

import pytest

from cluster.core.replica_snapshot import ReplicaSnapshot
from replicas.control import dispatch
from replicas.disk_tier.slots import Slots
from router.decisions import Go, Placed, TurnRequest
from router.placement_engine import PlacementEngine
from tests.contracts.disk_engines import CONTEXT, Engine, FixedSpeed, engine_on

CHUNKS = 9
"""319 of the first turn's 320 tokens have KV: 9 chunks of 32 tokens."""


@pytest.mark.engine
def test_a_program_continues_on_another_replica_with_the_same_tokens(tmp_path: Path, tiny_model: Path) -> None:
    with engine_on(tmp_path, tiny_model) as one:
        first = one.turn("p", CONTEXT)
        assert one.numbers()["disk_writes"]["written"] == 1
        assert one.numbers()["disk_used_tokens"] == CHUNKS * 32
        one.empty()
        one.disk._open = False  # nothing is loaded
        computed = one.second("q", first, last=True)
        assert one.numbers()["context_tokens"]["disk"] == 0
        identity = one.disk._slots.identity
    taken = Slots(tmp_path, identity, 2)
    assert taken.take(create=False)
    assert taken.own == 0, "the slot of the first replica, which another one has taken over"
    with engine_on(tmp_path, tiny_model) as other:
        assert other.disk._slots.own == 1
        assert other.second("p", first) == computed
        assert other.numbers()["context_tokens"]["disk"] == CHUNKS * 32
        assert other.story("p")[0]["disk_tokens"] == CHUNKS * 32
        # A further turn of it is computed with what was loaded, and one of another tenant is not.
        before = other.numbers()["disk_bytes"]["read"]
        other.empty()
        assert other.second("p", first, salt="another") == computed
        assert other.numbers()["disk_bytes"]["read"] == before
    taken.release()


def published(engine: Engine, replica: str, number: int, *, draining: bool = False) -> ReplicaSnapshot:
    """Return what a replica publishes once a second."""
    asked = {"replica": replica, "model": "m", "number": number, "draining": draining}
    return ReplicaSnapshot.decode(dispatch(engine.scheduler, "routing", asked)["snapshot"])


@pytest.mark.engine
def test_a_program_leaves_a_replica_that_drains_with_its_kv(tmp_path: Path, tiny_model: Path) -> None:
    """p pauses on a, too shortly for its context to be written. Then a drains, p is written and goes to b."""
    router, turn = PlacementEngine(), TurnRequest("default/p", "default", 345)
    with engine_on(tmp_path, tiny_model) as one:
        router.observe({"a": published(one, "a", 1)}, 0.0)
        assert isinstance(router.turn("t1", TurnRequest("default/p", "default", 300), 0.0), Go)
        one.disk.write_speed = FixedSpeed(10.0)
        first = one.turn("p", CONTEXT)
        router.ended("t1", 1.0, context_tokens=320)
        assert one.numbers()["disk_writes"]["short_pause"] == 1
        assert not one.files()
        assert not published(one, "a", 2).on_disk

        published(one, "a", 3, draining=True)
        assert dispatch(one.scheduler, "leave", {}) == {"leaves": True}
        one.settle()
        assert dispatch(one.scheduler, "leave", {}) == {"leaves": False}
        assert one.numbers()["disk_writes"]["written"] == 1
        drained = published(one, "a", 4, draining=True)
        router.observe({"a": drained}, 4.0)

        one.empty()
        one.disk._open = False  # nothing is loaded
        computed = one.second("q", first, last=True)
    with engine_on(tmp_path, tiny_model) as other:
        assert published(other, "b", 1).volume == drained.volume
        router.observe({"a": drained, "b": published(other, "b", 1)}, 5.0)
        decision = router.turn("t2", turn, 5.0)
        assert isinstance(decision, Go)
        assert (decision.home.replica, decision.reason) == ("b", Placed.MOVED_FROM_DRAINING)
        assert other.second("p", first) == computed
        assert other.story("p")[0]["disk_tokens"] == CHUNKS * 32
        assert other.numbers()["arrived_with_kv"] == 1
