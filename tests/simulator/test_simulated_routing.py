"""Placement under virtual time: what a run tells of its routing, and our own front on real schedulers."""

import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from cluster.core.errors import ConfigError
from cluster.core.slo import Outcome, ProgramRecord
from cluster.offline.bench.arrivals import Arrivals
from cluster.offline.bench.workload import PlannedProgram
from cluster.offline.simulator.load import closed_loop
from cluster.offline.simulator.routed import InfiniteCache, RoutingSummary, turns_on
from cluster.offline.simulator.routers import ALL, EVERYWHERE, OURS, ROUTERS, FrontRouter, Replicas, router_names
from cluster.offline.simulator.routing import TurnRouter
from replicas.virtual_replica import VirtualReplica
from tests.simulator.simulated import Bench, program, turn


def router(name: str, **front: object) -> Callable[[Sequence[VirtualReplica]], TurnRouter]:
    return lambda replicas: ROUTERS[name](Replicas(replicas, seed=3, front=front))


def some_programs(count: int, over_s: float) -> list[tuple[float, PlannedProgram]]:
    rng = random.Random(11)
    programs = []
    for number in range(count):
        turns = [turn(rng.randrange(60, 300), rng.randrange(5, 60), "ls", rng.expovariate(1.0)) for _ in range(3)]
        prefix = ("tools", 64) if number % 2 else None
        programs.append((rng.uniform(0, over_s), program(*turns, turn(9, 3), prefix=prefix)))
    return programs


def summary(bench: Bench, records: list[ProgramRecord], until_s: float) -> RoutingSummary:
    routed = bench.simulation.routed
    turns = turns_on(records, routed, len(bench.replicas), 0.0, until_s)
    return RoutingSummary.of(records, routed, turns, [one.busy_s for one in bench.replicas], bench.clock.now_s())


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("policy", ["caesura", "vllm"])
def test_every_router_serves_every_program_the_same_way_twice(bench: Bench, name: str, policy: str) -> None:
    programs = some_programs(30, 4.0)
    told = []
    for _ in range(2):
        records = bench.run(*programs, policy=policy, replicas=3, router=router(name))
        assert [record.outcome for record in records] == [Outcome.OK] * 30
        told.append((records, summary(bench, records, 4.0), bench.simulation.routed))
    assert told[0] == told[1]
    found = told[0][1]
    assert sum(found.decisions.values()) == 30 * 4
    assert found.refused == 0
    assert found.moves == 0 or name == OURS
    assert found.hit_of_infinite is not None and 0 < found.hit_of_infinite <= 1
    assert found.split == 0 or name in ("round_robin", "power_of_two", "kv_aware", "prefix_affinity", EVERYWHERE)
    for replica in bench.replicas:
        replica.check_integrity()


def test_a_router_that_forgets_splits_programs_and_loses_what_is_cached(bench: Bench) -> None:
    programs = some_programs(30, 4.0)
    ours, around = (
        summary(bench, bench.run(*programs, policy="caesura", replicas=3, router=router(name)), 4.0)
        for name in (OURS, "round_robin")
    )
    assert (ours.split, ours.decisions["new"]) == (0, 30)
    assert ours.decisions["stayed"] >= 85
    assert around.split > 20
    assert ours.hit_of_infinite > 0.9 > around.hit_of_infinite > 0.1  # type: ignore[operator]


def test_our_front_is_the_real_one_and_its_books_are_closed_in_the_end(bench: Bench) -> None:
    simulation = bench.prepare(some_programs(30, 4.0), policy="caesura", replicas=3, router=router(OURS))
    simulation.run(1e6)
    ours = bench.router
    assert isinstance(ours, FrontRouter)
    assert ours.front.waiting == 0
    ours.front.check_integrity()


def test_programs_that_do_not_fit_wait_at_the_front_and_their_first_token_is_late_for_it(bench: Bench) -> None:
    # A replica of 4,096 tokens; each program has 2,000 for the time of its tool, and nine tenths are admitted.
    big = program(turn(1990, 10, "ls", 3.0), turn(9, 3))
    strict = router(OURS, guarded_working_set=0.9)
    records = bench.run(*((0.0, big) for _ in range(3)), policy="caesura", replicas=1, router=strict)
    found = summary(bench, records, 4.0)
    assert found.waited > 0
    assert [record.outcome for record in records] == [Outcome.OK] * 3
    assert found.longest_wait_s is not None
    ttfts = [record.turns[0].ttft_s for record in records]
    assert max(ttfts) > found.longest_wait_s  # type: ignore[type-var]
    # Only first turns wait.
    routed = bench.simulation.routed
    assert all(way.sent_s == way.due_s for (_, index), way in routed.items() if index > 0)


def test_a_program_that_waits_too_long_is_refused_and_recorded_so(bench: Bench) -> None:
    big = program(turn(1990, 100, "ls", 30.0), turn(9, 3))
    small_patience = router(OURS, guarded_working_set=0.9, max_wait_s=0.5)
    records = bench.run(*((0.0, big) for _ in range(4)), policy="caesura", replicas=1, router=small_patience)
    refused = [record for record in records if record.outcome is Outcome.REJECTED]
    assert 0 < len(refused) < 4
    for record in refused:
        [only] = record.turns
        assert (only.outcome, only.first_token_s, only.output_tokens) == (Outcome.REJECTED, None, 0)
        assert record.jct_s is None and record.jct_wall_s is None
    found = summary(bench, records, 4.0)
    assert found.refused == len(refused)
    assert found.decisions["queue_timeout"] == len(refused)
    assert sum(record.outcome is Outcome.OK for record in records) == 4 - len(refused)


def test_a_closed_loop_has_as_many_programs_at_all_times(bench: Bench) -> None:
    pool = [program(turn(50, 5, "ls", 0.2), turn(9, 3)), program(turn(80, 9))]
    jobs, following = closed_loop(pool, 4, 1.0, seed=2)
    assert [job.arrival_s for job in jobs] == [0.0, 0.25, 0.5, 0.75]
    bench.prepare([], policy="caesura", replicas=2)
    simulation = bench.simulate(jobs, router(OURS), following)
    records = simulation.run(20.0)
    assert len({record.program_id for record in records}) == len(records) > 50
    for moment in (1.0, 5.0, 19.9):
        ends = [record.turns[-1].last_token_s for record in records]
        under_way = [
            record
            for record, end_s in zip(records, ends, strict=True)
            if record.arrival_s <= moment and (record.outcome is not Outcome.OK or end_s > moment)  # type: ignore[operator]
        ]
        assert len(under_way) == 4


def test_an_infinite_cache_has_what_was_sent_or_generated_before() -> None:
    first, second = program(turn(70, 11, "ls"), turn(30, 4), prefix=("tools", 48)), program(turn(40, 1))
    cache = InfiniteCache(16)
    assert cache.reusable(first, 0, 70, 0) == 0
    # 80 of the 81 tokens were computed, the one sampled last was not.
    assert cache.reusable(first, 1, 111, 81) == 80
    assert cache.reusable(second, 0, 40, 0) == 0
    assert cache.reusable(first, 0, 70, 0) == 48
    # A prompt's last token is always computed.
    assert cache.reusable(program(turn(48, 1), prefix=("tools", 48)), 0, 48, 0) == 32


def test_services_that_were_recorded_at_the_same_time_arrive_together(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, times in zip(paths, ([0.0, 3.0, 8.0], [1.0, 2.0]), strict=True):
        path.write_text("".join(f'{{"arrival_s": {time}}}\n' for time in times))
    process = Arrivals.parse(f"recorded:{paths[0]},{paths[1]}", 1.0)
    assert process.recorded == (0.5, 0.5, 0.5, 2.5), "0, 1, 2, 3, 8, with a mean gap of 2"


def test_recorded_arrivals_keep_their_gaps_at_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl.gz"
    moments = [(0.0, 0), (0.0, 0), (1.0, 1), (3.0, 0), (9.0, 0)]
    lines = [json.dumps({"arrival_s": at_s, "turn_inferred": later}) for at_s, later in moments]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    process = Arrivals.parse(f"recorded:{path}", 2.0)
    # Three gaps, 0, 3 and 6 s, whose mean is half a second at 2/s; the second turn's request is none.
    assert [gap / 2.0 for gap in process.recorded] == pytest.approx([0.0, 0.5, 1.0])
    times = process.times_s(np.random.default_rng(1), duration_s=300.0)
    assert times == sorted(times)
    assert len(times) == pytest.approx(600, abs=3)
    assert process.times_s(np.random.default_rng(1), count=590) == times[:590]
    with pytest.raises(ConfigError, match="cannot be read as a trace of requests"):
        Arrivals.parse(f"recorded:{tmp_path / 'nowhere'}", 2.0)


def test_everywhere_nothing_is_computed_twice_and_the_load_is_even(bench: Bench) -> None:
    programs = some_programs(30, 4.0)
    everywhere, hashed = (
        summary(bench, bench.run(*programs, replicas=3, num_blocks=4096, router=router(name)), 4.0)
        for name in (EVERYWHERE, "consistent_hash")
    )
    assert everywhere.split > 20 and everywhere.hit_of_infinite == 1.0
    assert everywhere.load_max_over_mean is not None and hashed.load_max_over_mean is not None
    assert everywhere.load_max_over_mean < min(1.2, hashed.load_max_over_mean)


def test_the_bound_is_not_among_all_that_are_compared() -> None:
    assert OURS in router_names(ALL) and EVERYWHERE not in router_names(ALL)
    assert router_names(f"{OURS}, {EVERYWHERE}") == (OURS, EVERYWHERE)
