"""What a server serves at most, found in a closed loop."""

from statistics import fmean

import pytest

from cluster.core.errors import ConfigError
from cluster.offline.bench.saturation import saturated_programs_per_s
from cluster.offline.bench.settings import BenchSettings
from cluster.offline.bench.workload import Shaping

CONCURRENCY, WARMUP_S, MEASURED_S, TURN_S = 3, 1.5, 0.5, 0.05


def settings(double, **changes):
    shaping = Shaping(scale_tools=0.0, max_context=2000, max_turns=3)
    return BenchSettings(url=double.url, shaping=shaping, policies=("vllm", "caesura"), **changes)


async def saturated(mine):
    loop = {"concurrency": CONCURRENCY, "warmup_s": WARMUP_S, "measured_s": MEASURED_S}
    return await saturated_programs_per_s(mine, **loop)


async def test_it_counts_what_is_served_while_each_program_that_ends_is_replaced(cluster_double) -> None:
    cluster_double.delay_s = TURN_S
    mine = settings(cluster_double)
    per_s = await saturated(mine)
    turns = per_s * MEASURED_S * fmean(len(program.turns) for program in mine.load().programs)
    assert turns == pytest.approx(round(turns))
    # No turn is shorter than TURN_S, so that no more turns fit into the time. One may have begun before it. With those
    # of the warm-up, they would be four times as many.
    assert 0 < turns <= CONCURRENCY * (MEASURED_S / TURN_S + 1)
    workers = [program.split("-")[1] for program in cluster_double.seen]
    assert set(workers) == {"0", "1", "2"}
    assert all(workers.count(worker) > 1 for worker in workers), "a program that ends is followed by another"
    assert cluster_double.admin == ["policy vllm", "reset", "policy as configured"]


async def test_a_server_that_serves_nothing_is_an_error(cluster_double) -> None:
    cluster_double.misbehaviour.kind = "400"
    with pytest.raises(ConfigError, match=r"^--url: http.* served no turn: HTTP 400: .*no"):
        await saturated(settings(cluster_double))
