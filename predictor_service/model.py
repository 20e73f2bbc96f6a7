"""What a model is asked, what it answers, and what it learns from while it serves.

The inputs are the same from a recorded trace and from a live request, so that a model that was trained on one serves
the other. Answers are in the order of the questions, one for each. A model never raises for what it is asked: what it
does not know, it answers from what all programs have in common.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from predictor_service.distribution import Distribution

HISTORY = 8
"""A context has so many earlier turns, the most recent one first."""
MAX_TEXT = 4096
"""Characters of a prompt's text; of a longer one the last."""
MAX_ARGUMENTS = 4096
"""Characters of a call's arguments; of longer ones the first."""


@dataclass(frozen=True, slots=True)
class TurnContext:
    """A turn that is about to be generated. Lengths in tokens, histories the most recent first."""

    source: str = ""
    """The kind of the program: a trace's name, or a tenant and a model."""
    position: int = 0
    """Turns before it."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    """Tokens of the prompt that the turn before had not: a tool's result, a user's message."""
    outputs: tuple[int, ...] = ()
    """Tokens that the turns before generated, at most HISTORY of them."""
    tools: tuple[str, ...] = ()
    """Tools that the turns before called, as keys of tool statistics (`bash:grep`), at most HISTORY of them."""
    durations_s: tuple[float | None, ...] = ()
    """Durations of those calls; None: not known."""
    returned: tuple[int, ...] = ()
    """Prompt tokens that those calls returned."""
    text: str = ""
    """The new text of the prompt; of a long text the end."""
    offered: tuple[str, ...] = ()
    """Names of the tools that the turn may call; empty: not known."""


@dataclass(frozen=True, slots=True)
class PauseContext:
    """A pause that begins: the turn has ended in a tool call."""

    turn: TurnContext
    tool: str
    """The called tool, as a key of tool statistics."""
    output_tokens: int = 0
    arguments: str = ""
    """The call's arguments as text, of long ones the beginning."""


NO_TOOL = ""
"""The tool of a turn that calls none: the program ends, or waits for its user."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """The rest of a program after the turn in question."""

    tokens: Distribution
    """Tokens of prompts and outputs that will have to be computed."""
    turns: float
    """Expected."""


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """The outcome of a turn."""

    output_tokens: int
    tool: str
    """NO_TOOL: none."""
    arguments: str = ""
    last: bool = False
    """The program ended with it."""


@dataclass(frozen=True, slots=True)
class PauseOutcome:
    """The outcome of a pause."""

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
        """What comes after them?"""
        ...


class ToolModel(Protocol):
    """Which tool will these turns call?"""

    def tools(self, turns: Sequence[TurnContext]) -> Sequence[Mapping[str, float]]:
        """Probabilities of tools' keys, NO_TOOL among them; together 1."""
        ...


class DurationModel(Protocol):
    """How long will these pauses be, from their beginning?"""

    def durations(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """Seconds, on DURATION_EDGES."""
        ...

    def returned(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """Prompt tokens that the calls return, on LENGTH_EDGES."""
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
    """A program that is over."""

    turns: Sequence[TurnContext]
    remaining: Sequence[tuple[int, int]]
    """After each of its turns: tokens to compute, turns."""


Observation = TurnSeen | PauseSeen | ProgramSeen


def learn(learner: Learner, observation: Observation) -> bool:
    """Let a model learn from an observation; False: it makes no sense, and nothing was learnt."""
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
    """Whether its numbers are finite and not negative."""
    match observation:
        case TurnSeen(outcome=TurnOutcome(output_tokens=tokens)):
            return _at_least_0(tokens)
        case PauseSeen(outcome=PauseOutcome(duration_s=duration_s, returned_tokens=returned)):
            return (duration_s is None or _at_least_0(duration_s)) and (returned is None or _at_least_0(returned))
        case ProgramSeen(remaining=remaining):
            return all(_at_least_0(number) for pair in remaining for number in pair)


def _at_least_0(number: float) -> bool:
    return math.isfinite(number) and number >= 0
