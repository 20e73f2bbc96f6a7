"""Load shedding before routers that have none of their own."""

from collections.abc import Sequence
from typing import Any

from cluster.offline.simulator.routing import Answer, Sent, SimulatedTurn, TurnedAway, TurnRouter
from replicas.load_shedding import TAKES_ALL, Shedding, new_work_s, shedding_of
from replicas.scheduler import AgentScheduler
from replicas.virtual_replica import VirtualReplica
from router.decisions import Refused


class SheddingRouter:
    """Refuses a new program that every replica refuses. All others are routed by another router.

    Args:
        router: the other router.
        replicas: the replicas. One whose policy bounds no wait, or that is vLLM's own, refuses nothing.
    """

    def __init__(self, router: TurnRouter, replicas: Sequence[VirtualReplica]) -> None:
        self.router = router
        self._replicas = replicas
        self.tick_s = router.tick_s

    def route(self, turn: SimulatedTurn, now_s: float) -> Answer:
        """See TurnRouter."""
        if turn.index == 0:
            found = [_shedding(replica.engine.scheduler, turn) for replica in self._replicas]
            if None not in found:
                waits_s = [one.retry_after_s for one in found if one is not None]
                return TurnedAway(Refused.LOAD_SHED.value, max(1.0, min(waits_s)))
        return self.router.route(turn, now_s)

    def waited(self, now_s: float) -> Sequence[tuple[str, Sent | TurnedAway]]:
        """See TurnRouter."""
        return self.router.waited(now_s)

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """See TurnRouter."""
        self.router.ended(turn, replica, context_tokens, now_s)

    def tick(self, now_s: float) -> None:
        """See TurnRouter."""
        self.router.tick(now_s)


def _shedding(scheduler: Any, turn: SimulatedTurn) -> Shedding | None:
    """Return what the replica refuses if that includes this new program. None: it takes the program."""
    if not isinstance(scheduler, AgentScheduler) or (found := shedding_of(scheduler)) is TAKES_ALL:
        return None
    work_s = new_work_s(scheduler, turn.identity, len(turn.prompt))
    return found if found.refuses(work_s, sheddable=turn.identity.hints.sheddable) else None
