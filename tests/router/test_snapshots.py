"""Snapshots reach subscribers' event loops from routers' threads, in order; and the age and status of replicas."""

import asyncio
import threading

from cluster.core.clock import ManualClock
from router.snapshots import ReplicaHealth, ReplicaStatus, SnapshotHub
from tests.router.router_views import snapshot


async def test_a_subscriber_gets_what_is_there_and_what_comes_in_its_own_loop() -> None:
    hub, seen, threads = SnapshotHub(), [], set()
    hub.publish("d", [("r0", snapshot("r0", 1).encode())])

    def look(view) -> None:
        threads.add(threading.get_ident())
        seen.append({replica: one and one.number for replica, one in view.items()})

    end = hub.subscribe("d", look)

    def publish() -> None:
        for number in range(2, 50):
            hub.publish("d", [("r0", snapshot("r0", number).encode()), ("r1", None)])

    await asyncio.to_thread(publish)
    await asyncio.sleep(0)
    assert seen == [{"r0": 1}, *({"r0": number, "r1": None} for number in range(2, 50))]
    assert threads == {threading.get_ident()}
    end()
    hub.publish("d", [])
    await asyncio.sleep(0)
    assert len(seen) == 49
    assert hub.view("d") == {}


async def test_deployments_do_not_meet() -> None:
    hub, seen = SnapshotHub(), []
    hub.subscribe("a", seen.append)
    hub.publish("b", [("r", None)])
    await asyncio.sleep(0)
    assert seen == [{}]


def test_unreadable_snapshots_are_none_and_counted_once_while_they_stay() -> None:
    hub = SnapshotHub()
    for packed in (b"", b"\xc1", b"\x80", {"running": 1}, "text", 7, snapshot("r", 1).encode()[:-1]):
        for _ in range(3):
            hub.publish("d", [("r", packed), ("new", None)])
        assert hub.view("d") == {"r": None, "new": None}
    assert hub.unreadable == 7
    hub.publish("d", [("r", snapshot("r", 2).encode())])
    assert hub.view("d")["r"] == snapshot("r", 2)


def test_a_subscriber_whose_loop_has_ended_is_no_trouble() -> None:
    hub = SnapshotHub()

    async def subscribe() -> None:
        hub.subscribe("d", lambda view: None)

    asyncio.run(subscribe())
    hub.publish("d", [("r", None)])
    assert hub.view("d") == {"r": None}


def test_the_age_is_that_of_the_newest_news_and_a_replica_that_is_gone_has_none() -> None:
    clock = ManualClock()
    health = ReplicaHealth(clock)
    health.observe({"a": snapshot("a", 1), "b": snapshot("b", 1), "c": None})
    clock.advance(3.0)
    health.observe({"a": snapshot("a", 1), "b": snapshot("b", 2), "c": None})
    assert health.ages_s() == {"a": 3.0, "b": 0.0, "c": None}
    health.observe({"b": snapshot("b", 2)})
    assert "a" not in health
    assert health.ages_s() == {"b": 0.0}


def test_every_state_is_counted_also_where_nobody_is_in_it() -> None:
    health = ReplicaHealth(ManualClock())
    assert health.states() == {ReplicaStatus.UP: 0, ReplicaStatus.DRAINING: 0, ReplicaStatus.SILENT: 0}
    health.observe({"a": snapshot("a"), "b": snapshot("b", draining=True), "c": None, "d": snapshot("d")})
    assert health.states() == {ReplicaStatus.UP: 2, ReplicaStatus.DRAINING: 1, ReplicaStatus.SILENT: 1}


def test_reports_go_to_the_first_replica_with_a_recent_snapshot_that_has_not_failed() -> None:
    clock = ManualClock()
    health = ReplicaHealth(clock)
    assert health.first() is None
    health.observe({"a": snapshot("a", 1), "b": snapshot("b", 1), "c": snapshot("c", 1), "d": None})
    assert health.first() == "a"
    clock.advance(60.0)
    health.observe({"a": snapshot("a", 1), "b": snapshot("b", 2), "c": snapshot("c", 2), "d": None})
    assert health.first() == "b", "a hangs"
    assert health.first({"b"}) == "c"
    assert health.first({"b", "c"}) == "a", "any is better than none"
    assert health.first({"a", "b", "c", "d"}) == "b"
    health.observe({"b": snapshot("b", 2, draining=True), "c": snapshot("c", 2)})
    assert health.first() == "c"
