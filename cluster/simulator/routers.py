"""The routers of the simulator, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from cluster.config import SloConfig
from cluster.errors import ConfigError
from cluster.routing import ReplicaSnapshot
from cluster.simulator.everywhere import Everywhere
from cluster.simulator.front_router import FrontRouter
from cluster.simulator.kv_aware import KvAware
from cluster.simulator.ray_peers import ConsistentHash, PowerOfTwo, PrefixAffinity, replica_name
from cluster.simulator.routing import LeastPrograms, RoundRobin, TurnRouter
from replicas.control import dispatch
from replicas.routing_view import plain_snapshot, routing_snapshot
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import chained_hashes
from replicas.virtual_replica import VirtualReplica
from router.front import ProgramFront
from router.settings import FrontSettings

ALL = "all"
OURS = "caesura"
LEAST_PROGRAMS = "least_programs"
EVERYWHERE = "everywhere"
"""No router that could be built: a bound for them."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """What a router is made for."""

    replicas: Sequence[VirtualReplica]
    seed: int
    max_ongoing: int | None = None
    """Turns that a peer's replica takes at a time; None: any number."""
    imbalanced_threshold: float = float("inf")
    """Of prefix_affinity: turns by which replicas may differ before it balances them."""
    slo: SloConfig = field(default_factory=SloConfig)
    front: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of our front that differ from its defaults."""


def _caesura(made: Replicas) -> TurnRouter:
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

    return FrontRouter(ProgramFront(front_settings(made.front), made.slo), names, look, release)


def front_settings(parameters: Mapping[str, Any]) -> FrontSettings:
    """Our front's, by what differs from the defaults.

    Raises:
        ConfigError: no such parameter, or not such a value.
    """
    try:
        return FrontSettings.model_validate(parameters)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"--front {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _kv_aware(made: Replicas) -> TurnRouter:
    engines = [replica.engine for replica in made.replicas]
    block_size = engines[0].shape.block_size
    return KvAware(
        len(engines),
        lambda prompt: chained_hashes(prompt, block_size),
        lambda index, hashes: engines[index].cached_blocks(hashes),
        lambda index, turn_id: made.replicas[index].is_prefilled(turn_id),
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
        lambda prompt: cost.sequence_s + cost.token_s + len(prompt) * cost.context_s,
        made.max_ongoing,
    )


ROUTERS: Mapping[str, Callable[[Replicas], TurnRouter]] = {
    OURS: _caesura,
    "kv_aware": _kv_aware,
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
    """``all`` that could be built, or names with commas between them."""
    if text.strip() == ALL:
        return tuple(name for name in ROUTERS if name != EVERYWHERE)
    return tuple(n.strip() for n in text.split(",") if n.strip())


def check_router(name: str) -> None:
    """Raise ConfigError unless there is a router of this name."""
    if name not in ROUTERS:
        raise ConfigError(f"--router: unknown router {name!r}; choose {ALL} or some of: {', '.join(sorted(ROUTERS))}")
