"""Fits models to one side of a split, and scores them on the other side (`predictor_service.examples.split`)."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cluster.core.errors import ConfigError
from cluster.core.program import without_class
from cluster.core.registry import BASED_PREDICTORS, PREDICTORS
from predictor_service.bundle import Origin, StoredModel, data_hash
from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES, Distribution, Floats
from predictor_service.examples import TEST_SHARE, ProgramExample, TurnExample, split, teach_end, teach_turn
from predictor_service.model import NO_TOOL, LengthModel, PauseContext, Remaining, TurnContext
from predictor_service.scores import (
    PER_TOOL_EXPONENTIAL,
    NumberScores,
    RankScores,
    SourceScores,
    number_scores,
    paper_scores,
    rank_correlation,
    tool_scores,
)
from predictor_service.statistics_model import StatisticsModel

ONLINE = ", learning"
"""Suffix of the name of a model that also learns from the tested programs, from each turn after its forecast."""


@dataclass(slots=True)
class _Asked:
    """Forecasts, and the examples with their outcomes."""

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
        if hasattr(model, "remaining"):
            self.remaining += model.remaining(contexts)
        if hasattr(model, "tools"):
            self.tools += model.tools(contexts)
        ended = [turn for turn in turns if turn.pause is not None and turn.pause_outcome is not None]
        if hasattr(model, "durations") and ended:
            pauses = [turn.pause for turn in ended]
            self.pauses += ended
            self.durations += model.durations(pauses)
            if hasattr(model, "returned"):
                self.returned += model.returned(pauses)

    def scores(self, model: str, source: str) -> SourceScores:
        outcomes = [turn.pause_outcome for turn in self.pauses]
        seconds = [outcome.duration_s if outcome else None for outcome in outcomes]
        tokens = [outcome.returned_tokens if outcome else None for outcome in outcomes]
        lengths = [turn.outcome.output_tokens for turn in self.turns]
        return SourceScores(
            model=model,
            source=source,
            lengths=number_scores(self.lengths, lengths),
            papers=paper_scores((self.lengths, lengths), _pairs(self.durations, seconds)),
            remaining=self._rank_scores() if self.remaining else None,
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


def _pairs(
    forecasts: Sequence[Distribution], happened: Sequence[float | None]
) -> tuple[Sequence[Distribution], Sequence[float]]:
    """Return the forecasts whose outcomes are known, and these outcomes."""
    if not forecasts:
        return (), ()
    known = [(forecast, value) for forecast, value in zip(forecasts, happened, strict=True) if value is not None]
    return [forecast for forecast, _ in known], [value for _, value in known]


def _known(forecasts: Sequence[Distribution], happened: Sequence[float | None]) -> NumberScores | None:
    return number_scores(*_pairs(forecasts, happened))


def scores(name: str, model: Any, programs: Sequence[ProgramExample]) -> list[SourceScores]:
    """Score a model that does not learn, on each source in the order of its first program."""
    asked: dict[str, _Asked] = {}
    for program in programs:
        asked.setdefault(program.source, _Asked()).ask(model, program.turns)
    return [answers.scores(name, source) for source, answers in asked.items()]


def scores_online(name: str, model: Any, programs: Sequence[ProgramExample]) -> list[SourceScores]:
    """Score a Learner that learns from each turn after its forecast, one program after another."""
    asked: dict[str, _Asked] = {}
    for program in programs:
        answers = asked.setdefault(program.source, _Asked())
        for turn in program.turns:
            answers.ask(model, [turn])
            teach_turn(model, turn)
        teach_end(model, program)
    return [answers.scores(name + ONLINE, source) for source, answers in asked.items()]


def fitted(name: str, programs: Sequence[ProgramExample], base: Path | None) -> Any:
    """Fit the registered model ``name`` to ``programs``. Those of `BASED_PREDICTORS` need the checkpoint ``base``.

    Raises:
        ConfigError: there is no such model, the base is missing, or there is too little data.
    """
    model = PREDICTORS.load(name)
    if name not in BASED_PREDICTORS:
        return model.fit(programs)
    if base is None:
        raise ConfigError(
            f"--base: the model {name} needs a directory with a checkpoint (config, safetensors, tokenizer)"
        )
    return model.fit(programs, base)


def evaluated(
    programs: Sequence[ProgramExample],
    seed: int,
    names: Sequence[str],
    ready: Mapping[str, Any] | None = None,
    base: Path | None = None,
    on_finished: Callable[[str], None] = lambda _: None,
    test_share: float = TEST_SHARE,
) -> list[SourceScores]:
    """Return the scores of baselines and models, fitted on one side of a split and tested on the other.

    Args:
        programs: the programs of both sides.
        seed: the seed of the split.
        names: names of registered models.
        ready: fitted models by name; they must not have seen the test side.
        base: see `fitted`.
        on_finished: called with the name of each model after its evaluation.
        test_share: the share of the groups that are tested on.

    Raises:
        ConfigError: a name is not registered, or a side of the split is empty.
    """
    train, test = split(programs, seed, test_share)
    if not train or not test:
        raise ConfigError(f"--split-seed {seed}: of {len(programs)} programs it leaves nothing to train on or to test")
    found: list[SourceScores] = []
    for name, fit in BASELINES.items():
        found += scores(name, fit(train), test)
        on_finished(name)
    for name in names:
        model = (ready or {}).get(name) or fitted(name, train, base)
        found += scores(name, model, test)
        if isinstance(model, StatisticsModel):
            # A copy learns, so that the model that was tested stays as it is.
            found += scores_online(name, StatisticsModel.from_bytes(model.to_bytes()), test)
        on_finished(name)
    return found


def test_share_of(name: str) -> float:
    """Return the share of the groups that the model ``name`` is tested on by default: that of its paper, or 0.3."""
    return float(getattr(PREDICTORS.load(name), "TEST_SHARE", TEST_SHARE))


def trained(
    name: str,
    programs: Sequence[ProgramExample],
    seed: int | None,
    base: Path | None = None,
    test_share: float | None = None,
) -> StoredModel:
    """Train the model ``name``, and score it by source on programs that it has not seen.

    Args:
        name: the name in the registry.
        programs: the programs of both sides.
        seed: the seed of the split; None trains on all programs and gives no scores.
        base: see `fitted`.
        test_share: the share of the groups that are tested on; None: see `test_share_of`.

    Raises:
        ConfigError: there is no such model, or too little data.
    """
    share = test_share_of(name) if test_share is None else test_share
    train, test = (list(programs), []) if seed is None else split(programs, seed, share)
    if not train:
        raise ConfigError(f"--split-seed {seed}: of {len(programs)} programs it leaves nothing to train on")
    model = fitted(name, train, base)
    metrics = {
        score.source: {k: v for k, v in asdict(score).items() if k not in ("model", "source")}
        for score in (scores(name, model, test) if test else ())
    }
    sources = tuple(sorted({program.source for program in train}))
    return StoredModel(name, model, Origin(data_hash(train), len(train), sources, seed, share, metrics))


def check_unseen(stored: StoredModel, seed: int, test_share: float | None = None) -> None:
    """Check that the model was not trained on the programs that ``seed`` and ``test_share`` select for the test.

    Args:
        stored: the model.
        seed: the seed of the split.
        test_share: the share of the groups that are tested on; None: that of the model's training.

    Raises:
        ConfigError: the model was trained on them, or may have been.
    """
    learnt, share = stored.origin.split_seed, stored.origin.test_share
    if learnt != seed:
        whence = "all programs" if learnt is None else f"the train side of --split-seed {learnt}"
        raise ConfigError(f"--bundle: the model {stored.name} was trained on {whence}, but --split-seed is {seed}")
    if test_share is not None and test_share > share:
        raise ConfigError(
            f"--test-share {test_share:g}: the model {stored.name} of --bundle was trained with {share:g}, so that it "
            "has seen some of these programs"
        )


# --- baselines: the mean per tool, and an exponential distribution of that mean (InferCept) ---

_POINT = 1e-9
"""Width of a distribution that stands for a single number."""
Key = tuple[str, str]
"""A source, and a tool without the class of its arguments."""


class _Means:
    """The mean of the values of a source's tool, or of all values if it has none."""

    def __init__(self) -> None:
        self._sums: dict[Key | None, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, key: Key, value: float) -> None:
        for level in (key, None):
            self._sums[level][0] += 1
            self._sums[level][1] += value

    def of(self, key: Key) -> float:
        count, total = self._sums.get(key) or self._sums.get(None) or (1.0, 0.0)
        return total / count


class PerToolMean:
    """Baseline: means of the train side by source and tool. A turn belongs to the tool whose result it contains."""

    def __init__(self) -> None:
        self._length, self._left_tokens, self._left_turns = _Means(), _Means(), _Means()
        self._duration, self._returned = _Means(), _Means()
        self._next: dict[Key, Counter[str]] = defaultdict(Counter)

    @classmethod
    def fit(cls, programs: Iterable[ProgramExample]) -> "PerToolMean":
        """Compute the means over ``programs``."""
        model = cls()
        for program in programs:
            for turn in program.turns:
                model._learn_turn(turn.context, turn.outcome.output_tokens, turn.outcome.tool, turn.remaining)
                if turn.pause is not None and turn.pause_outcome is not None:
                    key, outcome = _called(turn.pause), turn.pause_outcome
                    if outcome.duration_s is not None:
                        model._duration.add(key, outcome.duration_s)
                    if outcome.returned_tokens is not None:
                        model._returned.add(key, outcome.returned_tokens)
        return model

    def lengths(self, turns: Sequence[TurnContext]) -> Sequence[Distribution]:
        """See `LengthModel`. Each distribution is a single number on its own edges."""
        return [self._spread(self._length.of(_brought(turn)), LENGTH_EDGES) for turn in turns]

    def remaining(self, turns: Sequence[TurnContext]) -> Sequence[Remaining]:
        """See `LengthModel`."""
        return [
            Remaining(self._spread(self._left_tokens.of(key), LENGTH_EDGES), self._left_turns.of(key))
            for key in map(_brought, turns)
        ]

    def tools(self, turns: Sequence[TurnContext]) -> Sequence[Mapping[str, float]]:
        """See `ToolModel`. The probabilities are the shares after the same tool."""
        return [self._shares(_brought(turn)) for turn in turns]

    def durations(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """See `DurationModel`."""
        return [self._spread(self._duration.of(_called(pause)), DURATION_EDGES) for pause in pauses]

    def returned(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """See `DurationModel`."""
        return [self._spread(self._returned.of(_called(pause)), LENGTH_EDGES) for pause in pauses]

    def _spread(self, mean: float, edges: Floats) -> Distribution:
        mean = max(mean, _POINT)
        return Distribution(np.array([mean - _POINT, mean]), np.array([1.0]))

    def _learn_turn(self, turn: TurnContext, tokens: int, tool: str, remaining: tuple[int, int]) -> None:
        key = _brought(turn)
        self._length.add(key, tokens)
        self._left_tokens.add(key, remaining[0])
        self._left_turns.add(key, remaining[1])
        self._next[key][tool] += 1

    def _shares(self, key: Key) -> Mapping[str, float]:
        counts = self._next.get(key) or {NO_TOOL: 1}
        total = sum(counts.values())
        return {tool: count / total for tool, count in counts.items()}


class PerToolExponential(PerToolMean):
    """Baseline: an exponential distribution with each mean of `PerToolMean` (InferCept)."""

    def _spread(self, mean: float, edges: Floats) -> Distribution:
        below = -np.expm1(-edges / max(mean, _POINT))
        return Distribution.of_counts(edges, np.diff(below))


def _brought(turn: TurnContext) -> Key:
    return turn.source, without_class(turn.tools[0]) if turn.tools else "start"


def _called(pause: PauseContext) -> Key:
    return pause.turn.source, without_class(pause.tool)


PER_TOOL_MEAN = "per-tool mean"
BASELINES: Mapping[str, Callable[[Iterable[ProgramExample]], LengthModel]] = {
    PER_TOOL_MEAN: PerToolMean.fit,
    PER_TOOL_EXPONENTIAL: PerToolExponential.fit,
}
