"""Evicts holds where a turn lacks memory: whose, and how much of each.

The price of memory is the same for every token, and the cost to compute a context again grows faster than its length,
because later tokens attend to earlier ones. So a hold is worth most as a whole, and a pause policy keeps all of it or
nothing. A turn that lacks a few blocks, however, gets the end of the least valuable hold and no more: the rest of it is
still a prefix of the program's next prompt.
"""

from collections.abc import Callable

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from cluster.core.lifecycle.events import ReleaseReason
from replicas.hold_table import HeldBlocks, HoldTable
from replicas.policy import Claimant, HoldView, Policy

BROKEN = {
    Claimant.RUNNING: ReleaseReason.BROKEN_RUNNING,
    Claimant.WAITING: ReleaseReason.BROKEN_WAITING,
    Claimant.STARVED: ReleaseReason.BROKEN_STARVED,
}
"""Release reasons of a hold that is evicted for a turn."""

LEAST_SHARE = 1 / 8
"""Smallest part of a hold that is given up, so that a turn that grows does not look for a hold at each block."""


class Eviction:
    """The evictions of one scheduler.

    Args:
        holds: the holds.
        view: returns a hold's view.
        program_of: returns the program of a turn, or None if it belongs to none.
        anything_runs: returns whether a turn runs.
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

    def evict(self, request: Request, lacking: int, policy: Policy) -> bool:
        """Evict a hold that yields to a turn, or as much of its end as the turn lacks if the policy allows that.

        Its own program's hold comes last, and ends as a whole.

        Args:
            request: the turn.
            lacking: number of blocks that it lacks.
            policy: the policy.

        Returns:
            Whether anything was evicted.
        """
        if not len(self._holds):
            return False
        if request.status is RequestStatus.RUNNING:
            claimant = Claimant.RUNNING
        else:
            claimant = Claimant.WAITING if self._anything_runs() else Claimant.STARVED
        pause, own = policy.pause, self._program_of(request)
        views = ((self._view(held), held.key) for held in self._holds)
        ranked = ((key == own, pause.victim_key(view), key) for view, key in views if pause.yields(view, claimant))
        victim = min(ranked, default=None)
        if victim is None:
            return False
        key = victim[2]
        self._note(key, own)
        held = self._holds.get(key)
        ends = self._trim is not None and policy.evicts_ends and key != own
        kept = kept_blocks(held, lacking) if held is not None and ends else 0
        if kept and self._trim is not None:
            self._trim(key, kept, BROKEN[claimant])
        else:
            self._end(key, BROKEN[claimant])
        return True


def kept_blocks(held: HeldBlocks[KVCacheBlock], lacking: int) -> int:
    """Return how many leading blocks of a hold stay when its end is given up.

    Args:
        held: the hold.
        lacking: blocks that shall become free. A block that others own, too, does not become free.
    """
    kept = len(held.blocks)
    lacking = max(lacking, round(LEAST_SHARE * kept))
    while kept and lacking > 0:
        kept -= 1
        lacking -= held.blocks[kept].ref_cnt == 1
    return kept
