"""The routers of the simulator by name, with Caesura's own `PlacementEngine`, which also runs in the ingress.

Each replica publishes a snapshot once a second, which reaches the engine 0.5 s later, as in a live cluster. There is a
single engine, and a store that answers at once.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import ValidationError

from cluster.config.schema import SloConfig
from cluster.core.errors import ConfigError
from cluster.core.replica_snapshot import ReplicaSnapshot, prefix_blocks
from cluster.offline.simulator.disaggregated import Disaggregation
from cluster.offline.simulator.elastic import STATIC, ScaledRouter, Scaling
from cluster.offline.simulator.peers import Everywhere, KvAware
from cluster.offline.simulator.ray_peers import ConsistentHash, PowerOfTwo, PrefixAffinity, replica_name
from cluster.offline.simulator.restarts import RestartingRouter
from cluster.offline.simulator.routing import (
    Answer,
    LeastPrograms,
    RoundRobin,
    Sent,
    SimulatedTurn,
    TurnedAway,
    TurnRouter,
    Waits,
)
from replicas.control import dispatch
from replicas.router_side import PrefixMemory
from replicas.routing_view import plain_snapshot, routing_snapshot
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import chained_hashes
from replicas.virtual_replica import VirtualReplica
from router.decisions import Go, Refuse, TurnRequest, Wait
from router.placement_engine import PlacementEngine
from router.settings import EngineSettings

TICK_S = 0.5
"""Seconds between two ticks. Snapshots are made at every second tick and delivered at the next one."""

Look = Callable[[int, str, int], ReplicaSnapshot]
"""Makes a replica's snapshot from its index, its name and the snapshot's number. `FrontRouter` adds the prefixes."""


class FrontRouter:
    """Routes turns by a placement engine.

    Args:
        front: a new engine for these replicas.
        names: unique ids of the replicas, by index.
        look: makes snapshots.
        released: called with the key of a program and the index of the replica that it has left.
        present: indices of the replicas that serve, which may change; None: all do.
    """

    tick_s: float | None = TICK_S

    def __init__(
        self,
        front: PlacementEngine,
        names: Sequence[str],
        look: Look,
        released: Callable[[str, int], None],
        present: Set[int] | None = None,
    ) -> None:
        self.front = front
        self.latest: Mapping[str, ReplicaSnapshot] = {}
        self._present: Set[int] = frozenset(range(len(names))) if present is None else present
        self._names = names
        self._indices = {name: index for index, name in enumerate(names)}
        self._look = look
        self._released = released
        self._prefixes = [PrefixMemory() for _ in names]
        self._turns: dict[str, SimulatedTurn] = {}
        """Turns without a decision, by id."""
        self._number = 0
        self._seen: Mapping[str, ReplicaSnapshot] | None = None
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
            parent_key=identity.parent_key,
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
        if turn.ends_program:
            self.front.forget(turn.program, now_s)

    def tick(self, now_s: float) -> None:
        """See TurnRouter."""
        if self._seen is None:
            self._seen = self._snapshots()
        else:
            there = {self._names[index] for index in self._present}
            self.front.observe({name: seen for name, seen in self._seen.items() if name in there}, now_s)
            self._seen = None

    def _snapshots(self) -> Mapping[str, ReplicaSnapshot]:
        self._number += 1
        self.latest = {self._names[index]: self._snapshot(index) for index in sorted(self._present)}
        return self.latest

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


ALL = "all"
OURS = "caesura"
LEAST_PROGRAMS = "least_programs"
EVERYWHERE = "everywhere"
"""Name of an upper bound for all routers, which cannot be implemented in a real cluster."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas and the settings for which a router is made."""

    replicas: Sequence[VirtualReplica]
    seed: int
    max_ongoing: int | None = None
    """Ongoing turns of a replica at most, for routers other than Caesura's; None: no limit."""
    imbalanced_threshold: float = float("inf")
    """For prefix_affinity: difference in ongoing turns from which on it balances the replicas."""
    slo: SloConfig = field(default_factory=SloConfig)
    front: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of Caesura's router that differ from their defaults."""
    scaling: Scaling = field(default_factory=lambda: Scaling(STATIC))
    """How many of the replicas serve."""
    restart_every_s: float = 0.0
    """Seconds between the restarts of two replicas; 0: none restarts."""
    disaggregation: Disaggregation = field(default_factory=Disaggregation)
    """Which replicas only compute prompts. The router does not see them."""


def _caesura(made: Replicas) -> TurnRouter:
    if made.restart_every_s:
        every_s, start_s = made.restart_every_s, made.scaling.start_s
        return RestartingRouter(lambda present: _front_of(made, present), made.replicas, every_s, start_s)
    if first := made.disaggregation.replicas:
        return _front_of(made, frozenset(range(first, len(made.replicas))))
    if made.scaling.is_static:
        return _front_of(made, None)
    return ScaledRouter(lambda present: _front_of(made, present), made.replicas, made.scaling, made.slo.ttft_s)


def _front_of(made: Replicas, present: Set[int] | None) -> FrontRouter:
    names = [replica_name(index) for index in range(len(made.replicas))]

    def look(index: int, name: str, number: int) -> ReplicaSnapshot:
        replica = made.replicas[index]
        scheduler = replica.engine.scheduler
        if isinstance(scheduler, AgentScheduler):
            return routing_snapshot(scheduler, name, "", number, draining=False)
        return plain_snapshot(scheduler, replica.cost, name, "", number, draining=False)

    def release(program: str, index: int) -> None:
        scheduler = made.replicas[index].engine.scheduler
        if isinstance(scheduler, AgentScheduler):
            dispatch(scheduler, "release", {"key": program})

    return FrontRouter(PlacementEngine(front_settings(made.front), made.slo), names, look, release, present)


def front_settings(parameters: Mapping[str, Any]) -> EngineSettings:
    """Make the settings of Caesura's router from the parameters that differ from their defaults.

    Raises:
        ConfigError: a parameter does not exist, or its value is invalid.
    """
    try:
        return EngineSettings.model_validate(parameters)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"--front {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def kv_aware(made: Replicas) -> KvAware:
    """Make the router with Dynamo's cost before these replicas."""
    engines = [replica.engine for replica in made.replicas]
    block_size = engines[0].shape.block_size
    return KvAware(
        len(engines),
        lambda prompt: chained_hashes(prompt, block_size),
        lambda index, hashes: engines[index].cached_blocks(hashes),
        lambda index, turn_id: made.replicas[index].is_prefilled(turn_id),
        block_size,
        made.seed,
        made.max_ongoing,
    )


def _everywhere(made: Replicas) -> TurnRouter:
    engines, cost = [replica.engine for replica in made.replicas], made.replicas[0].cost
    block_size = engines[0].shape.block_size
    return Everywhere(
        len(engines),
        lambda prompt: chained_hashes(prompt, block_size),
        lambda index, hashes: engines[index].cached_blocks(hashes),
        lambda index, prompt, blocks: engines[index].fill_cache(prompt, blocks * block_size),
        lambda prompt: cost.sequence_s + cost.token_s + len(prompt) * (cost.context_s + cost.pair_s),
        made.max_ongoing,
    )


ROUTERS: Mapping[str, Callable[[Replicas], TurnRouter]] = {
    OURS: _caesura,
    "kv_aware": kv_aware,
    EVERYWHERE: _everywhere,
    "prefix_affinity": lambda made: PrefixAffinity(
        len(made.replicas), made.seed, made.max_ongoing, made.imbalanced_threshold
    ),
    "consistent_hash": lambda made: ConsistentHash(len(made.replicas), made.max_ongoing),
    "power_of_two": lambda made: PowerOfTwo(len(made.replicas), made.seed, made.max_ongoing),
    "round_robin": lambda made: RoundRobin(len(made.replicas), made.max_ongoing),
    LEAST_PROGRAMS: lambda made: LeastPrograms(len(made.replicas), made.max_ongoing),
}


def router_names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas. ``all`` stands for all routers except `EVERYWHERE`."""
    if text.strip() == ALL:
        return tuple(name for name in ROUTERS if name != EVERYWHERE)
    return tuple(n.strip() for n in text.split(",") if n.strip())


def check_router(name: str) -> None:
    """Raise ConfigError unless there is a router of this name."""
    if name not in ROUTERS:
        raise ConfigError(f"--router: unknown router {name!r}; choose {ALL} or some of: {', '.join(sorted(ROUTERS))}")
