"""Scores of forecasts with known outcomes, and tables of scores. The module is pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from predictor_service.distribution import TEN_TOKEN_BINS, Distribution, Floats

INTERVAL = 0.9
TEN = 10.0
LEAST_PROBABILITY = 1e-6
"""Least probability in the logarithmic loss, so that an outcome with the probability 0 costs 13.8 nats."""


@dataclass(frozen=True, slots=True)
class NumberScores:
    """Scores of forecasts of one quantity, in its unit. The point forecast is the median."""

    count: int
    mae: float
    """Mean absolute error of the point forecasts, in the unit of the quantity."""
    crps: float
    """Mean continuous ranked probability score. For a point forecast, it is the absolute error."""
    coverage: float
    """Share of outcomes within the central 90% interval, including its bounds. 0.9 is the best value."""
    within_5: float
    within_15: float
    bin_accuracy: float
    """Share of forecasts whose most probable bin is the outcome's, of 50 bins of 10; the last bin is open."""
    rank_correlation: float | None
    """Spearman's correlation of medians and outcomes; None if one of them is constant."""


@dataclass(frozen=True, slots=True)
class PaperScores:
    """The measures of the papers: Acc-5, Acc-15 and MAE (LAMPS, MARS); accuracy and squared error (AugServe).

    A length is forecast by a class, of 50 bins of 10 tokens: as the middle of the most probable bin. The papers count
    words (LAMPS); here, all are tokens. The point forecast of a duration is its expected value.
    """

    count: int
    """Number of turns whose output length was forecast and is known."""
    acc_5: float
    acc_15: float
    """Shares of lengths with an error of at most 5 and at most 15 tokens."""
    mae: float
    """Mean absolute error, in tokens."""
    bins_off: float
    """Mean distance of the forecast bin from the right one, in bins."""
    accuracy: float
    """Share of lengths whose bin was forecast."""
    mse_s2: float | None
    """Mean squared error of durations, in square seconds; None if the model forecasts none."""


@dataclass(frozen=True, slots=True)
class ToolScores:
    """Scores of forecasts of the tool that a turn calls."""

    count: int
    top_1: float
    log_loss: float
    """Mean logarithmic loss in nats."""


@dataclass(frozen=True, slots=True)
class RankScores:
    """Rank correlations of forecasts of remaining work. Only the order matters, because the forecasts rank programs."""

    count: int
    tokens: float | None
    turns: float | None


@dataclass(frozen=True, slots=True)
class SourceScores:
    """Scores of one model on the programs of one source. None: the model does not predict this, or there is no data."""

    model: str
    source: str
    lengths: NumberScores | None
    papers: PaperScores | None
    remaining: RankScores | None
    tools: ToolScores | None
    durations: NumberScores | None
    returned: NumberScores | None


def number_scores(forecasts: Sequence[Distribution], happened: Sequence[float]) -> NumberScores | None:
    """Score forecasts against their outcomes. Return None if there are none."""
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


def paper_scores(
    lengths: tuple[Sequence[Distribution], Sequence[float]], durations: tuple[Sequence[Distribution], Sequence[float]]
) -> PaperScores | None:
    """Score forecasts of lengths (tokens) and of durations (seconds), each with their outcomes, as the papers do."""
    forecasts, happened = lengths
    if not forecasts:
        return None
    true = np.asarray(happened, float)
    assigned = np.array([_likeliest_bin(forecast) for forecast in forecasts])
    errors = np.abs((assigned + 0.5) * TEN - true)
    squares = [(forecast.mean - seconds) ** 2 for forecast, seconds in zip(*durations, strict=True)]
    return PaperScores(
        count=len(forecasts),
        acc_5=float((errors <= 5).mean()),
        acc_15=float((errors <= 15).mean()),
        mae=float(errors.mean()),
        bins_off=float(np.abs(assigned - _bins(true)).mean()),
        accuracy=float((assigned == _bins(true)).mean()),
        mse_s2=float(np.mean(squares)) if squares else None,
    )


def tool_scores(forecasts: Sequence[Mapping[str, float]], happened: Sequence[str]) -> ToolScores | None:
    """Score forecasts against their outcomes. Return None if there are none."""
    if not forecasts:
        return None
    pairs = list(zip(forecasts, happened, strict=True))
    hits = [tool == max(forecast, key=lambda name: forecast[name]) for forecast, tool in pairs]
    losses = [-math.log(max(LEAST_PROBABILITY, forecast.get(tool, 0.0))) for forecast, tool in pairs]
    return ToolScores(len(pairs), float(np.mean(hits)), float(np.mean(losses)))


def rank_correlation(one: ArrayLike, other: ArrayLike) -> float | None:
    """Return Spearman's correlation, with equal ranks for equal values. None if one side has fewer than two values."""
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


# --- tables ---

PER_TOOL_EXPONENTIAL = "per-tool exponential"
"""Name of the baseline of the column `AGAINST`."""
AGAINST = "to exponential"
MEAN = "mean of sources"

PAPERS = """\
"The papers' measures" forecast the middle of the most probable of 50 bins of 10 tokens, and the expected seconds.
Their figures are of other data: LAMPS has Acc-5 68.5%, Acc-15 78.3% (of words) and MAE 3.06 (ToolBench; OPT-125M). This
MAE cannot be of words, as 21.7% of the errors exceed 15 words; it may be of bins. AugServe has an accuracy of 85% on
ToolBench and 65% on Merge, and mean squared errors of about 5 s and 0.4 s (fine-tuned BERT; its buckets are not in the
paper). Our Merge has no text to read, of ToolBench we have six programs, coding agents generate hundreds of tokens
a turn, hidden reasoning among them, and all programs of a tested task are held out."""


_LENGTH_COLUMNS = {
    "MAE": "mae",
    "within 5": "within_5",
    "within 15": "within_15",
    "bins": "bin_accuracy",
    "CRPS": "crps",
    "in 90%": "coverage",
    "rank": "rank_correlation",
}
_TABLES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "Tokens that a turn generates": ("lengths", {"turns": "count", **_LENGTH_COLUMNS}),
    "The papers' measures": (
        "papers",
        {
            "turns": "count",
            "Acc-5": "acc_5",
            "Acc-15": "acc_15",
            "MAE": "mae",
            "bins off": "bins_off",
            "accuracy": "accuracy",
            "MSE of seconds": "mse_s2",
        },
    ),
    "Seconds that a tool call takes": (
        "durations",
        {
            "pauses": "count",
            "MAE": "mae",
            "CRPS": "crps",
            AGAINST: "",
            "in 90%": "coverage",
            "rank": "rank_correlation",
        },
    ),
    "Tokens that a call returns": (
        "returned",
        {"pauses": "count", "MAE": "mae", "CRPS": "crps", "in 90%": "coverage", "rank": "rank_correlation"},
    ),
    "The tool that a turn calls": ("tools", {"turns": "count", "top 1": "top_1", "log loss": "log_loss"}),
    "What a program has left": (
        "remaining",
        {"turns": "count", "rank of tokens": "tokens", "rank of turns": "turns"},
    ),
}
"""By title of a table: the field of `SourceScores`, and by column the score in this field."""
_COUNTS = ("turns", "pauses")
_DIGITS = {"MAE": 2, "CRPS": 2, "bins off": 2, "MSE of seconds": 2}

Cells = Mapping[str, float | None]
"""The scores of a row by the column's title; None: there is no such score, and the cell is empty."""


def tables(found: Sequence[SourceScores]) -> str:
    """Return a Markdown table for each question that was answered."""
    made = (_table(title, _rows(found, question, columns)) for title, (question, columns) in _TABLES.items())
    return "\n\n".join(table for table in made if table is not None)


def json_lines(found: Sequence[SourceScores], about: Mapping[str, Any]) -> str:
    """Return one JSON line for each model and source, each with the keys of ``about``."""
    return "".join(json.dumps({**about, **asdict(scores)}) + "\n" for scores in found)


def _rows(found: Sequence[SourceScores], question: str, columns: Mapping[str, str]) -> list[tuple[str, str, Cells]]:
    rows: list[tuple[str, str, Cells]] = []
    for each in found:
        if (scores := getattr(each, question)) is not None:
            cells = {
                name: getattr(scores, score) if score else _against(each, found) for name, score in columns.items()
            }
            rows.append((each.source, each.model, cells))
    sources = list(dict.fromkeys(source for source, _, _ in rows))
    rows.sort(key=lambda row: sources.index(row[0]))
    if len(sources) < 2:
        return rows
    for model in dict.fromkeys(name for _, name, _ in rows):
        of_model = [row for _, name, row in rows if name == model]
        rows.append((MEAN, model, {column: _mean(column, [row[column] for row in of_model]) for column in of_model[0]}))
    return rows


def _against(scores: SourceScores, found: Sequence[SourceScores]) -> float | None:
    """Return the CRPS of durations divided by that of an exponential distribution with each tool's mean."""
    wanted = (PER_TOOL_EXPONENTIAL, scores.source)
    baseline = next((each.durations for each in found if (each.model, each.source) == wanted), None)
    return scores.durations.crps / baseline.crps if scores.durations and baseline and baseline.crps else None


def _mean(column: str, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if column in _COUNTS:
        return sum(known)
    return sum(known) / len(known) if len(known) == len(values) else None


def _table(title: str, rows: Sequence[tuple[str, str, Cells]]) -> str | None:
    if not rows:
        return None
    columns = ["source", "model", *rows[0][2]]
    lines = [f"{title}:", "", f"| {' | '.join(columns)} |", f"|---|---|{'---:|' * len(rows[0][2])}"]
    for source, model, cells in rows:
        shown = (_shown(column, value) for column, value in cells.items())
        lines.append(f"| {' | '.join((source, model, *shown))} |")
    return "\n".join(lines)


def _shown(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if column in _COUNTS else f"{value:.{_DIGITS.get(column, 3)}f}"
