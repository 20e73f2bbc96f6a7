"""The observed durations of calls by tool: their means and deviations, in seconds. The module is pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from cluster.core.program import without_class
from predictor_service.examples import ProgramExample
from predictor_service.model import NO_TOOL

LEAST_CALLS = 5
"""Calls of a tool from which on it has a mean of its own."""

CallTime = tuple[float, float]
"""The mean and the standard deviation of durations, in seconds."""


class CallTimes:
    """Mean durations by tool, with and without the class of its arguments.

    Args:
        by_tool: the mean and the deviation of each tool; `NO_TOOL` stands for all calls, and must be there.

    Raises:
        ValueError: there is no row of all calls, or a number is negative or not finite.
    """

    def __init__(self, by_tool: Mapping[str, CallTime]) -> None:
        rows = {tool: (float(mean), float(deviation)) for tool, (mean, deviation) in by_tool.items()}
        if NO_TOOL not in rows or not all(np.isfinite(row).all() and min(row) >= 0 for row in rows.values()):
            raise ValueError("durations by tool need a row of all calls, and numbers that are finite and not negative")
        self.by_tool = rows

    @classmethod
    def observed(cls, programs: Iterable[ProgramExample]) -> "CallTimes | None":
        """Return the durations that ``programs`` record; None if they record none."""
        seconds: dict[str, list[float]] = defaultdict(list)
        for program in programs:
            for turn in program.turns:
                if turn.pause and turn.pause_outcome and turn.pause_outcome.duration_s is not None:
                    for key in {turn.pause.tool, without_class(turn.pause.tool), NO_TOOL}:
                        seconds[key].append(turn.pause_outcome.duration_s)
        if not seconds:
            return None
        kept = {key: row for key, row in seconds.items() if key == NO_TOOL or len(row) >= LEAST_CALLS}
        return cls({key: (float(np.mean(row)), float(np.std(row))) for key, row in kept.items()})

    def of(self, tool: str) -> CallTime:
        """Return the mean and the deviation of a tool; those of all calls if it is unknown."""
        return next(self.by_tool[key] for key in (tool, without_class(tool), NO_TOOL) if key in self.by_tool)
