"""The simulator on real scheduler classes: times worked out by hand, pauses, shared prefixes, conservation."""

import random
from dataclasses import replace

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from cluster.core.errors import IntegrityError
from cluster.core.lifecycle.machine import Phase, ProgramState
from cluster.core.program import ProgramIdentity
from cluster.core.registry import PEERS, POLICIES
from cluster.core.slo import Outcome
from cluster.offline.simulator.foresight import Foresight, Reports
from cluster.offline.simulator.settings import BASELINES
from replicas.scheduler import AgentScheduler
from tests.replica.test_peers import needs_agentinfer
from tests.simulator.simulated import COST, Bench, program, turn

HEADS = {"one": [1] * 16, "same": [1] * 16, "other": [2] * 16}
EVERY = [
    pytest.param(name, marks=needs_agentinfer) if name == "agentinfer" else name
    for name in sorted({*POLICIES, *BASELINES, *PEERS})
]


def step_s(tokens: int, context: int, sequences: int, pairs: int) -> float:
    """The cost model's equation, written out once more."""
    linear = max(0.005, tokens * 0.0001)
    return 0.001 + sequences * 0.0002 + linear + context * 2e-6 + pairs * 1e-7


def prefill_s(begin: int, end: int) -> float:
    return step_s(end - begin, end, 1, sum(range(begin + 1, end + 1)))


def decodes_s(first_context: int, count: int) -> float:
    return sum(step_s(1, first_context + i, 1, first_context + i) for i in range(count))


@pytest.mark.parametrize("policy", ["vllm", "vllm-nocache", "continuum"])
def test_one_program_of_one_turn_takes_what_the_cost_model_says(bench: Bench, policy: str) -> None:
    [record] = bench.run((2.0, program(turn(100, 5))), policy=policy, max_num_batched_tokens=64)
    [only] = record.turns
    ttft_s = prefill_s(0, 64) + prefill_s(64, 100)
    assert only.ttft_s == pytest.approx(ttft_s, abs=1e-12)
    # The first of five tokens comes with the prompt; the other four decode at 101 to 104 tokens.
    assert record.jct_s == pytest.approx(ttft_s + decodes_s(101, 4), abs=1e-12)
    assert (only.queue_s, only.cached_tokens, only.output_tokens) == (0.0, 0, 5)


def test_a_turns_way_to_its_replica_is_latency_and_no_waiting(bench: Bench) -> None:
    simulation = bench.prepare([(1.0, program(turn(50, 3, "ls", 2.0), turn(9, 1)))])
    [replica] = bench.replicas
    replica.cost = replace(COST, turn_s=0.25)
    [record] = simulation.run(1e6)
    first, second = record.turns
    assert first.ttft_s == pytest.approx(0.25 + prefill_s(0, 50))
    assert second.intended_start_s == first.last_token_s + 2.0  # type: ignore[operator]
    assert second.ttft_s == pytest.approx(0.25 + prefill_s(48, 62))
    assert (first.queue_s, second.queue_s) == (0.0, 0.0)


@pytest.mark.parametrize(("pause_s", "recomputed"), [(1.0, 5), (9.0, 53)])
def test_without_a_prefix_cache_only_a_held_context_is_not_computed_again(
    bench: Bench, pause_s: float, recomputed: int
) -> None:
    # `continuum` holds for 2 s as long as it has seen no tool, and a context of 53 tokens has 3 full blocks. The second
    # program makes steps, in which the hold ends.
    paused, _ = bench.run(
        (1.0, program(turn(50, 3, "ls", pause_s), turn(9, 1))),
        (6.0, program(turn(40, 3))),
        policy="continuum",
        forgetful=True,
    )
    assert paused.recomputed_tokens == recomputed


def test_two_programs_that_arrive_together_share_their_steps(bench: Bench) -> None:
    records = bench.run((1.0, program(turn(30, 2))), (1.0, program(turn(50, 2))))
    both_s = step_s(80, 80, 2, sum(range(1, 31)) + sum(range(1, 51)))
    for record in records:
        assert record.turns[0].ttft_s == pytest.approx(both_s, abs=1e-12)
        assert record.jct_s == pytest.approx(both_s + step_s(2, 31 + 51, 2, 31 + 51), abs=1e-12)


@pytest.mark.parametrize(("policy", "cached"), [("vllm", 64), ("continuum", 64), ("vllm-nocache", 0)])
def test_a_shared_prefix_is_computed_once_where_there_is_a_prefix_cache(bench: Bench, policy: str, cached: int) -> None:
    records = bench.run(
        (0.0, program(turn(70, 1), prefix=("tools", 64))),
        (9.0, program(turn(100, 3), prefix=("tools", 64))),
        (18.0, program(turn(100, 3), prefix=("others", 64))),
        policy=policy,
    )
    assert [record.turns[0].cached_tokens for record in records] == [0, cached, 0]
    assert records[1].jct_s == pytest.approx(prefill_s(cached, 100) + decodes_s(101, 2), abs=1e-12)


@pytest.mark.parametrize("policy", ["vllm", "continuum"])
def test_a_tools_pause_is_honoured_exactly(bench: Bench, policy: str) -> None:
    planned = program(turn(100, 5, "ls", 2.5), turn(10, 2, "make", 0.125), turn(7, 1))
    [record] = bench.run((0.0, planned), policy=policy)
    first, second, third = record.turns
    assert second.intended_start_s == first.last_token_s + 2.5  # type: ignore[operator]
    assert third.intended_start_s == second.last_token_s + 0.125  # type: ignore[operator]
    assert record.jct_wall_s == pytest.approx(record.jct_s + 2.625)  # type: ignore[operator]
    # Six full blocks of the 104 computed tokens are found again; what was sampled last never was computed.
    assert (second.previous_context_tokens, second.cached_tokens, second.recomputed_tokens) == (105, 96, 9)


def test_the_scheduler_learns_the_pause_that_was_simulated(bench: Bench) -> None:
    bench.run((0.0, program(turn(40, 5, "ls", 2.5), turn(10, 2))), policy="continuum")
    scheduler = bench.replicas[0].engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    learnt = scheduler.durations.tool("ls")
    assert learnt is not None
    assert (learnt.count, learnt.mean_s) == (1, pytest.approx(2.5))


@pytest.mark.parametrize(
    ("reports", "phase"),
    [(Reports.NOTHING, Phase.HELD), (Reports.ENDS, None), (Reports.AHEAD, None)],
)
def test_a_policy_knows_the_tool_from_the_output_and_the_end_if_it_is_reported(
    bench: Bench, reports: Reports, phase: Phase | None
) -> None:
    planned = program(turn(60, 5, "ls", 1.0), turn(10, 9))
    simulation = bench.prepare([(0.0, planned)], policy="continuum", foresight=Foresight(reports=reports))
    scheduler = bench.replicas[0].engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    key = ProgramIdentity("p0").key
    assert key is not None
    seen: list[ProgramState | None] = []
    for at_s in (0.5, 1.5):
        simulation.timeline.at(at_s, lambda: seen.append(scheduler.programs.get(key)))
    simulation.run(1e6)
    first, second = seen
    assert first is not None and (first.phase, first.tools) == (Phase.HELD, ("ls",))
    assert (None if second is None else second.phase) is phase


def test_hidden_output_and_a_reset_context_are_not_reused(bench: Bench) -> None:
    hidden = replace(turn(64, 32, "think"), kept_tokens=16)
    reset = replace(turn(80, 1), reset=True)
    [record] = bench.run((0.0, program(hidden, turn(16, 1), reset, prefix=("system", 32))))
    # The kept 16 tokens moved; of the reset context only the prefix of two blocks stays.
    assert [t.cached_tokens for t in record.turns] == [0, 64, 32]
    assert [t.previous_context_tokens for t in record.turns] == [0, 64, 32]


def test_a_held_context_and_a_recomputed_one_are_waste(bench: Bench) -> None:
    planned = program(turn(100, 5, "ls", 1.5), turn(16, 1))
    bench.run((0.0, planned), policy="continuum")
    [held] = [replica.settled_waste() for replica in bench.replicas]
    assert held.held == pytest.approx(104 * 1.5)
    bench.run((0.0, planned), policy="vllm-nocache")
    [again] = [replica.settled_waste() for replica in bench.replicas]
    # 105 of the second prompt's 121 tokens have been there before; all of them are the batch.
    assert (again.held, again.recomputed) == (0.0, pytest.approx(105 / 121 * prefill_s(0, 121) * 121))


def test_the_baselines_run_vllms_own_class_untouched(bench: Bench) -> None:
    for policy in BASELINES:
        bench.run((0.0, program(turn(10, 1))), policy=policy)
        scheduler = bench.replicas[0].engine.scheduler
        assert type(scheduler) is AsyncScheduler
        assert scheduler.kv_cache_manager.enable_caching is (policy == "vllm")


def test_a_cut_off_run_says_what_was_unfinished(bench: Bench) -> None:
    long = program(turn(100, 50))
    paused = program(turn(10, 1, "sleep", 100.0), turn(1, 1))
    ran, waits, late = bench.run((0.0, long), (0.0, paused), (99.0, long), until_s=0.1)
    assert [record.outcome for record in (ran, waits, late)] == [Outcome.UNFINISHED] * 3
    assert [turn.outcome for turn in ran.turns] == [Outcome.UNFINISHED]
    assert 0 < ran.turns[0].output_tokens < 50
    assert [turn.outcome for turn in waits.turns] == [Outcome.OK]
    assert late.turns == ()


def test_programs_spread_over_replicas_and_stay_where_they_are(bench: Bench) -> None:
    planned = program(turn(100, 20, "ls", 0.1), turn(10, 2))
    records = bench.run((0.0, planned), (0.0, planned), (0.0, planned), (0.0, planned), replicas=2)
    assert all(record.outcome is Outcome.OK for record in records)
    assert [len(replica.schedule_s) for replica in bench.replicas] == [len(bench.replicas[0].schedule_s)] * 2
    # Both have two programs, so each has the second turn's context where the first turn left it.
    assert [record.turns[1].cached_tokens for record in records] == [112] * 4


def test_a_replica_whose_programs_have_ended_takes_the_next_one(bench: Bench) -> None:
    short, long = program(turn(100, 1)), program(turn(100, 400))
    arrivals = (0.0, short), (0.0, long), (0.5, short), (1.0, short)
    bench.run(*arrivals, replicas=2, foresight=Foresight(reports=Reports.ENDS))
    assert bench.replicas[1].preemptions == 0
    # Only the long one ran on the second replica: one step for its prompt, one for each token after the first.
    assert [len(replica.schedule_s) for replica in bench.replicas] == [3, 400]


def test_a_block_is_known_by_all_that_comes_before_it(bench: Bench) -> None:
    bench.prepare([])
    engine = bench.replicas[0].engine
    block = list(range(100, 116))
    one, same, other = (engine.submit(name, [*head, *block, 7], 1) for name, head in HEADS.items())
    assert len(one.block_hashes) == 2
    assert one.block_hashes == same.block_hashes
    assert not set(one.block_hashes) & set(other.block_hashes)


@pytest.mark.parametrize("host_blocks", [0, 90], ids=["no tier", "host tier"])
@pytest.mark.parametrize("policy", EVERY)
def test_every_policy_ends_every_program_and_gives_every_block_back(
    bench: Bench, policy: str, host_blocks: int
) -> None:
    rng = random.Random(7)
    programs = []
    for number in range(40):
        turns = [
            turn(rng.randrange(20, 200), rng.randrange(1, 120), rng.choice(["ls", "make"]), rng.expovariate(2.0))
            for _ in range(rng.randrange(1, 5))
        ]
        planned = program(*turns, turn(5, 3), prefix=("tools", 48) if number % 2 else None)
        programs.append((rng.uniform(0, 1.0), planned))
    # Memory for about three of them: holds are broken, turns preempted.
    shape = {"num_blocks": 140, "max_num_batched_tokens": 256, "host_blocks": host_blocks}
    records = bench.run(*programs, policy=policy, **shape)
    assert bench.replicas[0].preemptions > 0 or policy not in BASELINES
    for (_, planned), record in zip(programs, records, strict=True):
        assert record.outcome is Outcome.OK
        assert [t.output_tokens for t in record.turns] == [t.output_tokens for t in planned.turns]
        assert [t.prompt_tokens for t in record.turns] == planned.contexts()
        for done in record.turns:
            times = (done.intended_start_s, done.first_token_s, done.last_token_s)
            assert None not in times and list(times) == sorted(times), done  # type: ignore[type-var]
            assert done.queue_s is not None and done.queue_s >= 0
    bench.replicas[0].check_integrity()
    assert bench.replicas[0].engine.free_blocks() == 139


def test_a_leaked_block_is_found(bench: Bench) -> None:
    simulation = bench.prepare([(0.0, program(turn(100, 5)))])
    bench.replicas[0].engine.scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
    with pytest.raises(IntegrityError, match="255 of 256 blocks"):
        simulation.run(1e6)


def test_the_cost_model_by_hand_is_the_one_in_use() -> None:
    assert COST.step_s(64, 100, 1, 4000) == pytest.approx(step_s(64, 100, 1, 4000))


def test_programs_count_up_to_the_end_of_the_run_although_it_has_nothing_left_to_do(bench: Bench) -> None:
    [record] = bench.run((0.0, program(turn(100, 3))), until_s=500.0)
    assert bench.clock.now_s() < 500.0
    assert record.until_s == 500.0


@pytest.mark.parametrize("beside_tokens", [0, 300])
def test_a_recomputation_wastes_the_memory_of_turns_that_it_stops(bench: Bench, beside_tokens: int) -> None:
    """vLLM 0.2 schedules prompts alone: while a context is computed again, the memory of the other turn does nothing.

    177 tokens of a prompt of 193 were computed before; eq. 1 of InferCept counts the contexts of both turns.
    """
    returns = program(turn(160, 17, "ls", 5.0), turn(16, 1))
    beside = [(4.9, program(turn(beside_tokens, 100)))] if beside_tokens else []
    bench.run((0.0, returns), *beside, policy="vllm-v0", forgetful=True)
    kv = 193 + beside_tokens
    waste = bench.replicas[0].settled_waste().recomputed
    assert kv * prefill_s(0, 193) * 177 / 193 <= waste <= (kv + 100 * bool(beside)) * prefill_s(0, 193) * 177 / 193
