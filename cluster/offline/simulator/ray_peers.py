"""Ray's request routers under virtual time. They use Ray's own code where it runs without a cluster.

The hash ring and the prefix tree are Ray's classes, unchanged. The parts of Ray 2.60 that need actors and an event loop
are reimplemented here: the random pair of `PowerOfTwoChoicesRequestRouter.choose_replicas`, the choice among candidates
of `RequestRouter._select_from_candidate_replicas`, and the three cases of
`PrefixCacheAffinityRouter._prefix_match_best_replicas`. One router sees all turns and all their ends at once, which is
more knowledge than Ray's routers have with several ingresses.

Ray is imported when a router that needs it is made. No other module of the simulator imports it.
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
    """Chooses the one of two random replicas that has fewer ongoing turns, or the first one if they are equal."""

    def __init__(self, replicas: int, seed: int, max_ongoing: int | None = None) -> None:
        super().__init__(replicas, max_ongoing)
        self._random = Random(seed)

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Choose from a new random pair at each try."""
        replica = self.fewest(self.pair())
        return None if replica is None else Sent(replica, "of two")

    def pair(self) -> list[int]:
        """Return two different replicas in random order, or the only one."""
        count = len(self.ongoing)
        return self._random.sample(range(count), min(2, count))


@dataclass(frozen=True, slots=True)
class _ReplicaId:
    """The fields of Ray's ReplicaID that the ring reads."""

    unique_id: str
    index: int


class ConsistentHash(RequestRouter):
    """Ray's hash ring with the program as the session. If a replica is full, its turn goes to the next ones on it."""

    def __init__(self, replicas: int, max_ongoing: int | None = None) -> None:
        super().__init__(replicas, max_ongoing)
        self._ring = _ring([_ReplicaId(replica_name(index), index) for index in range(replicas)])

    def choose(self, turn: SimulatedTurn) -> Sent | None:
        """Choose the first replica that is not full among the program's own replica and the next two."""
        ranked = [replica.index for replica in self._ring._lookup_ranked_replicas(turn.program)]
        replica = next((index for index in ranked if not self.full(index)), None)
        return None if replica is None else Sent(replica, "primary" if replica == ranked[0] else "fallback")


class PrefixAffinity(PowerOfTwo):
    """Ray's prefix tree over prompts, with one character for each token.

    The candidates are the replicas that match the longest prefix of the prompt. If the match is shorter than a tenth of
    it, they are the replicas with the fewest characters in the tree. If the replicas' ongoing turns differ by more than
    ``imbalanced_threshold``, they are two random replicas. The candidate with the fewest ongoing turns is chosen.
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
        """Choose by the tree, or from two random replicas if the load is imbalanced."""
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
        """Insert the prompt into the tree. The output is never inserted."""
        super().sent(turn, replica)
        self._inserted += 1
        self._tree.insert(self._texts.pop(turn.turn_id), replica_name(replica), float(self._inserted))


def replica_name(index: int) -> str:
    """Return the id under which routers know a replica."""
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
        """Ray's tree with a faster comparison. Ray compares characters in Python, which takes most of its time."""

        @staticmethod
        def _shared_prefix_count(a: str, b: str) -> int:
            return shared_prefix(a, b)

    return FastPrefixTree()


def shared_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts."""
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
