"""The ranked queue against vLLM's own queue (constant rank) and against a sorted list (any rank)."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from cluster.core.program import ProgramIdentity
from replicas.waiting_queue import LOOKS, RANKS_A_STEP, RankedQueue, first_admissible


def request(name: str, rank: float = 0.0) -> Any:
    # Only the id and the hash of a request matter to a queue.
    class Named(SimpleNamespace):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    return Named(request_id=name, rank=rank, tokens=10 + len(name))


def ranked() -> RankedQueue:
    return RankedQueue(lambda r: (r.rank,), lambda r: r.tokens)  # type: ignore[attr-defined]


def names(queue: Any) -> list[str]:
    return [r.request_id for r in queue]


def test_least_rank_first_and_arrival_among_equals() -> None:
    queue = ranked()
    for name, rank in [("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)]:
        queue.add_request(request(name, rank))
    queue.prepend_request(request("front", 2.0))
    assert names(queue) == ["a", "b", "front", "c", "d"]
    assert [queue.pop_request().request_id for _ in range(5)] == ["a", "b", "front", "c", "d"]
    assert not queue
    with pytest.raises(IndexError):
        queue.peek_request()


def test_a_new_rank_counts_only_after_rerank() -> None:
    queue, late = ranked(), request("late", 9.0)
    queue.add_request(request("early", 5.0))
    queue.add_request(late)
    late.rank = 1.0
    assert queue.peek_request().request_id == "early"
    queue.rerank(["late", "unknown"])
    assert (queue.peek_request().request_id, queue.peek_rank()) == ("late", (1.0,))
    late.rank = 7.0
    queue.rerank_all()
    assert names(queue) == ["early", "late"]


def test_what_is_looked_at_is_what_is_removed_and_later_ranks_count_at_the_next_look() -> None:
    """vLLM allocates blocks between the look and the removal, which may evict a hold and so change a rank."""
    queue = RankedQueue(lambda r: (r.rank,), lambda r: 1)  # type: ignore[attr-defined]
    first, second, third = (request(name, rank) for name, rank in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
    for one in (first, second, third):
        queue.add_request(one)
    assert queue.peek_request() is first
    first.rank = 9.0
    queue.rerank_later(["a", "unknown"])
    assert queue.pop_request() is first
    third.rank = 0.0
    queue.rerank_later(["c"])
    assert queue.pop_request() is second
    queue.add_request(second)
    assert (queue.peek_rank(), queue.pop_request()) == ((0.0,), third)


def test_a_refresh_takes_a_share_of_the_ranks_and_all_once_a_period() -> None:
    queue, requests = ranked(), [request(f"r{i}", float(i)) for i in range(6)]
    for one in requests:
        queue.add_request(one)
        one.rank = -one.rank
    queue.refresh(3)
    assert names(queue) == ["r1", "r0", "r2", "r3", "r4", "r5"]
    queue.refresh(3)
    queue.refresh(3)
    assert [queue.pop_request().request_id for _ in range(6)] == ["r5", "r4", "r3", "r2", "r1", "r0"]


def test_a_long_queue_is_refreshed_in_as_many_steps_as_the_bound_takes() -> None:
    taken: list[str] = []
    take = lambda r: (float(taken.append(r.request_id) or 0),)  # type: ignore[func-returns-value]  # noqa: E731
    queue = RankedQueue(take, lambda r: 1)
    for i in range(3 * RANKS_A_STEP):
        queue.add_request(request(f"r{i}"))
    taken.clear()
    for step in range(1, 4):
        queue.refresh(2)
        assert len(set(taken)) == len(taken) == step * RANKS_A_STEP


def test_the_first_turn_that_can_be_admitted_is_found_in_both_queues_within_a_bound() -> None:
    queues = (ranked(), ranked())
    assert first_admissible(queues) is None

    def add(queue: RankedQueue, name: str, rank: float, status: RequestStatus) -> None:
        one = request(name, rank)
        one.status = status
        queue.add_request(one)

    for number in range(LOOKS - 1):
        add(queues[1], f"loads{number}", 1.0, RequestStatus.WAITING_FOR_REMOTE_KVS)
    assert first_admissible(queues) is None
    add(queues[0], "later", 3.0, RequestStatus.WAITING)
    add(queues[1], "skipped", 3.0, RequestStatus.PREEMPTED)
    found = first_admissible(queues)
    assert found is not None and (found.rank, found.request.request_id) == ((3.0,), "skipped"), "as vLLM chooses"
    before = names(queues[1])
    add(queues[1], "grammar", 2.0, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    found = first_admissible(queues)
    assert found is not None and found.request.request_id == "later", "the others are not looked at"
    assert names(queues[1]) == [*before[:-1], "grammar", "skipped"]
    assert queues[1].pop_request().request_id == "loads0"


def taking(count: int) -> tuple[RankedQueue, list[str]]:
    """A queue of so many requests, and the ids of those whose ranks are taken, in order."""
    taken: list[str] = []
    take = lambda r: (float(taken.append(r.request_id) or 0),)  # type: ignore[func-returns-value]  # noqa: E731
    queue = RankedQueue(take, lambda r: 1)
    for i in range(count):
        queue.add_request(request(f"r{i}"))
    taken.clear()
    return queue, taken


def test_changed_ranks_are_taken_again_in_the_step_or_as_soon_as_its_bound_allows() -> None:
    queue, taken = taking(3 * RANKS_A_STEP)
    changed = [f"r{i}" for i in range(RANKS_A_STEP, 3 * RANKS_A_STEP)]
    queue.refresh(None, changed[:3])
    assert taken == changed[:3]
    taken.clear()
    queue.refresh(None, [*changed, "unknown"])
    assert taken == changed[:RANKS_A_STEP]
    queue.refresh(None)
    assert taken == changed
    queue.refresh(None)
    assert taken == changed


def test_ranks_that_change_in_each_step_starve_nobody() -> None:
    queue, taken = taking(4 * RANKS_A_STEP)
    changed = [f"r{i}" for i in range(2 * RANKS_A_STEP)]
    for _ in range(8):
        before = len(taken)
        queue.refresh(8, changed)
        assert len(taken) - before <= RANKS_A_STEP
    assert set(taken) == {f"r{i}" for i in range(4 * RANKS_A_STEP)}


def test_an_event_of_a_large_tree_of_programs_ranks_a_bounded_number_in_a_step(replica: Any) -> None:
    engine = replica("caesura", num_blocks=64)
    scheduler = engine.scheduler
    engine.submit("running", range(1000, 1950), 40, ProgramIdentity("running", last_turn=True))
    engine.step()
    for number in range(100):
        identity = ProgramIdentity(f"child{number}", "parent", last_turn=True)
        engine.submit(f"c{number}", [2000 + number] * 100, 1, identity)
    for _ in range(20):
        engine.step()
    ranked: list[str] = []
    rank = scheduler.policies.order.key

    class Counting:
        refresh_steps = scheduler.policies.order.refresh_steps

        def key(self, turn: Any) -> Any:
            ranked.append(turn.program.key)
            return rank(turn)

    scheduler.policies = replace(scheduler.policies, order=Counting())
    scheduler.finish_requests("c7", RequestStatus.FINISHED_ABORTED)
    for _ in range(10):
        ranked.clear()
        engine.step()
        assert len(ranked) <= RANKS_A_STEP


@given(st.lists(st.tuples(st.sampled_from(["add", "pop", "refresh", "rerank_all"]), st.integers(0, 9)), max_size=80))
def test_the_order_is_that_of_the_ranks_last_taken(operations: list[tuple[str, int]]) -> None:
    """Ranks change all the time and are changed back; the model notes what each was when it was taken."""
    taken: dict[str, float] = {}

    def take(one: Any) -> tuple[float, ...]:
        taken[one.request_id] = one.rank
        return (one.rank,)

    queue, waiting = RankedQueue(take, lambda r: r.tokens), list[Any]()
    for count, (operation, number) in enumerate(operations):
        if operation == "add":
            waiting.append(request(f"r{count}", float(number)))
            queue.add_request(waiting[-1])
        elif operation == "pop" and queue:
            first = min(waiting, key=lambda one: taken[one.request_id])  # the earliest of equals
            assert queue.peek_rank() == (taken[first.request_id],)
            assert queue.pop_request() is first
            waiting.remove(first)
        for one in waiting:
            one.rank = float((one.rank + number) % 7)
        if operation == "refresh":
            queue.refresh(number + 1)
        elif operation == "rerank_all":
            queue.rerank_all()
        expected = sorted(waiting, key=lambda one: taken[one.request_id])
        assert names(queue) == [one.request_id for one in expected]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "prepend", "prepend_many", "pop", "remove", "rerank", "refresh"]), st.integers(0, 7)
    ),
    max_size=60,
)


def drive(queue: Any, operations: list[tuple[str, int]], remove: Callable[[Any, Any], None]) -> list[list[str]]:
    waiting: dict[str, Any] = {}
    log, count = [], 0
    for operation, number in operations:
        if operation in ("add", "prepend"):
            count += 1
            new = waiting[f"r{count}"] = request(f"r{count}")
            (queue.add_request if operation == "add" else queue.prepend_request)(new)
        elif operation == "prepend_many":
            many = FCFSRequestQueue()
            for _ in range(number % 3):
                count += 1
                waiting[f"r{count}"] = request(f"r{count}")
                many.add_request(waiting[f"r{count}"])
            queue.prepend_requests(many)
        elif operation == "pop" and queue:
            assert queue.peek_request().request_id == waiting.pop(queue.pop_request().request_id).request_id
        elif operation == "remove" and waiting:
            remove(queue, waiting.pop(sorted(waiting)[number % len(waiting)]))
        elif operation == "rerank" and isinstance(queue, RankedQueue):
            queue.rerank(list(waiting)[:number])
        elif operation == "refresh" and isinstance(queue, RankedQueue):
            queue.refresh(number + 1)
        assert len(queue) == len(waiting)
        log.append(names(queue))
    return log


@given(OPERATIONS)
def test_a_constant_rank_is_vllms_own_queue(operations: list[tuple[str, int]]) -> None:
    ours = drive(
        RankedQueue(lambda r: (), lambda r: 1),
        operations,
        lambda queue, r: queue.remove_requests([r, request("other")]),
    )
    stock = drive(FCFSRequestQueue(), operations, lambda queue, r: queue.remove_requests([r]))
    assert ours == stock


def test_how_many_are_late_is_known_whatever_becomes_of_them() -> None:
    queue, turns = ranked(), [request(f"r{i}", float(i)) for i in range(5)]
    for one in turns:
        queue.add_request(one)
    assert (queue.late, queue.tokens_in_time) == (0, 60)
    queue.is_late = lambda rank: rank >= (3.0,)
    queue.rerank_all()
    assert (queue.late, queue.tokens_in_time) == (2, 36)
    turns[4].tokens = 20
    turns[0].rank, turns[4].rank = 9.0, 1.0
    queue.rerank(["r0", "r4"])
    assert (queue.late, queue.tokens_in_time) == (2, 44)
    queue.remove_request(turns[0])
    assert queue.late == 1
    assert [queue.pop_request().request_id for _ in range(4)] == ["r1", "r4", "r2", "r3"]
    assert (queue.late, queue.tokens_in_time) == (0, 0)
