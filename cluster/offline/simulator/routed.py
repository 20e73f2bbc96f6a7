"""Records how each turn of a run was routed, and summarizes the routing of a run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.core.slo import Outcome, ProgramRecord
from cluster.offline.bench.results import cached_share
from cluster.offline.bench.workload import PlannedProgram


@dataclass(slots=True)
class RoutedTurn:
    """How one turn was routed. Times are seconds on the simulation's clock."""

    due_s: float
    reusable_tokens: int
    """Prompt tokens that a cache of unlimited size on one replica would have, in whole blocks."""
    reason: str = "waiting"
    """Reason of the router's decision."""
    sent_s: float | None = None
    replica: int | None = None
    moved: bool = False
    """Whether the program migrated for this turn."""


Routed = Mapping[tuple[str, int], RoutedTurn]
"""Routes by the program's id and the turn's index."""


class InfiniteCache:
    """Computes which tokens of a prompt a cache of unlimited size would have.

    Args:
        block_size: tokens of a block. Only whole blocks are reused.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._groups: set[str] = set()

    def reusable(self, program: PlannedProgram, index: int, prompt_tokens: int, known_tokens: int) -> int:
        """Return the reusable tokens of the prompt of turn ``index``, in whole blocks.

        The prompt begins with ``known_tokens`` that its program had sent or generated. This must be called once for
        each turn, in the order in which they are sent. The last generated token of a turn was never computed, and the
        last token of a prompt is always computed.
        """
        turn = program.turns[index]
        if index == 0:
            shared = program.prefix_group is not None and program.prefix_group in self._groups
            known_tokens = min(program.prefix_tokens, turn.fresh_tokens) if shared else 0
            if program.prefix_group is not None:
                self._groups.add(program.prefix_group)
        elif not turn.reset and program.turns[index - 1].kept_tokens == program.turns[index - 1].output_tokens:
            known_tokens -= 1
        return max(0, min(known_tokens, prompt_tokens - 1)) // self._block_size * self._block_size


@dataclass(frozen=True, slots=True)
class RoutingSummary:
    """Summary of the routing of all programs with an intended arrival in the measured window."""

    hit_rate: float | None
    """Share of prompt tokens that needed no computation at the first admission of their turn."""
    hit_of_infinite: float | None
    """The same tokens divided by those that a cache of unlimited size on one replica would have had."""
    load_max_over_mean: float | None
    """Mean number of waiting and running turns of a replica in the window: the largest divided by the mean."""
    busy_max_over_mean: float | None
    """Seconds for which a replica computed in the window: the largest divided by the mean. It is less meaningful than
    ``load_max_over_mean``, because a replica computes all the time even with a single turn."""
    refused: int
    """Number of rejected programs."""
    moves: int
    split: int
    """Number of programs whose turns went to more than one replica without a migration."""
    waited: int
    """Number of turns that waited at the router."""
    wait_s: float | None
    """Mean wait of these turns in seconds. Turns that still wait count with their wait so far."""
    longest_wait_s: float | None
    decisions: Mapping[str, int]
    """Number of turns by the reason of their routing decision."""

    @classmethod
    def of(
        cls,
        programs: Sequence[ProgramRecord],
        routed: Routed,
        turns: Sequence[float],
        busy_s: Sequence[float],
        now_s: float,
    ) -> "RoutingSummary":
        """Summarize a run. ``turns`` (see `turns_on`), ``busy_s``: by replica, in the window; ``now_s``: its end."""
        cached = reusable = 0
        waits: list[float] = []
        for program in programs:
            for turn in program.turns:
                way = routed[turn.program_id, turn.index]
                waited_s = (now_s if way.sent_s is None else way.sent_s) - way.due_s
                if waited_s > 0:
                    waits.append(waited_s)
                if turn.cached_tokens is not None:
                    cached += turn.cached_tokens
                    reusable += way.reusable_tokens
        ways = [[routed[turn.program_id, turn.index] for turn in program.turns] for program in programs]
        return cls(
            hit_rate=cached_share(turn for program in programs for turn in program.turns),
            hit_of_infinite=cached / reusable if reusable else None,
            load_max_over_mean=_max_over_mean(turns),
            busy_max_over_mean=_max_over_mean(busy_s),
            refused=sum(program.outcome is Outcome.REJECTED for program in programs),
            moves=sum(way.moved for turns in ways for way in turns),
            split=sum(map(_is_split, ways)),
            waited=len(waits),
            wait_s=sum(waits) / len(waits) if waits else None,
            longest_wait_s=max(waits, default=None),
            decisions=dict(sorted(Counter(way.reason for turns in ways for way in turns).items())),
        )


def turns_on(
    programs: Sequence[ProgramRecord], routed: Routed, replicas: int, begin_s: float, end_s: float
) -> list[float]:
    """Return the mean number of turns on each replica between two times."""
    seconds = [0.0] * replicas
    for program in programs:
        for turn in program.turns:
            way = routed[turn.program_id, turn.index]
            if way.replica is not None and way.sent_s is not None:
                last_s = end_s if turn.last_token_s is None else turn.last_token_s
                seconds[way.replica] += max(0.0, min(last_s, end_s) - max(way.sent_s, begin_s))
    return [spent_s / (end_s - begin_s) for spent_s in seconds]


def _max_over_mean(values: Sequence[float]) -> float | None:
    return max(values) * len(values) / sum(values) if any(values) else None


def _is_split(turns: Sequence[RoutedTurn]) -> bool:
    sent = [turn for turn in turns if turn.replica is not None]
    return any(b.replica != a.replica and not b.moved for a, b in pairwise(sent))
