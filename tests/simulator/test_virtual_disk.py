"""The disk tier under virtual time: what it takes to load a context, and that a program finds it after a restart.

A chunk is a block of 16 tokens, and takes 0.5 ms to read or write. The context of 176 tokens is eleven of them.
"""

from collections.abc import Callable, Sequence

import pytest

from cluster.core.clock import ManualClock
from cluster.core.slo import Outcome
from cluster.offline.simulator.elastic import STATIC, Scaling
from cluster.offline.simulator.restarts import RestartingRouter
from cluster.offline.simulator.routers import OURS, ROUTERS, Replicas
from cluster.offline.simulator.routing import TurnRouter
from replicas.scheduler import AgentScheduler
from replicas.virtual_disk import VirtualDisk, VirtualVolume
from replicas.virtual_replica import VirtualReplica
from tests.simulator.simulated import COST, Bench, program, turn
from tests.simulator.test_simulation import prefill_s

CHUNK_S = 0.5e-3
CONTEXT = 176
RETURNS = program(turn(160, 17, "ls", 22.0), turn(16, 1))


def drives(write_s: float = CHUNK_S, *, machines: bool = False) -> Callable[[int, ManualClock], VirtualDisk]:
    """Drives of replicas that see one volume, or, as ``machines``, each its own. A chunk is written in ``write_s``."""
    volumes: dict[str, VirtualVolume] = {}

    def drive(index: int, clock: ManualClock) -> VirtualDisk:
        name = f"v{index}" if machines else "v"
        volume = volumes.setdefault(name, VirtualVolume(name))
        return VirtualDisk(volume, index, clock, 100, 1 << 20, CHUNK_S, write_s)

    return drive


def restarts(replicas: Sequence[VirtualReplica]) -> TurnRouter:
    """One replica restarts each 10 s, and serves again after 4 s."""
    made = Replicas(replicas, 0, front={}, scaling=Scaling(STATIC, start_s=4.0), restart_every_s=10.0)
    return ROUTERS[OURS](made)


def test_what_the_host_has_lost_is_loaded_from_disk(bench: Bench) -> None:
    """The intruder takes all 32 blocks of the device at 10 s, and all of the host tier's."""
    intruder = program(turn(500, 1))
    tiers = {"num_blocks": 33, "host_blocks": 44}
    back, _ = bench.run((0.0, RETURNS), (10.0, intruder), policy="plas", disk=drives(), **tiers)
    second = back.turns[1]
    assert second.cached_tokens == CONTEXT
    loaded_s = 11 * CHUNK_S + COST.swap_s(CONTEXT)
    assert second.ttft_s == pytest.approx(loaded_s + prefill_s(CONTEXT, 193), abs=0.01), "and a few idle steps"


@pytest.mark.parametrize(
    ("disk", "found"),
    [(drives(), CONTEXT), (drives(machines=True), 0), (None, 0)],
    ids=["one volume", "other machine", "no disk"],
)
def test_a_program_finds_its_context_after_its_replica_has_restarted(
    bench: Bench, disk: Callable[[int, ManualClock], VirtualDisk] | None, found: int
) -> None:
    """p0 is placed on replica 1 at 0 s and pauses for 22 s. Replica 0 restarts at 10 s, replica 1 at 20 s. So the next
    turn goes to replica 0, which loads the context if it sees the volume.
    """
    [record] = bench.run((0.0, RETURNS), policy="caesura", replicas=2, router=restarts, disk=disk, host_blocks=200)
    assert isinstance(bench.router, RestartingRouter)
    assert bench.router.restarts == 2
    routed = bench.simulation.routed
    assert [routed["p0", index].replica for index in (0, 1)] == [1, 0]
    assert record.turns[1].cached_tokens == found


def test_a_replica_that_restarts_serves_its_turns_first_and_has_lost_its_memory(bench: Bench) -> None:
    """The first turn begins on replica 1 at 15 s and generates 2,000 tokens: the replica ends after it, not at 20 s."""
    long = program(turn(160, 2000, "ls", 2.0), turn(16, 1))
    [record] = bench.run((15.0, long), policy="caesura", replicas=2, router=restarts, host_blocks=200)
    first = record.turns[0].last_token_s
    assert first is not None
    assert first > 25.0
    assert record.outcome is Outcome.OK
    assert [bench.simulation.routed["p0", index].replica for index in (0, 1)] == [1, 0]
    scheduler = bench.replicas[1].engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    assert not scheduler.swapping.used_tokens


QUICK = program(*(turn(16, 2, "ls", 0.002) for _ in range(10)), turn(16, 1))
"""A program after which `ls` is expected to take 2 ms. To write a context takes longer."""


def test_a_replica_that_restarts_first_writes_what_was_not_worth_a_write(bench: Bench) -> None:
    """
    0 s   The replicas learn that `ls` takes 2 ms.
    1 s   p's turn ends on replica 1 and calls `ls`. Its context is not written: p is expected back before it would be.
    10 s  Replica 0 restarts.
    20 s  Replica 1 restarts. It writes p's context first.
    23 s  `ls` has taken 22 s. p's next turn goes to replica 0, and finds its context there.
    """
    programs = [(0.0, QUICK), (0.1, QUICK), (0.2, QUICK), (1.0, RETURNS)]
    simulation = bench.prepare(programs, policy="caesura", replicas=2, router=restarts, disk=drives(), host_blocks=200)
    simulation.timeline.run(19.0)
    scheduler = bench.replicas[1].engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    assert (scheduler.swapping.is_on_host("default/p3"), scheduler.swapping.is_on_disk("default/p3")) == (True, False)

    p = simulation.run(100.0)[-1]
    assert [simulation.routed["p3", index].replica for index in (0, 1)] == [1, 0]
    assert p.turns[1].cached_tokens == CONTEXT


def test_a_replica_that_restarts_waits_20_s_for_its_writes(bench: Bench) -> None:
    """
    0 s   p's turn ends on replica 1. A chunk takes 4 s to write: p's context takes 44 s.
    10 s  Replica 0 restarts.
    20 s  Replica 1 begins to restart, and to write.
    40 s  It ends, with 5 of 11 chunks written.
    60 s  p's next turn finds these 5 on replica 0, and computes the rest.
    """
    returns = program(turn(160, 17, "ls", 60.0), turn(16, 1))
    [record] = bench.run(
        (0.0, returns), policy="caesura", replicas=2, router=restarts, disk=drives(4.0), host_blocks=200
    )
    assert [bench.simulation.routed["p0", index].replica for index in (0, 1)] == [1, 0]
    assert record.turns[1].cached_tokens == 5 * 16
