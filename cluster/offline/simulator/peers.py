"""Two simulated routers with exact knowledge of all caches: one with Dynamo's cost, and an upper bound for routers."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from cluster.offline.simulator.routing import RequestRouter, Sent, SimulatedTurn

Hashes = Callable[[Sequence[int]], Sequence[bytes]]
"""Returns the hashes of a prompt's full blocks."""
CachedBlocks = Callable[[int, Sequence[bytes]], int]
"""Returns how many of these blocks, from the first one on, the replica with this index has in its cache."""
Prefilled = Callable[[int, str], bool]
"""Returns whether the turn with this id has its first token on the replica with this index."""


class KvAware(RequestRouter):
    """A router with exact knowledge of every replica's cache, and the cost of Dynamo's KV router.

    The cost and its defaults are those of Dynamo 1.6 (``KvRouterConfig``: ``prefill_load_scale`` 1, credit for cached
    blocks 1, temperature 0, output blocks not counted). `benchmarks.dynamo_router` holds its costs against Dynamo's own
    selection service, turn by turn. It minimizes

        prompt tokens that the replica's turns, with this one, have to compute / block size + blocks of its active turns

    A block that several active turns share counts once. Equal costs are drawn from at random, as there. Knowledge of
    the caches is never late or lost here, so that this router is no worse than the real one.

    Args:
        replicas: number of replicas.
        hashes: hashes a prompt's full blocks, each chained to the one before it.
        cached: counts cached blocks of a replica.
        prefilled: tells whether a turn has its first token.
        block_size: tokens of a block.
        seed: seed of the draws between equal costs.
        max_ongoing: see RequestRouter.
    """

    def __init__(
        self,
        replicas: int,
        hashes: Hashes,
        cached: CachedBlocks,
        prefilled: Prefilled,
        block_size: int,
        seed: int = 0,
        max_ongoing: int | None = None,
    ) -> None:
        super().__init__(replicas, max_ongoing)
        self._hashes = hashes
        self._cached = cached
        self._prefilled = prefilled
        self._block_size = block_size
        self._random = Random(seed)
        self._prefilling: list[dict[str, int]] = [{} for _ in range(replicas)]
        """By replica and turn without a first token: the tokens that the turn had to compute when it was sent."""
        self._active: list[Counter[bytes]] = [Counter() for _ in range(replicas)]
        """By replica: how many active turns have each block."""
        self._blocks: dict[str, Sequence[bytes]] = {}
        """The blocks of each active turn."""

    def loads(self, turn: SimulatedTurn) -> list[tuple[int, int]]:
        """Return what each replica would have with this turn: tokens to compute, and blocks of active turns."""
        hashes = self._hashes(turn.prompt)
        return [self._load(replica, turn, hashes) for replica in range(len(self.ongoing))]

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Choose a replica with the least cost that is not full."""
        costs = {
            replica: tokens / self._block_size + blocks
            for replica, (tokens, blocks) in enumerate(self.loads(turn))
            if not self.full(replica)
        }
        if not costs:
            return None
        least = min(costs.values())
        return Sent(self._random.choice([replica for replica, cost in costs.items() if cost == least]), "least cost")

    def sent(self, turn: SimulatedTurn, replica: int) -> None:
        """Count the turn's blocks as active on the replica, and its tokens as to be computed there."""
        super().sent(turn, replica)
        hashes = self._hashes(turn.prompt)
        self._prefilling[replica][turn.turn_id] = self._new_tokens(replica, turn, hashes)
        self._blocks[turn.turn_id] = hashes
        self._active[replica].update(hashes)

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """Stop counting the turn's blocks as active."""
        super().ended(turn, replica, context_tokens, now_s)
        active = self._active[replica]
        for block in self._blocks.pop(turn.turn_id):
            active[block] -= 1
            if not active[block]:
                del active[block]
        self._prefilling[replica].pop(turn.turn_id, None)

    def _load(self, replica: int, turn: SimulatedTurn, hashes: Sequence[bytes]) -> tuple[int, int]:
        active = self._active[replica]
        # A chained hash is active only if all before it are.
        shared = bisect_left(hashes, True, key=lambda block: block not in active)
        tokens = self._prefill_tokens(replica) + self._new_tokens(replica, turn, hashes)
        return tokens, len(active) + len(hashes) - shared

    def _new_tokens(self, replica: int, turn: SimulatedTurn, hashes: Sequence[bytes]) -> int:
        return len(turn.prompt) - self._cached(replica, hashes) * self._block_size

    def _prefill_tokens(self, replica: int) -> int:
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
