"""Which replica a turn is placed on: filters, then scorers, then the least sum of lost seconds. Pure.

Placement that all ingresses have to agree on without the store uses rendezvous hashing (Thaler and Ravishankar, 1998).
Each pair of a key and a replica has a weight, and the key goes to the replica with the greatest weight. A replica that
comes or goes changes the placement of its own keys only. Loads do not count, since each ingress knows those of another
moment.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import ceil, inf
from typing import ClassVar, NamedTuple, Protocol

from cluster.core.kv_price import Place
from cluster.core.registry import FILTERS, SCORERS
from router.candidate import Arrival, Candidate, Gap, gap
from router.settings import EngineSettings

# --- rendezvous hashing -----------------------------------------------------------------------------------------------


def weight(key: str, replica: str) -> int:
    """Rendezvous weight of a pair, in [0, 2**64)."""
    pair = f"{len(key)}\n{key}{replica}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(pair, digest_size=8).digest(), "little")


def ranked(key: str, replicas: Iterable[str]) -> list[str]:
    """The replicas by descending weight for ``key``."""
    return sorted(replicas, key=lambda replica: (-weight(key, replica), replica))


# --- filters ----------------------------------------------------------------------------------------------------------


class Filter(Protocol):
    """Which of the replicas may take the turn? The answer is a part of them, in their order, and deterministic."""

    required: ClassVar[bool]
    """True: a replica that does not pass is never used. False: the filter is skipped where no replica passes."""
    local_only: ClassVar[bool]
    """It uses knowledge of this ingress alone, so that ingresses that must agree cannot use it."""

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The replicas that pass."""
        ...


class SameModel:
    """Keeps replicas that serve this router's model, or have not published their model."""

    required: ClassVar[bool] = True
    local_only: ClassVar[bool] = False

    def __init__(self, settings: EngineSettings, model: str | None) -> None:
        self._model = model

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """See `Filter`."""
        model = self._model
        return [one for one in candidates if model is None or one.model is None or one.model == model]


class _StatelessFilter:
    def __init__(self, settings: EngineSettings, model: str | None) -> None:
        pass


class NotSuspect(_StatelessFilter):
    """Keeps replicas that have published a snapshot and not failed a turn recently: a replica may be dead for a while
    before Ray reports it, and its engine may be frozen.
    """

    required: ClassVar[bool] = False
    local_only: ClassVar[bool] = True

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """See `Filter`."""
        return [one for one in candidates if not one.suspect]


class LargeEnough(_StatelessFilter):
    """Keeps replicas whose whole memory would take the turn."""

    required: ClassVar[bool] = False
    local_only: ClassVar[bool] = False

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """See `Filter`."""
        needed = turn.expected.prompt_tokens + turn.expected.output_tokens
        return [one for one in candidates if needed <= one.load.kv_tokens]


class TenantSpread:
    """Keeps the tenant's part of the replicas, by rendezvous hashing of the tenant: its load stays on them."""

    required: ClassVar[bool] = False
    local_only: ClassVar[bool] = False

    def __init__(self, settings: EngineSettings, model: str | None) -> None:
        self._spread = settings.tenant_spread

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """See `Filter`."""
        if self._spread >= 1:
            return list(candidates)
        part = _tenant_replicas(turn.tenant, tuple(one.replica for one in candidates), self._spread)
        return [one for one in candidates if one.replica in part]


class NotDraining(_StatelessFilter):
    """Keeps replicas that are not draining."""

    required: ClassVar[bool] = True
    local_only: ClassVar[bool] = False

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """See `Filter`."""
        return [one for one in candidates if not one.draining]


@lru_cache(maxsize=4096)
def _tenant_replicas(tenant: str, replicas: tuple[str, ...], spread: float) -> frozenset[str]:
    return frozenset(ranked(tenant, replicas)[: ceil(spread * len(replicas))])


# --- scorers ----------------------------------------------------------------------------------------------------------


class Scorer(Protocol):
    """How many seconds are lost, for one reason, if the turn's program is bound to the replica?

    The answer is finite, never negative, and deterministic. Placement minimises the weighted sum of all scorers, so a
    loss that is equal on every replica need not be counted.
    """

    def seconds(self, turn: Arrival, candidate: Candidate, gap: Gap) -> float:
        """``gap``: the part of the turn's prompt that is missing on the replica. A larger gap never loses less."""
        ...


class Start:
    """Time until the turn starts: the backlog, resuming programs, and memory that has to be freed."""

    def seconds(self, turn: Arrival, candidate: Candidate, gap: Gap) -> float:
        """The backlog's time; where memory is short, also the part of the running turns that has to end first."""
        load = candidate.load
        short = gap.compute_tokens + gap.fetch_tokens + gap.read_tokens + candidate.backlog_tokens - load.free_tokens
        if short <= 0 or load.running_tokens <= 0:
            return candidate.start_s
        return candidate.start_s + candidate.residual_s * min(1.0, short / load.running_tokens)


class Missing:
    """Time to compute the missing prompt, or to load it from the host tier or from disk."""

    def seconds(self, turn: Arrival, candidate: Candidate, gap: Gap) -> float:
        """See `Scorer`."""
        return gap.seconds(candidate.load)


class Pace:
    """Decode time: the program's own, and what it adds to the iterations of the other programs.

    An iteration is counted with all programs that run, wait, or resume within seconds. The turns that run now would
    mislead, since a replica whose memory is full runs few and looks fast. All bound programs would mislead too, since a
    program that pauses for minutes slows nobody. Counting the others' loss places long contexts where few programs
    have to wait while they are read.
    """

    def seconds(self, turn: Arrival, candidate: Candidate, gap: Gap) -> float:
        """Own output tokens, times the iteration's length and what the program adds to it for each of the others."""
        own_s = candidate.load.sequence_s + turn.expected.context_tokens * candidate.load.context_s
        if turn.home == candidate.replica:  # the program is one of the active ones
            others, step_s = max(0.0, candidate.active - 1), candidate.active_step_s
        else:
            others, step_s = candidate.active, candidate.active_step_s + own_s
        return turn.expected.outputs * (step_s + others * own_s)


class Memory:
    """Time to restore KV that will have been evicted at later turns, where the bound programs exceed the memory."""

    def seconds(self, turn: Arrival, candidate: Candidate, gap: Gap) -> float:
        """The evicted part of the context, at each later turn; from the host tier as far as that reaches, then from
        disk, if there is one that is faster than computing.
        """
        expected, load = turn.expected, candidate.load
        needed = 0.0 if turn.home == candidate.replica else candidate.needs(expected)
        wanted = candidate.occupied_tokens + needed
        over = wanted - load.kv_tokens
        if over <= 0:
            return 0.0
        fetched = min(over, load.host_tokens) / wanted
        lost = max(0.0, over - load.host_tokens) / wanted
        lost_s = load.rates.cheapest((Place.DISK,), 1.0)[1].seconds
        token_s = fetched * 2 * load.swap_token_s + lost * lost_s
        return expected.later_turns * expected.context_tokens * token_s


# --- the choice -------------------------------------------------------------------------------------------------------


NO_GAP = Gap(0.0, 0.0)


class Choice(NamedTuple):
    """A replica for a turn."""

    candidate: Candidate
    gap: Gap
    """The part of the prompt that is missing there."""
    seconds: float
    """Sum of the weighted scorers."""

    @property
    def first_token_s(self) -> float:
        """Expected time to the turn's first token."""
        return self.candidate.start_s + self.gap.seconds(self.candidate.load)


@dataclass(frozen=True)
class PlacementPolicy:
    """The filters and scorers that the settings name."""

    filters: tuple[Filter, ...]
    """The required ones come first: an optional one must not keep only replicas that a required one then removes."""
    scorers: tuple[tuple[Scorer, float], ...]
    """Each with its weight."""

    @classmethod
    def of(cls, settings: EngineSettings, model: str | None = None) -> "PlacementPolicy":
        """``model`` None accepts replicas of any model."""
        filters: list[Filter] = [FILTERS.load(name)(settings, model) for name in settings.filters]
        return cls(
            filters=tuple(sorted(filters, key=lambda one: not one.required)),
            scorers=tuple((SCORERS.load(name)(), factor) for name, factor in settings.scorers.items() if factor > 0),
        )

    def eligible(
        self, turn: Arrival, candidates: Sequence[Candidate], *, deterministic: bool = False
    ) -> list[Candidate]:
        """The replicas that may take the turn; never one that has failed it.

        ``deterministic``: decide by what every ingress knows.
        """
        left = [one for one in candidates if one.replica not in turn.avoid] if turn.avoid else list(candidates)
        for each in self.filters:
            if deterministic and each.local_only:
                continue
            passed = each.keep(turn, left)
            if passed or each.required:
                left = passed
        return left

    def score(self, turn: Arrival, candidate: Candidate, guess: int = 0) -> Choice:
        """The choice of this replica with its score; ``guess``: see `gap`."""
        missing = gap(turn, candidate, guess)
        return Choice(candidate, missing, self._seconds(turn, candidate, missing))

    def best(
        self,
        turn: Arrival,
        candidates: Iterable[Candidate],
        *,
        fits: Callable[[Candidate], bool] | None = None,
        at_most_s: float = inf,
    ) -> Choice | None:
        """The replica with the least loss; of equals the one with the fewest programs, then by rendezvous weight.

        Only the replicas that might win with the whole prompt in their cache have their cached prefixes looked up.

        Args:
            turn: the turn.
            candidates: the replicas to choose from.
            fits: whether a replica may be chosen; None: any may.
            at_most_s: a replica that loses more is not chosen (seconds).
        """
        if fits is not None and at_most_s == inf:
            candidates, fits = filter(fits, candidates), None
        floors = [(self._seconds(turn, one, NO_GAP, at_most_s), number, one) for number, one in enumerate(candidates)]
        floors.sort()
        least, guess = at_most_s, 0
        equals: list[Choice] = []
        for floor, _, one in floors:
            if floor > least:
                break
            if fits is not None and not fits(one):
                continue
            choice = self.score(turn, one, guess)
            guess = choice.gap.shared_blocks or guess
            if choice.seconds <= least:
                if choice.seconds < least:
                    equals.clear()
                least = choice.seconds
                equals.append(choice)
        if len(equals) <= 1:
            return equals[0] if equals else None
        return min(
            equals,
            key=lambda one: (one.candidate.programs, -weight(turn.key, one.candidate.replica), one.candidate.replica),
        )

    def _seconds(self, turn: Arrival, candidate: Candidate, missing: Gap, at_most_s: float = inf) -> float:
        """The sum of the scorers, or of the first ones that exceed ``at_most_s`` together."""
        seconds = 0.0
        for scorer, factor in self.scorers:
            seconds += factor * scorer.seconds(turn, candidate, missing)
            if seconds > at_most_s:
                break
        return seconds


def migration_margin_s(turn: Arrival, here: Choice, settings: EngineSettings) -> float:
    """Seconds by which a replica has to be better than the program's home, beside what the migration costs.

    A program whose KV at home is gone, or only on disk, is as free to move as a new program.
    """
    missing = (here.gap.compute_tokens + here.gap.read_tokens) / max(1, turn.expected.prompt_tokens)
    return settings.move_gain_s + settings.move_margin * (1 - min(1.0, missing)) * here.seconds


def migration_pays(turn: Arrival, here: Choice, there: Choice, settings: EngineSettings, ttft_s: float | None) -> bool:
    """Whether a program gains from a migration by more than its cost and the margins of the settings.

    Args:
        turn: the program's next turn.
        here: its home.
        there: the best other replica.
        settings: hysteresis, gain and margin.
        ttft_s: the SLO of the time to the first token, if there is one. A turn that meets it at home never moves to a
            replica where it would miss it.
    """
    if ttft_s is not None and here.first_token_s <= ttft_s < there.first_token_s:
        return False
    cost_s = max(0.0, there.gap.seconds(there.candidate.load) - here.gap.seconds(here.candidate.load))
    return here.seconds - there.seconds > settings.hysteresis * cost_s + migration_margin_s(turn, here, settings)
