"""Goodput and attainment against the offered load; where there is one load only, side by side."""

from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from cluster.report.axes import Axis, linear
from cluster.report.drawing import Drawing, Frame, series_colour
from cluster.report.reading import Column, Run, Runs, number

SIZE = Frame(width=560, height=300)
GOODPUT, ATTAINMENT = "good programs per second", "SLO attainment of programs"
BAR_PX = 46.0


def plots(runs: Runs) -> list[Markup]:
    """Two: goodput, and attainment."""
    if len(runs.rates) > 1:
        return [_over_load(runs, "goodput_programs", GOODPUT), _over_load(runs, "attainment", ATTAINMENT)]
    return [_bars(runs, "goodput_programs", GOODPUT), _bars(runs, "attainment", ATTAINMENT)]


def _over_load(runs: Runs, key: str, label: str) -> Markup:
    rates = runs.rates
    # A tick at each load that was tried.
    offered = replace(linear(rates, "offered programs per second"), high=rates[-1], ticks=(0.0, *rates))
    values = [value for run in runs.runs if (value := number(run.head.summary, key)) is not None]
    goodput = key == "goodput_programs"
    axis = linear([*values, *(rates if goodput else (1.0,))], label)
    plot = Drawing(SIZE, offered, _at_most(axis, 1.0) if not goodput else axis, f"{label} against load")
    if goodput:
        plot.line([(0, 0), (rates[-1], rates[-1])], "var(--faint)", dashed=True, title="all that is offered")
        plot.text(plot.px(rates[-1] / 3) - 6, plot.py(rates[-1] / 3) - 4, "offered", "note", "end")
        bounds = [(rate, bound) for rate in rates if (bound := _bound(runs, rate)) is not None]
        if any(bound < rate for rate, bound in bounds):
            plot.line(bounds, "var(--faint)", title="fluid bound: no policy can do better")
            plot.text(plot.px(rates[-1]) - 4, plot.py(bounds[-1][1]) + 14, "fluid bound", "note", "end")
    for index, (column, name) in enumerate(runs.columns.items()):
        means = [(rate, mean) for rate in rates if (mean := runs.mean(column, rate, key)) is not None]
        plot.line(means, series_colour(index))
        for rate, mean in means:
            _spread(plot, runs.of(column, rate), key, rate, index)
            plot.dot(rate, mean, series_colour(index), title=f"{name} at {rate:g}/s: {mean:.3g}")
    return plot.done()


def _bound(runs: Runs, rate: float) -> float | None:
    found = [
        value
        for run in runs.runs
        if run.head.rate == rate
        for path in (("bound_per_s",), ("simulation", "bound_per_s"))
        if (value := number(run.head.summary, *path)) is not None
    ]
    return max(found, default=None)


def _bars(runs: Runs, key: str, label: str) -> Markup:
    columns, rate = list(runs.columns.items()), runs.rates[0]
    values = [value for run in runs.runs if (value := number(run.head.summary, key)) is not None]
    top = [rate] if key == "goodput_programs" else [1.0]
    axis = linear([*values, *top], label)
    places = Axis(0, len(columns), (), f"at {rate:g} offered programs per second")
    plot = Drawing(SIZE, places, axis if key == "goodput_programs" else _at_most(axis, 1.0), f"{label} by policy")
    half = min(0.35, BAR_PX / 2 / (SIZE.width / len(columns)))
    for index, (column, name) in enumerate(columns):
        mean = runs.mean(column, rate, key)
        if mean is not None:
            plot.box((index + 0.5 - half, index + 0.5 + half), (0, mean), series_colour(index), f"{name}: {mean:.3g}")
            plot.text(plot.px(index + 0.5), plot.py(mean) - 6, f"{mean:.3g}", "value", "middle")
            _spread(plot, runs.of(column, rate), key, index + 0.5 + half * 0.6, index)
        plot.text(plot.px(index + 0.5), SIZE.height - SIZE.bottom + 15, name, "tick", "middle")
    if key == "goodput_programs":
        plot.line([(0, rate), (len(columns), rate)], "var(--faint)", dashed=True)
        plot.text(SIZE.width - SIZE.right, plot.py(rate) + 14, "offered", "note", "end")
    return plot.done(x_grid=False)


def _spread(plot: Drawing, runs: Sequence[Run], key: str, x: float, index: int) -> None:
    """Each seed or block, where there are several."""
    known = [(run, value) for run in runs if (value := number(run.head.summary, key)) is not None]
    for run, value in known if len(known) > 1 else ():
        title = f"{run.head.policy}, seed {run.head.seed}, block {run.head.block + 1}: {value:.3g}"
        plot.dot(x, value, series_colour(index) if plot.x.ticks else "var(--ink)", title=title, radius=2.0)


def _at_most(axis: Axis, top: float) -> Axis:
    return replace(axis, high=top, ticks=tuple(tick for tick in axis.ticks if tick <= top + 1e-9))


def focus(runs: Runs) -> float:
    """The load that the rest of the page looks at: where the policies differ most, among those that were recorded."""
    recorded = sorted({run.head.rate for run in runs.runs if run.programs}) or runs.rates

    def apart(rate: float) -> float:
        found = [runs.mean(column, rate, "goodput_programs") for column in _at(runs, rate)]
        known = [value for value in found if value is not None]
        return max(known) - min(known) if known else 0.0

    return max(reversed(recorded), key=apart)


def _at(runs: Runs, rate: float) -> list[Column]:
    return [column for column in runs.columns if runs.of(column, rate)]
