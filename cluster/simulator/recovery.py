"""Whether a server comes back after a burst: attainment in windows of intended arrival."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.goodput import ProgramRecord, Slo
from cluster.simulator.load import Burst

WINDOW_S = 30.0
RECOVERED = 0.95
"""Attainment of a window that counts as recovered."""


@dataclass(frozen=True, slots=True)
class Window:
    """Programs meant to arrive within ``WINDOW_S`` seconds from ``start_s``."""

    start_s: float
    offered: int
    good: int

    @property
    def attainment(self) -> float | None:
        """Good over offered; None: nothing arrived."""
        return self.good / self.offered if self.offered else None


@dataclass(frozen=True, slots=True)
class Recovery:
    """One burst and what followed. ``windows`` from the first arrival on, the one after the burst starts at its end."""

    windows: tuple[Window, ...]
    recovered_s: float | None
    """From the burst's end to the start of the first window that is good enough; None: there is none."""

    @classmethod
    def of(cls, programs: Sequence[ProgramRecord], slo: Slo, burst: Burst, until_s: float) -> "Recovery":
        """``programs``: all of a run, warm-up included; ``until_s``: where arrivals end."""
        first_s = burst.end_s - WINDOW_S * (burst.end_s // WINDOW_S)
        windows = []
        for number in range(int((until_s - first_s) // WINDOW_S)):
            start_s = first_s + number * WINDOW_S
            inside = [p for p in programs if start_s <= p.arrival_s < start_s + WINDOW_S]
            windows.append(Window(start_s, len(inside), sum(slo.program_is_good(p) for p in inside)))
        after = (w for w in windows if w.start_s >= burst.end_s and w.attainment is not None)
        recovered = next((w.start_s for w in after if (w.attainment or 0.0) >= RECOVERED), None)
        return cls(tuple(windows), None if recovered is None else recovered - burst.end_s)
