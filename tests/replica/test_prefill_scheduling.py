"""Which prompts a step computes first. On the replica of `policy_views`: steps of 100 tokens cost nothing more."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.config.schema import SloConfig
from replicas.prefill_scheduling import missing_tokens
from replicas.virtual_engine import VirtualEngine
from tests.replica.policy_views import COST
from tests.replica.test_timelines import SYNC_AND_ASYNC, Programs

Replica = Callable[..., VirtualEngine]
TTFT_S = 1.0


def programs(replica: Replica, policy: str = "caesura", asynchronous: bool = False, num_blocks: int = 640) -> Programs:
    p = Programs(replica(policy, asynchronous, num_blocks))
    slo = SloConfig(ttft_s=TTFT_S)
    p.scheduler.facts = replace(p.scheduler.facts, cost=COST, slo=slo, max_tokens=1000)
    return p


def with_a_late_prompt(p: Programs) -> str:
    """`d` generates, and of `a`'s 5000 tokens some are computed when it is too late for all of them."""
    p.arrive("d", 10, output=200)
    p.step()
    late = p.arrive("a", 5000)
    assert late in p.step()
    p.clock.advance(2 * TTFT_S)
    p.step()
    assert p.scheduler.views.load.prefill_tokens == 0, "nobody hurries for it"
    return late


@SYNC_AND_ASYNC
def test_a_late_prompt_lets_a_turn_begin_that_can_be_in_time(replica: Replica, asynchronous: bool) -> None:
    p = programs(replica, asynchronous=asynchronous)
    late = with_a_late_prompt(p)
    assert p.step() == {"d1": 1, late: 99}
    in_time = p.arrive("b", 60, output=5)
    assert p.step() == {"d1": 1, in_time: 60}
    assert p.step() == {"d1": 1, in_time: 1, late: 98}


def test_vllm_computes_a_prompt_that_has_begun_before_any_that_waits(replica: Replica) -> None:
    """What a policy that puts nobody off still does."""
    p = programs(replica, "infercept")
    late = p.arrive("a", 5000)
    p.step()
    p.clock.advance(2 * TTFT_S)
    p.arrive("b", 60)
    before_b = 0
    while p.step().keys() == {late}:
        before_b += 1
    assert before_b >= 2


def test_of_two_prompts_under_way_the_late_one_gets_what_is_left(replica: Replica) -> None:
    p = programs(replica)
    late = with_a_late_prompt(p)
    in_time = p.arrive("b", 250, output=5)
    assert p.step() == {"d1": 1, in_time: 99}
    assert p.step() == {"d1": 1, in_time: 99}
    assert p.step() == {"d1": 1, in_time: 52, late: 47}


def test_where_the_other_one_waits_for_memory_the_late_one_goes_on(replica: Replica) -> None:
    p = programs(replica, num_blocks=400)
    late = with_a_late_prompt(p)
    for _ in range(25):
        p.step()
    p.arrive("b", 3500)
    had = [late in p.step() for _ in range(8)]
    assert had == [False, True] * 4


def test_nobody_sits_out_for_a_turn_that_is_late_itself(replica: Replica) -> None:
    p = programs(replica, num_blocks=400)
    late = with_a_late_prompt(p)
    for _ in range(25):
        p.step()
    p.arrive("b", 3500)
    p.clock.advance(2 * TTFT_S)
    for _ in range(10):  # until its rank is taken again
        p.step()
    assert p.scheduler.views.load.waiting_late == 1
    assert all(late in p.step() for _ in range(6))


@SYNC_AND_ASYNC
def test_all_that_is_put_off_ends(replica: Replica, asynchronous: bool) -> None:
    """One turn after the other comes in time, for as long as the late prompt needs."""
    p = programs(replica, asynchronous=asynchronous)
    late = with_a_late_prompt(p)
    for n in range(200):
        p.arrive(chr(ord("e") + n % 20), 30, output=2)
        p.step()
        p.clock.advance(0.02)
        if late not in p.scheduler.requests:
            break
    else:
        pytest.fail("the late prompt has not been computed")


def test_a_prompt_under_way_is_late_by_what_is_still_missing_of_it(replica: Replica) -> None:
    """5000 tokens take 0.5 s: after 0.7 s that is too long, but not for the last 2000."""
    for most, is_late in [(4000, True), (2000, False)]:
        p = programs(replica)
        request = p.scheduler.requests[p.arrive("a", 5000)]
        while missing_tokens(request) > most:
            p.step()
        missing = missing_tokens(request)
        p.clock.advance(0.7 - p.clock.now_s())
        p.step()
        assert p.scheduler.views.load.prefill_tokens == (0 if is_late else missing)
