"""How good models are on programs that they were not fitted on. See `predictor_service.split` for who is tested."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import ConfigError
from cluster.registry import PREDICTORS
from predictor_service.baselines import PerToolExponential, PerToolMean
from predictor_service.distribution import Distribution
from predictor_service.examples import ProgramExample, TurnExample, teach_end, teach_turn
from predictor_service.metrics import (
    NumberScores,
    RankScores,
    ToolScores,
    number_scores,
    rank_correlation,
    tool_scores,
)
from predictor_service.model import LengthModel, Remaining
from predictor_service.split import split
from predictor_service.statistics_model import StatisticsModel

PER_TOOL_MEAN, PER_TOOL_EXPONENTIAL = "per-tool mean", "per-tool exponential"
BASELINES: Mapping[str, Callable[[Iterable[ProgramExample]], LengthModel]] = {
    PER_TOOL_MEAN: PerToolMean.fit,
    PER_TOOL_EXPONENTIAL: PerToolExponential.fit,
}
ONLINE = ", learning"
"""Follows the name of a model that learns from the programs it is tested on, each after it was forecast."""


@dataclass(frozen=True, slots=True)
class SourceScores:
    """One model on one source's programs; None: it does not answer this, or there was nothing to answer."""

    model: str
    source: str
    lengths: NumberScores | None
    remaining: RankScores | None
    tools: ToolScores | None
    durations: NumberScores | None
    returned: NumberScores | None


@dataclass(slots=True)
class _Asked:
    """Forecasts, and what happened."""

    lengths: list[Distribution] = field(default_factory=list)
    remaining: list[Remaining] = field(default_factory=list)
    tools: list[Mapping[str, float]] = field(default_factory=list)
    durations: list[Distribution] = field(default_factory=list)
    returned: list[Distribution] = field(default_factory=list)
    turns: list[TurnExample] = field(default_factory=list)
    pauses: list[TurnExample] = field(default_factory=list)

    def ask(self, model: Any, turns: Sequence[TurnExample]) -> None:
        contexts = [turn.context for turn in turns]
        self.turns += turns
        self.lengths += model.lengths(contexts)
        self.remaining += model.remaining(contexts)
        if hasattr(model, "tools"):
            self.tools += model.tools(contexts)
        ended = [turn for turn in turns if turn.pause is not None and turn.pause_outcome is not None]
        if hasattr(model, "durations") and ended:
            pauses = [turn.pause for turn in ended]
            self.pauses += ended
            self.durations += model.durations(pauses)
            self.returned += model.returned(pauses)

    def scores(self, model: str, source: str) -> SourceScores:
        outcomes = [turn.pause_outcome for turn in self.pauses]
        seconds = [outcome.duration_s if outcome else None for outcome in outcomes]
        tokens = [outcome.returned_tokens if outcome else None for outcome in outcomes]
        return SourceScores(
            model=model,
            source=source,
            lengths=number_scores(self.lengths, [turn.outcome.output_tokens for turn in self.turns]),
            remaining=self._rank_scores(),
            tools=tool_scores(self.tools, [turn.outcome.tool for turn in self.turns]) if self.tools else None,
            durations=_known(self.durations, seconds),
            returned=_known(self.returned, tokens),
        )

    def _rank_scores(self) -> RankScores:
        tokens, turns = zip(*(turn.remaining for turn in self.turns), strict=True)
        return RankScores(
            count=len(self.turns),
            tokens=rank_correlation([left.tokens.mean for left in self.remaining], tokens),
            turns=rank_correlation([left.turns for left in self.remaining], turns),
        )


def _known(forecasts: Sequence[Distribution], happened: Sequence[float | None]) -> NumberScores | None:
    pairs = [(forecast, value) for forecast, value in zip(forecasts, happened, strict=True) if value is not None]
    return number_scores([forecast for forecast, _ in pairs], [value for _, value in pairs])


def scores(name: str, model: Any, programs: Sequence[ProgramExample]) -> list[SourceScores]:
    """A model that stays as it is, on each source in the order in which they come."""
    asked: dict[str, _Asked] = {}
    for program in programs:
        asked.setdefault(program.source, _Asked()).ask(model, program.turns)
    return [answers.scores(name, source) for source, answers in asked.items()]


def scores_online(name: str, model: Any, programs: Sequence[ProgramExample]) -> list[SourceScores]:
    """A Learner that learns from each turn once it has forecast it, the programs one after another."""
    asked: dict[str, _Asked] = {}
    for program in programs:
        answers = asked.setdefault(program.source, _Asked())
        for turn in program.turns:
            answers.ask(model, [turn])
            teach_turn(model, turn)
        teach_end(model, program)
    return [answers.scores(name + ONLINE, source) for source, answers in asked.items()]


def evaluated(
    programs: Sequence[ProgramExample],
    seed: int,
    names: Sequence[str],
    ready: Mapping[str, Any] | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> list[SourceScores]:
    """Baselines and models, fitted on the one side and asked on the other.

    Args:
        programs: of both sides.
        seed: of the split.
        names: registered models.
        ready: of them, those that need no fitting; they have not seen the other side.
        done: told what is finished.

    Raises:
        ConfigError: a name is not registered, or a side of the split is empty.
    """
    train, test = split(programs, seed)
    if not train or not test:
        raise ConfigError(f"--split-seed {seed}: of {len(programs)} programs it leaves nothing to train on or to test")
    found: list[SourceScores] = []
    for name, fit in BASELINES.items():
        found += scores(name, fit(train), test)
        done(name)
    for name in names:
        cls = PREDICTORS.load(name)
        model = (ready or {}).get(name) or cls.fit(train)
        found += scores(name, model, test)
        if isinstance(model, StatisticsModel):
            # A copy: the one that was asked stays as it is.
            found += scores_online(name, StatisticsModel.from_bytes(model.to_bytes()), test)
        done(name)
    return found
