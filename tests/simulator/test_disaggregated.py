"""Disaggregated prefill in the simulator: which prompts move, when the turn begins, and what its KV costs.

A token's KV has 1 MiB, so that a network of 8.388608 Gbit/s sends one token in 1 ms.
"""

import pytest

from cluster.core.errors import ConfigError
from cluster.offline.simulator.disaggregated import Disaggregation, PrefillPool
from cluster.offline.simulator.routers import OURS, ROUTERS, Replicas
from cluster.offline.simulator.settings import SimulationSettings
from tests.simulator.simulated import Bench, program, turn
from tests.simulator.test_simulation import prefill_s

TOKEN_S = 1e-3
SPLIT = Disaggregation(replicas=1, above_tokens=320, network_gbit_s=8 * 2**20 / 1e9 / TOKEN_S)


def prepare(bench: Bench, *programs: tuple[float, object], split: Disaggregation = SPLIT) -> PrefillPool:
    """Two replicas, of which the first computes long prompts."""
    bench.prepare(
        programs,  # type: ignore[arg-type]
        policy="caesura",
        replicas=2,
        router=lambda replicas: ROUTERS[OURS](Replicas(replicas, 0, disaggregation=split)),
    )
    bench.simulation._prefill = pool = PrefillPool(bench.replicas, split)
    return pool


def test_a_long_first_prompt_is_computed_elsewhere_and_a_short_one_of_a_tool_is_not(bench: Bench) -> None:
    """
    0 s      The first turn has 640 tokens, of which its replica has none. Replica 0 computes them.
             Their KV takes 639 x 1 ms to replica 1, which computes the last block and generates 17 tokens.
    later    The second turn has 16 new tokens. It begins on replica 1, which holds its context.
    """
    pool = prepare(bench, (0.0, program(turn(640, 17, "ls", 2.0), turn(16, 1))))
    [record] = bench.simulation.run(100.0)
    assert (pool.prompts, pool.sent_tokens) == (1, 640)
    assert [bench.simulation.routed["p0", index].replica for index in (0, 1)] == [1, 1]
    first, second = record.turns
    assert first.ttft_s == pytest.approx(prefill_s(0, 640) + 640 * TOKEN_S + prefill_s(624, 640), abs=0.005)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 656
    assert second.ttft_s == pytest.approx(prefill_s(640, 673), abs=0.005)


def test_a_replica_sends_one_prompt_after_the_other(bench: Bench) -> None:
    """Both prompts of 640 tokens are computed at about the same time. The KV of one waits for that of the other."""
    prepare(bench, (0.0, program(turn(640, 1))), (0.0, program(turn(640, 1))))
    one, other = bench.simulation.run(100.0)
    assert one.turns[0].ttft_s is not None
    assert other.turns[0].ttft_s is not None
    assert abs(other.turns[0].ttft_s - one.turns[0].ttft_s) == pytest.approx(640 * TOKEN_S, abs=0.02)


def test_a_prompt_that_its_replica_has_cached_does_not_move(bench: Bench) -> None:
    """The second program has the prefix of the first one, and lacks only 64 tokens of it."""
    shared = ("group", 640)
    long = program(turn(704, 1), prefix=shared)
    pool = prepare(bench, (0.0, long), (5.0, long))
    bench.simulation.run(100.0)
    assert pool.prompts == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"disaggregation": SPLIT, "replicas": 2}, "--prefill-replicas: needs --router caesura"),
        ({"disaggregation": SPLIT, "routers": ("caesura",)}, "--prefill-replicas: 1 is not less than --replicas"),
        (
            {"disaggregation": Disaggregation(1, network_gbit_s=0.0), "routers": ("caesura",), "replicas": 2},
            "--network-gbit-s",
        ),
        ({"disaggregation": Disaggregation(-1)}, "--prefill-replicas"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulationSettings(policies=("vllm",), rates_per_s=(1.0,), **settings)  # type: ignore[arg-type]
