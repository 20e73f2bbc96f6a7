"""Simulated replicas whose number an autoscaling policy decides.

All replicas that there may be exist from the beginning. The router sees those that serve. One that is added serves
after the start-up time, and is paid for from the decision on. One that is removed gets no further turn, is paid for
until its turns have ended, and loses its KV, except what is on its disk: as in a live cluster, its programs move at
their next turn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from cluster.core.errors import ConfigError
from cluster.core.registry import AUTOSCALERS
from cluster.core.replica_snapshot import ReplicaSnapshot
from cluster.core.scaling_report import ReplicaLoadReport, ReplicaReport
from cluster.offline.simulator.ray_autoscaler import RayQueueLength
from cluster.offline.simulator.routing import Answer, Sent, SimulatedTurn, TurnedAway, TurnRouter
from replicas.control import dispatch
from replicas.scheduler import AgentScheduler
from replicas.virtual_replica import VirtualReplica
from router.autoscaling.policy import AutoscalingPolicy, ScalingView
from router.placement_engine import PlacementEngine

STATIC = "static"
"""The number of replicas does not change."""
QUEUE_LENGTH = "queue_length"
"""Ray Serve's default policy."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the number of replicas is decided."""

    policy: str
    """`STATIC`, `QUEUE_LENGTH` or a registered autoscaling policy."""
    least: int = 1
    start_s: float = 120.0
    """Seconds from a decision until the replica serves."""
    target_ongoing: float = 2.0
    """Turns of a replica at which Ray's default policy aims."""

    def __post_init__(self) -> None:
        """Raise ConfigError if there is no such policy."""
        known = (STATIC, QUEUE_LENGTH, *AUTOSCALERS)
        if self.policy not in known:
            raise ConfigError(f"--autoscaler: unknown policy {self.policy!r}; choose one of: {', '.join(known)}")

    @property
    def is_static(self) -> bool:
        """Whether the number of replicas does not change."""
        return self.policy == STATIC


class Front(TurnRouter, Protocol):
    """A router with Caesura's engine."""

    front: PlacementEngine
    latest: Mapping[str, ReplicaSnapshot]
    """The newest snapshot of each replica that serves."""


class ScaledRouter:
    """Routes turns by another router, and lets a policy decide how many of the replicas serve.

    Args:
        make: makes the other router from the indices of the replicas that serve, which it reads at each snapshot.
        replicas: all replicas that there may be.
        scaling: how their number is decided.
        ttft_s: the bound of a turn's first token; None: there is none.
    """

    def __init__(
        self,
        make: Callable[[set[int]], "Front"],
        replicas: Sequence[VirtualReplica],
        scaling: Scaling,
        ttft_s: float | None,
    ) -> None:
        self.present = set(range(scaling.least))
        self.front = make(self.present)
        self.tick_s = self.front.tick_s
        self.sizes: list[tuple[float, int]] = [(0.0, scaling.least)]
        """Times in seconds, and the number of replicas that are paid for from then on."""
        self._replicas = replicas
        self._scaling = scaling
        self._ttft_s = ttft_s
        self._policy = policy_of(scaling, self._open_turns)
        self._state: Any = self._policy.first()
        self._target = scaling.least
        self._starting: dict[int, float] = {}
        self._leaving: set[int] = set()
        self._open: dict[str, _OpenTurn] = {}
        self._ended = self._missed = 0

    # --- turns --------------------------------------------------------------------------------------------------------

    def route(self, turn: SimulatedTurn, now_s: float) -> Answer:
        """See TurnRouter."""
        self._open[turn.turn_id] = _OpenTurn(now_s)
        answer = self.front.route(turn, now_s)
        self._note(turn.turn_id, answer)
        return answer

    def waited(self, now_s: float) -> Sequence[tuple[str, Sent | TurnedAway]]:
        """See TurnRouter."""
        answers = self.front.waited(now_s)
        for turn_id, answer in answers:
            self._note(turn_id, answer)
        return answers

    def ended(self, turn: SimulatedTurn, replica: int, context_tokens: int, now_s: float) -> None:
        """See TurnRouter."""
        self._close(turn.turn_id, missed=False)
        self.front.ended(turn, replica, context_tokens, now_s)

    def _note(self, turn_id: str, answer: Answer) -> None:
        if isinstance(answer, Sent):
            self._open[turn_id].replica = answer.replica
        elif isinstance(answer, TurnedAway):
            self._close(turn_id, missed=True)

    def _close(self, turn_id: str, *, missed: bool) -> None:
        turn = self._open.pop(turn_id)
        self._ended += 1
        self._missed += missed or turn.late

    def _open_turns(self) -> int:
        return len(self._open)

    # --- replicas -----------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Let replicas serve whose start is over, end those whose turns have ended, and ask the policy."""
        for index in [index for index, at_s in self._starting.items() if at_s <= now_s]:
            del self._starting[index]
            self.present.add(index)
        busy = {turn.replica for turn in self._open.values()}
        for index in self._leaving - busy:
            replica = self._replicas[index]
            if replica.disk is None:
                forget_all(replica, now_s)
            elif replica.may_end:
                replica.restart()
            else:
                continue
            self._leaving.discard(index)
        self._find_late(now_s)
        decision = self._policy.decide(self._view(now_s), self._state)
        self._state = decision.state
        self._resize(decision.replicas, now_s)
        size = len(self.present) + len(self._starting) + len(self._leaving)
        if size != self.sizes[-1][1]:
            self.sizes.append((now_s, size))
        self.front.tick(now_s)

    def _resize(self, wanted: int, now_s: float) -> None:
        """Start replicas, or end some: first those that are starting, then the newest, as Ray does."""
        self._target = wanted
        while len(self.present) + len(self._starting) > wanted:
            if self._starting:
                self._starting.popitem()
            else:
                index = max(self.present)
                self.present.discard(index)
                self._leaving.add(index)
                self._replicas[index].leave()
        for index in range(len(self._replicas)):
            if len(self.present) + len(self._starting) >= wanted:
                return
            if index not in self.present and index not in self._starting and index not in self._leaving:
                self._starting[index] = now_s + self._scaling.start_s

    def _find_late(self, now_s: float) -> None:
        if self._ttft_s is None:
            return
        for turn_id, turn in self._open.items():
            if not turn.late and now_s - turn.due_s > self._ttft_s:
                turn.late = turn.replica is None or not self._replicas[turn.replica].is_prefilled(turn_id)

    def _view(self, now_s: float) -> ScalingView:
        late = sum(turn.late for turn in self._open.values())
        demand = self.front.front.demand(now_s, self._ended + late, self._missed + late)
        loads = [
            ReplicaLoadReport.of_snapshot(snapshot, self._scaling.start_s) for snapshot in self.front.latest.values()
        ]
        reports = [ReplicaReport(load, {} if number else {"": demand}) for number, load in enumerate(loads)]
        return ScalingView(now_s, len(self.present), self._target, self._scaling.least, len(self._replicas), reports)


@dataclass(slots=True)
class _OpenTurn:
    due_s: float
    replica: int | None = None
    late: bool = False
    """Its first token is later than its SLO allows."""


def policy_of(scaling: Scaling, open_turns: Callable[[], int]) -> AutoscalingPolicy[Any]:
    """Make the policy. ``open_turns`` returns the turns that wait or run, by which Ray's policy decides."""
    if scaling.policy == QUEUE_LENGTH:
        return RayQueueLength(open_turns, scaling.target_ongoing)
    policy: AutoscalingPolicy[Any] = AUTOSCALERS.load(scaling.policy)()
    return policy


def forget_all(replica: VirtualReplica, now_s: float) -> None:
    """Drop all KV and all programs of a replica without turns, since its process has ended."""
    scheduler = replica.engine.scheduler
    if not isinstance(scheduler, AgentScheduler):
        scheduler.reset_prefix_cache()
        return
    for program in list(scheduler.programs.recent()):
        dispatch(scheduler, "moved", {"key": program.key})
    dispatch(scheduler, "reset", {})


def replica_seconds(sizes: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float:
    """Return the seconds of all replicas together between two times.

    Args:
        sizes: times, and numbers of replicas from then on; the first time is not after ``begin_s``.
        begin_s: the beginning.
        end_s: the end.
    """
    spans = pairwise([*sizes, (max(end_s, sizes[-1][0]), 0)])
    return sum(number * max(0.0, min(to_s, end_s) - max(from_s, begin_s)) for (from_s, number), (to_s, _) in spans)
