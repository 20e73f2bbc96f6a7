"""The replica's side of the router: its snapshot, the turns that it rejects, and whether it drains.

The snapshot names prompt prefixes that are probably cached. The most useful are blocks with which several programs
began, such as system prompts and tool definitions. They come first in the snapshot and are dropped last. Blocks of only
one program fill the remaining room, because the next program with the same prefix may come at any time. One common LRU
list would not work: a few programs with long prompts of their own would evict every system prompt.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from msgspec.structs import replace

from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import ControlError, ControlTimeout, ProgramMoved
from cluster.core.replica_snapshot import MAX_PREFIXES, ReplicaSnapshot, pack_blocks, prefix_blocks, prompt_of, salt_of
from cluster.core.scaling_report import Demand, ReplicaLoadReport, ReplicaReport
from cluster.observing.recorders import Fallback
from replicas.control import ControlChannel

MAX_FENCED = 65_536
"""Largest number of programs whose epochs are remembered. The most recent ones stay."""


class Fence:
    """The highest epoch that this replica knows of each program (`router.decisions.Home.epoch`).

    A turn of a forgotten program is accepted: a turn on an old home costs a recomputation, but its answer is right.
    """

    def __init__(self, max_programs: int = MAX_FENCED) -> None:
        self._max_programs = max_programs
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._epochs)

    def raise_to(self, key: str, epoch: int) -> None:
        """Record that the program was placed with this epoch, here or elsewhere."""
        self._epochs[key] = max(epoch, self._epochs.get(key, epoch))
        self._epochs.move_to_end(key)
        if len(self._epochs) > self._max_programs:
            self._epochs.popitem(last=False)

    def knows_later(self, key: str, epoch: int) -> bool:
        """Return whether the program was placed with a later epoch, here or elsewhere."""
        return self._epochs.get(key, epoch) > epoch

    def refuses(self, key: str, epoch: int) -> int | None:
        """Return the later epoch that is known if a turn comes too late, else None.

        Older turns are rejected from then on.
        """
        known = self._epochs.get(key, epoch)
        if epoch < known:
            return known
        self.raise_to(key, epoch)
        return None


MAX_KEYS = 8192
"""Largest number of programs that are remembered, so that a later turn of one does not count as another program's."""


class PrefixMemory:
    """Prefix blocks of the prompts that a replica serves, as text or as token ids. The number of blocks is bounded."""

    def __init__(self, max_blocks: int = MAX_PREFIXES) -> None:
        self._max_blocks = max_blocks
        self._shared: OrderedDict[int, None] = OrderedDict()
        self._once: OrderedDict[int, None] = OrderedDict()
        self._keys: OrderedDict[str, None] = OrderedDict()

    def serve(self, key: str | None, prompt: Sequence[int] | bytes, salt: str = "") -> None:
        """Learn from a turn that is served here. Nothing is learnt from a program's later turns.

        Args:
            key: the program's key. None: the turn belongs to no program.
            prompt: as for `prefix_blocks`.
            salt: as for `prefix_blocks`.
        """
        if key is not None:
            known = key in self._keys
            self._keys[key] = None
            self._keys.move_to_end(key)
            if known:
                return
            if len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)
        # Last block first, so that the end of a prompt is dropped before the beginning that it needs.
        for block in reversed(prefix_blocks(prompt, salt)):
            if block in self._once or block in self._shared:
                self._once.pop(block, None)
                self._touch(self._shared, block)
            else:
                self._touch(self._once, block)

    def packed(self) -> bytes:
        """Return the blocks for `ReplicaSnapshot.prefixes`: those of several programs first, the most recently used
        first.
        """
        return pack_blocks(islice(chain(reversed(self._shared), reversed(self._once)), self._max_blocks))

    def _touch(self, blocks: OrderedDict[int, None], block: int) -> None:
        blocks[block] = None
        blocks.move_to_end(block)
        if len(blocks) > self._max_blocks:
            blocks.popitem(last=False)


logger = logging.getLogger("ray.serve")

DEMAND_STALE_S = 5.0
"""The demand that an ingress has sent is dropped after this long: the ingress sends it elsewhere, or has ended."""

GENERATES = frozenset({"chat", "completions", "generate"})
"""Methods whose prompts the model computes."""


class RouterSide:
    """The router's side of one replica.

    Args:
        channel: the channel to its scheduler.
        replica: Ray Serve's unique id of the replica.
        model: the model's id, as clients use it.
        fell_back: counts the calls that the scheduler did not answer in time.
        clock: measures the age of what ingresses have sent.
    """

    def __init__(
        self,
        channel: ControlChannel,
        replica: str,
        model: str,
        fell_back: Callable[[Fallback], None],
        clock: Clock | None = None,
    ) -> None:
        self._channel = channel
        self._replica = replica
        self._model = model
        self._fell_back = fell_back
        self._fence = Fence()
        self._prefixes = PrefixMemory()
        self._number = 0
        self._published: bytes | None = None
        self._snapshot: ReplicaSnapshot | None = None
        self.start_s = 0.0
        """Seconds from the start of this process until it could serve; 0: it cannot yet."""
        self._clock = clock or MonotonicClock()
        self._demands: dict[str, tuple[float, Demand]] = {}
        self.draining = False

    def receive(self, method: str, body: Mapping[str, Any], key: str | None, epoch: int | None) -> None:
        """Check the epoch of a request and learn its prefix.

        Raises:
            ProgramMoved: the program's home is now another replica.
        """
        if key is not None and epoch is not None and (later := self._fence.refuses(key, epoch)) is not None:
            raise ProgramMoved(f"program {key!r} has left this home; epoch {epoch} is over", epoch=later)
        if method in GENERATES:
            self._prefixes.serve(key, prompt_of(body), salt_of(body))

    async def moved_away(self, key: str, epoch: int) -> dict[str, Any]:
        """End a program here whose home is another replica with this epoch. Turns of older epochs are rejected.

        Its KV is freed. Turns in flight go on, and their KV is freed when they end. A notice of an older epoch than the
        one that is known here does nothing, since the program may live here again.

        Raises:
            ControlTimeout: the scheduler did not answer. Older turns are rejected nevertheless.
            EngineGone: the engine is dead.
        """
        if self._fence.knows_later(key, epoch):
            return {"moved": False}
        self._fence.raise_to(key, epoch)
        return await self._channel.call("moved", key=key)

    async def publish(self) -> bytes | None:
        """Return the replica's snapshot, as `ReplicaSnapshot.encode` packs it.

        It is the previous snapshot if the scheduler does not answer, and None if there is no previous one.
        """
        placing: dict[str, Any] = {"replica": self._replica, "model": self._model, "draining": self.draining}
        try:
            answer = await self._channel.call("routing", number=self._number + 1, **placing)
        except ControlError as error:
            if isinstance(error, ControlTimeout):
                self._fell_back(Fallback.CONTROL_TIMEOUT)
            logger.warning("no new snapshot for the router: %s", error)
            return self._published
        self._number += 1
        self._snapshot = replace(
            ReplicaSnapshot.decode(answer["snapshot"]), prefixes=self._prefixes.packed(), start_s=self.start_s
        )
        self._published = self._snapshot.encode()
        return self._published

    def receive_demand(self, ingress: str, demand: Mapping[str, float]) -> None:
        """Take the demand that an ingress sees, which it sends about once a second to one replica.

        Args:
            ingress: the name of the ingress.
            demand: `Demand.numbers`.
        """
        self._demands[ingress] = (self._clock.now_s(), Demand.of(demand))

    def scaling_report(self) -> dict[str, float]:
        """Return `ReplicaReport.numbers` for the autoscaler. It is empty until the first snapshot."""
        if self._snapshot is None:
            return {}
        now_s = self._clock.now_s()
        self._demands = {name: one for name, one in self._demands.items() if now_s - one[0] <= DEMAND_STALE_S}
        demands = {name: demand for name, (_, demand) in self._demands.items()}
        load = ReplicaLoadReport.of_snapshot(self._snapshot, self.start_s)
        return ReplicaReport(load, demands).numbers()
