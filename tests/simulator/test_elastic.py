"""Simulated replicas whose number follows the load: no turn is lost, and what is removed is gone."""

from collections.abc import Callable, Sequence

import pytest

from cluster.config.schema import SloConfig
from cluster.core.errors import ConfigError
from cluster.core.slo import Outcome
from cluster.offline.simulator.elastic import QUEUE_LENGTH, ScaledRouter, Scaling, replica_seconds
from cluster.offline.simulator.routers import OURS, ROUTERS, Replicas
from cluster.offline.simulator.routing import TurnRouter
from cluster.offline.simulator.settings import SimulationSettings
from replicas.scheduler import AgentScheduler
from replicas.virtual_replica import VirtualReplica
from tests.simulator.simulated import Bench, program, turn

START_S = 5.0
AFTER_S = 300.0
"""When one more program comes, which keeps the clock going."""


def scaled(policy: str, **more: float) -> Callable[[Sequence[VirtualReplica]], TurnRouter]:
    scaling = Scaling(policy, least=1, start_s=START_S, **more)
    return lambda replicas: ROUTERS[OURS](Replicas(replicas, 0, slo=SloConfig(), scaling=scaling))


def surge(bench: Bench, policy: str, **more: float) -> ScaledRouter:
    """Sixty programs in fifteen seconds, on up to three replicas of 4,096 tokens; then one program, much later."""
    planned = program(turn(600, 40, "tool", 2.0), turn(100, 40, "tool", 2.0), turn(100, 40))
    arrivals = [*(n / 4 for n in range(60)), AFTER_S]
    records = bench.run(
        *((at_s, planned) for at_s in arrivals), policy="caesura", replicas=3, router=scaled(policy, **more)
    )
    assert [record.outcome for record in records] == [Outcome.OK] * 61
    assert isinstance(bench.router, ScaledRouter)
    return bench.router


def test_replicas_come_with_a_surge_and_go_after_it_with_their_programs_and_kv(bench: Bench) -> None:
    router = surge(bench, "caesura")
    numbers = [number for _, number in router.sizes]
    assert max(numbers) == 3 and numbers[-1] == 1
    first_s = next(at_s for at_s, number in router.sizes if number > 1)
    assert first_s < 15, "while the surge lasts"
    homes = {route.replica for route in bench.simulation.routed.values()}
    assert len(homes) > 1
    for replica in bench.replicas[1:]:
        scheduler = replica.engine.scheduler
        assert isinstance(scheduler, AgentScheduler)
        assert not list(scheduler.programs.recent())
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not any(block.block_hash for block in pool.blocks)


def test_rays_default_policy_follows_the_number_of_turns_after_its_delays(bench: Bench) -> None:
    """Thirty seconds later the surge is over: its mean still needs replicas, which stay for ten minutes."""
    router = surge(bench, QUEUE_LENGTH)
    assert router.sizes[-1][1] == max(number for _, number in router.sizes) > 1
    assert router.sizes[1][0] >= 30.0
    few = surge(Bench(bench.model), QUEUE_LENGTH, target_ongoing=1000.0)
    assert few.sizes == [(0.0, 1)]


def test_replica_seconds() -> None:
    sizes = [(0.0, 1), (10.0, 3), (20.0, 2)]
    assert replica_seconds(sizes, 0.0, 30.0) == 10 + 30 + 20
    assert replica_seconds(sizes, 5.0, 15.0) == 5 + 15
    assert replica_seconds([(0.0, 4)], 100.0, 160.0) == 240


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"scaling": Scaling("caesura")}, "--autoscaler: needs --router caesura"),
        (
            {"scaling": Scaling("caesura", least=3), "routers": (OURS,), "replicas": 2},
            "--min-replicas: 3 is not from 1",
        ),
        ({"scaling": Scaling("caesura", start_s=0.0), "routers": (OURS,)}, "--start-s"),
    ],
)
def test_wrong_settings_name_the_flag(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        SimulationSettings(policies=("caesura",), rates_per_s=(1.0,), **given)  # type: ignore[arg-type]


def test_an_unknown_policy() -> None:
    with pytest.raises(
        ConfigError, match="--autoscaler: unknown policy 'best'; choose one of: static, queue_length, c"
    ):
        Scaling("best")
