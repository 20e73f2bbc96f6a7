"""Placement: filters, then scorers, then the least sum. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.registry import FILTERS, SCORERS
from router.candidate import Arrival, Candidate, Gap, gap
from router.filters import Filter
from router.rendezvous import weight
from router.scorers import Scorer
from router.settings import FrontSettings


class Choice(NamedTuple):
    """A replica for a turn."""

    candidate: Candidate
    gap: Gap
    """What of the prompt is missing there."""
    seconds: float
    """Lost there."""

    @property
    def first_token_s(self) -> float:
        """Expected until the turn's first token."""
        return self.candidate.start_s + self.gap.seconds(self.candidate.facts)


@dataclass(frozen=True)
class Placement:
    """The filters and scorers of the settings."""

    filters: tuple[Filter, ...]
    scorers: tuple[tuple[str, Scorer, float], ...] = field(repr=False)
    """Name, scorer, weight."""

    @classmethod
    def of(cls, settings: FrontSettings, model: str | None = None) -> "Placement":
        """Those that the settings name; ``model`` None takes replicas of any."""
        return cls(
            filters=tuple(FILTERS.load(name)(settings, model) for name in settings.filters),
            scorers=tuple(
                (name, SCORERS.load(name)(), factor) for name, factor in settings.scorers.items() if factor > 0
            ),
        )

    def eligible(self, turn: Arrival, candidates: Sequence[Candidate], *, alike: bool = False) -> list[Candidate]:
        """Those that may take the turn; never one that has failed it.

        ``alike``: only by what every front knows.
        """
        left = [one for one in candidates if one.replica not in turn.avoid] if turn.avoid else list(candidates)
        for each in self.filters:
            if alike and each.private:
                continue
            passed = each.keep(turn, left)
            if passed or each.required:
                left = passed
        return left

    def score(self, turn: Arrival, candidate: Candidate, guess: int = 0) -> Choice:
        """What is lost there; ``guess``: see `gap`."""
        missing = gap(turn, candidate, guess)
        seconds = 0.0
        for _, scorer, factor in self.scorers:
            seconds += factor * scorer.seconds(turn, candidate, missing)
        return Choice(candidate, missing, seconds)

    def reasons(self, turn: Arrival, candidate: Candidate) -> dict[str, float]:
        """The score's parts, seconds by scorer."""
        missing = gap(turn, candidate)
        return {name: factor * scorer.seconds(turn, candidate, missing) for name, scorer, factor in self.scorers}

    def best(self, turn: Arrival, candidates: Sequence[Candidate]) -> Choice | None:
        """The one that loses least; of equals that with the fewest programs, then whichever the key prefers."""
        choices: list[Choice] = []
        guess = 0
        for one in candidates:
            choices.append(self.score(turn, one, guess))
            guess = choices[-1].gap.shared_blocks or guess
        if not choices:
            return None
        least = min(choice.seconds for choice in choices)
        equals = [choice for choice in choices if choice.seconds <= least]
        if len(equals) == 1:
            return equals[0]
        return min(
            equals,
            key=lambda one: (one.candidate.programs, -weight(turn.key, one.candidate.replica), one.candidate.replica),
        )
