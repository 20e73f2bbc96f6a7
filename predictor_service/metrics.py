"""How good forecasts were, once it is known what happened. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from predictor_service.distribution import TEN_TOKEN_BINS, Distribution, Floats

INTERVAL = 0.9
TEN = 10.0
LEAST_PROBABILITY = 1e-6
"""Of what happened, for the logarithm: what a model thought impossible costs 13.8."""


@dataclass(frozen=True, slots=True)
class NumberScores:
    """Of forecasts of one number, in its unit; a forecast's own number is its median."""

    count: int
    mae: float
    """Mean absolute error."""
    crps: float
    """Continuous ranked probability score, in the mean: that of a point is its absolute error."""
    coverage: float
    """Share of what happened within the middle 90%, its bounds included; 0.9 is best."""
    within_5: float
    within_15: float
    bin_accuracy: float
    """Share whose likeliest of 50 bins of 10 was that of what happened; the last one has all beyond, too."""
    rank_correlation: float | None
    """Spearman's, between medians and what happened; None where one of them is always the same."""


@dataclass(frozen=True, slots=True)
class ToolScores:
    """Of forecasts of the tool that a turn calls."""

    count: int
    top_1: float
    log_loss: float
    """Nats."""


@dataclass(frozen=True, slots=True)
class RankScores:
    """Of forecasts of what programs have left, which order them: only the order counts."""

    count: int
    tokens: float | None
    turns: float | None


def number_scores(forecasts: Sequence[Distribution], happened: Sequence[float]) -> NumberScores | None:
    """None of nothing."""
    if not forecasts:
        return None
    true = np.asarray(happened, float)
    medians = np.array([forecast.quantile(0.5) for forecast in forecasts])
    errors = np.abs(medians - true)
    tail = (1 - INTERVAL) / 2
    inside = [
        forecast.quantile(tail) <= value <= forecast.quantile(1 - tail)
        for forecast, value in zip(forecasts, happened, strict=True)
    ]
    return NumberScores(
        count=len(forecasts),
        mae=float(errors.mean()),
        crps=float(np.mean([forecast.crps(value) for forecast, value in zip(forecasts, happened, strict=True)])),
        coverage=float(np.mean(inside)),
        within_5=float((errors <= 5).mean()),
        within_15=float((errors <= 15).mean()),
        bin_accuracy=float((np.array([_likeliest_bin(forecast) for forecast in forecasts]) == _bins(true)).mean()),
        rank_correlation=rank_correlation(medians, true),
    )


def tool_scores(forecasts: Sequence[Mapping[str, float]], happened: Sequence[str]) -> ToolScores | None:
    """None of nothing."""
    if not forecasts:
        return None
    pairs = list(zip(forecasts, happened, strict=True))
    hits = [tool == max(forecast, key=lambda name: forecast[name]) for forecast, tool in pairs]
    losses = [-math.log(max(LEAST_PROBABILITY, forecast.get(tool, 0.0))) for forecast, tool in pairs]
    return ToolScores(len(pairs), float(np.mean(hits)), float(np.mean(losses)))


def rank_correlation(one: ArrayLike, other: ArrayLike) -> float | None:
    """Spearman's: of the ranks, equal values sharing theirs. None where one side has fewer than two values."""
    ranks, others = _ranks(one), _ranks(other)
    if len(ranks) < 2 or not ranks.std() or not others.std():
        return None
    return float(np.corrcoef(ranks, others)[0, 1])


def _ranks(values: ArrayLike) -> Floats:
    _, places, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def _bins(values: Floats) -> Floats:
    return np.clip(np.ceil(values / TEN) - 1, 0, TEN_TOKEN_BINS - 1)


def _likeliest_bin(forecast: Distribution) -> int:
    edges = np.arange(TEN_TOKEN_BINS) * TEN
    cumulated = np.interp(edges, forecast.edges, np.concatenate([[0.0], np.cumsum(forecast.shares)]))
    return int(np.argmax(np.diff(np.append(cumulated, 1.0))))
