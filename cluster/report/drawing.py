"""Plots as SVG in a page: shapes whose colours are the page's (`page.css`), so that they change with light and dark."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from cluster.report.axes import Axis

SERIES = 8
"""Colours that the page has for things that are compared: `--s0` to `--s7`."""
LINE_PX, LETTER_PX = 15, 6.4


def series_colour(number: int) -> str:
    """Of the ``number``-th policy, everywhere on the page."""
    return f"var(--s{number % SERIES})"


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the axes are, pixels from the left and the top."""

    width: float
    height: float
    left: float = 52.0
    right: float = 14.0
    top: float = 26.0
    bottom: float = 40.0


@dataclass(slots=True)
class Drawing:
    """One plot under way. Points are in the units of the axes; y grows upwards."""

    frame: Frame
    x: Axis
    y: Axis
    name: str
    """For those who cannot see it."""
    _parts: list[str] = field(default_factory=list)
    _words_end: list[float] = field(default_factory=list)
    """Of the words beside bounds, line by line from below: pixels from the left."""

    def px(self, value: float) -> float:
        """Pixels from the left."""
        inner = self.frame.width - self.frame.left - self.frame.right
        return round(self.frame.left + self.x.at(value) * inner, 1)

    def py(self, value: float) -> float:
        """Pixels from the top."""
        inner = self.frame.height - self.frame.top - self.frame.bottom
        return round(self.frame.height - self.frame.bottom - self.y.at(value) * inner, 1)

    def line(
        self, points: Iterable[tuple[float, float]], colour: str, *, dashed: bool = False, title: str = ""
    ) -> None:
        """A line through ``points``."""
        path = " ".join(f"{self.px(x)},{self.py(y)}" for x, y in points)
        if path:
            kind = "curve dashed" if dashed else "curve"
            self._add(f'<polyline class="{kind}" style="stroke:{colour}" points="{path}"', "polyline", title)

    def area(
        self, bottom: Sequence[tuple[float, float]], top: Sequence[tuple[float, float]], colour: str, title: str
    ) -> None:
        """What lies between two lines."""
        path = " ".join(f"{self.px(x)},{self.py(y)}" for x, y in (*top, *reversed(bottom)))
        if path:
            self._add(f'<polygon style="fill:{colour}" points="{path}"', "polygon", title)

    def box(self, x: tuple[float, float], y: tuple[float, float], colour: str, title: str = "") -> None:
        """A filled rectangle, half a pixel wide at the least."""
        left, right = self.px(x[0]), self.px(x[1])
        top, bottom = self.py(y[1]), self.py(y[0])
        size = f'width="{max(0.5, right - left):.1f}" height="{max(0.5, bottom - top):.1f}"'
        self._add(f'<rect style="fill:{colour}" x="{left}" y="{top}" {size}', "rect", title)

    def dot(self, x: float, y: float, colour: str, *, title: str = "", radius: float = 3.5) -> None:
        """A point."""
        self._add(f'<circle style="fill:{colour}" cx="{self.px(x)}" cy="{self.py(y)}" r="{radius}"', "circle", title)

    def text(self, x_px: float, y_px: float, text: str, kind: str = "tick", anchor: str = "start") -> None:
        """Words at a place in pixels."""
        self._parts.append(
            f'<text class="{kind}" x="{x_px:.1f}" y="{y_px:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def upright(self, x: float, label: str) -> None:
        """A bound: a dashed line from bottom to top with a word beside it. Several come from left to right."""
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
        """The SVG, the axes drawn beneath all else."""
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
