"""Evicts holds where a turn lacks memory: whose, and how much of each.

The price of memory is the same for every token, and the cost to compute a context again grows faster than its length,
because later tokens attend to earlier ones. So a hold is worth most as a whole, and a pause policy keeps all of it or
nothing. A turn that lacks a few blocks, however, gets the end of the least valuable hold and no more: the rest of it is
still a prefix of the program's next prompt.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import islice

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from cluster.core.lifecycle.events import ReleaseReason
from replicas.hold_table import HeldBlocks, HoldTable
from replicas.policy import Claimant, HoldView, PausePolicy, Policy, RankKey

BROKEN = {
    Claimant.RUNNING: ReleaseReason.BROKEN_RUNNING,
    Claimant.WAITING: ReleaseReason.BROKEN_WAITING,
    Claimant.STARVED: ReleaseReason.BROKEN_STARVED,
}
"""Release reasons of a hold that is evicted for a turn."""

RANKED_A_STEP = 32
"""Number of holds that are ranked anew in a step that evicts. With more holds, their ranks are a few steps old, so that
the cost of a step does not grow with the holds: to rank one takes about 20 µs. The first hold is ranked again before it
is evicted.
"""
MOST_RANKED = 256
"""The same after steps that did not evict, and for holds that are new or have changed."""
SPARE_RANKS = 64
"""Number of stale ranks that may be kept beside one for each hold, and of stale entries of a heap of ranks."""

LEAST_SHARE, LEAST_BLOCKS = 1 / 8, 4
"""Smallest part of a hold that is given up, so that a turn that grows does not look for a hold at each block: a share,
and a number of blocks."""


class Eviction:
    """The evictions of one scheduler.

    Args:
        holds: the holds.
        view: returns a hold's view.
        program_of: returns the program of a turn, or None if it belongs to none.
        anything_runs: returns whether a turn runs, or loads its context.
        end: ends the hold of a program, for a reason.
        trim: gives up all but a number of leading blocks of the hold of a program, for a reason. None: holds end as a
            whole, because a beginning of a context is of no use (`replicas.kv_groups.KvGroups.prefixes_stay`).
        note: notes the program whose hold yields, and the one for whose turn.
    """

    def __init__(
        self,
        *,
        holds: HoldTable[KVCacheBlock],
        view: Callable[[HeldBlocks[KVCacheBlock]], HoldView],
        program_of: Callable[[Request], str | None],
        anything_runs: Callable[[], bool],
        end: Callable[[str, ReleaseReason], object],
        trim: Callable[[str, int, ReleaseReason], None] | None,
        note: Callable[[str, str | None], None],
    ) -> None:
        self._holds = holds
        self._view = view
        self._program_of = program_of
        self._anything_runs = anything_runs
        self._end = end
        self._trim = trim
        self._note = note
        self._rankings: dict[Claimant, _Ranking] = {}

    def evict(self, request: Request, lacking: int, policy: Policy, step: int) -> bool:
        """Evict a hold that yields to a turn, or as much of its end as the turn lacks if the policy allows that.

        Its own program's hold comes last, and ends as a whole.

        Args:
            request: the turn.
            lacking: number of blocks that it lacks.
            policy: the policy.
            step: number of the scheduler's step. Views of holds do not change within a step.

        Returns:
            Whether anything was evicted.
        """
        if not len(self._holds):
            return False
        if request.status is RequestStatus.RUNNING:
            claimant = Claimant.RUNNING
        else:
            claimant = Claimant.WAITING if self._anything_runs() else Claimant.STARVED
        own = self._program_of(request)
        key = self._victim(claimant, policy.pause, own, step)
        if key is None:
            return False
        self._note(key, own)
        held = self._holds.get(key)
        ends = self._trim is not None and policy.evicts_ends and key != own
        kept = kept_blocks(held, lacking) if held is not None and ends else 0
        if kept and self._trim is not None:
            self._trim(key, kept, BROKEN[claimant])
        else:
            self._end(key, BROKEN[claimant])
        return True

    def _victim(self, claimant: Claimant, pause: PausePolicy, own: str | None, step: int) -> str | None:
        """Return the program whose hold goes first, or None if no hold yields."""
        changed = self._holds.take_changed()
        for known in self._rankings.values():
            known.changed(changed)
        ranking = self._rankings.get(claimant)
        if ranking is None or ranking.pause is not pause:
            ranking = self._rankings[claimant] = _Ranking(self._holds, self._rank_of(claimant, pause), pause)
            ranking.changed(held.key for held in self._holds)
        ranking.refresh(step)
        return ranking.first(own)

    def _rank_of(self, claimant: Claimant, pause: PausePolicy) -> Callable[[HeldBlocks[KVCacheBlock]], RankKey | None]:
        def rank(held: HeldBlocks[KVCacheBlock]) -> RankKey | None:
            view = self._view(held)
            return pause.victim_key(view) if pause.yields(view, claimant) else None

        return rank


class _Ranking:
    """The holds that yield to one kind of claimant, the least valuable first.

    Args:
        holds: all holds.
        rank: returns the rank of a hold now, or None if it does not yield.
        pause: the policy that ranks them.
    """

    def __init__(
        self,
        holds: HoldTable[KVCacheBlock],
        rank: Callable[[HeldBlocks[KVCacheBlock]], RankKey | None],
        pause: PausePolicy,
    ) -> None:
        self.pause = pause
        self._holds = holds
        self._rank = rank
        self._step = -MOST_RANKED
        self._left = 0
        """Number of changed holds that may still be ranked in this step."""
        self._unranked: dict[str, None] = {}
        """Programs whose hold is new or has changed."""
        self._ranks: OrderedDict[str, RankKey | None] = OrderedDict()
        """The other programs, the one that was ranked first before the others."""
        self._heap: list[tuple[RankKey, str]] = []
        """The ranks that are not None, and stale entries."""

    def changed(self, keys: Iterable[str]) -> None:
        """Note holds that are new or have changed."""
        self._unranked.update(dict.fromkeys(keys))
        if len(self._unranked) > 2 * len(self._holds) + SPARE_RANKS:
            self._unranked = {key: None for key in self._unranked if key in self._holds}

    def refresh(self, step: int) -> None:
        """Rank the holds that are due in this step, and those that have changed. Both numbers are bounded."""
        for key in list(islice(self._ranks, min(MOST_RANKED, RANKED_A_STEP * (step - self._step)))):
            self._put(key)
        if step != self._step:
            self._step, self._left = step, MOST_RANKED
        self._left -= self._rank_changed(self._left)
        if len(self._ranks) > 2 * len(self._holds) + SPARE_RANKS:
            self._ranks = OrderedDict((key, rank) for key, rank in self._ranks.items() if key in self._holds)
        if len(self._heap) > 2 * len(self._ranks) + SPARE_RANKS:
            self._heap = [(rank, key) for key, rank in self._ranks.items() if rank is not None]
            heapify(self._heap)

    def first(self, own: str | None) -> str | None:
        """Return the first program, with its rank as of now. ``own`` comes after all others."""
        found, is_own = self._first(own)
        while found is None and self._unranked:
            self._rank_changed(MOST_RANKED)
            found, is_own = self._first(own)
        return own if found is None and is_own else found

    def _first(self, own: str | None) -> tuple[str | None, bool]:
        """Return the first program but ``own``, or None, and whether ``own`` yields, if that was looked at."""
        kept: tuple[RankKey, str] | None = None
        found = None
        while self._heap and found is None:
            rank, key = self._heap[0]
            if self._ranks.get(key) != rank:  # the entry is stale
                heappop(self._heap)
                continue
            self._put(key)
            if self._ranks.get(key) != rank:
                continue
            if key == own:
                kept = heappop(self._heap)
            else:
                found = key
        if kept is not None:
            heappush(self._heap, kept)
        return found, kept is not None

    def _rank_changed(self, most: int) -> int:
        """Rank ``most`` changed holds, or all if there are fewer. Return their number."""
        keys = list(islice(self._unranked, most))
        for key in keys:
            del self._unranked[key]
            self._put(key)
        return len(keys)

    def _put(self, key: str) -> None:
        before, held = self._ranks.pop(key, None), self._holds.get(key)
        if held is None:
            return
        rank = self._ranks[key] = self._rank(held)
        if rank is not None and rank != before:
            heappush(self._heap, (rank, key))


def kept_blocks(held: HeldBlocks[KVCacheBlock], lacking: int) -> int:
    """Return how many leading blocks of a hold stay when its end is given up.

    Args:
        held: the hold.
        lacking: blocks that shall become free. A block that others own, too, does not become free.
    """
    kept = len(held.blocks)
    lacking = max(lacking, LEAST_BLOCKS, round(LEAST_SHARE * kept))
    while kept and lacking > 0:
        kept -= 1
        lacking -= held.blocks[kept].ref_cnt == 1
    return kept
