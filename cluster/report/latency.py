"""Latencies of turns and programs, as cumulative distributions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from cluster.bench.record import ProgramLine
from cluster.report.axes import Axis, logarithmic
from cluster.report.drawing import Drawing, Frame, series_colour
from cluster.report.reading import Runs

SIZE = Frame(width=372, height=280, left=40)
POINTS = 300
"""Of a curve, at most; those of the tails are all there."""
OK = "ok"


@dataclass(frozen=True, slots=True)
class Latency:
    """What is drawn. ``bound``: the SLO's key."""

    label: str
    bound: str | None
    of: Callable[[ProgramLine], Iterable[float | None]]


LATENCIES = (
    Latency("TTFT of a turn, s", "ttft_s", lambda p: (t.ttft_s for t in p.turns if t.outcome == OK)),
    Latency("completion without tools, s", None, lambda p: (p.jct_s,)),
    Latency("seconds a token, without tools", "normalized_latency_s", lambda p: (p.norm_latency_s,)),
)


def plots(runs: Runs, rate: float) -> list[Markup]:
    """A plot for each latency, over all measured programs at one load."""
    return [_plot(runs, rate, latency) for latency in LATENCIES]


def _plot(runs: Runs, rate: float, latency: Latency) -> Markup:
    samples = {index: _samples(runs, rate, index, latency) for index in range(len(runs.columns))}
    bounds = _bounds(runs, rate, latency.bound)
    x = logarithmic([*(value for values in samples.values() for value in values), *bounds.values()], latency.label)
    y = Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0), "share of all")
    plot = Drawing(SIZE, x, y, f"{latency.label}: cumulative distribution")
    for bound in sorted(set(bounds.values())):
        plot.upright(bound, f"SLO {bound:.3g}")
    for index, name in enumerate(runs.columns.values()):
        values = samples[index]
        plot.line(steps(values), series_colour(index), title=f"{name}: {len(values)} values")
    return plot.done()


def _samples(runs: Runs, rate: float, index: int, latency: Latency) -> list[float]:
    column = list(runs.columns)[index]
    programs = (program for run in runs.of(column, rate) for program in run.measured)
    return sorted(value for program in programs for value in latency.of(program) if value is not None)


def _bounds(runs: Runs, rate: float, key: str | None) -> Mapping[str, float]:
    if key is None:
        return {}
    slos = ((run.head.policy, run.head.slo.get(key)) for run in runs.runs if run.head.rate == rate)
    return {policy: bound for policy, bound in slos if bound is not None}


def steps(values: Sequence[float]) -> list[tuple[float, float]]:
    """The empirical distribution of ``values``, ascending, thinned where it is dense."""
    count = len(values)
    stride = max(1, count // POINTS)
    tail = max(0, count - 2 * stride)
    chosen = sorted({*range(0, count, stride), *range(tail, count)})
    points: list[tuple[float, float]] = [(values[0], 0.0)] if values else []
    for index in chosen:
        points += [(values[index], points[-1][1]), (values[index], (index + 1) / count)]
    return points
