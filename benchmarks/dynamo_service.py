"""Dynamo's own KV router before simulated replicas.

`SelectionService` of ai-dynamo-runtime is the core of Dynamo's KV router without its runtime: the radix tree of all
caches, the accounting of active turns, and the choice. It learns of the caches as from live engines: through a ZeroMQ
socket for each replica, in vLLM's own messages. Here the messages are the events of the virtual replicas' block pools.
They are published just before each choice, and the choice waits until the service has applied them, so that real time
plays no part. The service is notified of a turn's first token and of its end, as Dynamo's frontend does.

One limit remains: the service forgets a turn some minutes of real time after it was sent, if it has not ended.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

import zmq
from msgspec import msgpack
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    KVEventBatch,
)

from cluster.offline.simulator.routing import RequestRouter, Sent, SimulatedTurn
from replicas.virtual_replica import VirtualReplica

T = TypeVar("T")

LOCAL = "tcp://127.0.0.1"
UNUSED_PORT = f"{LOCAL}:1"
"""Address that the service knows as a replica's. It never connects to it."""
APPLIED_WITHIN_S = 30.0
JOINS_WITHIN_S = 0.05
"""Real seconds after which a mark is published again. A socket drops what it publishes before the service listens."""
FIRST_MARK = 1 << 20
"""First token id of marks, above those of all prompts."""

Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class DynamoService:
    """The selection service, and the sockets from which it learns of the caches.

    Args:
        replicas: number of replicas, which it knows by their indices.
        block_size: tokens of a block.
    """

    def __init__(self, replicas: int, block_size: int) -> None:
        from dynamo._core import SelectionService

        self._service = SelectionService(indexer_threads=1)
        self._loop = asyncio.new_event_loop()
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._numbers = [0] * replicas
        self._block_size = block_size
        self._mark = FIRST_MARK
        for index in range(replicas):
            socket = self._context.socket(zmq.PUB)
            port = socket.bind_to_random_port(LOCAL)
            self._sockets.append(socket)
            worker = {"worker_id": index, "block_size": block_size, "endpoint": UNUSED_PORT}
            self._wait(self._await("upsert_worker", worker | {"kv_events_endpoint": f"{LOCAL}:{port}"}))
        self.apply([[] for _ in range(replicas)])

    def close(self) -> None:
        """Stop the service and close the sockets."""
        self._service.shutdown()
        self._context.destroy(linger=0)
        self._loop.close()

    def apply(self, events: Sequence[Sequence[Event]]) -> None:
        """Publish the events of each replica, and wait until the service has applied all of them.

        A mark ends the events of each replica: a block that no prompt has. The service applies the events of a replica
        in order, so that it has applied all of them when it knows the mark.

        Raises:
            TimeoutError: it does not apply them.
        """
        mark, self._mark = self._mark, self._mark + 1
        for index, of_replica in enumerate(events):
            self._publish(index, [*of_replica, self._stored(mark)])
        self._wait(self._until_marked(mark))
        for index in range(len(events)):
            self._publish(index, [BlockRemoved(block_hashes=[mark], medium="GPU")])

    def loads(self, prompt: Sequence[int]) -> list[tuple[int, int]]:
        """Return what each replica would have with this prompt: tokens to compute, and blocks of active turns."""
        found = self._wait(self._await("potential_loads", {"token_ids": list(prompt)}))
        by_id = {one["worker_id"]: one for one in found}
        return [
            (by_id[index]["potential_prefill_tokens"], by_id[index]["potential_decode_blocks"])
            for index in range(len(self._sockets))
        ]

    def choose(self, turn_id: str, prompt: Sequence[int]) -> int:
        """Choose a replica, and count the turn as active on it."""
        request = {"selection_id": turn_id, "token_ids": list(prompt)}
        return int(self._wait(self._await("select_and_reserve", request))["worker_id"])

    def prefilled(self, turn_id: str) -> None:
        """Record a turn's first token."""
        self._wait(self._await("prefill_complete", turn_id))

    def ended(self, turn_id: str) -> None:
        """Record a turn's end."""
        self._wait(self._await("free_reservation", turn_id))

    def _wait(self, action: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(action)

    async def _await(self, method: str, argument: Any) -> Any:
        return await getattr(self._service, method)(argument)

    def _publish(self, index: int, events: Sequence[Event]) -> None:
        batch = KVEventBatch(ts=time.time(), events=list(events))
        self._sockets[index].send_multipart([b"", self._numbers[index].to_bytes(8, "big"), msgpack.encode(batch)])
        self._numbers[index] += 1

    def _stored(self, mark: int) -> BlockStored:
        return BlockStored(
            block_hashes=[mark],
            parent_block_hash=None,
            token_ids=[mark] * self._block_size,
            block_size=self._block_size,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )

    async def _until_marked(self, mark: int) -> None:
        request = {"token_ids": [mark] * self._block_size}
        began = again = time.monotonic()
        while True:
            overlaps = await self._service.overlap_scores(request)
            known = {one["worker_id"] for one in overlaps["workers"] if one["device_blocks"]}
            if len(known) == len(self._sockets):
                return
            now = time.monotonic()
            if now - began > APPLIED_WITHIN_S:
                raise TimeoutError(
                    f"the service has not applied the events of {len(self._sockets) - len(known)} replicas"
                )
            if now - again > JOINS_WITHIN_S:
                again = now
                for index in set(range(len(self._sockets))) - known:
                    self._publish(index, [self._stored(mark)])
            await asyncio.sleep(0)


class Recorder(EventPublisher):  # type: ignore[misc]  # vLLM is untyped
    """Keeps the events that a scheduler publishes at the end of its steps, until they are taken.

    Args:
        replica: a replica, whose scheduler records events from now on.
    """

    def __init__(self, replica: VirtualReplica) -> None:
        super().__init__()
        self._published: list[Event] = []
        self._pool = replica.engine.scheduler.kv_cache_manager.block_pool
        self._pool.enable_kv_cache_events = True
        replica.engine.scheduler.kv_event_publisher = self

    def publish(self, events: EventBatch) -> None:
        """Keep the events of a step."""
        self._published += events.events

    def shutdown(self) -> None:
        """Do nothing: there is nothing to close."""

    def take(self) -> list[Event]:
        """Return the events since the last call, with those of a step that has not ended."""
        taken, self._published = [*self._published, *self._pool.take_events()], []
        return taken


class DynamoRouter(RequestRouter):
    """Places turns by Dynamo's selection service.

    Args:
        replicas: the replicas. Their schedulers record events from now on.
        service: the service, for as many replicas.
    """

    def __init__(self, replicas: Sequence[VirtualReplica], service: DynamoService) -> None:
        super().__init__(len(replicas))
        self._replicas = replicas
        self.service = service
        self._recorders = [Recorder(replica) for replica in replicas]
        self._prefilling: dict[str, int] = {}
        """Replica of each turn without a first token."""

    def synchronize(self) -> None:
        """Notify the service of everything that has happened on the replicas."""
        self.service.apply([recorder.take() for recorder in self._recorders])
        for turn_id, replica in list(self._prefilling.items()):
            if self._replicas[replica].is_prefilled(turn_id):
                del self._prefilling[turn_id]
                self.service.prefilled(turn_id)

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Let the service choose."""
        self.synchronize()
        replica = self.service.choose(turn.turn_id, turn.prompt)
        self._prefilling[turn.turn_id] = replica
        return Sent(replica, "dynamo")

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """Notify the service."""
        super().ended(turn, replica, context_tokens, now_s)
        self._prefilling.pop(turn.turn_id, None)
        self.service.ended(turn.turn_id)
