"""The ranked queue against vLLM's own queue (constant rank) and against a sorted list (any rank)."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from replicas.waiting_queue import RankedQueue


def request(name: str, rank: float = 0.0) -> Any:
    # Only the id and the hash of a request matter to a queue.
    class Named(SimpleNamespace):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    return Named(request_id=name, rank=rank)


def ranked() -> RankedQueue:
    return RankedQueue(lambda r: (r.rank,))  # type: ignore[attr-defined]


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


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "prepend", "prepend_many", "pop", "remove", "rerank"]), st.integers(0, 7)),
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
        assert len(queue) == len(waiting)
        log.append(names(queue))
    return log


@given(OPERATIONS)
def test_a_constant_rank_is_vllms_own_queue(operations: list[tuple[str, int]]) -> None:
    ours = drive(RankedQueue(lambda r: ()), operations, lambda queue, r: queue.remove_requests([r, request("other")]))
    stock = drive(FCFSRequestQueue(), operations, lambda queue, r: queue.remove_requests([r]))
    assert ours == stock
