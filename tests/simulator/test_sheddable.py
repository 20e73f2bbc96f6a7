"""Sheddable programs (batch work) among others: they yield, and none of them starves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config.schema import PolicyConfig
from cluster.core.program import ProgramIdentity
from cluster.core.slo import Outcome, ProgramRecord
from cluster.offline.bench.workload import PlannedProgram
from cluster.offline.simulator.foresight import Foresight
from cluster.offline.simulator.routers import OURS, ROUTERS, Replicas
from cluster.offline.simulator.routing import LeastPrograms, TurnRouter
from cluster.offline.simulator.shedding import SheddingRouter
from replicas.virtual_replica import VirtualReplica
from tests.simulator.simulated import Bench, program, turn

MAX_WAIT_S = 4.0
BATCH_DUE_S, BATCH_WAIT_S = 2 * MAX_WAIT_S, 2.5 * MAX_WAIT_S
"""When a batch turn comes before all others, and its longest wait."""
POLICY = PolicyConfig(name="caesura", parameters={"max_wait_s": MAX_WAIT_S})
BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Classes(Foresight):
    """Clients that give the programs of BATCH a priority of 1."""

    oracle: bool = True

    def identities(
        self, name: str, program: PlannedProgram, seed: tuple[int, ...], parent: str | None = None
    ) -> list[ProgramIdentity]:
        found = Foresight.identities(self, name, program, seed, parent)
        if program.program_id != BATCH:
            return found
        return [replace(one, hints=replace(one.hints, priority=1)) for one in found]


def batch(prompt: int, output: int) -> PlannedProgram:
    return replace(program(turn(prompt, output)), program_id=BATCH)


def shed(replicas: Sequence[VirtualReplica]) -> TurnRouter:
    return SheddingRouter(LeastPrograms(len(replicas)), replicas)


def front(replicas: Sequence[VirtualReplica]) -> TurnRouter:
    return ROUTERS[OURS](Replicas(replicas, seed=3, front={}))


def waits_s(records: Sequence[ProgramRecord]) -> list[float]:
    return [wait_s for one in records if not one.is_refused for wait_s in one.first_tokens_s if wait_s is not None]


SIZES = st.tuples(st.integers(20, 1200), st.integers(1, 120), st.booleans())
"""Tokens of the prompt and of the output, and whether it is batch work. A replica has 4,096."""
BURSTS = st.lists(st.tuples(st.floats(0.0, 3.0), st.lists(SIZES, min_size=1, max_size=24)), min_size=1, max_size=6)
"""Each after so many seconds, all its programs at once."""


@given(bursts=BURSTS)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_no_admitted_program_starves_of_whatever_class(bench: Bench, bursts: list[Any]) -> None:
    """A batch turn may be preempted, so that its end is bound, too: it waits for `BATCH_WAIT_S` at most, all its waits
    together, and half of the time between preemptions is progress.
    """
    at_s, programs = 0.0, []
    for gap_s, sizes in bursts:
        at_s += gap_s
        programs += [(at_s, (batch if low else lambda *size: program(turn(*size)))(*size)) for *size, low in sizes]
    records = bench.run(*programs, policy=POLICY, foresight=Classes(), router=shed)
    agents = [record for record, (_, one) in zip(records, programs, strict=True) if one.program_id != BATCH]
    assert max(waits_s(agents), default=0.0) <= MAX_WAIT_S
    assert max(waits_s(records), default=0.0) <= BATCH_WAIT_S
    for record in records:
        assert record.outcome is Outcome.OK or record.is_refused, "nothing admitted is lost"
        if record.outcome is Outcome.OK:
            spent_s = record.jct_s
            assert spent_s is not None
            assert spent_s <= 2 * BATCH_WAIT_S


def test_batch_work_among_more_agents_than_can_be_served_waits_no_longer_than_the_bound(bench: Bench) -> None:
    flood = [(0.1 * number, program(turn(200, 100))) for number in range(120)]
    records = bench.run((5.0, batch(300, 20)), *flood, policy=POLICY, foresight=Classes())
    (waited_s,) = waits_s(records[:1])
    assert BATCH_DUE_S < waited_s <= BATCH_WAIT_S


STREAM = [(0.25 * number, program(turn(900, 30))) for number in range(80)]
"""Agents for 20 s, which take about 80% of the replica's time."""
JOBS = [(0.0, batch(1200, 1500)) for _ in range(2)]
"""Batch work of 2,700 tokens each, which takes about ten seconds alone."""


def test_batch_work_fills_the_valleys_and_agents_hardly_notice_it(bench: Bench) -> None:
    alone = bench.run(*STREAM, policy="caesura", foresight=Classes())
    both = bench.run(*JOBS, *STREAM, policy="caesura", foresight=Classes())
    jobs, agents = both[: len(JOBS)], both[len(JOBS) :]
    assert [job.outcome for job in jobs] == [Outcome.OK] * len(JOBS)
    late = sum(wait_s > 1.0 for wait_s in waits_s(agents)) - sum(wait_s > 1.0 for wait_s in waits_s(alone))
    assert late <= 2
    equal = bench.run(*((at_s, replace(one, program_id="job")) for at_s, one in JOBS), *STREAM, policy="caesura")
    assert sum(wait_s > 1.0 for wait_s in waits_s(equal[len(JOBS) :])) > 2 * late + 5, "without the class they wait"


def test_our_own_router_refuses_batch_work_first(bench: Bench) -> None:
    """Twice as much as the replica can serve."""
    flood = [(0.1 * n, batch(200, 100) if n % 2 else program(turn(200, 100))) for n in range(150)]
    records = bench.run(*flood, policy=POLICY, foresight=Classes(), router=front)
    refused = [sum(one.is_refused for one in records[first::2]) for first in (0, 1)]
    assert refused[0] < refused[1] / 2
