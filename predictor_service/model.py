"""What a model answers. Every one is chosen by name; answers are in the order of the questions, one for each.

A model never raises for what it is asked: what it does not know, it answers from what all programs have in common.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from predictor_service.context import PauseContext, TurnContext
from predictor_service.distribution import Distribution

NO_TOOL = ""
"""The tool of a turn that calls none: the program ends, or waits for its user."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What a program has ahead after the turn in question."""

    tokens: Distribution
    """Of prompts and outputs, that will need computed."""
    turns: float
    """Expected."""


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """What became of a turn."""

    output_tokens: int
    tool: str
    """NO_TOOL: none."""
    arguments: str = ""
    last: bool = False
    """The program ended with it."""


@dataclass(frozen=True, slots=True)
class PauseOutcome:
    """What became of a pause."""

    duration_s: float | None = None
    """None: not recorded."""
    returned_tokens: int | None = None
    """Prompt tokens that the next turn had beyond this one's prompt and output; None: not known."""


class LengthModel(Protocol):
    """How many tokens will these turns generate?"""

    def lengths(self, turns: Sequence[TurnContext]) -> Sequence[Distribution]:
        """Tokens, on LENGTH_EDGES."""
        ...

    def remaining(self, turns: Sequence[TurnContext]) -> Sequence[Remaining]:
        """And what comes after them?"""
        ...


class ToolModel(Protocol):
    """Which tool will these turns call?"""

    def tools(self, turns: Sequence[TurnContext]) -> Sequence[Mapping[str, float]]:
        """Probabilities of tools' keys, NO_TOOL among them; together 1."""
        ...


class DurationModel(Protocol):
    """How long will these pauses be, from their beginning? For one under way: `Distribution.beyond`."""

    def durations(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """Seconds, on DURATION_EDGES."""
        ...

    def returned(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """Prompt tokens that the calls bring, on LENGTH_EDGES."""
        ...


class Learner(Protocol):
    """A model that learns while it serves. Nonsense (NaN, negative) raises ValueError and changes nothing."""

    def turn_ended(self, turn: TurnContext, outcome: TurnOutcome) -> None:
        """A turn has been generated."""
        ...

    def pause_ended(self, pause: PauseContext, outcome: PauseOutcome) -> None:
        """A tool has returned."""
        ...

    def program_ended(self, turns: Sequence[TurnContext], remaining: Sequence[tuple[int, int]]) -> None:
        """A program is over: after each of its turns came (tokens to compute, turns)."""
        ...
