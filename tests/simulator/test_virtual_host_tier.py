"""The host tier under virtual time: what is fetched, what it takes, and what goes on meanwhile.

Unless a test says otherwise a replica has 32 usable blocks of 16 tokens, and an intruder of 500 prompt tokens takes
them all: whatever was cached is gone from the device.
"""

from dataclasses import replace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from cluster.config.schema import PolicyConfig
from cluster.core.slo import Outcome
from cluster.offline.bench.workload import PlannedProgram
from cluster.offline.simulator.settings import STOCK_NO_CACHE
from replicas.host_tier import HostCache
from replicas.virtual_engine import VirtualLink
from tests.simulator.simulated import COST, Bench, program, turn
from tests.simulator.test_simulation import prefill_s

SMALL = {"num_blocks": 33, "host_blocks": 200}
SLOW = replace(COST, swap_token_s=1e-3)
"""A link on which a context takes longer than many steps."""
INTRUDER = program(turn(500, 1))
RETURNS = program(turn(160, 17, "ls", 5.0), turn(16, 1))
"""176 tokens are computed before its pause: eleven full blocks."""
CONTEXT = 176


def link_of(bench: Bench) -> VirtualLink:
    link = bench.replicas[0].link
    assert link is not None
    return link


@pytest.mark.parametrize("policy", ["vllm", "plas"])
def test_a_context_that_the_device_has_lost_is_fetched_and_not_computed_again(bench: Bench, policy: str) -> None:
    back, _ = bench.run((0.0, RETURNS), (2.0, INTRUDER), policy=policy, **SMALL)
    second = back.turns[1]
    assert (second.cached_tokens, second.fetched_tokens, second.reused_tokens) == (CONTEXT, CONTEXT, CONTEXT)
    # Of 177 known tokens the last was sampled, never computed; it and the 16 new ones are.
    assert second.recomputed_tokens == 1
    assert second.ttft_s == pytest.approx(COST.swap_s(CONTEXT) + prefill_s(CONTEXT, 193), abs=1e-9)
    assert link_of(bench).loaded_tokens == CONTEXT
    assert bench.replicas[0].settled_waste().recomputed == pytest.approx(prefill_s(CONTEXT, 193) * 193 / 17)


def test_what_the_device_still_has_is_not_fetched(bench: Bench) -> None:
    [record] = bench.run((0.0, RETURNS), **SMALL)
    assert (record.turns[1].cached_tokens, record.turns[1].fetched_tokens) == (CONTEXT, 0)
    assert link_of(bench).loaded_tokens == 0


def test_without_a_prefix_cache_there_is_no_tier(bench: Bench) -> None:
    [record] = bench.run((0.0, RETURNS), policy=STOCK_NO_CACHE, **SMALL)
    assert (record.turns[1].cached_tokens, record.turns[1].fetched_tokens) == (0, 0)
    assert bench.replicas[0].link is None


@pytest.mark.parametrize(("handling", "fetched"), [("swap", CONTEXT), ("discard", 0)])
def test_an_engine_that_forgets_finds_on_the_host_only_what_was_swapped_out(
    bench: Bench, handling: str, fetched: int
) -> None:
    policy = PolicyConfig(name="infercept", parameters={"handling": handling})
    back, _ = bench.run((0.0, RETURNS), (2.0, INTRUDER), policy=policy, forgetful=True, **SMALL)
    second = back.turns[1]
    assert (second.fetched_tokens, second.recomputed_tokens) == (fetched, CONTEXT + 1 - fetched)
    kept, _ = bench.run((0.0, RETURNS), (2.0, INTRUDER), policy=policy, **SMALL)
    assert kept.turns[1].fetched_tokens == CONTEXT, "vLLM's connector finds every copy"


def test_an_engine_that_forgets_can_swap_out_while_it_holds(bench: Bench) -> None:
    """The link has no time for the context at the pause, and has it at a review."""
    policy = PolicyConfig(name="infercept", parameters={"swap_out_share": 0.1, "cache_aware": False})
    beside = (0.0, program(turn(20, 200)))
    back, *_ = bench.run((0.0, RETURNS), (2.0, INTRUDER), beside, policy=policy, forgetful=True, **SMALL)
    assert back.turns[1].fetched_tokens == CONTEXT


@pytest.mark.parametrize("starts_s", [0.5, -0.3])
def test_copies_of_running_turns_take_no_host_memory_from_swapped_contexts(bench: Bench, starts_s: float) -> None:
    """The host has 48 blocks, and each program may have 12. Four turns of 12 blocks or more run for seconds.

    They begin after the context of 11 blocks was swapped out, or before: then they fill the host when it pauses.
    """
    policy = PolicyConfig(name="infercept", parameters={"handling": "swap"})
    first_s = max(0.0, -starts_s)
    beside = [(first_s + starts_s, program(turn(190, 1200, "ls", 0.1), turn(16, 1)))] * 4
    shape = {"num_blocks": 500, "host_blocks": 48}
    back, *_ = bench.run((first_s, RETURNS), *beside, policy=policy, forgetful=True, **shape)
    assert back.turns[1].fetched_tokens == CONTEXT


def test_a_turn_that_is_preempted_after_its_context_was_loaded_computes_all_of_it_again(bench: Bench) -> None:
    """It comes back at 5 s, finds its context on the host, and grows with the other turn beyond the memory."""
    policy = PolicyConfig(name="infercept", parameters={"handling": "swap"})
    back = program(turn(160, 17, "ls", 5.0), turn(16, 200))
    later = (4.9, program(turn(100, 250)))
    returned, _ = bench.run((0.0, back), later, policy=policy, forgetful=True, **SMALL)
    assert bench.replicas[0].preemptions > 0
    assert link_of(bench).loaded_tokens == CONTEXT
    assert returned.outcome is Outcome.OK


def test_a_preempted_turn_computes_its_kv_again_where_copies_are_forgotten(bench: Bench) -> None:
    """Both turns fit at first and not at their ends, so that the later one is preempted."""
    policy = PolicyConfig(name="infercept", parameters={"handling": "swap"})
    both = [(0.0, program(turn(200, 100))), (0.1, program(turn(200, 100)))]
    forgetful = bench.run(*both, policy=policy, forgetful=True, **SMALL)
    assert bench.replicas[0].preemptions > 0
    assert link_of(bench).loaded_tokens == 0
    assert [record.outcome for record in forgetful] == [Outcome.OK, Outcome.OK]


def test_a_swapped_context_that_does_not_fit_lets_a_smaller_turn_pass(bench: Bench) -> None:
    """It comes back while a long turn has 24 of 32 blocks and more, and needs 13. The small turn needs four."""
    policy = PolicyConfig(name="infercept", parameters={"handling": "swap"})
    long, small = (5.0, program(turn(380, 100))), (5.3, program(turn(50, 5)))
    back, beside, passes = bench.run((0.0, RETURNS), long, small, policy=policy, forgetful=True, **SMALL)
    long_end_s = beside.turns[0].last_token_s
    assert long_end_s is not None and back.turns[1].intended_start_s < 5.3
    assert passes.turns[0].first_token_s < long_end_s < back.turns[1].first_token_s  # type: ignore[operator]
    assert back.turns[1].fetched_tokens == CONTEXT


def test_other_turns_decode_while_a_context_is_fetched(bench: Bench) -> None:
    long = program(turn(20, 100))
    alone, _ = bench.run((5.0, long), (2.0, INTRUDER), cost=SLOW, **SMALL)
    back, _, beside = bench.run((0.0, RETURNS), (2.0, INTRUDER), (5.0, long), cost=SLOW, **SMALL)
    second = back.turns[1]
    assert second.fetched_tokens == CONTEXT
    # The load begins when the step that planned it has ended, and is seen when a step ends after it.
    assert SLOW.swap_s(CONTEXT) < second.ttft_s < SLOW.swap_s(CONTEXT) + 4 * 0.007  # type: ignore[operator]
    # For the other turn, one step is longer: the one that computes the rest of the prompt.
    assert alone.jct_s is not None and beside.jct_s is not None
    assert 0 < beside.jct_s - alone.jct_s < 0.004


def test_a_turn_that_arrives_while_a_replica_waits_for_the_link_is_not_kept_waiting(bench: Bench) -> None:
    due_s = 5.0 + bench.run((0.0, RETURNS), (2.0, INTRUDER), cost=SLOW, **SMALL)[0].turns[0].last_token_s  # type: ignore[operator]
    late_s = due_s + 0.05
    back, _, late = bench.run((0.0, RETURNS), (2.0, INTRUDER), (late_s, program(turn(30, 1))), cost=SLOW, **SMALL)
    assert back.turns[1].intended_start_s == due_s
    assert late.turns[0].ttft_s == pytest.approx(prefill_s(0, 30), abs=1e-9)
    assert back.turns[1].ttft_s == pytest.approx(SLOW.swap_s(CONTEXT) + prefill_s(CONTEXT, 193), abs=1e-9)


def test_a_step_waits_for_the_stores_whose_blocks_it_overwrites(bench: Bench) -> None:
    first, second = bench.run((0.0, program(turn(160, 1))), (0.0, INTRUDER), cost=SLOW, **SMALL)
    assert first.turns[0].ttft_s == pytest.approx(prefill_s(0, 160), abs=1e-9)
    # The intruder waited for the memory, then for the copy of ten blocks that began with its own step.
    waited_s = prefill_s(0, 160) + SLOW.swap_s(160)
    assert second.turns[0].ttft_s == pytest.approx(waited_s + prefill_s(0, 500), abs=1e-9)


def test_each_direction_does_one_transfer_after_the_other(bench: Bench) -> None:
    both = program(turn(160, 1, "ls", 5.0), turn(16, 1))
    one, other, _ = bench.run((0.0, both), (0.0, both), (2.0, INTRUDER), cost=SLOW, **SMALL)
    ttfts = sorted(record.turns[1].ttft_s for record in (one, other))  # type: ignore[type-var]
    assert ttfts[0] == pytest.approx(SLOW.swap_s(160) + prefill_s(160, 177), abs=1e-9)
    assert ttfts[1] == pytest.approx(2 * SLOW.swap_s(160) + prefill_s(160, 177), abs=1e-9)


def test_a_full_host_forgets_what_was_used_longest_ago(bench: Bench) -> None:
    def returns(pause_s: float) -> PlannedProgram:
        return program(turn(160, 1, "ls", pause_s), turn(16, 1))

    # Room for two contexts of ten blocks: the third one takes the first one's place. The intruder does not fit at all.
    oldest, newer, _, _ = bench.run(
        (0.0, returns(9.0)),
        (1.0, returns(6.0)),
        (2.0, program(turn(160, 1))),
        (4.0, INTRUDER),
        num_blocks=33,
        host_blocks=20,
    )
    assert (newer.turns[1].fetched_tokens, oldest.turns[1].fetched_tokens) == (160, 0)
    assert oldest.turns[1].recomputed_tokens == 161


def test_stores_end_after_the_last_turn_and_then_the_simulation_does(bench: Bench) -> None:
    bench.run((0.0, RETURNS), cost=SLOW, **SMALL)
    # 193 tokens were computed; twelve full blocks of them.
    assert link_of(bench).stored_tokens == 192
    assert link_of(bench).next_end_s is None
    assert not bench.replicas[0].engine.scheduler.has_requests()
    assert bench.clock.now_s() < 5.0 + 1.0


def test_the_baseline_is_vllms_own_class_and_its_own_host_tier(bench: Bench) -> None:
    bench.run((0.0, RETURNS), host_blocks=77)
    scheduler = bench.replicas[0].engine.scheduler
    assert type(scheduler) is AsyncScheduler
    assert type(scheduler.connector) is OffloadingConnector
    manager = scheduler.connector.connector_scheduler.manager
    assert type(manager) is CPUOffloadingManager
    assert manager._policy.cache_capacity == 77


def test_a_policy_has_caesuras_host_tier(bench: Bench) -> None:
    bench.run((0.0, RETURNS), policy="plas", host_blocks=77)
    manager = bench.replicas[0].engine.scheduler.connector.connector_scheduler.manager
    assert type(manager) is HostCache
    assert manager.capacity_tokens == 77 * 16


def test_a_cut_off_run_with_transfers_under_way_is_whole(bench: Bench) -> None:
    back, _ = bench.run((0.0, RETURNS), (2.0, INTRUDER), cost=SLOW, until_s=5.3, **SMALL)
    assert [t.outcome for t in back.turns] == [Outcome.OK, Outcome.UNFINISHED]
