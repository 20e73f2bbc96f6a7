"""Which prompts a step computes first. On the replica of `policy_views`: steps of 100 tokens cost nothing more."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.schema import SloConfig
from replicas.policy import RankKey
from replicas.prefill_scheduling import Head, PrefillScheduling, missing_tokens
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


def test_a_turn_that_does_not_fit_into_memory_stops_nobody(replica: Replica) -> None:
    p = programs(replica, num_blocks=400)
    late = with_a_late_prompt(p)
    for _ in range(25):
        p.step()
    p.arrive("b", 3500)
    assert all(late in p.step() for _ in range(8))


@SYNC_AND_ASYNC
def test_a_short_turn_begins_beside_a_prompt_that_has_begun(replica: Replica, asynchronous: bool) -> None:
    """Both can be in time. Steps beside others have 100 tokens, and `b` needs 20 of them."""
    p = programs(replica, asynchronous=asynchronous)
    long = p.arrive("a", 3000)
    assert p.step() == {long: 1000}, "nothing decodes beside it"
    short = p.arrive("b", 20, output=5)
    scheduled = p.step()
    assert scheduled[short] == 20
    assert scheduled[long] == 100 - 20
    assert p.step()[short] == 1


def test_of_several_prompts_that_have_begun_one_gets_what_is_left(replica: Replica) -> None:
    p = programs(replica)
    p.arrive("d", 10, output=200)
    p.step()
    first = p.arrive("a", 1500)
    p.step()
    second = p.arrive("c", 1000)
    scheduled = p.step()
    assert scheduled.keys() == {"d1", second}, "the rest of the step is less than c needs"
    scheduled = p.step()
    assert scheduled.keys() == {"d1", second}, "and it goes first from now on"
    short = p.arrive("b", 20, output=5)
    scheduled = p.step()
    assert (scheduled[short], scheduled.get(first)) == (20, None)
    assert scheduled[second] == p.scheduler.max_num_scheduled_tokens - 1 - 20


def test_a_turn_that_ranks_after_the_prompt_waits_for_it(replica: Replica) -> None:
    p = programs(replica)
    p.arrive("d", 10, output=200)
    p.step()
    begun = p.scheduler.requests[p.arrive("a", 1000)]
    p.step()
    later = p.arrive("b", 3000)
    while missing_tokens(begun) > 1:
        scheduled = p.step()
        assert later not in scheduled or missing_tokens(begun) <= 1, "b gets what a's last step leaves"


def test_the_limit_of_a_prompt_that_the_operator_chose_stays(replica: Replica) -> None:
    p = programs(replica)
    assert p.scheduler.scheduler_config.long_prefill_token_threshold == 0
    p.scheduler._prompt_tokens = 50
    long = p.arrive("a", 3000)
    other = p.arrive("b", 20)  # vLLM 0.32 does not limit a prompt that is alone
    assert p.step() == {long: 50, other: 20}


def test_room_for_a_waiting_turn_raises_no_limit_that_the_operator_chose(replica: Replica) -> None:
    """Of 100 tokens, 80 would be left to the prompt beside `b`."""
    p = programs(replica)
    long = p.arrive("a", 3000)
    p.step()
    p.scheduler._prompt_tokens = 60
    short = p.arrive("b", 20, output=5)
    assert p.step() == {long: 60, short: 20}
    p.arrive("c", 45, output=5)
    assert p.step()[long] == 100 - 1 - 45, "less is left than the limit"


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


def waiting_for(name: str, missing: int, drafted: int = 0) -> Any:
    """A running turn that needs so many tokens, and has so many drafted ones."""
    return SimpleNamespace(
        request_id=name,
        num_tokens=missing,
        num_tokens_with_spec=missing + drafted,
        num_output_placeholders=0,
        num_computed_tokens=0,
        next_decode_eligible_step=0,
    )


def test_a_prompt_before_the_waiting_turn_is_not_bounded(replica: Replica) -> None:
    """`first` needs 60 of 100 tokens, and the waiting turn 20. The other prompt waits, as a bound of 19 would be for
    all prompts."""

    scheduling = PrefillScheduling()
    ranks: dict[str, RankKey] = {"first": (1.0,), "last": (3.0,)}
    running = [waiting_for("d", 1), waiting_for("last", 500), waiting_for("first", 60)]
    tokens = scheduling.tokens(running)
    scheduling.order(
        running, rank=lambda one: ranks[one.request_id], ranked=True, is_late=lambda rank: False, tokens=tokens
    )
    assert [one.request_id for one in running] == ["d", "first", "last"]
    assert scheduling.make_room(running, lambda: Head("b", (2.0,), 20), budget=100, step=7) == 0
    assert [one.next_decode_eligible_step for one in running] == [0, 0, 9]
    assert scheduling.make_room(running, lambda: Head("b", (2.0,), 20), budget=100, step=8) == 0
    assert running[2].next_decode_eligible_step == 9, "b lacks something else"
    assert scheduling.make_room(running, lambda: Head("c", (2.0,), 20), budget=200, step=9) == 200 - 61 - 20
    assert running[2].next_decode_eligible_step == 9


def test_room_is_made_for_a_turn_that_was_not_admitted_in_every_other_step_only() -> None:
    running = [waiting_for("a", 500)]
    scheduling = PrefillScheduling()
    tokens = scheduling.tokens(running)
    scheduling.order(running, rank=lambda one: (3.0,), ranked=True, is_late=lambda rank: False, tokens=tokens)
    bounds = [scheduling.make_room(running, lambda: Head("b", (2.0,), 20), budget=100, step=step) for step in range(4)]
    assert bounds == [80, 0, 80, 0]


def test_the_drafts_of_turns_that_generate_are_left_to_them() -> None:
    """Two turns take 4 tokens each, and the waiting turn 20."""
    running = [waiting_for("d", 1, drafted=3), waiting_for("e", 1, drafted=3), waiting_for("a", 500)]
    scheduling = PrefillScheduling()
    tokens = scheduling.tokens(running)
    scheduling.order(running, rank=lambda one: (3.0,), ranked=True, is_late=lambda rank: False, tokens=tokens)
    assert scheduling.make_room(running, lambda: Head("b", (2.0,), 20), budget=100, step=1) == 72


@pytest.mark.parametrize("policy", ["caesura", "infercept"])
@SYNC_AND_ASYNC
def test_no_running_turn_starves_where_each_has_drafts(replica: Replica, policy: str, asynchronous: bool) -> None:
    """60 turns take 4 tokens each. Without drafts the policies' steps have 124 and 100 tokens."""
    p = programs(replica, policy, asynchronous)
    p.scheduler.num_spec_tokens = 3
    turns = [p.engine.submit(f"t{n}", [1000 + n] * 20, 60).request_id for n in range(60)]
    for _ in range(20):
        p.step()
    assert len(p.scheduler.running) == len(turns)
    assert dict.fromkeys(turns, 4) == p.step()
    late = p.engine.submit("late", [2000] * 200, 60).request_id
    steps = [p.step() for _ in range(10)]
    assert all(step.items() >= dict.fromkeys(turns, 4).items() for step in steps)
    assert sum(step.get(late, 0) for step in steps) >= 200
