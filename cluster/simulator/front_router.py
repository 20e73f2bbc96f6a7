"""Our router in the simulator: the very `Front` that the ingress runs, on snapshots as old as live ones.

Every replica is looked at once a second, and what was seen reaches the front half a second later: as much as a live
replica's news take to reach an ingress. There is one front, and a store that answers at once.
"""

from collections.abc import Callable, Sequence

import msgspec

from cluster.routing import ReplicaSnapshot, prefix_blocks
from cluster.simulator.routing import Answer, Sent, SimulatedTurn, TurnedAway, Waits
from replicas.prefix_memory import PrefixMemory
from router.decisions import Front, Go, Refuse, TurnRequest, Wait

TICK_S = 0.5
"""Snapshots are made at every second tick and told at the one after it."""

Look = Callable[[int, str, int], ReplicaSnapshot]
"""A replica's snapshot now, by its index, its name and the snapshot's number; its prefixes are filled in here."""


class FrontRouter:
    """Asks a front.

    Args:
        front: made for these replicas, with no time behind it.
        names: the replicas' unique ids, by index.
        look: makes snapshots.
        released: told of a program, by its key, and the index of the replica that it has moved away from.
    """

    tick_s: float | None = TICK_S

    def __init__(self, front: Front, names: Sequence[str], look: Look, released: Callable[[str, int], None]) -> None:
        self.front = front
        self._names = names
        self._indices = {name: index for index, name in enumerate(names)}
        self._look = look
        self._released = released
        self._prefixes = [PrefixMemory() for _ in names]
        self._turns: dict[str, SimulatedTurn] = {}
        """That are not decided."""
        self._number = 0
        self._seen: dict[str, ReplicaSnapshot | None] | None = None
        front.observe(self._snapshots(), 0.0)

    def route(self, turn: SimulatedTurn, now_s: float) -> Answer:
        """See TurnRouter."""
        self._turns[turn.turn_id] = turn
        identity = turn.identity
        request = TurnRequest(
            key=turn.program,
            tenant=identity.tenant,
            prompt_tokens=len(turn.prompt),
            prefix=prefix_blocks(turn.prompt),
            last=identity.last_turn,
            hints=identity.hints,
            forecast=identity.forecast,
        )
        decision = self.front.turn(turn.turn_id, request, now_s)
        return Waits() if isinstance(decision, Wait) else self._decided(turn.turn_id, decision, now_s)

    def waited(self, now_s: float) -> Sequence[tuple[str, Sent | TurnedAway]]:
        """See TurnRouter."""
        return [(turn_id, self._decided(turn_id, decision, now_s)) for turn_id, decision in self.front.admitted(now_s)]

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """See TurnRouter."""
        self.front.ended(turn.turn_id, now_s, context_tokens=context_tokens)
        if turn.identity.last_turn:
            self.front.forget(turn.program, now_s)

    def tick(self, now_s: float) -> None:
        """See TurnRouter."""
        if self._seen is None:
            self._seen = self._snapshots()
        else:
            self.front.observe(self._seen, now_s)
            self._seen = None

    def _snapshots(self) -> dict[str, ReplicaSnapshot | None]:
        self._number += 1
        return {name: self._snapshot(index) for index, name in enumerate(self._names)}

    def _snapshot(self, index: int) -> ReplicaSnapshot:
        snapshot = self._look(index, self._names[index], self._number)
        return msgspec.structs.replace(snapshot, prefixes=self._prefixes[index].packed())

    def _decided(self, turn_id: str, decision: Go | Refuse, now_s: float) -> Sent | TurnedAway:
        turn = self._turns.pop(turn_id)
        if isinstance(decision, Refuse):
            self.front.ended(turn_id, now_s)
            return TurnedAway(decision.reason.value, decision.retry_after_s)
        replica = self._indices[decision.home.replica]
        self.front.settle(turn.program, decision.home, now_s)
        self._prefixes[replica].serve(turn.program, turn.prompt)
        moved_from = None if decision.moved_from is None else self._indices[decision.moved_from]
        if moved_from is not None:
            self._released(turn.program, moved_from)
        return Sent(replica, decision.reason.value, moved_from)
