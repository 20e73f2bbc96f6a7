"""Plots as SVG: axes with round ticks, and shapes with the light and dark colours of `page.css`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from markupsafe import Markup, escape
from matplotlib.ticker import LogLocator, MaxNLocator

FINEST_LOG = 1e-3
"""Least value on a logarithmic axis. Lower values, such as 0.5 ms, are drawn there."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a plot. ``low`` < ``high``."""

    low: float
    high: float
    ticks: tuple[float, ...]
    label: str
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of ``value``: 0 at ``low``, 1 at ``high``. Values outside are put at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def named(self, tick: float) -> str:
        """Return a short text for a tick's number."""
        if tick == 0:
            return "0"
        size = abs(tick)
        if size >= 1e6:
            return f"{tick / 1e6:g}M"
        if size >= 1e4:
            return f"{tick / 1e3:g}k"
        return f"{tick:.10g}" if size >= 1e-4 else f"{tick:.0e}"


def linear(values: Iterable[float], label: str, *, ticks: int = 6, from_zero: bool = True) -> Axis:
    """Make an axis from 0, or from the least value, to a round number above the largest one."""
    known = [value for value in values if math.isfinite(value)]
    low = min(0.0, *known, 0.0) if from_zero else min(known, default=0.0)
    high = max(known, default=1.0)
    if high <= low:
        high = low + 1.0
    found = [float(tick) for tick in MaxNLocator(ticks, steps=(1, 2, 2.5, 5, 10)).tick_values(low, high)]
    top = found[-1] if from_zero else high
    return Axis(low, top, tuple(tick for tick in found if low <= tick <= top), label)


def logarithmic(values: Iterable[float], label: str) -> Axis:
    """Make a logarithmic axis around all positive values, which begins at `FINEST_LOG` or above."""
    known = [max(value, FINEST_LOG) for value in values if value > 0 and math.isfinite(value)]
    low, high = min(known, default=FINEST_LOG), max(known, default=1.0)
    if high < 2 * low:
        low, high = low / 1.5, high * 1.5
    subs = (1.0,) if high / low > 300 else (1.0, 2.0, 5.0)
    found = (float(tick) for tick in LogLocator(10, subs=subs).tick_values(low, high))
    return Axis(low, high, tuple(tick for tick in found if low <= tick <= high), label, log=True)


SERIES = 8
"""Number of the page's colours for compared policies: `--s0` to `--s7`."""
LINE_PX, LETTER_PX = 15, 6.4


def series_colour(number: int) -> str:
    """Return the colour of the policy with this number, which is the same on the whole page."""
    return f"var(--s{number % SERIES})"


def stylesheet() -> str:
    """Return the stylesheet of the page, which plots in files of their own also need."""
    return (files("cluster.offline.report") / "page.css").read_text(encoding="utf-8")


def standalone(plot: Markup, frame: "Frame", names: Sequence[str]) -> str:
    """Return the content of a file with one plot, its style, and a legend of the compared policies."""
    legend: list[str] = []
    x, y = frame.left, frame.height + LINE_PX
    for index, name in enumerate(names):
        long = 24 + LETTER_PX * len(name)
        if x > frame.left and x + long > frame.width:
            x, y = frame.left, y + LINE_PX + 3
        legend.append(f'<rect style="fill:{series_colour(index)}" x="{x}" y="{y - 10}" width="12" height="12"/>')
        legend.append(f'<text class="tick" x="{x + 17}" y="{y}">{escape(name)}</text>')
        x += long + 12
    size = f'width="{frame.width:g}" height="{y + 10:g}" viewBox="0 0 {frame.width:g} {y + 10:g}"'
    background = '<rect style="fill:var(--page)" width="100%" height="100%"/>'
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{stylesheet()}</style>{background}'
    return f"{opened}{plot}{''.join(legend)}</svg>\n"


@dataclass(frozen=True, slots=True)
class Frame:
    """Size of a plot and margins of its axes, in pixels."""

    width: float
    height: float
    left: float = 52.0
    right: float = 14.0
    top: float = 26.0
    bottom: float = 40.0


@dataclass(slots=True)
class Drawing:
    """A plot that is being drawn. Points are in the units of the axes, and y grows upwards."""

    frame: Frame
    x: Axis
    y: Axis
    name: str
    """Text alternative of the plot."""
    _parts: list[str] = field(default_factory=list)
    _words_end: list[float] = field(default_factory=list)
    """End of the last label beside a bound in each line of labels, from below, in pixels from the left."""

    def px(self, value: float) -> float:
        """Return the position of a value on the x axis in pixels from the left."""
        inner = self.frame.width - self.frame.left - self.frame.right
        return round(self.frame.left + self.x.at(value) * inner, 1)

    def py(self, value: float) -> float:
        """Return the position of a value on the y axis in pixels from the top."""
        inner = self.frame.height - self.frame.top - self.frame.bottom
        return round(self.frame.height - self.frame.bottom - self.y.at(value) * inner, 1)

    def line(
        self, points: Iterable[tuple[float, float]], colour: str, *, dashed: bool = False, title: str = ""
    ) -> None:
        """Draw a line through ``points``."""
        path = " ".join(f"{self.px(x)},{self.py(y)}" for x, y in points)
        if path:
            kind = "curve dashed" if dashed else "curve"
            self._add(f'<polyline class="{kind}" style="stroke:{colour}" points="{path}"', "polyline", title)

    def area(
        self, bottom: Sequence[tuple[float, float]], top: Sequence[tuple[float, float]], colour: str, title: str
    ) -> None:
        """Fill the area between two lines."""
        path = " ".join(f"{self.px(x)},{self.py(y)}" for x, y in (*top, *reversed(bottom)))
        if path:
            self._add(f'<polygon style="fill:{colour}" points="{path}"', "polygon", title)

    def box(self, x: tuple[float, float], y: tuple[float, float], colour: str, title: str = "") -> None:
        """Draw a filled rectangle, at least half a pixel wide and high."""
        left, right = self.px(x[0]), self.px(x[1])
        top, bottom = self.py(y[1]), self.py(y[0])
        size = f'width="{max(0.5, right - left):.1f}" height="{max(0.5, bottom - top):.1f}"'
        self._add(f'<rect style="fill:{colour}" x="{left}" y="{top}" {size}', "rect", title)

    def dot(self, x: float, y: float, colour: str, *, title: str = "", radius: float = 3.5) -> None:
        """Draw a filled circle at a position in data units. ``title`` is its tooltip, ``radius`` is in pixels."""
        self._add(f'<circle style="fill:{colour}" cx="{self.px(x)}" cy="{self.py(y)}" r="{radius}"', "circle", title)

    def text(self, x_px: float, y_px: float, text: str, kind: str = "tick", anchor: str = "start") -> None:
        """Draw text at a position in pixels."""
        self._parts.append(
            f'<text class="{kind}" x="{x_px:.1f}" y="{y_px:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def upright(self, x: float, label: str) -> None:
        """Draw a bound: a vertical dashed line with a label. Several bounds must be drawn from left to right."""
        left = self.px(x)
        top, bottom = self.frame.top, self.frame.height - self.frame.bottom
        self._parts.append(f'<line class="bound" x1="{left}" y1="{top}" x2="{left}" y2="{bottom}"/>')
        long = LETTER_PX * len(label) + 5
        beyond = left + long > self.frame.width
        begin, end = (left - long, left) if beyond else (left, left + long)
        row = next((row for row, taken in enumerate(self._words_end) if taken <= begin), len(self._words_end))
        self._words_end[row : row + 1] = [end]
        at = left + (-4 if beyond else 4), bottom - 6 - row * LINE_PX
        self.text(*at, label, "note", "end" if beyond else "start")

    def done(self, *, x_grid: bool = True, y_ticks: bool = True) -> Markup:
        """Return the SVG. The axes are drawn below everything else."""
        frame = self.frame
        size = f'width="{frame.width:g}" height="{frame.height:g}" viewBox="0 0 {frame.width:g} {frame.height:g}"'
        axes = "".join(self._axes(x_grid, y_ticks))
        name = escape(self.name)
        return Markup(
            f'<svg {size} role="img" aria-label="{name}"><title>{name}</title>{axes}{"".join(self._parts)}</svg>'
        )

    def _axes(self, x_grid: bool, y_ticks: bool) -> Iterable[str]:
        frame = self.frame
        bottom, right = frame.height - frame.bottom, frame.width - frame.right
        for tick in self.x.ticks:
            at = self.px(tick)
            if x_grid:
                yield f'<line class="grid" x1="{at}" y1="{frame.top}" x2="{at}" y2="{bottom}"/>'
            named = escape(self.x.named(tick))
            yield f'<text class="tick" x="{at}" y="{bottom + LINE_PX}" text-anchor="middle">{named}</text>'
        for tick in self.y.ticks if y_ticks else ():
            at = self.py(tick)
            yield f'<line class="grid" x1="{frame.left}" y1="{at}" x2="{right}" y2="{at}"/>'
            named = escape(self.y.named(tick))
            yield f'<text class="tick" x="{frame.left - 6}" y="{at + 4}" text-anchor="end">{named}</text>'
        yield f'<text class="label" x="{frame.left}" y="{frame.top - 11}">{escape(self.y.label)}</text>'
        yield f'<line class="axis" x1="{frame.left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
        middle = (frame.left + right) / 2
        label = escape(self.x.label)
        yield f'<text class="label" x="{middle}" y="{frame.height - 6}" text-anchor="middle">{label}</text>'

    def _add(self, opened: str, tag: str, title: str) -> None:
        self._parts.append(f"{opened}><title>{escape(title)}</title></{tag}>" if title else f"{opened}/>")
