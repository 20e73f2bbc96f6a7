"""Of turns with the same beginning one computes it, whatever the steps' tokens are shared by."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.config.schema import SloConfig
from cluster.core.program import Hints, ProgramIdentity
from replicas.single_flight import shared_blocks
from replicas.virtual_engine import VirtualEngine
from tests.replica.policy_views import COST
from tests.replica.test_timelines import BLOCK, SYNC_AND_ASYNC, Programs

Replica = Callable[..., VirtualEngine]
HEAD = 64 * BLOCK


def site(replica: Replica, *, asynchronous: bool = False, ttft_s: float = 1000.0, threshold: int = 0) -> Programs:
    """A replica of 100 prompt tokens a step, of which a single prompt gets at most ``threshold``."""
    p = Programs(replica("caesura", asynchronous, 640))
    p.scheduler.facts = replace(p.scheduler.facts, cost=COST, slo=SloConfig(ttft_s=ttft_s), max_tokens=100)
    p.scheduler._prompt_tokens = threshold
    return p


def sibling(p: Programs, number: int, tail: int = 2 * BLOCK) -> str:
    """A first turn whose prompt begins with HEAD tokens of all siblings."""
    prompt = [7] * HEAD + [100 + number] * tail
    identity = ProgramIdentity(f"p/{number}", "p", hints=Hints(expected_tool="ls"))
    return p.engine.submit(f"s{number}", prompt, 3, identity).request_id


def computed(p: Programs, steps: int = 400) -> Counter[str]:
    """The tokens that each turn computes until all have ended."""
    found: Counter[str] = Counter()
    for _ in range(steps):
        if not p.scheduler.has_unfinished_requests():
            return found
        found.update(p.step())
    raise AssertionError(f"{p.scheduler.requests.keys()} never end")


@SYNC_AND_ASYNC
@pytest.mark.parametrize("threshold", [0, 32])
def test_siblings_compute_their_common_head_once(replica: Replica, asynchronous: bool, threshold: int) -> None:
    """8 siblings, of which some arrive while the head is being computed. With a bound of 32 tokens for each prompt,
    every step has tokens left for those that wait; without one, the step leaves tokens to those that rank first.
    """
    p = site(replica, asynchronous=asynchronous, threshold=threshold)
    names = [sibling(p, number) for number in range(5)]
    found = Counter(p.step())
    names += [sibling(p, number) for number in range(5, 8)]
    found += computed(p)
    prompts = sum(found.values()) - 2 * len(names)  # each generates two tokens beside that of its prompt
    assert prompts == HEAD + 2 * BLOCK * len(names)
    assert sorted(found) == names
    assert p.scheduler.counters["single_flight_waits"]


def test_a_turn_with_another_beginning_takes_the_tokens_that_are_left(replica: Replica) -> None:
    p = site(replica, threshold=32)
    first, second = sibling(p, 0), sibling(p, 1)
    other = p.arrive("b", 64)
    assert p.step() == {first: 32, other: 32}
    assert second in p.scheduler.requests
    p.engine.run()


def test_a_turn_in_time_does_not_wait_for_a_late_prompt_that_skips_steps(replica: Replica) -> None:
    p = site(replica, ttft_s=1.0)
    p.arrive("d", 10, output=200)
    p.step()
    late = sibling(p, 0, tail=8 * BLOCK)
    p.step()
    p.clock.advance(2.0)
    p.step()
    assert p.scheduler.prefill_scheduling.is_late(late)
    in_time = sibling(p, 1)
    steps = [p.step() for _ in range(3)]
    assert any(in_time in step for step in steps)
    assert p.scheduler.counters["single_flight_waits"] == 0


def test_a_turn_whose_leader_is_gone_computes_the_rest(replica: Replica) -> None:
    p = site(replica, threshold=32)
    p.arrive("d", 10, output=200)  # vLLM 0.32 does not limit a prompt that is alone
    first, second = sibling(p, 0), sibling(p, 1)
    assert second not in p.step()
    p.scheduler.finish_requests(first, p.scheduler.requests[first].status.FINISHED_ABORTED)
    assert p.step()[second] == 32
    p.engine.run()


def test_a_papers_policy_computes_as_vllm_does(replica: Replica) -> None:
    p = Programs(replica("continuum", num_blocks=640))
    p.scheduler._prompt_tokens = 32
    sibling(p, 0), sibling(p, 1)
    assert len(p.step()) == 2
    p.engine.run()


def test_shared_blocks_are_the_common_beginning() -> None:
    one = [b"a", b"b", b"c", b"d"]
    assert [shared_blocks(one, other) for other in ([], [b"x"], [b"a"], [b"a", b"b", b"x"], one, [*one, b"e"])] == [
        *(0, 0, 1, 2, 4, 4)
    ]
