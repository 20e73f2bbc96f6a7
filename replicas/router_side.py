"""The replica's half of the router: its snapshot, the turns that it refuses, whether it drains.

The snapshot names the beginnings of prompts that are likely cached. Blocks that several programs began with are what
is worth knowing: system prompts and tool definitions. They come first and are dropped last. What only one program has
begun with takes the room that they leave, since the next program with the same beginning may come at any time. (All
blocks in one line would not do: a few programs with long prompts of their own would push out every system prompt.)
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from msgspec.structs import replace

from cluster.core.errors import ControlError, ControlTimeout, ProgramMoved
from cluster.core.replica_snapshot import MAX_PREFIXES, ReplicaSnapshot, pack_blocks, prefix_blocks, prompt_of, salt_of
from cluster.observing.recorders import Fallback
from replicas.control import ControlChannel

MAX_FENCED = 65_536
"""Programs whose epochs are remembered, those heard of last."""


class Fence:
    """The highest epoch that this replica knows of each program (`router.decisions.Home.epoch`).

    What is forgotten is let through: a turn on an old home costs a recomputation, no wrong answer.
    """

    def __init__(self, max_programs: int = MAX_FENCED) -> None:
        self._max_programs = max_programs
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._epochs)

    def raise_to(self, key: str, epoch: int) -> None:
        """The program has been placed, here or elsewhere, with this epoch."""
        self._epochs[key] = max(epoch, self._epochs.get(key, epoch))
        self._epochs.move_to_end(key)
        if len(self._epochs) > self._max_programs:
            self._epochs.popitem(last=False)

    def refuses(self, key: str, epoch: int) -> int | None:
        """The later epoch that is known, if a turn of this one comes too late; else older ones may come no more."""
        known = self._epochs.get(key, epoch)
        if epoch < known:
            return known
        self.raise_to(key, epoch)
        return None


MAX_KEYS = 8192
"""Programs that are remembered, so that a later turn of one does not count as another program's."""


class PrefixMemory:
    """Fed with the prompts that a replica serves, as text or as token ids; whoever asks names them alike. Bounded."""

    def __init__(self, max_blocks: int = MAX_PREFIXES) -> None:
        self._max_blocks = max_blocks
        self._shared: OrderedDict[int, None] = OrderedDict()
        self._once: OrderedDict[int, None] = OrderedDict()
        self._keys: OrderedDict[str, None] = OrderedDict()

    def serve(self, key: str | None, prompt: Sequence[int] | bytes, salt: str = "") -> None:
        """A turn of a program (None: of none) is served here. Of a program's later turns nothing is learnt.

        ``prompt`` and ``salt``: as for `prefix_blocks`.
        """
        if key is not None:
            known = key in self._keys
            self._keys[key] = None
            self._keys.move_to_end(key)
            if known:
                return
            if len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)
        # Last block first: then the end of a prompt is dropped before its beginning, without which it is of no use.
        for block in reversed(prefix_blocks(prompt, salt)):
            if block in self._once or block in self._shared:
                self._once.pop(block, None)
                self._touch(self._shared, block)
            else:
                self._touch(self._once, block)

    def packed(self) -> bytes:
        """For `ReplicaSnapshot.prefixes`: blocks of several programs first, those used last first."""
        return pack_blocks(islice(chain(reversed(self._shared), reversed(self._once)), self._max_blocks))

    def _touch(self, blocks: OrderedDict[int, None], block: int) -> None:
        blocks[block] = None
        blocks.move_to_end(block)
        if len(blocks) > self._max_blocks:
            blocks.popitem(last=False)


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
        self._fence.raise_to(key, epoch)
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
