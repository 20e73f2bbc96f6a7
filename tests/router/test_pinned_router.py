"""PinnedRequestRouter within Ray's own routing loop: exactly the replica that is named, or a failure at once."""

import asyncio
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from cluster.core.errors import ReplicaGone
from router.pinned_router import PinnedRequestRouter
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

    async def call(self, session: str, *, is_retry: bool = False) -> Replica:
        """One call: chosen and sent."""
        self.count += 1
        metadata = RequestMetadata(f"request-{self.count}", f"internal-{self.count}", session_id=session)
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


async def test_a_call_for_a_full_replica_does_not_wait() -> None:
    """A control call must arrive most when a replica is full: the end of a tool or of a program frees memory."""
    routed, full = Routed(), Replica("full", 1)
    await routed.see(full)
    probes = full.probes
    assert {await within(routed.call("full")) for _ in range(20)} == {full}
    assert full.probes == probes, "the replica is not asked whether it has room"


async def test_a_call_without_a_name_goes_to_any_replica_though_all_are_full() -> None:
    routed, a, b = Routed(), Replica("a", 1), Replica("b", 1)
    await routed.see(a, b)
    for name in ("a", "b"):
        await within(routed.call(name))
    assert {await within(routed.call("")) for _ in range(2)} == {a, b}


async def test_a_call_without_a_name_waits_for_the_first_replica() -> None:
    routed, a = Routed(), Replica("a")
    waiting = asyncio.create_task(routed.call(""))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    routed.router.update_replicas([a])
    assert await within(waiting) is a


async def test_a_call_that_a_replica_rejected_stops_no_other() -> None:
    routed, full = Routed(), Replica("full", 1)
    await routed.see(full)
    rejected = asyncio.create_task(routed.call("full", is_retry=True))
    assert await within(routed.call("full")) is full
    assert await within(rejected) is full, "it is sent again after a pause"


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
