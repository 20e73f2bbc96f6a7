"""The model `tabular`: gradient-boosted trees (LightGBM) that correct the statistics' forecasts.

For each question, trees predict the normal score of the value in the statistics' distribution, which is its distance
from the median in standard deviations. The answer is that distribution, shifted by the prediction and stretched by the
error of the predictions on held-out programs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Protocol

import lightgbm
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter
from scipy.special import ndtr, ndtri

from cluster.core.errors import ConfigError
from predictor_service.bundle import Bundle, Origin, read_bundle, write_bundle
from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES, Distribution, Floats, bin_of
from predictor_service.examples import ProgramExample, TurnExample
from predictor_service.features import (
    FEATURES_VERSION,
    PAUSE_FEATURES,
    TURN_FEATURES,
    Vectors,
    pause_features,
    turn_features,
)
from predictor_service.model import (
    DurationModel,
    LengthModel,
    PauseContext,
    Remaining,
    RemainingModel,
    ReturnedModel,
    TurnContext,
)
from predictor_service.statistics_model import StatisticsModel

PRIOR_SHARE = 0.2
"""Weight of the statistics' own distribution in every answer. With it, answers follow statistics that learn online,
even for turns that the trees do not know."""
FOLDS = 5
"""Folds of the groups. Each fold is forecast by statistics of the others. The last one decides when training stops."""
MOST_TURNS = 60_000
"""Turns to train on, at most. Of more turns, programs are drawn at random."""
LEAST_ROWS = 20
"""Least number of rows to train on, and of rows in the last fold."""
MOST_ROUNDS, PATIENCE_ROUNDS = 600, 20
"""Rounds of boosting at most, and rounds without an improvement on the last fold after which it stops."""
PARAMETERS = {
    "objective": "l2",
    "learning_rate": 0.1,
    "num_leaves": 31,
    "min_data_in_leaf": 20,
    "feature_fraction": 0.3,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "lambda_l2": 1.0,
    "max_bin": 63,
    "num_threads": 1,
    "deterministic": True,
    "force_col_wise": True,
    "verbosity": -1,
}
LARGEST_SCORE = 3.7
"""Bound at which normal scores are clipped. About 1 in 10,000 values is beyond it on each side."""
LEAST_CUMULATED = 1e-9
SPREAD_PRIOR = 50
"""Rows with a spread of 1 that are added to each source's rows, as a source may have few of them."""
MOST_TURNS_LEFT = 4096.0

_MODEL, _STATISTICS = "tabular", "statistics.bin"
LENGTHS, REMAINING, TURNS, DURATIONS, RETURNED = QUESTIONS = ("lengths", "remaining", "turns", "durations", "returned")
_EDGES = {LENGTHS: LENGTH_EDGES, REMAINING: LENGTH_EDGES, DURATIONS: DURATION_EDGES, RETURNED: LENGTH_EDGES}
_TURN_INPUTS, _PAUSE_INPUTS = TURN_FEATURES + 7, PAUSE_FEATURES + 6
"""Inputs of the trees: the features, three numbers of each prior distribution and, for turns, the expected turns."""
_SPREADS = TypeAdapter(dict[str, dict[str, Annotated[float, Field(gt=0, lt=100)]]])


class Prior(LengthModel, RemainingModel, DurationModel, ReturnedModel, Protocol):
    """The model whose forecasts are corrected."""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The features of turns or pauses, and the prior's answers to each question."""

    features: Vectors
    priors: Mapping[str, Floats]
    """By question, the shares of bins, shape [rows, bins]; for `TURNS`, the expected number, shape [rows]."""


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """The trees of one question."""

    trees: Any
    """A `lightgbm.Booster`."""
    spreads: Mapping[str, float]
    """By source, the standard deviation of normal scores around their predictions. The key "" is for other sources."""

    def shares(self, inputs: Inputs, question: str, sources: Sequence[str]) -> Floats:
        """Return the prior's distributions after the shift and the stretch, shape [rows, bins]."""
        prior = inputs.priors[question]
        spread = np.array([[self.spreads.get(source, self.spreads[""])] for source in sources])
        shift = self.trees.predict(inputs.features, num_threads=1)[:, None]
        scores = ndtri(np.clip(_cumulated(prior), LEAST_CUMULATED, 1 - LEAST_CUMULATED))
        cumulated = ndtr((scores - shift) / spread)
        cumulated[:, 0], cumulated[:, -1] = 0.0, 1.0
        answer: Floats = (1 - PRIOR_SHARE) * np.diff(cumulated, axis=1) + PRIOR_SHARE * prior
        return answer


def turn_inputs(turns: Sequence[TurnContext], prior: Prior) -> Inputs:
    """Make the inputs of the trees for turns."""
    lengths = _stacked(prior.lengths(turns), LENGTH_EDGES)
    later = prior.remaining(turns)
    remaining = _stacked([answer.tokens for answer in later], LENGTH_EDGES)
    count = np.array([answer.turns for answer in later], dtype=np.float64)
    summaries = [_summary(lengths, LENGTH_EDGES), _summary(remaining, LENGTH_EDGES), np.log1p(count)[:, None]]
    features = np.hstack([turn_features(turns), *summaries]).astype(np.float32)
    return Inputs(features, {LENGTHS: lengths, REMAINING: remaining, TURNS: count})


def pause_inputs(pauses: Sequence[PauseContext], prior: Prior) -> Inputs:
    """Make the inputs of the trees for pauses."""
    durations = _stacked(prior.durations(pauses), DURATION_EDGES)
    returned = _stacked(prior.returned(pauses), LENGTH_EDGES)
    summaries = [_summary(durations, DURATION_EDGES), _summary(returned, LENGTH_EDGES)]
    features = np.hstack([pause_features(pauses), *summaries]).astype(np.float32)
    return Inputs(features, {DURATIONS: durations, RETURNED: returned})


class TabularModel:
    """Predicts lengths, remaining work, durations and returned tokens.

    Args:
        statistics: statistics fitted to the programs that the trees were trained on.
        corrections: corrections by question. A question without one gets the prior's answer.
        prior: the model that is corrected; None uses ``statistics``. It may be statistics that learn while they serve,
            so that the answers follow them.
    """

    def __init__(
        self, statistics: StatisticsModel, corrections: Mapping[str, Correction], prior: Prior | None = None
    ) -> None:
        self.statistics = statistics
        self._corrections = corrections
        self._prior: Prior = statistics if prior is None else prior

    def with_prior(self, prior: Prior) -> "TabularModel":
        """Return a model with the same trees that corrects other statistics."""
        return TabularModel(self.statistics, self._corrections, prior)

    def lengths(self, turns: Sequence[TurnContext]) -> Sequence[Distribution]:
        """See `LengthModel`."""
        return self.lengths_and_remaining(turns)[0]

    def remaining(self, turns: Sequence[TurnContext]) -> Sequence[Remaining]:
        """See `LengthModel`."""
        return self.lengths_and_remaining(turns)[1]

    def lengths_and_remaining(self, turns: Sequence[TurnContext]) -> tuple[Sequence[Distribution], Sequence[Remaining]]:
        """Predict both quantities. The features are computed once."""
        if not turns:
            return [], []
        inputs, sources = turn_inputs(turns, self._prior), [turn.source for turn in turns]
        counts = inputs.priors[TURNS]
        if TURNS in self._corrections:
            predicted = np.expm1(self._corrections[TURNS].trees.predict(inputs.features, num_threads=1))
            counts = (1 - PRIOR_SHARE) * np.clip(predicted, 0.0, MOST_TURNS_LEFT) + PRIOR_SHARE * counts
        tokens = self._distributions(REMAINING, inputs, sources)
        remaining = [Remaining(answer, float(count)) for answer, count in zip(tokens, counts, strict=True)]
        return self._distributions(LENGTHS, inputs, sources), remaining

    def durations(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """See `DurationModel`."""
        return self.durations_and_returned(pauses)[0]

    def returned(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """See `DurationModel`."""
        return self.durations_and_returned(pauses)[1]

    def durations_and_returned(
        self, pauses: Sequence[PauseContext]
    ) -> tuple[Sequence[Distribution], Sequence[Distribution]]:
        """Predict both quantities. The features are computed once."""
        if not pauses:
            return [], []
        inputs, sources = pause_inputs(pauses, self._prior), [pause.turn.source for pause in pauses]
        return self._distributions(DURATIONS, inputs, sources), self._distributions(RETURNED, inputs, sources)

    def _distributions(self, question: str, inputs: Inputs, sources: Sequence[str]) -> list[Distribution]:
        correction = self._corrections.get(question)
        shares = inputs.priors[question] if correction is None else correction.shares(inputs, question, sources)
        return [Distribution(_EDGES[question], row) for row in shares]

    @classmethod
    def fit(cls, programs: Sequence[ProgramExample], seed: int = 0) -> "TabularModel":
        """Train on ``programs``, on one core.

        The trees see only forecasts of statistics that were fitted without the row's own group of programs, as in
        serving. Otherwise they would trust statistics that have already seen the row.

        Raises:
            ConfigError: there is too little data.
        """
        drawn = _drawn(programs, seed)
        folds = [[program for program in drawn if fold_of(program.split_group, seed) == fold] for fold in range(FOLDS)]
        rows: dict[str, list[_Rows]] = {question: [] for question in QUESTIONS}
        for inside in folds:
            statistics = StatisticsModel.fit(program for other in folds if other is not inside for program in other)
            turns = [turn for program in inside for turn in program.turns]
            paused = [turn for turn in turns if turn.pause_outcome is not None]
            of_turns = turn_inputs([turn.context for turn in turns], statistics)
            of_pauses = pause_inputs([turn.pause for turn in paused if turn.pause is not None], statistics)
            for question in (LENGTHS, REMAINING, TURNS):
                rows[question].append(_known(question, turns, of_turns))
            for question in (DURATIONS, RETURNED):
                rows[question].append(_known(question, paused, of_pauses))
        corrections = {name: found for name in QUESTIONS if (found := _correction(rows[name], seed)) is not None}
        if LENGTHS not in corrections:
            fit, held_out = sum(len(part.targets) for part in rows[LENGTHS][:-1]), len(rows[LENGTHS][-1].targets)
            raise ConfigError(
                f"too little to learn from: {fit} turns in {FOLDS - 1} of {FOLDS} parts of the groups and {held_out} "
                f"in the last one; the model tabular needs {LEAST_ROWS} in each"
            )
        return cls(StatisticsModel.fit(programs), corrections)

    def save(self, directory: Path, origin: Origin | None = None) -> None:
        """Write a bundle.

        Raises:
            ConfigError: it cannot be written.
        """
        parts = {_file(name): one.trees.model_to_string().encode() for name, one in self._corrections.items()}
        parts[_STATISTICS] = self.statistics.to_bytes()
        settings = {"spreads": {name: dict(one.spreads) for name, one in self._corrections.items()}}
        write_bundle(directory, Bundle(_MODEL, FEATURES_VERSION, origin or Origin(), parts=parts, settings=settings))

    @classmethod
    def load(cls, directory: Path) -> "TabularModel":
        """Read a bundle that `save` wrote.

        Raises:
            ConfigError: it is no complete bundle of this model and version; the message names the file and the field.
        """
        bundle = read_bundle(directory, _MODEL, FEATURES_VERSION)
        with bundle.reading(directory):
            statistics = StatisticsModel.from_bytes(bundle.part(_STATISTICS))
            corrections = {}
            for name, spreads in _SPREADS.validate_python(bundle.settings.get("spreads")).items():
                if name not in QUESTIONS or "" not in spreads:
                    raise ValueError(f"settings.spreads.{name}: is no question, or has no general spread")
                corrections[name] = Correction(_trees(name, bundle.part(_file(name))), spreads)
        return cls(statistics, corrections)


def fold_of(group: str, seed: int) -> int:
    """Return the fold of a group. It does not depend on other groups, nor on the split for the test."""
    digest = blake2b(f"fold/{seed}/{group}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % FOLDS


def _drawn(programs: Sequence[ProgramExample], seed: int) -> list[ProgramExample]:
    kept: list[ProgramExample] = []
    turns = 0
    for index in np.random.default_rng(seed).permutation(len(programs)):
        program = programs[int(index)]
        if kept and turns + len(program.turns) > MOST_TURNS:
            break
        kept.append(program)
        turns += len(program.turns)
    return kept


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of one question whose outcomes are known."""

    features: Vectors
    targets: Floats
    sources: NDArray[np.str_]


def _correction(folds: Sequence[_Rows], seed: int) -> Correction | None:
    """Train trees on all folds but the last one. Return None if too few values are known."""
    fit, held_out = _joined(folds[:-1]), folds[-1]
    if min(len(fit.targets), len(held_out.targets)) < LEAST_ROWS:
        return None
    data = lightgbm.Dataset(fit.features, fit.targets)
    trees = lightgbm.train(
        {**PARAMETERS, "seed": seed},
        data,
        MOST_ROUNDS,
        valid_sets=[lightgbm.Dataset(held_out.features, held_out.targets, reference=data)],
        callbacks=[lightgbm.early_stopping(PATIENCE_ROUNDS, verbose=False)],
    )
    squares = (held_out.targets - trees.predict(held_out.features, num_threads=1)) ** 2
    spreads = {"": _spread(squares)}
    for source in set(held_out.sources.tolist()):
        spreads[source] = _spread(squares[held_out.sources == source])
    return Correction(trees, spreads)


def _joined(parts: Sequence[_Rows]) -> _Rows:
    return _Rows(
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.sources for part in parts]),
    )


def _spread(squares: Floats) -> float:
    return float(np.sqrt((squares.sum() + SPREAD_PRIOR) / (len(squares) + SPREAD_PRIOR)))


def _value(question: str, example: TurnExample) -> float:
    """Return the actual value of a question's quantity; NaN if it is unknown."""
    match question:
        case "lengths":
            return float(example.outcome.output_tokens)
        case "remaining":
            return float(example.remaining[0])
        case "turns":
            return float(example.remaining[1])
    outcome = example.pause_outcome
    value = None if outcome is None else outcome.duration_s if question == DURATIONS else outcome.returned_tokens
    return np.nan if value is None else float(value)


def _known(question: str, examples: Sequence[TurnExample], inputs: Inputs) -> _Rows:
    values = np.array([_value(question, example) for example in examples], dtype=np.float64)
    known = np.isfinite(values)
    prior = inputs.priors[question][known]
    targets = np.log1p(values[known]) if question == TURNS else normal_scores(prior, _EDGES[question], values[known])
    sources = np.array([example.context.source for example in examples], dtype=np.str_)
    return _Rows(inputs.features[known], targets, sources[known])


def normal_scores(prior: Floats, edges: Floats, values: Floats) -> Floats:
    """Return the normal score of each value in its prior distribution, shape [rows]."""
    bins, rows = bin_of(edges, values), np.arange(len(values))
    part = np.clip((values - edges[bins]) / (edges[bins + 1] - edges[bins]), 0.0, 1.0)
    below = _cumulated(prior)
    ranks = below[rows, bins] + part * (below[rows, bins + 1] - below[rows, bins])
    # Rounding can make the sum of all shares a little larger than 1.
    scores: Floats = np.clip(ndtri(np.clip(ranks, 0.0, 1.0)), -LARGEST_SCORE, LARGEST_SCORE)
    return scores


def _stacked(answers: Sequence[Distribution], edges: Floats) -> Floats:
    return np.array([answer.shares for answer in answers], dtype=np.float64).reshape(len(answers), len(edges) - 1)


def _cumulated(shares: Floats) -> Floats:
    """Return the cumulated shares at the edges, shape [rows, bins + 1]."""
    return np.concatenate([np.zeros((len(shares), 1)), np.cumsum(shares, axis=1)], axis=1)


def _summary(shares: Floats, edges: Floats) -> Vectors:
    """Return the logarithms of each prior's mean, median and upper decile as features, shape [rows, 3]."""
    cumulated = np.cumsum(shares, axis=1)
    middles = (edges[:-1] + edges[1:]) / 2
    ranks = [middles[np.minimum((cumulated < q).sum(axis=1), len(middles) - 1)] for q in (0.5, 0.9)]
    return np.log(np.stack([shares @ middles, *ranks], axis=1) + 1e-3).astype(np.float32)


def _file(question: str) -> str:
    return f"{question}.lightgbm.txt"


def _trees(question: str, content: bytes) -> Any:
    """Read trees in LightGBM's text format, which contains only numbers.

    Raises:
        ValueError: the content is no such model, or the model has other features.
    """
    try:
        trees = lightgbm.Booster(model_str=content.decode("ascii"))
    except (lightgbm.basic.LightGBMError, UnicodeDecodeError) as error:
        raise ValueError(f"{_file(question)}: {error}") from error
    wanted = _PAUSE_INPUTS if question in (DURATIONS, RETURNED) else _TURN_INPUTS
    if trees.num_feature() != wanted:
        raise ValueError(f"{_file(question)}: has {trees.num_feature()} features, not {wanted}")
    return trees
