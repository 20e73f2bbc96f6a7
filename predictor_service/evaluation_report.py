"""What an evaluation found, as text: Markdown tables, one for each question, and JSON lines."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from predictor_service.evaluate import PER_TOOL_EXPONENTIAL, SourceScores

MEAN = "mean of sources"

Cells = Mapping[str, float | None]
"""By column."""

PAPERS = """\
The papers' figures are of other data: LAMPS has 68.5% of lengths within 5 words, 78.3% within 15 and a mean absolute
error of 3.06 words (ToolBench; OPT-125M); AugServe has 65% of 50 bins of 10 tokens right on Merge and 85% on ToolBench
(fine-tuned BERT that reads the prompt). Our Merge has no text to read, of ToolBench we have six programs, coding agents
generate hundreds of tokens a turn, hidden reasoning among them, and all programs of a tested task are held out."""


def tables(found: Sequence[SourceScores]) -> str:
    """A table of each question to which there are answers."""
    return "\n\n".join(
        table for title, cells in _QUESTIONS.items() if (table := _table(title, _rows(found, cells))) is not None
    )


def json_lines(found: Sequence[SourceScores], about: Mapping[str, Any]) -> str:
    """One line a model and source, each with ``about``."""
    return "".join(json.dumps({**about, **asdict(scores)}) + "\n" for scores in found)


def _lengths(scores: SourceScores, found: Sequence[SourceScores]) -> Cells | None:
    of = scores.lengths
    return (
        None
        if of is None
        else {
            "turns": of.count,
            "MAE": of.mae,
            "within 5": of.within_5,
            "within 15": of.within_15,
            "bins": of.bin_accuracy,
            "CRPS": of.crps,
            "in 90%": of.coverage,
            "rank": of.rank_correlation,
        }
    )


def _durations(scores: SourceScores, found: Sequence[SourceScores]) -> Cells | None:
    of = scores.durations
    if of is None:
        return None
    baseline = next(
        (each.durations for each in found if (each.model, each.source) == (PER_TOOL_EXPONENTIAL, scores.source)), None
    )
    against = of.crps / baseline.crps if baseline and baseline.crps else None
    return {
        "pauses": of.count,
        "MAE": of.mae,
        "CRPS": of.crps,
        "to exponential": against,
        "in 90%": of.coverage,
        "rank": of.rank_correlation,
    }


def _returned(scores: SourceScores, found: Sequence[SourceScores]) -> Cells | None:
    of = scores.returned
    return (
        None
        if of is None
        else {
            "pauses": of.count,
            "MAE": of.mae,
            "CRPS": of.crps,
            "in 90%": of.coverage,
            "rank": of.rank_correlation,
        }
    )


def _tools(scores: SourceScores, found: Sequence[SourceScores]) -> Cells | None:
    of = scores.tools
    return None if of is None else {"turns": of.count, "top 1": of.top_1, "log loss": of.log_loss}


def _remaining(scores: SourceScores, found: Sequence[SourceScores]) -> Cells | None:
    of = scores.remaining
    return None if of is None else {"turns": of.count, "rank of tokens": of.tokens, "rank of turns": of.turns}


_QUESTIONS: Mapping[str, Callable[[SourceScores, Sequence[SourceScores]], Cells | None]] = {
    "Tokens that a turn generates": _lengths,
    "Seconds that a tool call takes": _durations,
    "Tokens that a call returns": _returned,
    "The tool that a turn calls": _tools,
    "What a program has left": _remaining,
}
_COUNTS = ("turns", "pauses")
_DIGITS = {"MAE": 2, "CRPS": 2}


def _rows(
    found: Sequence[SourceScores], cells: Callable[[SourceScores, Sequence[SourceScores]], Cells | None]
) -> list[tuple[str, str, Cells]]:
    rows = [(each.source, each.model, row) for each in found if (row := cells(each, found)) is not None]
    sources = list(dict.fromkeys(source for source, _, _ in rows))
    rows.sort(key=lambda row: sources.index(row[0]))
    if len(sources) < 2:
        return rows
    for model in dict.fromkeys(name for _, name, _ in rows):
        of_model = [row for _, name, row in rows if name == model]
        rows.append((MEAN, model, {column: _mean(column, [row[column] for row in of_model]) for column in of_model[0]}))
    return rows


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
