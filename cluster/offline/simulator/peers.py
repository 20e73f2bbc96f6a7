"""Two simulated routers with exact knowledge of all caches: one with Dynamo's cost, and an upper bound for routers."""

from collections.abc import Callable, Sequence

from cluster.offline.simulator.routing import RequestRouter, Sent, SimulatedTurn

Hashes = Callable[[Sequence[int]], Sequence[bytes]]
"""Returns the hashes of a prompt's full blocks."""
CachedBlocks = Callable[[int, Sequence[bytes]], int]
"""Returns how many of these blocks, from the first one on, the replica with this index has in its cache."""
Prefilled = Callable[[int, str], bool]
"""Returns whether the turn with this id has its first token on the replica with this index."""


class KvAware(RequestRouter):
    """A router with exact knowledge of every replica's cache, and the published cost of Dynamo's KV router.

    Ray's KVAwareRouter asks Dynamo's selection service. That service receives cache events through sockets and expires
    loads in real time, so it cannot run under virtual time. This class has its cost function with the defaults
    (Dynamo 1.6, ``KvRouterConfig``: ``prefill_load_scale`` 1, credit for cached blocks 1, temperature 0, output blocks
    not counted). It minimizes

        prompt blocks that the replica's turns, including this one, still have to compute + blocks of its active turns

    Knowledge of the caches is never late or lost here, so that this router is no worse than the real one.

    Args:
        replicas: number of replicas.
        hashes: hashes a prompt's blocks.
        cached: counts cached blocks of a replica.
        prefilled: tells whether a turn has its first token.
        max_ongoing: see RequestRouter.
    """

    def __init__(
        self,
        replicas: int,
        hashes: Hashes,
        cached: CachedBlocks,
        prefilled: Prefilled,
        max_ongoing: int | None = None,
    ) -> None:
        super().__init__(replicas, max_ongoing)
        self._hashes = hashes
        self._cached = cached
        self._prefilled = prefilled
        self._prefilling: list[dict[str, int]] = [{} for _ in range(replicas)]
        """By replica and turn without a first token: the blocks that the turn had to compute when it was sent."""
        self._active_blocks = [0] * replicas
        self._blocks: dict[str, int] = {}

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Choose the first replica with the least cost that is not full."""
        hashes = self._hashes(turn.prompt)
        costs: dict[int, tuple[int, int]] = {}
        for replica in range(len(self.ongoing)):
            if not self.full(replica):
                new = len(hashes) - self._cached(replica, hashes)
                costs[replica] = (self._prefill_blocks(replica) + new + self._active_blocks[replica], new)
        if not costs:
            return None
        replica = min(costs, key=lambda replica: costs[replica][0])
        self._prefilling[replica][turn.turn_id] = costs[replica][1]
        self._blocks[turn.turn_id] = len(hashes)
        return Sent(replica, "least cost")

    def sent(self, turn: SimulatedTurn, replica: int) -> None:
        """Count the turn's blocks as active on the replica."""
        super().sent(turn, replica)
        self._active_blocks[replica] += self._blocks[turn.turn_id]

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """Stop counting the turn's blocks as active."""
        super().ended(turn, replica, context_tokens, now_s)
        self._active_blocks[replica] -= self._blocks.pop(turn.turn_id)
        self._prefilling[replica].pop(turn.turn_id, None)

    def _prefill_blocks(self, replica: int) -> int:
        prefilling = self._prefilling[replica]
        for turn_id in [turn_id for turn_id in prefilling if self._prefilled(replica, turn_id)]:
            del prefilling[turn_id]
        return sum(prefilling.values())


Copy = Callable[[int, Sequence[int], int], None]
"""Puts this many blocks of a prompt, from the first one on, into the cache of the replica with this index."""
Weight = Callable[[Sequence[int]], float]
"""Returns the seconds that a turn with this prompt adds to an iteration."""


class Everywhere(RequestRouter):
    """An upper bound for routers, which cannot be implemented: every replica has all KV that any replica has computed.

    A turn goes to the replica where it adds the least iteration time, for itself and for the ongoing turns. The part of
    its prompt's KV that another replica has is copied at once. With unlimited memory nothing would be computed twice,
    and a router could only balance the load. This router balances it freely, because no program is bound to a replica.

    Args:
        replicas: number of replicas.
        hashes: hashes a prompt's blocks.
        cached: counts cached blocks of a replica.
        copy: copies blocks into a cache.
        weight: computes the iteration time of a turn.
        max_ongoing: see RequestRouter.
    """

    def __init__(
        self,
        replicas: int,
        hashes: Hashes,
        cached: CachedBlocks,
        copy: Copy,
        weight: Weight,
        max_ongoing: int | None = None,
    ) -> None:
        super().__init__(replicas, max_ongoing)
        self._hashes = hashes
        self._cached = cached
        self._copy = copy
        self._weight = weight
        self._weights: list[dict[str, float]] = [{} for _ in range(replicas)]

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Choose the first replica that is not full and where the turn adds the least iteration time to all turns."""
        open_ = [replica for replica in range(len(self.ongoing)) if not self.full(replica)]
        if not open_:
            return None
        own_s = self._weight(turn.prompt)
        replica = min(open_, key=lambda one: sum(self._weights[one].values()) + own_s * len(self._weights[one]))
        hashes = self._hashes(turn.prompt)
        somewhere = max(self._cached(one, hashes) for one in range(len(self.ongoing)))
        if somewhere > self._cached(replica, hashes):
            self._copy(replica, turn.prompt, somewhere)
        return Sent(replica, "least under way")

    def sent(self, turn: SimulatedTurn, replica: int) -> None:
        """Count the turn in the iterations of the replica."""
        super().sent(turn, replica)
        self._weights[replica][turn.turn_id] = self._weight(turn.prompt)

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """Stop counting the turn in the iterations of the replica."""
        super().ended(turn, replica, context_tokens, now_s)
        del self._weights[replica][turn.turn_id]
