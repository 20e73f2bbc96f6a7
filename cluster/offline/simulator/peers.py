"""Two simulated routers that know every replica's cache: Dynamo's published cost, and a bound for all routers."""

from collections.abc import Callable, Sequence

from cluster.offline.simulator.routing import RequestRouter, Sent, SimulatedTurn

Hashes = Callable[[Sequence[int]], Sequence[bytes]]
"""Of a prompt's full blocks."""
CachedBlocks = Callable[[int, Sequence[bytes]], int]
"""How many leading ones of these blocks a replica, by its index, has in its cache."""
Prefilled = Callable[[int, str], bool]
"""Whether a turn, by its id, has its first token on that replica."""


class KvAware(RequestRouter):
    """A router that knows every replica's cache exactly, by the published cost of Dynamo's KV router.

    Ray's KVAwareRouter asks Dynamo's selection service, which learns of caches through sockets and forgets loads in
    real time: it cannot be driven under virtual time. This is its cost function with its defaults (Dynamo 1.6,
    ``KvRouterConfig``: ``prefill_load_scale`` 1, credit for cached blocks 1, temperature 0, output blocks not
    counted): the least of

        prompt blocks that the replica's turns, this one included, still have to compute + blocks of its active turns

    with nothing late or lost on the way from the replicas, so that it is no worse than the real one.

    Args:
        replicas: how many there are.
        hashes: names a prompt's blocks.
        cached: looks into the replicas' caches.
        prefilled: looks at their turns.
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
        """Blocks that turns without a first token had to compute when they were sent."""
        self._active_blocks = [0] * replicas
        self._blocks: dict[str, int] = {}

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """The replica of least cost that is not full, the first one of several."""
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
        """Its blocks are active from now on."""
        super().sent(turn, replica)
        self._active_blocks[replica] += self._blocks[turn.turn_id]

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """They no longer are."""
        super().ended(turn, replica, context_tokens, now_s)
        self._active_blocks[replica] -= self._blocks.pop(turn.turn_id)
        self._prefilling[replica].pop(turn.turn_id, None)

    def _prefill_blocks(self, replica: int) -> int:
        prefilling = self._prefilling[replica]
        for turn_id in [turn_id for turn_id in prefilling if self._prefilled(replica, turn_id)]:
            del prefilling[turn_id]
        return sum(prefilling.values())


Copy = Callable[[int, Sequence[int], int], None]
"""Puts so many leading blocks of a prompt into a replica's cache."""
Weight = Callable[[Sequence[int]], float]
"""Seconds that a turn with this prompt adds to an iteration."""


class Everywhere(RequestRouter):
    """A bound for routers, which none can be built to: every replica has what any of them has computed.

    A turn goes where iterations are shortest for it, and get longer for as few others as may be; the KV of its prompt,
    as far as another replica has it, is there at once. On memory without end nothing is ever computed twice, so that
    what is left to a router is an even load. This one's is even: no program has a home that keeps it from that.

    Args:
        replicas: how many there are.
        hashes: names a prompt's blocks.
        cached: looks into the replicas' caches.
        copy: fills them.
        weight: of turns.
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
        """The replica not full where least is lost, for it and for those under way; the first one of several."""
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
        """It takes part in the iterations there."""
        super().sent(turn, replica)
        self._weights[replica][turn.turn_id] = self._weight(turn.prompt)

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """It no longer does."""
        super().ended(turn, replica, context_tokens, now_s)
        del self._weights[replica][turn.turn_id]
