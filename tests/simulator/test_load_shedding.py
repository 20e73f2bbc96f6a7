"""Load shedding: no admitted turn waits longer than the bound, whatever arrives, and what is refused knows at once."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config.schema import PolicyConfig
from cluster.core.slo import Outcome, ProgramRecord
from cluster.offline.bench.workload import PlannedProgram
from cluster.offline.simulator.foresight import Foresight
from cluster.offline.simulator.routers import OURS, ROUTERS, Replicas
from cluster.offline.simulator.routing import LeastPrograms, TurnRouter
from cluster.offline.simulator.shedding import SheddingRouter
from replicas.virtual_replica import VirtualReplica
from tests.simulator.simulated import Bench, program, turn

MAX_WAIT_S = 4.0
POLICY = PolicyConfig(name="caesura", parameters={"max_wait_s": MAX_WAIT_S})
TOLD = Foresight(oracle=True)


def shed(replicas: Sequence[VirtualReplica]) -> TurnRouter:
    return SheddingRouter(LeastPrograms(len(replicas)), replicas)


def front(replicas: Sequence[VirtualReplica]) -> TurnRouter:
    return ROUTERS[OURS](Replicas(replicas, seed=3, front={}))


def admitted(records: Sequence[ProgramRecord]) -> list[ProgramRecord]:
    return [record for record in records if record.outcome is not Outcome.REJECTED]


SIZES = st.tuples(st.integers(20, 1200), st.integers(1, 120))
"""Tokens of the prompt and of the output. A replica has 4,096."""
BURSTS = st.lists(st.tuples(st.floats(0.0, 3.0), st.lists(SIZES, min_size=1, max_size=24)), min_size=1, max_size=6)
"""Each after so many seconds, all its programs at once."""


@given(bursts=BURSTS)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_no_admitted_program_waits_longer_than_the_bound(bench: Bench, bursts: list[Any]) -> None:
    at_s, programs = 0.0, []
    for gap_s, sizes in bursts:
        at_s += gap_s
        programs += [(at_s, program(turn(fresh, output))) for fresh, output in sizes]
    records = bench.run(*programs, policy=POLICY, foresight=TOLD, router=shed)
    assert longest_wait_s(records) <= MAX_WAIT_S
    for record in records:
        assert record.outcome is Outcome.OK or record.is_refused, "nothing admitted is lost"


@pytest.mark.parametrize("seed", range(6))
def test_programs_that_come_back_together_exceed_the_bound_by_little(bench: Bench, seed: int) -> None:
    """The bound does not count who may come back. These bursts, whose tools end together, wait 5.1 s."""
    rng = random.Random(seed)

    def burst(at_s: float) -> list[tuple[float, PlannedProgram]]:
        pause_s = rng.choice((0.5, 2.0))
        first = [turn(rng.randrange(20, 1200), rng.randrange(1, 120), "ls", pause_s) for _ in range(30)]
        later = [turn(rng.randrange(20, 300), rng.randrange(1, 60), "ls", pause_s) for _ in range(30)]
        return [(at_s, program(one, other, turn(9, 3))) for one, other in zip(first, later, strict=True)]

    programs = [one for number in range(5) for one in burst(1.5 * number)]
    records = bench.run(*programs, policy=POLICY, foresight=TOLD, router=shed)
    assert 0 < len(admitted(records)) < len(records)
    assert longest_wait_s(records) <= 1.5 * MAX_WAIT_S


def longest_wait_s(records: Sequence[ProgramRecord]) -> float:
    return max(wait_s for record in admitted(records) for wait_s in record.first_tokens_s if wait_s is not None)


FLOOD = [(0.1 * number, program(turn(200, 100, "ls", 0.5), turn(50, 50))) for number in range(150)]


def test_without_shedding_the_same_programs_wait_longer(bench: Bench) -> None:
    kept = bench.run(*FLOOD, policy=POLICY, foresight=TOLD, router=shed)
    assert 0 < len(admitted(kept)) < len(kept)
    assert longest_wait_s(kept) <= MAX_WAIT_S
    everything = bench.run(*FLOOD, policy=POLICY, foresight=TOLD)
    assert len(admitted(everything)) == len(everything)
    assert longest_wait_s(everything) > 2 * MAX_WAIT_S


def test_our_own_router_sheds_by_snapshots(bench: Bench) -> None:
    """A snapshot is a second old, so that a bound is exceeded by about as much as arrives in that time."""
    records = bench.run(*FLOOD, policy=POLICY, foresight=TOLD, router=front)
    refused = [record for record in records if record.is_refused]
    assert refused
    assert longest_wait_s(records) <= 1.5 * MAX_WAIT_S
    reasons = {bench.simulation.routed[record.program_id, 0].reason for record in refused}
    assert reasons == {"load_shed"}


def test_a_policy_without_a_bound_refuses_nobody(bench: Bench) -> None:
    for policy in ("vllm", "infercept"):
        records = bench.run(*FLOOD, policy=policy, foresight=TOLD, router=shed)
        assert [record.outcome for record in records] == [Outcome.OK] * len(FLOOD)


def test_where_nobody_waits_nobody_is_refused(bench: Bench) -> None:
    slow = [(2.0 * number, one) for number, (_, one) in enumerate(FLOOD[:20])]
    records = bench.run(*slow, policy=POLICY, foresight=TOLD, router=shed)
    assert [record.outcome for record in records] == [Outcome.OK] * len(slow)
