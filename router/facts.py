"""A replica's snapshot as numbers that can be reckoned with, whatever was in it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

from cluster.routing import ReplicaSnapshot, StepCosts

MOST_TOKENS = 1e12
MOST_COUNT = 1e7
MOST_SECONDS = 1e6
NOTHING_TOLD = StepCosts(2e-3, 1e-5, 6e-3, 3e-5, 5e-8, 3e-6)
"""An 8B model on a large GPU, roughly: where nobody has told anything, the ratios are what counts."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The numbers of a `ReplicaSnapshot`, none below 0, infinite or not a number."""

    overhead_s: float = NOTHING_TOLD.overhead_s
    sequence_s: float = NOTHING_TOLD.sequence_s
    weights_s: float = NOTHING_TOLD.weights_s
    token_s: float = NOTHING_TOLD.token_s
    context_s: float = NOTHING_TOLD.context_s
    swap_token_s: float = NOTHING_TOLD.swap_token_s
    kv_tokens: float = 100_000.0
    free_tokens: float = 100_000.0
    host_tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    running_tokens: float = 0.0
    waiting_tokens: float = 0.0
    output_tokens: float = 0.0
    programs: float = 0.0
    working_set_tokens: float = 0.0
    working_set_programs: float = 0.0
    active_tokens: float = 0.0
    active_programs: float = 0.0
    turn_output_tokens: float = 0.0
    turn_new_tokens: float = 0.0
    program_turns: float = 0.0
    pause_s: float = 0.0
    resume_tokens: tuple[tuple[float, float], ...] = ()

    @property
    def costs(self) -> StepCosts:
        """Of its steps."""
        return StepCosts(
            self.overhead_s, self.sequence_s, self.weights_s, self.token_s, self.context_s, self.swap_token_s
        )

    @classmethod
    def of(cls, snapshot: ReplicaSnapshot) -> "Facts":
        """The snapshot's; what makes no sense is drawn to what does."""
        costs = {name: _sound(getattr(snapshot.costs, name), MOST_SECONDS) for name in _COSTS}
        numbers = {name: _sound(getattr(snapshot, name), _most(name)) for name in _COUNTS}
        resumes = tuple(
            (_sound(within_s, MOST_SECONDS), _sound(tokens, MOST_TOKENS)) for within_s, tokens in snapshot.resume_tokens
        )
        return cls(**costs, **numbers, resume_tokens=resumes)

    @classmethod
    def median(cls, facts: Sequence["Facts"]) -> "Facts":
        """A replica like the others, each number by itself; defaults where there are none."""
        if not facts:
            return cls()
        return cls(**{name: median(getattr(one, name) for one in facts) for name in (*_COSTS, *_COUNTS)})


_COSTS = StepCosts.__struct_fields__
_COUNTS = tuple(field.name for field in fields(Facts) if field.name not in (*_COSTS, "resume_tokens"))


def _most(name: str) -> float:
    if name.endswith("_s"):
        return MOST_SECONDS
    return MOST_TOKENS if name.endswith("_tokens") else MOST_COUNT


def _sound(value: float, most: float) -> float:
    if not value > 0:  # not a number, too
        return 0.0
    return float(value) if value < most else most
