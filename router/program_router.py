"""ProgramRouter: sends a call to exactly the replica that it names. A thin shell; who lives where is decided before.

Overrides of Ray Serve's RequestRouter, Ray 2.60.0 (tests/contracts/test_router_contracts.py holds the private names):
    choose_replicas               the replica that `session_id` names; without one all, and the one with the fewest
                                  requests gets the call
    _choose_replica_for_request   a call that names a replica waits for that replica only. Ray's own loop works on
                                  2 x replicas calls at a time, so that a few for a full replica would hold up all
    update_replicas, on_replica_actor_died   what replicas publish goes to the board
    decrement_queue_len_cache     wakes who waits for the replica

A replica that is gone fails the call at once, with ReplicaGone; Ray's routers would wait for another one.

Ray sends this module to the routers by value, with all that it names: what is to be one in a process, as the board, is
reached through its own module.
"""

import asyncio
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter

from cluster.errors import ReplicaGone
from cluster.routing import ROUTING_STATS_KEY
from router import board


class _Line:
    """Who waits for one replica: the first asks it whether it has room, the others wait behind."""

    def __init__(self) -> None:
        self.turnstile = asyncio.Lock()
        self.stirred = asyncio.Event()
        self.length = 0


class ProgramRouter(RequestRouter):
    """``session_id`` of the handle is the unique id of a replica, or empty."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lines: dict[str, _Line] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that is named, or all. A request for one that is gone is failed."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray asks again without a pause
        if not (named := _named_by(pending_request)):
            return [candidate_replicas]
        if (replica := self._named(named)) is not None:
            return [[replica]]
        # What is raised here is only logged, and the request would wait for ever; no candidate would be a busy loop.
        if not pending_request.future.done():
            pending_request.future.set_exception(_gone(named))
        return [candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        named = _named_by(pending_request)
        if not named:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        line = self._lines.setdefault(named, _Line())
        line.length += 1
        try:
            async with line.turnstile:
                replica = await self._with_room(named, line)
        finally:
            line.length -= 1
            if not line.length:
                self._lines.pop(named, None)
        self._record_queue_wait_time(pending_request)
        return replica

    async def _with_room(self, named: str, line: _Line) -> RunningReplica:
        attempt = 0
        while True:
            line.stirred.clear()
            if (replica := self._named(named)) is None:
                raise _gone(named)
            chosen = await self._select_from_candidate_replicas([replica], attempt)
            if chosen is not None:
                return chosen
            try:
                async with asyncio.timeout(self._compute_backoff_s(attempt)):
                    await line.stirred.wait()
            except TimeoutError:
                attempt += 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Which replicas there are, and what they publish."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call found it dead, before the controller did."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        """A call of this router has ended there."""
        super().decrement_queue_len_cache(replica_id)
        if (line := self._lines.get(replica_id.unique_id)) is not None:
            line.stirred.set()

    def _publish(self) -> None:
        stats = ((id.unique_id, replica.routing_stats) for id, replica in self._replicas.items())
        board.BOARD.publish(self._deployment_id.name, ((id, told.get(ROUTING_STATS_KEY)) for id, told in stats))
        for named, line in self._lines.items():
            if self._named(named) is None:
                line.stirred.set()

    def _named(self, unique_id: str) -> RunningReplica | None:
        wanted = ReplicaID(unique_id=unique_id, deployment_id=self._deployment_id)
        return self._replicas.get(wanted)


def _named_by(pending_request: PendingRequest) -> str:
    """The replica that a call names; "" for none. In a request that Serve's own HTTP proxy brings (in the direct data
    plane, one for which HAProxy did not know the replica), `session_id` is what a client said: no replica.
    """
    metadata = pending_request.metadata
    return "" if metadata.is_http_request else metadata.session_id


def _gone(named: str) -> ReplicaGone:
    return ReplicaGone(f"replica {named[:64]!r} is not there")
