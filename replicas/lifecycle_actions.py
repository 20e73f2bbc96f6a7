"""What the events of programs do: the lifecycle's actions on one scheduler's holds, copies and statistics."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from cluster.core.lifecycle.events import (
    Action,
    CancelFetch,
    Conclude,
    Event,
    Fetch,
    FreeHold,
    HoldEnded,
    Observe,
    ReleaseReason,
    ToolFinished,
)
from cluster.core.lifecycle.machine import Phase
from cluster.durations.table import DurationTable
from replicas.cached_prefix import CachedPrefixes
from replicas.duration_sync import DurationChanges
from replicas.early_prefill import EarlyPrefill
from replicas.forecasts import Forecaster
from replicas.hold_table import HeldBlocks, HoldTable
from replicas.program_table import ProgramTable
from replicas.program_trees import ProgramTrees
from replicas.rewritten_context import ReturningOutputs, matching_blocks
from replicas.stats import Stats
from replicas.swapping import Swapping
from replicas.turns import Turn


class LifecycleActions:
    """Applies events to programs, and performs the actions that follow.

    Args:
        now_s: returns the scheduler's time, in seconds.
        programs: the programs.
        trees: the trees of programs.
        holds: the holds.
        turns: the turns that wait or run, by request id.
        swapping: the host tier.
        early_prefill: computes next prompts in pauses.
        cached_prefixes: estimates what the prefix cache has of paused programs.
        returning_outputs: learns which outputs return in prompts.
        durations: the statistics of pauses.
        duration_changes: the statistics that have changed.
        forecaster: learns from programs that end.
        stats: the statistics.
        counters: the scheduler's counters.
        block_tokens: tokens of a block.
        prefixes_stay: see `replicas.kv_groups.KvGroups.prefixes_stay`.
        rerank: ranks the waiting turns with these ids again before the next one is chosen.
    """

    def __init__(
        self,
        *,
        now_s: Callable[[], float],
        programs: ProgramTable,
        trees: ProgramTrees,
        holds: HoldTable[KVCacheBlock],
        turns: Mapping[str, Turn],
        swapping: Swapping,
        early_prefill: EarlyPrefill,
        cached_prefixes: CachedPrefixes,
        returning_outputs: ReturningOutputs,
        durations: DurationTable,
        duration_changes: DurationChanges,
        forecaster: Forecaster,
        stats: Stats,
        counters: Counter[str],
        block_tokens: int,
        prefixes_stay: bool,
        rerank: Callable[[Sequence[str]], None],
    ) -> None:
        self._now_s = now_s
        self._programs = programs
        self._trees = trees
        self._holds = holds
        self._turns = turns
        self._swapping = swapping
        self._early_prefill = early_prefill
        self._cached_prefixes = cached_prefixes
        self._returning_outputs = returning_outputs
        self._durations = durations
        self._duration_changes = duration_changes
        self._forecaster = forecaster
        self._stats = stats
        self._counters = counters
        self._block_tokens = block_tokens
        self._prefixes_stay = prefixes_stay
        self._rerank = rerank

    def apply(self, key: str, event: Event) -> tuple[Action, ...]:
        """Apply an event to a program, and perform the actions that follow, except for Decide. Return the actions."""
        actions = tuple(self._programs.apply(key, event))
        self.act(key, actions)
        self._swapping.follow(key, self._programs.get(key))
        return actions

    def act(self, key: str, actions: Sequence[Action]) -> None:
        """Perform a program's actions, except for Decide."""
        for action in actions:
            match action:
                case FreeHold(reason):
                    self._stats.hold_ends(key, reason)
                    self._early_prefill.forget(key)
                    self._holds.release(key)
                    self.rerank_turns(key, reason)
                case Fetch():
                    self._swapping.fetch(key)
                case CancelFetch():
                    self._swapping.cancel(key)
                case Observe(tool, seconds):
                    self._durations.observe(tool, seconds)
                    self._duration_changes.note(tool)
                case Conclude(_, served_tokens):
                    self._forecaster.program_ended(key, served_tokens)
                    self.child_ended(self._trees.forget(key, self._now_s()))
                    self._swapping.forget(key)
                    self._cached_prefixes.forget(key)
                    self._returning_outputs.forget(key)

    def sweep(self, now_s: float) -> None:
        """End the programs that were idle for too long, and learn from those that are likely to have ended."""
        for key, actions in self._programs.sweep(now_s):
            self.act(key, actions)
        for state in self._programs.likely_ended():
            self._forecaster.program_ended(state.key, state.served_tokens)

    def child_ended(self, parent: str | None) -> None:
        """Load the context of a program that is swapped out, since its last child has ended and its turn will come.

        Nothing is loaded for a parent that one sweep has ended together with the child: no turn of it will come.
        """
        program = self._programs.get(parent) if parent is not None else None
        if program is not None and program.phase is Phase.SWAPPED:
            self.apply(program.key, ToolFinished(self._now_s()))

    # --- parts of holds -----------------------------------------------------------------------------------------------

    def keeps_prompt(self, request: Request, key: str) -> bool:
        """Release what the prompt has replaced of the hold. Return whether it contains the prompt before, if known."""
        if not self._prefixes_stay:
            return True
        keeps = self._returning_outputs.resumes(key, request.block_hashes)
        if (held := self._holds.get(key)) is not None:
            self._early_prefill.resumes(key, request.block_hashes)
            self._release_superseded(request, key, held)
        return keeps

    def _release_superseded(self, request: Request, key: str, held: HeldBlocks[KVCacheBlock]) -> None:
        kept = matching_blocks(held.blocks, request.block_hashes)
        if kept == len(held.blocks):
            return
        self._counters["superseded_blocks"] += len(held.blocks) - kept
        if kept == 0:
            self.apply(key, HoldEnded(self._now_s(), ReleaseReason.SUPERSEDED))
        else:
            self.keep(key, kept)

    def trim(self, key: str, kept: int, reason: ReleaseReason) -> None:
        """Evict all but the leading blocks of a hold."""
        self._counters["evicted_blocks"] += self.keep(key, kept)
        self.rerank_turns(key, reason)

    def keep(self, key: str, kept: int) -> int:
        """Free all but the leading blocks of a hold. Return the number of blocks that it has lost."""
        self._stats.hold_changes(key)
        self._early_prefill.trimmed(key, kept * self._block_tokens)
        return self._holds.trim(key, kept, kept * self._block_tokens)

    def rerank_turns(self, key: str, reason: ReleaseReason) -> None:
        """Rank a program's waiting turns again before the next turn is chosen, because its hold has ended."""
        program = self._programs.get(key)
        if program is None or program.active <= (1 if reason is ReleaseReason.USED else 0):
            return
        self._rerank([request_id for request_id, turn in self._turns.items() if turn.key == key])
