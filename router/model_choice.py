"""Which model a program of a class goes to: the first rule that holds. Pure.

A program stays with the model that its class chose, since its KV is there. So the choice is made once for each program
and class, by the ingress of its first turn; `cluster.dispatch.model_selection` shares it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from cluster.config.models import ClassRule


class Chosen(StrEnum):
    """Why a class leads to a model. Label of a metric."""

    RULE = "rule"
    """A rule applies."""
    LEAST_LOADED = "least_loaded"
    """No rule applies, since models are missing or busy: the fitting model that starts soonest."""
    LAST = "last"
    """No model's load is known: the last rule, which has no condition."""


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """The features of a turn that rules test."""

    tools: frozenset[str]
    """Names of the tools that it offers, and of the tool whose result it brings."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model of a class, and why."""

    model: str
    reason: Chosen


def choose_model(rules: Sequence[ClassRule], turn: TurnFacts, start_s: Mapping[str, float | None]) -> ModelChoice:
    """The model for a program whose first turn of this class is ``turn``.

    Args:
        rules: of the class; the last one has no condition.
        turn: the turn.
        start_s: by model, seconds within which a turn is expected to start; None: there is no replica now.
    """
    fitting = [rule for rule in rules if _fits(rule, turn)]
    for rule in fitting:
        waits_s = start_s.get(rule.model)
        if waits_s is not None and (rule.max_start_s is None or waits_s <= rule.max_start_s):
            return ModelChoice(rule.model, Chosen.RULE)
    known = [(waits_s, rule.model) for rule in fitting if (waits_s := start_s.get(rule.model)) is not None]
    if known:
        return ModelChoice(min(known)[1], Chosen.LEAST_LOADED)
    return ModelChoice(rules[-1].model, Chosen.LAST)


def _fits(rule: ClassRule, turn: TurnFacts) -> bool:
    if rule.min_prompt_tokens is not None and turn.prompt_tokens < rule.min_prompt_tokens:
        return False
    if rule.max_prompt_tokens is not None and turn.prompt_tokens > rule.max_prompt_tokens:
        return False
    return rule.tools is None or any(fnmatchcase(tool, pattern) for tool in turn.tools for pattern in rule.tools)
