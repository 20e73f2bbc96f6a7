"""A Ray request router that sends a call to exactly the replica that it names.

Only control calls come by here. Turns go to the replica's own server (`replicas.turn_server`).

Overrides of Ray Serve's RequestRouter, Ray 2.60.0 (tests/contracts/test_router_contracts.py holds the private names):
    choose_replicas               all: Ray's own loop is used only while there is no replica
    _choose_replica_for_request   the replica that `session_id` names; without one the replica with the fewest requests.
                                  Ray's own loop works on 2 x replicas calls at a time and asks a replica whether it has
                                  room, so that a few calls for a full replica would hold up all
    update_replicas, on_replica_actor_died   what replicas publish goes to the snapshot hub

A control call must arrive most when a replica is full, since the end of a tool or of a program is what frees memory. So
it is sent at once, and none waits for another. A replica that is gone fails the call at once, with ReplicaGone; Ray's
routers would wait for another one.

Ray sends this module to the routers by value, with all that it names. An object that must exist once in a process, such
as the hub, is reached through its own module.
"""

import asyncio

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter

from cluster.core.errors import ReplicaGone
from cluster.core.replica_snapshot import ROUTING_STATS_KEY
from router import snapshots


class PinnedRequestRouter(RequestRouter):
    """The handle's ``session_id`` is the unique id of a replica, or empty."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, as one group of candidates. Ray's loop calls it while there is no replica."""
        return [candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        named = pending_request.metadata.session_id
        if not self._replicas and not named:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if is_retry:  # the replica had no slot left, or ends
            await asyncio.sleep(self._compute_backoff_s(0))
        cached = self._replica_queue_len_cache
        replicas = self._replicas.values()
        replica = (
            self._named(named)
            if named
            else min(replicas, key=lambda one: cached.get(one.replica_id) or 0, default=None)
        )
        if replica is None:
            raise ReplicaGone(f"replica {named[:64]!r} is not there")
        return replica

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The controller has published the replicas and their statistics."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call found the replica dead before the controller did."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        stats = ((id.unique_id, replica.routing_stats) for id, replica in self._replicas.items())
        snapshots.HUB.publish(
            self._deployment_id.name, ((id, published.get(ROUTING_STATS_KEY)) for id, published in stats)
        )

    def _named(self, unique_id: str) -> RunningReplica | None:
        wanted = ReplicaID(unique_id=unique_id, deployment_id=self._deployment_id)
        return self._replicas.get(wanted)
