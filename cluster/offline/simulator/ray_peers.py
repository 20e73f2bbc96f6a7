"""Ray's own request routers under virtual time, by Ray's own code wherever that runs without a cluster.

The hash ring and the prefix tree are Ray's classes as they are. What of a router is bound to actors and its event loop
is written again here, rule by rule, from Ray 2.60: the random pair of `PowerOfTwoChoicesRequestRouter.choose_replicas`,
the choice among candidates of `RequestRouter._select_from_candidate_replicas`, and the three cases of
`PrefixCacheAffinityRouter._prefix_match_best_replicas`. One router sees all turns and every end at once, which is more
than Ray's have with several ingresses.

Ray is imported when a router that needs it is made: this is the only module of the simulator that does it.
"""

import logging
from dataclasses import dataclass
from random import Random
from typing import Any

from cluster.offline.simulator.routing import RequestRouter, Sent, SimulatedTurn

VIRTUAL_NODES = 100
FALLBACK_REPLICAS = 2
"""Both are the defaults of Ray's ConsistentHashRouter."""
MATCH_RATE_THRESHOLD = 0.1
"""The default of Ray's PrefixCacheAffinityRouter."""


class PowerOfTwo(RequestRouter):
    """Of two random replicas the one with fewer turns under way, the first of them if they have as many."""

    def __init__(self, replicas: int, seed: int, max_ongoing: int | None = None) -> None:
        super().__init__(replicas, max_ongoing)
        self._random = Random(seed)

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Of a new pair at each try."""
        replica = self.fewest(self.pair())
        return None if replica is None else Sent(replica, "of two")

    def pair(self) -> list[int]:
        """Two different replicas in random order, or the only one."""
        count = len(self.ongoing)
        return self._random.sample(range(count), min(2, count))


@dataclass(frozen=True, slots=True)
class _ReplicaId:
    """What the ring reads of Ray's ReplicaID."""

    unique_id: str
    index: int


class ConsistentHash(RequestRouter):
    """Ray's ring, the program's name as the session; a full replica's turn goes to the next ones on the ring."""

    def __init__(self, replicas: int, max_ongoing: int | None = None) -> None:
        super().__init__(replicas, max_ongoing)
        self._ring = _ring([_ReplicaId(replica_name(index), index) for index in range(replicas)])

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """The first that is not full of its own replica and the two after it."""
        ranked = [replica.index for replica in self._ring._lookup_ranked_replicas(turn.program)]
        replica = next((index for index in ranked if not self.full(index)), None)
        return None if replica is None else Sent(replica, "primary" if replica == ranked[0] else "fallback")


class PrefixAffinity(PowerOfTwo):
    """Ray's prefix tree over prompts, a character a token.

    Unless the replicas' turns under way differ by more than ``imbalanced_threshold``: the replicas that match most of
    the prompt, or if that is less than a tenth of it, those with the fewest characters in the tree; among several the
    one with the fewest turns under way. Otherwise, of two random ones.
    """

    def __init__(
        self,
        replicas: int,
        seed: int,
        max_ongoing: int | None = None,
        imbalanced_threshold: float = float("inf"),
    ) -> None:
        super().__init__(replicas, seed, max_ongoing)
        self._imbalanced_threshold = imbalanced_threshold
        self._names = {replica_name(index): index for index in range(replicas)}
        self._tree = _prefix_tree()
        self._tree.add_tenants(list(self._names), 0.0)
        self._inserted = 0
        self._texts: dict[str, str] = {}

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """By the tree, or of two."""
        text = self._texts.get(turn.turn_id) or "".join(map(chr, turn.prompt))
        self._texts[turn.turn_id] = text
        candidates, reason = self.pair(), "imbalanced"
        if max(self.ongoing) - min(self.ongoing) <= self._imbalanced_threshold:
            matched, tenants = self._tree.prefix_match(text, list(self._names))
            reason = "matched"
            if len(matched) / len(text) < MATCH_RATE_THRESHOLD:
                tenants, reason = self._tree.get_smallest_tenants(), "smallest"
            candidates = [self._names[tenant] for tenant in tenants] if tenants else candidates
        replica = self.fewest(candidates)
        return None if replica is None else Sent(replica, reason)

    def sent(self, turn: SimulatedTurn, replica: int) -> None:
        """The tree learns the prompt, never the answer."""
        super().sent(turn, replica)
        self._inserted += 1
        self._tree.insert(self._texts.pop(turn.turn_id), replica_name(replica), float(self._inserted))


def replica_name(index: int) -> str:
    """As routers know a replica."""
    return f"replica-{index:03d}"


def _ring(replicas: list[_ReplicaId]) -> Any:
    from ray.serve.experimental import consistent_hash_router as hashing

    hashing.logger.setLevel(logging.WARNING)  # it logs every ring
    ring = hashing.ConsistentHashRouter.__new__(hashing.ConsistentHashRouter)  # its __init__ needs an actor's loop
    ring._deployment_id = "simulated"
    ring._num_virtual_nodes = VIRTUAL_NODES
    ring._num_fallback_replicas = FALLBACK_REPLICAS
    ring._rebuild_ring(frozenset(replicas))
    return ring


def _prefix_tree() -> Any:
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

    class FastPrefixTree(PrefixTree):  # type: ignore[misc]
        """Ray compares two texts character by character in Python, which takes nearly all of its time."""

        @staticmethod
        def _shared_prefix_count(a: str, b: str) -> int:
            return shared_prefix(a, b)

    return FastPrefixTree()


def shared_prefix(a: str, b: str) -> int:
    """Equal characters at the beginning of both."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
