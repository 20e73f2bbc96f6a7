"""The inputs and outputs of predictor models, and the observations from which they learn while they serve.

The inputs have the same form in a recorded trace and in a live request, so that a model trained on traces can serve
requests. A model returns one answer for each input, in their order. It never raises because of an input: for an unknown
program, it answers with the statistics of all programs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from predictor_service.distribution import Distribution

HISTORY = 8
"""Earlier turns in a context, at most. The most recent one comes first."""
MAX_TEXT = 16_384
"""Characters of a prompt's text that are kept: the last ones. They are 8 for each of the 2,048 tokens of LAMPS."""
MAX_ARGUMENTS = 4096
"""Characters of a call's arguments that are kept: the first ones."""


@dataclass(frozen=True, slots=True)
class TurnContext:
    """A turn that is about to be generated. Lengths are in tokens. Histories have the most recent turn first."""

    source: str = ""
    """Kind of the program: the name of a trace, or a tenant and a model."""
    position: int = 0
    """Number of turns of the program before this one."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    """Prompt tokens that the turn before did not have, such as a tool's result or a user's message."""
    outputs: tuple[int, ...] = ()
    """Output tokens of the earlier turns, at most `HISTORY` of them."""
    tools: tuple[str, ...] = ()
    """Tools that the earlier turns called, as keys of tool statistics (`bash:grep`), at most `HISTORY` of them."""
    durations_s: tuple[float | None, ...] = ()
    """Durations of those calls in seconds; None if a duration is unknown."""
    returned: tuple[int, ...] = ()
    """Prompt tokens that those calls returned."""
    text: str = ""
    """The new text of the prompt, cut to its last `MAX_TEXT` characters."""
    offered: tuple[str, ...] = ()
    """Names of the tools that the turn may call; empty if they are unknown."""


@dataclass(frozen=True, slots=True)
class PauseContext:
    """A pause that begins because a turn has ended with a tool call."""

    turn: TurnContext
    tool: str
    """The called tool, as a key of tool statistics."""
    output_tokens: int = 0
    arguments: str = ""
    """The call's arguments as text, cut to their first `MAX_ARGUMENTS` characters."""


NO_TOOL = ""
"""Stands for the tool of a turn that calls none, because the program ends or waits for its user."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """The work that a program has left after a turn."""

    tokens: Distribution
    """Number of tokens of prompts and outputs that have to be computed."""
    turns: float
    """Expected number of turns."""


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """The outcome of a turn."""

    output_tokens: int
    tool: str
    """Key of the called tool; `NO_TOOL` if the turn called none."""
    arguments: str = ""
    last: bool = False
    """Whether the program ended with this turn."""


@dataclass(frozen=True, slots=True)
class PauseOutcome:
    """The outcome of a pause."""

    duration_s: float | None = None
    """Duration of the pause in seconds; None if it was not recorded."""
    returned_tokens: int | None = None
    """Prompt tokens of the next turn beyond this turn's prompt and output; None if they are unknown."""


class LengthModel(Protocol):
    """Predicts how many tokens turns generate."""

    def lengths(self, turns: Sequence[TurnContext]) -> Sequence[Distribution]:
        """Predict the output tokens of each turn, on `LENGTH_EDGES`."""
        ...


@runtime_checkable
class RemainingModel(Protocol):
    """Predicts the work that follows turns."""

    def remaining(self, turns: Sequence[TurnContext]) -> Sequence[Remaining]:
        """Predict the work that each turn's program has left after it."""
        ...


class ToolModel(Protocol):
    """Predicts which tool turns call."""

    def tools(self, turns: Sequence[TurnContext]) -> Sequence[Mapping[str, float]]:
        """Predict the probability of each tool's key, including `NO_TOOL`. They sum up to 1."""
        ...


class DurationModel(Protocol):
    """Predicts the duration of pauses from their beginning."""

    def durations(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """Predict the seconds of each pause, on `DURATION_EDGES`."""
        ...


@runtime_checkable
class ReturnedModel(Protocol):
    """Predicts the tokens that calls return."""

    def returned(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """Predict the prompt tokens that each call returns, on `LENGTH_EDGES`."""
        ...


class Learner(Protocol):
    """A model that learns while it serves. An invalid number (NaN, negative) raises ValueError and changes nothing."""

    def turn_ended(self, turn: TurnContext, outcome: TurnOutcome) -> None:
        """Learn from a turn that has been generated."""
        ...

    def pause_ended(self, pause: PauseContext, outcome: PauseOutcome) -> None:
        """Learn from a pause whose tool has returned."""
        ...

    def program_ended(self, turns: Sequence[TurnContext], remaining: Sequence[tuple[int, int]]) -> None:
        """Learn from a program that has ended. ``remaining``: after each turn, (tokens to compute, turns)."""
        ...


@dataclass(frozen=True, slots=True)
class TurnSeen:
    """A turn and its outcome."""

    turn: TurnContext
    outcome: TurnOutcome


@dataclass(frozen=True, slots=True)
class PauseSeen:
    """A pause and its outcome."""

    pause: PauseContext
    outcome: PauseOutcome


@dataclass(frozen=True, slots=True)
class ProgramSeen:
    """A program that has ended."""

    turns: Sequence[TurnContext]
    remaining: Sequence[tuple[int, int]]
    """After each of its turns, the tokens that had to be computed, and the number of turns."""


Observation = TurnSeen | PauseSeen | ProgramSeen


def learn(learner: Learner, observation: Observation) -> bool:
    """Let a model learn from an observation. Return False if the observation is invalid and nothing was learnt."""
    try:
        match observation:
            case TurnSeen():
                learner.turn_ended(observation.turn, observation.outcome)
            case PauseSeen():
                learner.pause_ended(observation.pause, observation.outcome)
            case ProgramSeen():
                learner.program_ended(observation.turns, observation.remaining)
    except ValueError:
        return False
    return True


def sensible(observation: Observation) -> bool:
    """Return whether the numbers of an observation are finite and not negative."""
    match observation:
        case TurnSeen(outcome=TurnOutcome(output_tokens=tokens)):
            return _at_least_0(tokens)
        case PauseSeen(outcome=PauseOutcome(duration_s=duration_s, returned_tokens=returned)):
            return (duration_s is None or _at_least_0(duration_s)) and (returned is None or _at_least_0(returned))
        case ProgramSeen(remaining=remaining):
            return all(_at_least_0(number) for pair in remaining for number in pair)


def _at_least_0(number: float) -> bool:
    return math.isfinite(number) and number >= 0
