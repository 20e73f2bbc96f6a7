"""The replica's half of the router: what it tells of itself, which turns it refuses, whether it drains."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from cluster.errors import ControlError, ControlTimeout, ProgramMoved
from cluster.observing.replica import Fallback
from cluster.routing import ReplicaSnapshot, prompt_of, salt_of
from replicas.control import ControlChannel
from replicas.fence import Fence
from replicas.prefix_memory import PrefixMemory

logger = logging.getLogger("ray.serve")

GENERATES = frozenset({"chat", "completions"})
"""Methods whose prompts the model computes."""


class RouterSide:
    """One replica's.

    Args:
        channel: to its scheduler.
        replica: Ray Serve's unique id of it.
        model: the model's id, as clients name it.
        fell_back: counts the times that the scheduler did not answer.
    """

    def __init__(
        self, channel: ControlChannel, replica: str, model: str, fell_back: Callable[[Fallback], None]
    ) -> None:
        self._channel = channel
        self._replica = replica
        self._model = model
        self._fell_back = fell_back
        self._fence = Fence()
        self._prefixes = PrefixMemory()
        self._number = 0
        self._published: bytes | None = None
        self.draining = False

    def receive(self, method: str, body: Mapping[str, Any], key: str | None, epoch: int | None) -> None:
        """A request has come.

        Raises:
            ProgramMoved: its program lives elsewhere now.
        """
        if key is not None and epoch is not None and (later := self._fence.refuses(key, epoch)) is not None:
            raise ProgramMoved(f"program {key!r} has left this home; epoch {epoch} is over", epoch=later)
        if method in GENERATES:
            self._prefixes.serve(key, prompt_of(body), salt_of(body))

    async def moved_away(self, key: str, epoch: int) -> dict[str, Any]:
        """The program lives elsewhere with this epoch: turns of older ones are refused, its KV is given up.

        Turns in flight go on; what they leave is given up when they end.

        Raises:
            ControlTimeout: the scheduler did not answer; the refusal holds all the same.
            EngineGone: the engine is dead.
        """
        self._fence.tell(key, epoch)
        return await self._channel.call("moved", key=key)

    async def publish(self) -> bytes | None:
        """The snapshot of now as `ReplicaSnapshot.encode` packs it; the one before where the scheduler does not answer.

        None: there never was one.
        """
        placing = {"replica": self._replica, "model": self._model, "draining": self.draining}
        try:
            answer = await self._channel.call("routing", number=self._number + 1, **placing)
        except ControlError as error:
            if isinstance(error, ControlTimeout):
                self._fell_back(Fallback.CONTROL_TIMEOUT)
            logger.warning("no new snapshot for the router: %s", error)
            return self._published
        self._number += 1
        snapshot = ReplicaSnapshot.decode(answer["snapshot"])
        self._published = replace(snapshot, prefixes=self._prefixes.packed()).encode()
        return self._published
