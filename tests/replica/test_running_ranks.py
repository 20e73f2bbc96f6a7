"""Policies whose running turns have ranks, too: which prompt a step computes first, and which turn is preempted."""

from collections.abc import Callable

import pytest

from replicas.virtual_engine import VirtualEngine
from tests.replica.test_timelines import SYNC_AND_ASYNC, Programs

Replica = Callable[..., VirtualEngine]


@pytest.mark.parametrize("name", ["lamps", "mars"])
@SYNC_AND_ASYNC
def test_a_short_turn_begins_before_the_rest_of_a_long_prompt(replica: Replica, name: str, asynchronous: bool) -> None:
    """LAMPS section 4.3, MARS algorithm 1: each iteration's batch is built from the ranked list, of 384 tokens."""
    p = Programs(replica(name, asynchronous, 640))
    long = p.arrive("a", 3000)
    assert p.step() == {long: 384}
    short = p.arrive("b", 20, output=5)
    assert p.step() == {short: 20, long: 364}


def test_without_ranks_a_prompt_that_has_begun_is_computed_first(replica: Replica) -> None:
    p = Programs(replica("lamps", False, 640, ranks_running=False))
    long = p.arrive("a", 3000)
    p.step()
    p.arrive("b", 20, output=5)
    assert p.step() == {long: 384}


@pytest.mark.parametrize("name", ["lamps", "mars", "augserve"])
@pytest.mark.parametrize("ranked", [True, False])
def test_the_turn_that_ranks_last_is_preempted(replica: Replica, name: str, ranked: bool) -> None:
    """Memory of 640 tokens. `old` was admitted first and has more to do; vLLM preempts who was admitted last."""
    p = Programs(replica(name, False, 41, ranks_running=ranked))
    old = p.arrive("old", 300, output=200)
    p.step()
    new = p.arrive("new", 100, output=150)
    requests = [p.scheduler.requests[one] for one in (old, new)]
    for _ in range(300):
        p.step()
        if any(one.num_preemptions for one in requests):
            break
    assert [one.num_preemptions for one in requests] == ([1, 0] if ranked else [0, 1])
