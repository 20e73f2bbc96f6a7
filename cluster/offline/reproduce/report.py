"""Prints a paper's comparison, and writes it as JSON, as Markdown and as plots."""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from cluster.offline.report.drawing import Drawing, Frame, linear, logarithmic, series_colour, standalone
from cluster.offline.reproduce.comparison import Compared, Results
from cluster.offline.reproduce.plan import Figure, Paper

PLOT = Frame(width=560, height=300)
HIGHER_IS_BETTER = ("goodput", "attainment", "throughput")


def shown(value: float | None) -> str:
    """Return a number with three significant digits; ``-`` for None."""
    return "-" if value is None else f"{value:.3g}"


def table_of(figure: Figure, rows: Sequence[Compared], factors: Container[str]) -> Table:
    """Return the table *published, here, ratio* of a figure, and a column for each of the factors."""
    table = Table(title=figure.title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("")
    ran = {key: factor.what for key, factor in figure.factors.items() if key in factors}
    for column in ("published", "here", "ratio", *ran.values()):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*cells(row, ran))
    return table


def cells(row: Compared, factors: Iterable[str]) -> list[str]:
    """Return the texts of a row, with its numbers under ``factors``."""
    here = shown(row.here) + (f" ± {row.spread:.2g}" if row.spread is not None else "")
    ratio = shown(row.ratio) + ("" if row.near else " *")
    return [row.what, shown(row.published), here, ratio, *(shown(row.with_factors.get(key)) for key in factors)]


def summary(rows: Sequence[Compared]) -> str:
    """Return how many rows are near the published ones."""
    near, by_rest = sum(row.near for row in rows), sum(row.near_by_rest for row in rows)
    text = f"{near} of {len(rows)} numbers are within 25% of the published ones (the others have a *)."
    if all(row.kind != "less" for row in rows):
        return text
    return f"{text} If a reduction in percent is compared by what it leaves, {by_rest} are."


def as_json(
    name: str, paper: Paper, rows: Sequence[Compared], results: Results, made: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything as JSON: ``made`` (command, date, ...), the rows, and the curves of the plots."""
    figures = dict.fromkeys(row.figure for row in rows)
    return {
        **made,
        "paper": name,
        "seeds": results.seeds,
        "rows": [
            asdict(row) | {"ratio": row.ratio, "near": row.near, "near_by_rest": row.near_by_rest} for row in rows
        ],
        "curves": {
            figure: {
                measure: {
                    system: curve(figure, paper.figures[figure], system, measure, results)
                    for system in paper.figures[figure].systems
                }
                for measure in paper.figures[figure].measures
            }
            for figure in figures
        },
    }


def curve(name: str, figure: Figure, system: str, measure: str, results: Results) -> list[tuple[float, float]]:
    """Return a system's measure over the loads that were run."""
    points = [(load.rate, results.mean(name, "", system, key, measure)) for key, load in figure.loads.items()]
    return [(rate, value) for rate, value in points if value is not None]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the JSON file."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_plots(name: str, figure: Figure, results: Results, folder: Path) -> list[Path]:
    """Write a plot for each measure over the load, if the figure has several loads of one kind."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for measure in figure.measures:
        curves = {system: curve(name, figure, system, measure, results) for system in figure.systems}
        rates = sorted({rate for points in curves.values() for rate, _ in points})
        values = [value for points in curves.values() for _, value in points]
        if len(rates) < 2 or any(len({rate for rate, _ in points}) < len(points) for points in curves.values()):
            continue
        offered = linear(rates, "requests per second")
        axis = linear(values, measure) if measure.startswith(HIGHER_IS_BETTER) else logarithmic(values, measure)
        plot = Drawing(PLOT, offered, axis, f"{figure.title}: {measure}")
        for index, (system, points) in enumerate(curves.items()):
            plot.line(points, series_colour(index))
            for rate, value in points:
                plot.dot(rate, value, series_colour(index), title=f"{system} at {rate:g}/s: {value:.3g}")
        paths.append(folder / f"{name}_{measure}.svg")
        paths[-1].write_text(standalone(plot.done(), PLOT, list(curves)), encoding="utf-8")
    return paths
