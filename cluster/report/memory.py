"""What the KV memory was used for over time, a plot a policy."""

from collections.abc import Iterable
from dataclasses import replace

from markupsafe import Markup

from cluster.bench.record import MemoryLine
from cluster.report.axes import linear
from cluster.report.drawing import Drawing, Frame
from cluster.report.reading import Run

SIZE = Frame(width=560, height=224)
KINDS = (
    ("running", "of turns", "var(--running)"),
    ("held", "held for paused programs", "var(--held)"),
    ("cached", "free, but still in the prefix cache", "var(--cached)"),
    ("empty", "free", "var(--empty)"),
)
"""From the bottom up."""
HOST = ("host", "copies in host memory (dashed line)", "var(--ink)")


def plot(run: Run, end_s: float) -> Markup | None:
    """Up to ``end_s``, that of the longest run; None: this run's memory was not looked at."""
    memory = run.memory
    if len(memory) < 2:
        return None
    capacity = run.head.capacity_tokens or max(_device(line) for line in memory)
    host = max(line.host for line in memory)
    x = linear([end_s], "seconds")
    x = replace(x, high=end_s, ticks=tuple(tick for tick in x.ticks if tick <= end_s))
    y = linear([capacity, host], "tokens of KV", ticks=4)
    drawing = Drawing(SIZE, x, y, f"KV memory over time, {run.head.policy}")
    below = [0.0] * len(memory)
    for kind, words, colour in KINDS:
        above = [low + getattr(line, kind) for low, line in zip(below, memory, strict=True)]
        lower, upper = (list(zip(_times(memory), edge, strict=True)) for edge in (below, above))
        drawing.area(lower, upper, colour, words)
        below = above
    if host:
        drawing.line([(line.at_s, line.host) for line in memory], HOST[2], dashed=True, title=HOST[1])
    from_s, last_s = run.head.window_s
    if from_s > 0:
        drawing.upright(from_s, "measured from here")
    if 0 < last_s < end_s:
        drawing.upright(last_s, "last arrival")
    return drawing.done(x_grid=False)


def shares(run: Run) -> dict[str, float]:
    """Of the device's memory, each kind's mean share in the measured window, percent."""
    begin_s, end_s = run.head.window_s
    seen = [line for line in run.memory if begin_s <= line.at_s <= end_s] or run.memory
    total = sum(_device(line) for line in seen)
    return {kind: 100 * sum(getattr(line, kind) for line in seen) / total for kind, _, _ in KINDS} if total else {}


def _device(line: MemoryLine) -> int:
    return line.running + line.held + line.cached + line.empty


def _times(memory: Iterable[MemoryLine]) -> list[float]:
    return [line.at_s for line in memory]
