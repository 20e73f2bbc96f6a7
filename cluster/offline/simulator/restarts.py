"""Simulated replicas that restart one after another, as in a rolling change.

A replica that restarts gets no further turn. It does what a live one does (`replicas.leaving`): it begins to write the
contexts of its programs to disk, if it has a disk tier. It ends when its turns have ended, and then its writes, for
which it waits LEAVE_S at most. What is not written then is lost. Its device and its host tier are empty when it serves
again; its disk is not. The next replica restarts after it.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from cluster.core.replica_snapshot import ReplicaSnapshot
from cluster.offline.simulator.elastic import Front
from cluster.offline.simulator.routing import Answer, Sent, SimulatedTurn, TurnedAway
from replicas.leaving import LEAVE_S
from replicas.virtual_replica import VirtualReplica
from router.placement_engine import PlacementEngine


class RestartingRouter:
    """Routes turns by another router, while the replicas restart.

    Args:
        make: makes the other router from the indices of the replicas that serve, which it reads at each snapshot.
        replicas: the replicas.
        every_s: seconds between the restarts of two replicas, at least.
        start_s: seconds from the end of a replica until it serves again.
    """

    def __init__(
        self, make: Callable[[set[int]], Front], replicas: Sequence[VirtualReplica], every_s: float, start_s: float
    ) -> None:
        self.present = set(range(len(replicas)))
        self._router = make(self.present)
        self.tick_s = self._router.tick_s
        self.restarts = 0
        """Number of replicas that have ended."""
        self._replicas = replicas
        self._every_s = every_s
        self._start_s = start_s
        self._due_s = every_s
        self._next = 0
        self._leaving: int | None = None
        self._back_s: float | None = None
        self._written_by_s: float | None = None
        """Time at which the wait for writes ends. None: turns are still open."""
        self._open: dict[str, int] = {}

    @property
    def front(self) -> PlacementEngine:
        """The router's placement engine, which knows where each program lives and which replicas take turns."""
        return self._router.front

    @property
    def latest(self) -> Mapping[str, ReplicaSnapshot]:
        """The newest snapshot of each replica that serves."""
        return self._router.latest

    def route(self, turn: SimulatedTurn, now_s: float) -> Answer:
        """See TurnRouter."""
        answer = self._router.route(turn, now_s)
        self._note(turn.turn_id, answer)
        return answer

    def waited(self, now_s: float) -> Sequence[tuple[str, Sent | TurnedAway]]:
        """See TurnRouter."""
        answers = self._router.waited(now_s)
        for turn_id, answer in answers:
            self._note(turn_id, answer)
        return answers

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """See TurnRouter."""
        self._open.pop(turn.turn_id, None)
        self._router.ended(turn, replica, context_tokens, now_s)

    def _note(self, turn_id: str, answer: Answer) -> None:
        if isinstance(answer, Sent):
            self._open[turn_id] = answer.replica

    def tick(self, now_s: float) -> None:
        """Let a replica that has started serve, end one that has nothing to do any more, and begin the next restart."""
        if self._leaving is not None:
            self._leave(self._leaving, now_s)
        elif now_s >= self._due_s:
            self._leaving, self._next = self._next, (self._next + 1) % len(self._replicas)
            self._due_s, self._back_s, self._written_by_s = now_s + self._every_s, None, None
            self.present.discard(self._leaving)
            self._replicas[self._leaving].leave()
        self._router.tick(now_s)

    def _leave(self, index: int, now_s: float) -> None:
        replica = self._replicas[index]
        if self._back_s is not None:
            if now_s >= self._back_s:
                self.present.add(index)
                self._leaving = None
            return
        if index in self._open.values():
            return
        if self._written_by_s is None:
            self._written_by_s = now_s + LEAVE_S
        if now_s >= self._written_by_s:
            self._written_by_s = inf
            replica.abandon_writes()
        if not replica.may_end:
            return
        replica.restart()
        self.restarts += 1
        self._back_s = now_s + self._start_s
