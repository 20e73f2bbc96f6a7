"""A Ray request router that sends a call to exactly the replica that it names. Placement is decided before the call.

Overrides of Ray Serve's RequestRouter, Ray 2.60.0 (tests/contracts/test_router_contracts.py holds the private names):
    choose_replicas               the replica that `session_id` names; without one all, and the one with the fewest
                                  requests gets the call
    _choose_replica_for_request   a turn that names a replica waits for that replica only. Ray's own loop works on
                                  2 x replicas calls at a time, so that a few for a full replica would hold up all.
                                  A control call waits for nothing
    create_replica_wrapper        turns leave `CONTROL_SLOTS` of a replica's requests to control calls
    update_replicas, on_replica_actor_died   what replicas publish goes to the snapshot hub
    decrement_queue_len_cache     wakes the turns that wait for the replica

Turns are streamed. A call that is not streamed is a control call: it must arrive most when a replica is full, since the
end of a tool or of a program is what frees memory. Control calls have slots of their own on the replica, so they are
sent at once, and none waits for another.

A replica that is gone fails the call at once, with ReplicaGone; Ray's routers would wait for another one.

Ray sends this module to the routers by value, with all that it names. An object that must exist once in a process, such
as the hub, is reached through its own module.
"""

import asyncio
from typing import Any

from ray.serve._private.common import ReplicaID, RunningReplicaInfo
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter

from cluster.core.errors import ReplicaGone
from cluster.core.replica_snapshot import ROUTING_STATS_KEY
from router import snapshots

CONTROL_SLOTS = 64
"""Of a replica's `max_ongoing_requests`, this many are for control calls; Ray's own count on the replica has both."""


def turn_limit(max_ongoing_requests: int) -> int:
    """Turns that a replica takes at a time, of the requests that it takes in all."""
    return max(1, max_ongoing_requests - CONTROL_SLOTS)


class TurnLimitedReplica(RunningReplica):
    """A replica as turns see it: full before Ray would say so."""

    @property
    def max_ongoing_requests(self) -> int:
        """Turns at a time."""
        return turn_limit(super().max_ongoing_requests)


class _TurnQueue:
    """The turns that wait for one replica. The first one polls the replica for room; the others wait behind it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.changed = asyncio.Event()
        self.length = 0


class PinnedRequestRouter(RequestRouter):
    """The handle's ``session_id`` is the unique id of a replica, or empty."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queues: dict[str, _TurnQueue] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that is named, or all. A request for a replica that is gone fails."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray asks again without a pause
        if not (named := _named_by(pending_request)):
            return [candidate_replicas]
        if (replica := self._named(named)) is not None:
            return [[replica]]
        # An exception here is only logged, and the request would wait for ever. No candidate would be a busy loop.
        if not pending_request.future.done():
            pending_request.future.set_exception(_gone(named))
        return [candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        named = _named_by(pending_request)
        if self._replicas and not pending_request.metadata.is_streaming:
            return await self._for_control_call(named, is_retry)
        if not named:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        queue = self._queues.setdefault(named, _TurnQueue())
        queue.length += 1
        try:
            async with queue.lock:
                replica = await self._with_room(named, queue)
        finally:
            queue.length -= 1
            if not queue.length:
                self._queues.pop(named, None)
        self._record_queue_wait_time(pending_request)
        return replica

    async def _for_control_call(self, named: str, is_retry: bool) -> RunningReplica:
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
            raise _gone(named)
        return replica

    async def _with_room(self, named: str, queue: _TurnQueue) -> RunningReplica:
        attempt = 0
        while True:
            queue.changed.clear()
            if (replica := self._named(named)) is None:
                raise _gone(named)
            chosen = await self._select_from_candidate_replicas([replica], attempt)
            if chosen is not None:
                return chosen
            try:
                async with asyncio.timeout(self._compute_backoff_s(attempt)):
                    await queue.changed.wait()
            except TimeoutError:
                attempt += 1

    def create_replica_wrapper(self, replica_info: RunningReplicaInfo) -> RunningReplica:
        """A replica with the limit for turns."""
        return TurnLimitedReplica(replica_info)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The controller has published the replicas and their statistics."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call found the replica dead before the controller did."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        """A call of this router has ended on the replica."""
        super().decrement_queue_len_cache(replica_id)
        if (queue := self._queues.get(replica_id.unique_id)) is not None:
            queue.changed.set()

    def _publish(self) -> None:
        stats = ((id.unique_id, replica.routing_stats) for id, replica in self._replicas.items())
        snapshots.HUB.publish(
            self._deployment_id.name, ((id, published.get(ROUTING_STATS_KEY)) for id, published in stats)
        )
        for named, queue in self._queues.items():
            if self._named(named) is None:
                queue.changed.set()

    def _named(self, unique_id: str) -> RunningReplica | None:
        wanted = ReplicaID(unique_id=unique_id, deployment_id=self._deployment_id)
        return self._replicas.get(wanted)


def _named_by(pending_request: PendingRequest) -> str:
    """The replica that a call names; "" for none.

    In a request that Serve's HTTP proxy brings, `session_id` is the client's, and names no replica. In the direct data
    plane that is a request for which HAProxy did not know the replica.
    """
    metadata = pending_request.metadata
    return "" if metadata.is_http_request else metadata.session_id


def _gone(named: str) -> ReplicaGone:
    return ReplicaGone(f"replica {named[:64]!r} is not there")
