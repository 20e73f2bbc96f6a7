"""Which running turns yield to a waiting one. On the replica of `policy_views`: an iteration takes 10 ms, and 1,000
tokens of a prompt 0.1 s.
"""

from dataclasses import replace
from math import inf

import pytest

from cluster.core.program import Hints
from cluster.core.slo import Slo
from replicas.policies.caesura import CaesuraParameters, slack_s
from replicas.policies.yielding import Yielding, expected_wait_s, loss_s
from replicas.policy import KvPlace, RunningView, ShortageView, TurnView
from tests.replica.policy_views import load, turn

MAX_WAIT_S = 120.0
LOAD = load(running=2)
YIELDING = CaesuraParameters().build().preemption
BOUND = Slo(ttft_s=3.0)
"""`waits` arrived 2 s ago, its 1,000 tokens take 0.1 s, and two iterations 20 ms: it may wait for 0.88 s."""


def waits(**changes: object) -> TurnView:
    return turn(LOAD, **{"bounds": BOUND, **changes})  # type: ignore[arg-type]


def runs(name: str, left: float, freed: int, *, sheddable: bool = False, **changes: object) -> RunningView:
    computed = int(changes.pop("computed", freed))  # type: ignore[call-overload]
    return replace(RunningView(name, sheddable, 0, left, freed, computed), **changes)  # type: ignore[arg-type]


def victims(waiting: TurnView, lacking: int, *running: RunningView) -> tuple[str, ...]:
    assert YIELDING is not None
    return YIELDING.victims(ShortageView(waiting, lacking, running))


BATCH = runs("batch", left=1000, freed=2000, sheddable=True)
"""It runs for 10 s, and its 2,000 tokens take 0.2 s to compute again."""
CHAT = runs("chat", left=200, freed=1000)
"""It ends in 2 s."""


def test_a_sheddable_turn_yields_to_one_that_would_miss_its_bound() -> None:
    assert slack_s(waits()) == pytest.approx(0.88)
    assert victims(waits(), 1000, BATCH, CHAT) == ("batch",)


def test_no_other_turn_yields() -> None:
    assert victims(waits(), 1000, replace(BATCH, sheddable=False), CHAT) == ()


def test_a_turn_that_is_in_time_anyway_waits() -> None:
    soon = replace(CHAT, left_tokens=87.0)
    assert victims(waits(), 1000, BATCH, soon) == ()
    assert victims(waits(), 1000, BATCH, replace(soon, left_tokens=89.0)) == ("batch",)
    assert victims(waits(), 1001, BATCH, soon) == ("batch",), "the end of that turn is not enough"


def test_a_turn_that_is_late_anyway_waits() -> None:
    assert victims(waits(arrived_s=LOAD.now_s - 3.0), 1000, BATCH, CHAT) == ()


def test_a_turn_without_a_bound_gets_memory_if_less_is_lost_than_its_wait() -> None:
    """BATCH loses 0.2 s."""
    free = waits(bounds=Slo())
    assert slack_s(free) == inf
    assert victims(free, 1000, BATCH, replace(CHAT, left_tokens=21.0)) == ("batch",)
    assert victims(free, 1000, BATCH, replace(CHAT, left_tokens=19.0)) == ()


def test_what_the_victims_lose_is_less_than_the_wait() -> None:
    """The turn could wait for 0.88 s, and would wait for 0.9 s. 10,000 tokens take 1 s to compute again."""
    others = replace(CHAT, left_tokens=90.0)
    large = replace(BATCH, freed_tokens=10_000, computed_tokens=10_000)
    assert victims(waits(), 1000, large, others) == ()
    assert victims(waits(), 1000, replace(large, computed_tokens=8900), others) == ("batch",)
    copied = replace(large, copied_tokens=10_000)
    assert loss_s(copied, LOAD) == pytest.approx(0.1)
    assert victims(waits(), 1000, copied, others) == ("batch",), "the host tier has its KV"


def test_the_cheapest_turns_that_suffice_yield() -> None:
    small = runs("small", 1000, 500, sheddable=True, computed=100)
    middle = runs("middle", 1000, 900, sheddable=True, computed=900)
    large = runs("large", 1000, 2000, sheddable=True, computed=2500)
    assert victims(waits(), 400, small, middle, large, CHAT) == ("small",)
    assert victims(waits(), 1300, small, middle, large, CHAT) == ("small", "middle")
    assert victims(waits(), 1900, small, middle, large, CHAT) == ("large",), "the small ones would be needless"
    assert victims(waits(), 3500, small, middle, large, CHAT) == (), "all together do not suffice"


def test_a_place_in_the_batch_is_enough() -> None:
    assert victims(waits(), 0, BATCH, CHAT) == ("batch",)
    assert victims(waits(), 0, BATCH, replace(CHAT, left_tokens=10.0)) == ()


def test_a_sheddable_turn_preempts_nobody() -> None:
    assert victims(waits(hints=Hints(priority=1)), 1000, BATCH, CHAT) == ()


def test_a_turn_that_has_waited_for_long_gets_memory_though_it_is_late() -> None:
    assert victims(waits(arrived_s=LOAD.now_s - 59.0), 1000, BATCH, CHAT) == ()
    assert victims(waits(arrived_s=LOAD.now_s - 61.0), 1000, BATCH, CHAT) == ("batch",)


def test_a_turn_that_generated_before_its_preemption_needs_no_first_token() -> None:
    """It waits after vLLM's preemption. Its first token was in time."""
    before = waits(first_token_s=99.0, preempted=True, kv=KvPlace.NONE)
    assert slack_s(before) == inf
    assert victims(before, 1000, BATCH, CHAT) == ("batch",)


def test_a_turn_that_was_preempted_runs_for_as_long_as_it_has_lost() -> None:
    assert victims(waits(), 1000, replace(BATCH, again_s=0.19), CHAT) == ()
    assert victims(waits(), 1000, replace(BATCH, again_s=0.21), CHAT) == ("batch",)


def test_a_turn_that_has_waited_for_twice_the_longest_wait_is_not_preempted() -> None:
    assert victims(waits(), 1000, replace(BATCH, waited_s=239.0), CHAT) == ("batch",)
    assert victims(waits(), 1000, replace(BATCH, waited_s=241.0), CHAT) == ()


def test_the_wait_ends_when_enough_turns_have_ended() -> None:
    shortage = ShortageView(waits(), 1500, (BATCH, CHAT, replace(CHAT, left_tokens=500.0, missing_tokens=1000)))
    assert expected_wait_s(shortage) == pytest.approx(5.1)
    assert expected_wait_s(replace(shortage, lacking_tokens=900)) == pytest.approx(2.0)
    assert expected_wait_s(replace(shortage, lacking_tokens=10**6)) == pytest.approx(10.0)


def test_the_longest_wait_is_a_setting() -> None:
    built = CaesuraParameters(max_wait_s=7.0).build().preemption
    assert isinstance(built, Yielding)
    assert built.max_wait_s == 7.0
