"""Axes of plots: values to places between 0 and 1, and ticks at round numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.ticker import LogLocator, MaxNLocator

FINEST_LOG = 1e-3
"""Where a logarithmic axis begins at the latest: half a millisecond is no time."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a plot. ``low`` < ``high``."""

    low: float
    high: float
    ticks: tuple[float, ...]
    label: str
    log: bool = False

    def at(self, value: float) -> float:
        """Where ``value`` is: 0 at ``low``, 1 at ``high``; what lies outside is put at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def named(self, tick: float) -> str:
        """The tick's number, as short as it can be."""
        if tick == 0:
            return "0"
        size = abs(tick)
        if size >= 1e6:
            return f"{tick / 1e6:g}M"
        if size >= 1e4:
            return f"{tick / 1e3:g}k"
        return f"{tick:.10g}" if size >= 1e-4 else f"{tick:.0e}"


def linear(values: Iterable[float], label: str, *, ticks: int = 6, from_zero: bool = True) -> Axis:
    """From 0, or the least value, to a little above the largest one."""
    known = [value for value in values if math.isfinite(value)]
    low = min(0.0, *known, 0.0) if from_zero else min(known, default=0.0)
    high = max(known, default=1.0)
    if high <= low:
        high = low + 1.0
    found = [float(tick) for tick in MaxNLocator(ticks, steps=(1, 2, 2.5, 5, 10)).tick_values(low, high)]
    top = found[-1] if from_zero else high
    return Axis(low, top, tuple(tick for tick in found if low <= tick <= top), label)


def logarithmic(values: Iterable[float], label: str) -> Axis:
    """Around all positive values, `FINEST_LOG` at the least."""
    known = [max(value, FINEST_LOG) for value in values if value > 0 and math.isfinite(value)]
    low, high = min(known, default=FINEST_LOG), max(known, default=1.0)
    if high < 2 * low:
        low, high = low / 1.5, high * 1.5
    subs = (1.0,) if high / low > 300 else (1.0, 2.0, 5.0)
    found = (float(tick) for tick in LogLocator(10, subs=subs).tick_values(low, high))
    return Axis(low, high, tuple(tick for tick in found if low <= tick <= high), label, log=True)
