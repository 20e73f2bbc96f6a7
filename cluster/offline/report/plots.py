"""The plots of runs: goodput over load, latencies as cumulative distributions, and KV memory over time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from cluster.offline.bench.metrics import number
from cluster.offline.bench.record import MemoryLine, ProgramLine
from cluster.offline.report.drawing import Axis, Drawing, Frame, linear, logarithmic, series_colour, standalone
from cluster.offline.report.reading import Column, Run, Runs

LOAD_SIZE = Frame(width=560, height=300)
GOODPUT, ATTAINMENT = "good programs per second", "SLO attainment of programs"
BAR_PX = 46.0


def write_plots(runs: Runs, folder: Path) -> list[Path]:
    """Write goodput, attainment and, of recorded programs, latencies into ``folder``, each an SVG file."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = list(zip(("goodput", "attainment"), load_plots(runs), (LOAD_SIZE, LOAD_SIZE), strict=True))
    if any(run.programs for run in runs.runs):
        latencies = latency_plots(runs, focus(runs))
        plots += [(one.name, plot, LATENCY_SIZE) for one, plot in zip(LATENCIES, latencies, strict=True)]
    names, paths = list(runs.columns.values()), []
    for name, plot, frame in plots:
        paths.append(folder / f"{name}.svg")
        paths[-1].write_text(standalone(plot, frame, names), encoding="utf-8")
    return paths


def load_plots(runs: Runs) -> list[Markup]:
    """Return two plots over the load: goodput and SLO attainment."""
    if len(runs.rates) > 1:
        return [_over_load(runs, "goodput_programs", GOODPUT), _over_load(runs, "attainment", ATTAINMENT)]
    return [_bars(runs, "goodput_programs", GOODPUT), _bars(runs, "attainment", ATTAINMENT)]


def _over_load(runs: Runs, key: str, label: str) -> Markup:
    rates = runs.rates
    # The x axis has a tick at each load of a run.
    offered = replace(linear(rates, "offered programs per second"), high=rates[-1], ticks=(0.0, *rates))
    values = [value for run in runs.runs if (value := number(run.head.summary, key)) is not None]
    goodput = key == "goodput_programs"
    axis = linear([*values, *(rates if goodput else (1.0,))], label)
    plot = Drawing(LOAD_SIZE, offered, _at_most(axis, 1.0) if not goodput else axis, f"{label} against load")
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
    plot = Drawing(LOAD_SIZE, places, axis if key == "goodput_programs" else _at_most(axis, 1.0), f"{label} by policy")
    half = min(0.35, BAR_PX / 2 / (LOAD_SIZE.width / len(columns)))
    for index, (column, name) in enumerate(columns):
        mean = runs.mean(column, rate, key)
        if mean is not None:
            plot.box((index + 0.5 - half, index + 0.5 + half), (0, mean), series_colour(index), f"{name}: {mean:.3g}")
            plot.text(plot.px(index + 0.5), plot.py(mean) - 6, f"{mean:.3g}", "value", "middle")
            _spread(plot, runs.of(column, rate), key, index + 0.5 + half * 0.6, index)
        plot.text(plot.px(index + 0.5), LOAD_SIZE.height - LOAD_SIZE.bottom + 15, name, "tick", "middle")
    if key == "goodput_programs":
        plot.line([(0, rate), (len(columns), rate)], "var(--faint)", dashed=True)
        plot.text(LOAD_SIZE.width - LOAD_SIZE.right, plot.py(rate) + 14, "offered", "note", "end")
    return plot.done(x_grid=False)


def _spread(plot: Drawing, runs: Sequence[Run], key: str, x: float, index: int) -> None:
    """Draw a point for each seed or block if there are several."""
    known = [(run, value) for run in runs if (value := number(run.head.summary, key)) is not None]
    for run, value in known if len(known) > 1 else ():
        title = f"{run.head.policy}, seed {run.head.seed}, block {run.head.block + 1}: {value:.3g}"
        plot.dot(x, value, series_colour(index) if plot.x.ticks else "var(--ink)", title=title, radius=2.0)


def _at_most(axis: Axis, top: float) -> Axis:
    return replace(axis, high=top, ticks=tuple(tick for tick in axis.ticks if tick <= top + 1e-9))


def focus(runs: Runs) -> float:
    """Return the load on which the rest of the page focuses: the recorded one at which the policies differ most."""
    recorded = sorted({run.head.rate for run in runs.runs if run.programs}) or runs.rates

    def apart(rate: float) -> float:
        found = [runs.mean(column, rate, "goodput_programs") for column in _at(runs, rate)]
        known = [value for value in found if value is not None]
        return max(known) - min(known) if known else 0.0

    return max(reversed(recorded), key=apart)


def _at(runs: Runs, rate: float) -> list[Column]:
    return [column for column in runs.columns if runs.of(column, rate)]


LATENCY_SIZE = Frame(width=372, height=280, left=40)
POINTS = 300
"""Points of a curve, about. All values of the upper tail are drawn."""
OK = "ok"


@dataclass(frozen=True, slots=True)
class Latency:
    """A latency that is plotted. ``bound``: the key of its bound in the SLO."""

    name: str
    """Name of its file."""
    label: str
    bound: str | None
    of: Callable[[ProgramLine], Iterable[float | None]]
    """Its values of a program. None: it did not end; it counts in the share that no curve reaches."""


LATENCIES = (
    Latency(
        "ttft_cdf", "TTFT of a turn, s", "ttft_s", lambda p: [t.ttft_s if t.outcome == OK else None for t in p.turns]
    ),
    Latency("completion_cdf", "completion without tools, s", None, lambda p: (p.jct_s,)),
    Latency("per_token_cdf", "seconds a token, without tools", "normalized_latency_s", lambda p: (p.norm_latency_s,)),
)


def latency_plots(runs: Runs, rate: float) -> list[Markup]:
    """Return a plot for each latency over all measured programs at one load."""
    return [_latency_plot(runs, rate, latency) for latency in LATENCIES]


def _latency_plot(runs: Runs, rate: float, latency: Latency) -> Markup:
    samples = {index: _samples(runs, rate, index, latency) for index in range(len(runs.columns))}
    bounds = _bounds(runs, rate, latency.bound)
    x = logarithmic([*(value for values, _ in samples.values() for value in values), *bounds.values()], latency.label)
    y = Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0), "share of all")
    plot = Drawing(LATENCY_SIZE, x, y, f"{latency.label}: cumulative distribution")
    for bound in sorted(set(bounds.values())):
        plot.upright(bound, f"SLO {bound:.3g}")
    for index, name in enumerate(runs.columns.values()):
        values, of = samples[index]
        plot.line(steps(values, of), series_colour(index), title=f"{name}: {len(values)} of {of}")
    return plot.done()


def _samples(runs: Runs, rate: float, index: int, latency: Latency) -> tuple[list[float], int]:
    """Return the known values in ascending order, and how many there would be if all had ended."""
    column = list(runs.columns)[index]
    programs = (program for run in runs.of(column, rate) for program in run.measured)
    values = [value for program in programs for value in latency.of(program)]
    return sorted(value for value in values if value is not None), len(values)


def _bounds(runs: Runs, rate: float, key: str | None) -> Mapping[str, float]:
    if key is None:
        return {}
    slos = ((run.head.policy, run.head.slo.get(key)) for run in runs.runs if run.head.rate == rate)
    return {policy: bound for policy, bound in slos if bound is not None}


def steps(values: Sequence[float], of: int) -> list[tuple[float, float]]:
    """Return the points of the empirical distribution of ascending ``values`` among ``of``, thinned where dense."""
    count = len(values)
    stride = max(1, count // POINTS)
    tail = max(0, count - 2 * stride)
    chosen = sorted({*range(0, count, stride), *range(tail, count)})
    points: list[tuple[float, float]] = [(values[0], 0.0)] if values else []
    for index in chosen:
        points += [(values[index], points[-1][1]), (values[index], (index + 1) / of)]
    return points


MEMORY_SIZE = Frame(width=560, height=224)
MEMORY_KINDS = (
    ("running", "of turns", "var(--running)"),
    ("held", "held for paused programs", "var(--held)"),
    ("cached", "free, but still in the prefix cache", "var(--cached)"),
    ("empty", "free", "var(--empty)"),
)
"""Kinds of memory with labels and colours, from the bottom of the plot to its top."""
HOST_KIND = ("host", "copies in host memory (dashed line)", "var(--ink)")


def memory_plot(run: Run, end_s: float) -> Markup | None:
    """Plot the memory of a run up to ``end_s``, the end of the longest run. None: it has no memory samples."""
    memory = run.memory
    if len(memory) < 2:
        return None
    capacity = run.head.capacity_tokens or max(_device(line) for line in memory)
    host = max(line.host for line in memory)
    x = linear([end_s], "seconds")
    x = replace(x, high=end_s, ticks=tuple(tick for tick in x.ticks if tick <= end_s))
    y = linear([capacity, host], "tokens of KV", ticks=4)
    drawing = Drawing(MEMORY_SIZE, x, y, f"KV memory over time, {run.head.policy}")
    below = [0.0] * len(memory)
    for kind, words, colour in MEMORY_KINDS:
        above = [low + getattr(line, kind) for low, line in zip(below, memory, strict=True)]
        lower, upper = (list(zip(_times(memory), edge, strict=True)) for edge in (below, above))
        drawing.area(lower, upper, colour, words)
        below = above
    if host:
        drawing.line([(line.at_s, line.host) for line in memory], HOST_KIND[2], dashed=True, title=HOST_KIND[1])
    from_s, last_s = run.head.window_s
    if from_s > 0:
        drawing.upright(from_s, "measured from here")
    if 0 < last_s < end_s:
        drawing.upright(last_s, "last arrival")
    return drawing.done(x_grid=False)


def memory_shares(run: Run) -> dict[str, float]:
    """Return the mean share of each kind of device memory in the measured window, in percent."""
    begin_s, end_s = run.head.window_s
    seen = [line for line in run.memory if begin_s <= line.at_s <= end_s] or run.memory
    total = sum(_device(line) for line in seen)
    return (
        {kind: 100 * sum(getattr(line, kind) for line in seen) / total for kind, _, _ in MEMORY_KINDS} if total else {}
    )


def _device(line: MemoryLine) -> int:
    return line.running + line.held + line.cached + line.empty


def _times(memory: Iterable[MemoryLine]) -> list[float]:
    return [line.at_s for line in memory]
