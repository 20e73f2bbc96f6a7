"""vLLM's waiting queue, ordered by an OrderPolicy instead of by arrival."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from replicas.hold_table import RoundRobin
from replicas.policy import IsLate, RankKey

LOADED: RankKey = ()
"""The rank before every rank that a policy may give. It is that of a waiting turn that owns memory, because its context
was or is being loaded from the host. Behind a turn that lacks memory it would wait for ever, because only its own end
frees that memory."""
LAST: RankKey = (math.inf, math.inf)
"""The rank after those of all turns."""
EQUAL: RankKey = (0.0,)
"""The rank that replaces a policy's empty rank."""
RANKS_A_STEP = 16
"""Largest number of ranks that one step computes again. Each takes about 13 µs, and a step of `schedule` 2 ms."""
SLACK = 16
"""Entries of the heap, beyond two for each request, after which stale ones are dropped."""
ADMISSIBLE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""Statuses of turns that wait for nothing but memory and a place in the batch. The others wait for their context, which
is being loaded, or for their grammar, and vLLM skips them."""
LOOKS = 16
"""Largest number of requests of a queue of which the first wanted one is found."""


class Ranked(NamedTuple):
    """A waiting turn and its rank."""

    rank: RankKey
    request: Request


class RankedQueue(RequestQueue):
    """A queue with the least rank first. Equal ranks have vLLM's order, so that a constant rank gives its FCFS queue.

    A rank is computed when a request is added, and again by :meth:`rerank` and :meth:`refresh`. It does not change in
    between. Removal is lazy: a stale entry is dropped when it reaches the top of the heap.
    """

    def __init__(
        self,
        rank: Callable[[Request], RankKey],
        missing_tokens: Callable[[Request], int],
    ) -> None:
        self._rank = rank
        self._missing_tokens = missing_tokens
        self._missing: dict[str, int] = {}
        """Of each request that is not late."""
        self._heap: list[tuple[RankKey, int, str]] = []
        self._entries: dict[str, tuple[RankKey, int, Request]] = {}
        self.is_late: IsLate | None = None
        self._late: set[str] = set()
        self.tokens_in_time = 0
        """Tokens that the requests that are not late have to compute, as of their last ranking."""
        self._refreshes: RoundRobin[str] = RoundRobin(RANKS_A_STEP)
        # Numbers grow at the tail and fall at the head, so that a prepended request comes before all equal ranks.
        self._tail = itertools.count(1)
        self._head = itertools.count(-1, -1)
        self._stale: dict[str, None] = {}

    def _put(self, request: Request, number: int) -> None:
        self._enter(self._rank(request), number, request)
        self._refreshes.add(request.request_id)

    def _enter(self, rank: RankKey, number: int, request: Request) -> None:
        self._entries[request.request_id] = (rank, number, request)
        self._count(request, rank)
        heapq.heappush(self._heap, (rank, number, request.request_id))
        if len(self._heap) > 2 * len(self._entries) + SLACK:
            self._drop_stale()

    def _count(self, request: Request, rank: RankKey) -> None:
        self._forget(request.request_id)
        if self.is_late is not None and self.is_late(rank):
            self._late.add(request.request_id)
        else:
            tokens = self._missing[request.request_id] = self._missing_tokens(request)
            self.tokens_in_time += tokens

    def _forget(self, request_id: str) -> None:
        self._late.discard(request_id)
        self.tokens_in_time -= self._missing.pop(request_id, 0)

    def _drop_stale(self) -> None:
        self._heap = [(rank, number, key) for key, (rank, number, _) in self._entries.items()]
        heapq.heapify(self._heap)

    def _top(self) -> tuple[RankKey, int, Request] | None:
        while self._heap:
            rank, number, request_id = self._heap[0]
            entry = self._entries.get(request_id)
            if entry is not None and entry[1] == number and entry[0] == rank:
                return entry
            heapq.heappop(self._heap)
        return None

    def add_request(self, request: Request) -> None:
        """Add a request after those of equal rank."""
        self._put(request, next(self._tail))

    def prepend_request(self, request: Request) -> None:
        """Add a request before those of equal rank."""
        self._put(request, next(self._head))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Add requests before those of equal rank, in reverse of the given order, as vLLM's own queue does."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        """Return the request that is admitted next.

        Raises:
            IndexError: the queue is empty.
        """
        return self._first()[2]

    def peek_rank(self) -> RankKey:
        """Return the rank of the request that is admitted next.

        Raises:
            IndexError: the queue is empty.
        """
        return self._first()[0]

    def first_of(self, wanted: Callable[[Request], bool]) -> Ranked | None:
        """Return the request that is admitted next of those that are wanted. None: the first `LOOKS` are not."""
        if not self._entries:
            return None
        self._first()
        skipped: list[tuple[RankKey, int, str]] = []
        found: Ranked | None = None
        while found is None and len(skipped) < LOOKS and (top := self._top()) is not None:
            if wanted(top[2]):
                found = Ranked(top[0], top[2])
            else:
                skipped.append(heapq.heappop(self._heap))
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found

    def _first(self) -> tuple[RankKey, int, Request]:
        if self._stale:
            stale, self._stale = self._stale, {}
            self.rerank(stale)
        return self._head_entry()

    def _head_entry(self) -> tuple[RankKey, int, Request]:
        top = self._top()
        if top is None:
            raise IndexError("the queue is empty")
        return top

    def pop_request(self) -> Request:
        """Remove and return the request that was looked at last.

        Raises:
            IndexError: the queue is empty.
        """
        request = self._head_entry()[2]
        heapq.heappop(self._heap)
        self.remove_request(request)
        return request

    def remove_request(self, request: Request) -> None:
        """Remove one request.

        Raises:
            KeyError: it is not in the queue.
        """
        del self._entries[request.request_id]
        self._stale.pop(request.request_id, None)
        self._refreshes.remove(request.request_id)
        self._forget(request.request_id)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove those requests that are in the queue."""
        for request in requests:
            if request.request_id in self._entries:
                self.remove_request(request)

    def rerank_later(self, request_ids: Iterable[str]) -> None:
        """Compute the ranks of those requests again that are in this queue, when the head is looked at next.

        It is not done at once: between looking at the head of a queue and removing it, vLLM allocates blocks, which may
        evict a hold, and with it change a rank.
        """
        self._stale.update((request_id, None) for request_id in request_ids if request_id in self._entries)

    def rerank(self, request_ids: Iterable[str]) -> None:
        """Compute the ranks of those requests again that are in this queue. Their order among equal ranks stays."""
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is not None:
                before, number, request = entry
                rank = self._rank(request)
                if rank != before:
                    self._enter(rank, number, request)

    def refresh(self, steps: int | None, changed: Iterable[str] = ()) -> None:
        """Compute a share of the ranks again. It is called once a step.

        No rank is older than ``steps`` calls. With more than ``steps`` · RANKS_A_STEP requests the period is longer, so
        that a step costs the same however long the queue is.

        Args:
            steps: the period. None: ranks do not change with time.
            changed: ids of requests whose ranks have changed, in this queue or not. However many they are, a step
                computes RANKS_A_STEP ranks at most. The rest follows in the next steps.
        """
        self._refreshes.hasten(changed)
        self.rerank(self._refreshes.next(steps))

    def rerank_all(self) -> None:
        """Compute every rank again at once, because the policy has changed."""
        self._entries = {key: (self._rank(request), n, request) for key, (_, n, request) in self._entries.items()}
        for rank, _, request in self._entries.values():
            self._count(request, rank)
        self._drop_stale()

    @property
    def late(self) -> int:
        """Number of requests that wait with a rank that ``is_late``."""
        return len(self._late)

    def puts_off(self, request_id: str) -> bool:
        """Return whether this request waits with a rank that ``is_late``."""
        return request_id in self._late

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        ordered = sorted(self._entries.values(), key=lambda entry: entry[:2])
        return (request for _, _, request in ordered)


def first_of(queues: tuple[RankedQueue, RankedQueue], wanted: Callable[[Request], bool]) -> Ranked | None:
    """Return the turn of vLLM's two queues that is admitted next of those that are wanted, as vLLM chooses: at equal
    ranks, that of the second one.
    """
    first, second = (queue.first_of(wanted) for queue in queues)
    return first if second is None or (first is not None and first.rank < second.rank) else second


def first_admissible(
    queues: tuple[RankedQueue, RankedQueue], blocked: Callable[[Request], bool] | None = None
) -> Ranked | None:
    """Return the turn that is admitted next of those that can be.

    Args:
        queues: vLLM's two queues.
        blocked: whether a turn waits for a slot of its adapter (`replicas.adapter_slots`). None: there are no adapters.
    """
    if blocked is None:
        return first_of(queues, _is_admissible)
    return first_of(queues, lambda request: request.status in ADMISSIBLE and not blocked(request))


def _is_admissible(request: Request) -> bool:
    return request.status in ADMISSIBLE
