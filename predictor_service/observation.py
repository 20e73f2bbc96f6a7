"""What a model learns from while it serves: turns, pauses and programs that have ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from predictor_service.context import PauseContext, TurnContext
from predictor_service.model import Learner, PauseOutcome, TurnOutcome


@dataclass(frozen=True, slots=True)
class TurnSeen:
    """A turn, and what became of it."""

    turn: TurnContext
    outcome: TurnOutcome


@dataclass(frozen=True, slots=True)
class PauseSeen:
    """A pause, and what became of it."""

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
    """Tell a model; False: it makes no sense, and nothing was learnt."""
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
    """Are its numbers finite and not negative?"""
    match observation:
        case TurnSeen(outcome=TurnOutcome(output_tokens=tokens)):
            return _at_least_0(tokens)
        case PauseSeen(outcome=PauseOutcome(duration_s=duration_s, returned_tokens=returned)):
            return (duration_s is None or _at_least_0(duration_s)) and (returned is None or _at_least_0(returned))
        case ProgramSeen(remaining=remaining):
            return all(_at_least_0(number) for pair in remaining for number in pair)


def _at_least_0(number: float) -> bool:
    return math.isfinite(number) and number >= 0
