"""A bound for routers, which none can be built to: every replica has what any of them has computed.

A turn goes where iterations are shortest for it, and get longer for as few others as may be; the KV of its prompt, as
far as another replica has it, is there at once. On memory without end nothing is ever computed twice, wherever a turn
goes, so that what is left to a router is an even load, and this one's is: programs have no home that would keep them
from it.
"""

from collections.abc import Callable, Sequence

from cluster.simulator.kv_aware import CachedBlocks, Hashes
from cluster.simulator.routing import RequestRouter, Sent, SimulatedTurn

Copy = Callable[[int, Sequence[int], int], None]
"""Puts so many leading blocks of a prompt into a replica's cache."""
Weight = Callable[[Sequence[int]], float]
"""Seconds that a turn with this prompt adds to an iteration."""


class Everywhere(RequestRouter):
    """See the module.

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
