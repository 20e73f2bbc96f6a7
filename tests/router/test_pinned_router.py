"""PinnedRequestRouter within Ray's own routing loop: exactly the replica that is named, or a failure at once."""

import asyncio
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
    RunningReplicaInfo,
)
from ray.serve._private.request_router.common import PendingRequest

from cluster.core.errors import ReplicaGone
from router.pinned_router import CONTROL_SLOTS, PinnedRequestRouter, TurnLimitedReplica
from router.snapshots import HUB
from tests.router.router_views import snapshot

DEPLOYMENT = DeploymentID(name="LLMServer:tiny", app_name="caesura")


class Replica:
    """What Ray's loop asks of a replica; it takes so many calls at a time."""

    def __init__(self, name: str, room: int = 2) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self.max_ongoing_requests = room
        self.ongoing = 0
        self.probes = 0
        self.routing_stats: dict[str, Any] = {}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.probes += 1
        return self.ongoing


class Routed:
    """A router with its replicas, and what Ray does around it."""

    def __init__(self) -> None:
        self.router = PinnedRequestRouter(
            DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True, initial_backoff_s=0.001
        )
        self.count = 0

    async def see(self, *replicas: Replica) -> None:
        """What the controller says; Ray asks those that are new how busy they are."""
        before = asyncio.all_tasks()
        self.router.update_replicas(list(replicas))
        await asyncio.gather(*asyncio.all_tasks() - before)

    async def call(self, session: str, *, is_retry: bool = False, control: bool = False) -> Replica:
        """One call: chosen and sent. Turns are streamed, control calls are not."""
        self.count += 1
        metadata = RequestMetadata(
            f"request-{self.count}", f"internal-{self.count}", session_id=session, is_streaming=not control
        )
        pending = PendingRequest(args=[], kwargs={}, metadata=metadata)
        replica: Replica = await self.router._choose_replica_for_request(pending, is_retry=is_retry)
        self.router.on_send_request(replica.replica_id)
        replica.ongoing += 1
        return replica

    def end(self, replica: Replica) -> None:
        replica.ongoing -= 1
        self.router.decrement_queue_len_cache(replica.replica_id)


async def within(work: Any) -> Any:
    async with asyncio.timeout(30):
        return await work


async def test_the_named_replica_gets_the_call_however_busy_it_is() -> None:
    routed, a, b = Routed(), Replica("a", 100), Replica("b", 100)
    await routed.see(a, b)
    assert {(await within(routed.call("a"))) for _ in range(40)} == {a}
    assert b.ongoing == 0


async def test_without_a_name_the_fewest_requests_win() -> None:
    routed, a, b = Routed(), Replica("a", 100), Replica("b", 100)
    await routed.see(a, b)
    await within(routed.call("a"))
    chosen = [await within(routed.call("")) for _ in range(5)]
    assert (a.ongoing, b.ongoing) == (3, 3)
    assert chosen[0] is b


@pytest.mark.parametrize("others", [0, 1])
async def test_a_replica_that_is_not_there_fails_the_call_at_once(others) -> None:
    routed = Routed()
    if others:
        await routed.see(Replica("a"))
    with pytest.raises(ReplicaGone):
        await within(routed.call("gone"))
    with pytest.raises(ReplicaGone):
        await within(routed.call("gone", is_retry=True))
    assert not routed.router._queues


async def test_many_calls_that_wait_for_a_full_replica_do_not_hold_up_others() -> None:
    routed, full, free = Routed(), Replica("full", 1), Replica("free", 100)
    await routed.see(full, free)
    await within(routed.call("full"))
    waiting = [asyncio.create_task(routed.call("full")) for _ in range(60)]
    await asyncio.sleep(0)
    assert {await within(routed.call("free")) for _ in range(10)} == {free}
    assert await within(routed.call("")) is free
    for _ in waiting:
        routed.end(full)
        done, pending = await within(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))
        (served,) = done
        assert served.result() is full
        assert full.ongoing == 1
        waiting = list(pending)
        if not waiting:
            break
    assert not waiting and not routed.router._queues


async def test_calls_are_served_in_their_order_and_one_at_a_time_asks() -> None:
    routed, full = Routed(), Replica("full", 1)
    await routed.see(full)
    await within(routed.call("full"))
    order: list[int] = []

    async def wait(number: int) -> None:
        await routed.call("full")
        order.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(20)]
    for _ in waiting:
        await asyncio.sleep(0.002)
        routed.end(full)
    await within(asyncio.gather(*waiting))
    assert order == list(range(20))
    assert full.probes < 20 * 20


async def test_a_control_call_does_not_wait_behind_turns_for_a_full_replica() -> None:
    routed, full = Routed(), Replica("full", 1)
    await routed.see(full)
    await within(routed.call("full"))
    turns = [asyncio.create_task(routed.call("full")) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert await within(routed.call("full", control=True)) is full
    assert not any(turn.done() for turn in turns)
    for turn in turns:
        turn.cancel()
    await within(asyncio.gather(*turns, return_exceptions=True))


async def test_a_control_call_without_a_name_goes_to_any_replica_though_all_are_full() -> None:
    routed, a, b = Routed(), Replica("a", 1), Replica("b", 1)
    await routed.see(a, b)
    for name in ("a", "b"):
        await within(routed.call(name))
    assert {await within(routed.call("", control=True)) for _ in range(2)} == {a, b}


async def test_a_control_call_that_waits_stops_no_other() -> None:
    routed, full = Routed(), Replica("full", 1)
    await routed.see(full)
    rejected = asyncio.create_task(routed.call("full", is_retry=True, control=True))
    assert await within(routed.call("full", control=True)) is full
    assert await within(rejected) is full, "a call that the replica rejected is sent again after a pause"


async def test_a_control_call_for_a_replica_that_is_gone_fails_at_once() -> None:
    routed = Routed()
    with pytest.raises(ReplicaGone):
        await within(routed.call("gone", control=True))


@pytest.mark.parametrize(("requests", "turns"), [(256 + CONTROL_SLOTS, 256), (1, 1)])
def test_turns_leave_some_of_a_replicas_requests_to_control_calls(requests: int, turns: int) -> None:
    """Ray counts both against `max_ongoing_requests`, on the replica too."""
    replica = TurnLimitedReplica.__new__(TurnLimitedReplica)  # an actor is needed to make one
    replica.update_replica_info(
        RunningReplicaInfo(ReplicaID(unique_id="a", deployment_id=DEPLOYMENT), "n", "127.0.0.1", None, "a", requests)
    )
    assert replica.max_ongoing_requests == turns


async def test_who_waits_for_a_replica_that_goes_is_failed_and_who_gives_up_is_gone() -> None:
    routed, full = Routed(), Replica("full", 1)
    await routed.see(full)
    await within(routed.call("full"))
    waiting = [asyncio.create_task(routed.call("full")) for _ in range(5)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    waiting[3].cancel()
    routed.router.on_replica_actor_died(full.replica_id)
    outcomes = await within(asyncio.gather(*waiting, return_exceptions=True))
    assert [type(outcome) for outcome in outcomes] == [
        asyncio.CancelledError,
        ReplicaGone,
        ReplicaGone,
        asyncio.CancelledError,
        ReplicaGone,
    ]
    assert not routed.router._queues


async def test_rays_own_loop_gets_the_named_replica_or_a_failed_request() -> None:
    """`choose_replica` of a handle without a reservation goes by this way."""
    routed, a, b = Routed(), Replica("a"), Replica("b")
    await routed.see(a, b)
    for session, expected in (("a", [[a]]), ("b", [[b]]), ("", [[a, b]]), ("gone", [[a, b]])):
        metadata = RequestMetadata("r", "i", session_id=session)
        pending = PendingRequest(args=[], kwargs={}, metadata=metadata)
        assert await routed.router.choose_replicas([a, b], pending) == expected
        assert pending.routing_context.should_backoff
        assert pending.future.done() is (session == "gone")
        if session == "gone":
            assert isinstance(pending.future.exception(), ReplicaGone)
    assert await routed.router.choose_replicas([a, b], None) == [[a, b]]


async def test_what_replicas_publish_goes_to_the_hub() -> None:
    routed, a, b = Routed(), Replica("a"), Replica("b")
    a.routing_stats = {"caesura": snapshot("a", 3).encode(), "other": 1}
    b.routing_stats = {"caesura": {"running": 3}}
    await routed.see(a, b)
    assert HUB.view(DEPLOYMENT.name) == {"a": snapshot("a", 3), "b": None}
    routed.router.on_replica_actor_died(b.replica_id)
    assert HUB.view(DEPLOYMENT.name) == {"a": snapshot("a", 3)}
    await routed.see()
    assert HUB.view(DEPLOYMENT.name) == {}
