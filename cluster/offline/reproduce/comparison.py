"""Published numbers beside ours: each row of a figure, computed from the measures of its runs."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.offline.reproduce.plan import Figure, Row
from cluster.offline.reproduce.running import Measured

NEAR = 0.25
"""A number is reproduced if it differs from the published one by at most this share of it."""
LEVELS = 200
"""Number of levels at which `sustained` compares two systems. Each is the same number of times the one before."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One row: the published number and ours."""

    figure: str
    what: str
    headline: bool
    published: float
    here: float | None
    """Computed from the means over the seeds; None: undefined, because no program completed or a baseline is 0."""
    spread: float | None
    """Standard deviation of the numbers of single seeds; None for one seed."""
    with_factors: Mapping[str, float | None]
    """Ours with each factor, by its name."""
    kind: str = "value"
    """How the row is computed, see `cluster.offline.reproduce.plan`."""
    measure: str | None = None
    """This and the next three are those of the plan's row; None in results that are older than these fields."""
    system: str | None = None
    against: str | None = None
    load: str | None = None

    @property
    def ratio(self) -> float | None:
        """Ours divided by the published number."""
        return None if self.here is None or not self.published else self.here / self.published

    @property
    def near(self) -> bool:
        """Whether ours is within `NEAR` of the published number."""
        return self.ratio is not None and abs(self.ratio - 1) <= NEAR

    @property
    def near_by_rest(self) -> bool:
        """Whether it is near if a row of the kind `less` is compared by what is left: 1 - percent / 100.

        96 and 99.8% below are near as numbers, but 4 and 0.2% of the other system's measure are left.
        """
        if self.kind != "less":
            return self.near
        if self.here is None or self.here >= 100:
            return False
        return abs((100 - self.published) / (100 - self.here) - 1) <= NEAR


class Results:
    """The measures of runs, by their place in the plan."""

    def __init__(self, runs: Iterable[Measured]) -> None:
        self._values: dict[tuple[str, str, str, str, int], Mapping[str, float | None]] = {}
        self._factors: set[tuple[str, str]] = set()
        self.seeds: list[int] = []
        self.figures: set[str] = set()
        for run in runs:
            job = run.job
            self.figures.add(job.figure)
            self._factors.add((job.figure, job.factor))
            self._values[job.figure, job.factor, job.system, job.load, job.seed] = run.values
            if job.seed not in self.seeds:
                self.seeds.append(job.seed)

    def has(self, figure: str, system: str, load: str) -> bool:
        """Return whether a system was run at a load, without a factor."""
        return any((figure, "", system, load, seed) in self._values for seed in self.seeds)

    def value(self, figure: str, factor: str, system: str, load: str, seed: int, measure: str) -> float | None:
        """Return a measure; None if it is undefined or was not run.

        A system that a factor does not change has the measure that it has without the factor.
        """
        values = self._values.get((figure, factor, system, load, seed))
        if values is None and (figure, factor) in self._factors:
            values = self._values.get((figure, "", system, load, seed))
        return (values or {}).get(measure)

    def mean(self, figure: str, factor: str, system: str, load: str, measure: str) -> float | None:
        """Return the mean over the seeds; None if it is undefined for one of them."""
        values = [self.value(figure, factor, system, load, seed, measure) for seed in self.seeds]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known and len(known) == len(values) else None


def compare(name: str, figure: Figure, results: Results) -> list[Compared]:
    """Return the rows of a figure whose loads were run."""
    if name not in results.figures:
        return []
    rows: list[Compared] = []
    for row in figure.rows:
        if row.load is not None and not results.has(name, row.system, row.load):
            continue
        values = [_number(name, figure, "", row, results, [seed]) for seed in results.seeds]
        known = [value for value in values if value is not None]
        rows.append(
            Compared(
                figure=name,
                what=row.what,
                headline=row.headline,
                published=row.published,
                here=_number(name, figure, "", row, results, results.seeds),
                spread=statistics.stdev(known) if len(known) == len(values) > 1 else None,
                kind=row.kind,
                measure=row.measure,
                system=row.system,
                against=row.against,
                load=row.load,
                with_factors={key: _number(name, figure, key, row, results, results.seeds) for key in figure.factors},
            )
        )
    return rows


def _number(name: str, figure: Figure, factor: str, row: Row, results: Results, seeds: Sequence[int]) -> float | None:
    """Return the number of a row from the means over ``seeds``."""

    def mean(system: str, load: str) -> float | None:
        values = [results.value(name, factor, system, load, seed, row.measure) for seed in seeds]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known and len(known) == len(values) else None

    if row.kind == "value":
        return mean(row.system, row.load or "")
    assert row.against is not None
    if row.kind == "sustained":
        curves = [
            [(load.rate, value) for key, load in figure.loads.items() if (value := mean(system, key)) is not None]
            for system in (row.system, row.against)
        ]
        return sustained(sorted(curves[0]), sorted(curves[1]))
    loads = figure.loads if row.load is None else {row.load: figure.loads[row.load]}
    found = []
    for load in loads:
        own, others = mean(row.system, load), mean(row.against, load)
        if own is None or others is None:
            continue
        if not others:  # the ratio would be infinite, and without it the others would be too small
            return None
        found.append(100 * (1 - own / others) if row.kind == "less" else own / others)
    if row.kind == "mean_ratio":
        return statistics.fmean(found) if found else None
    if row.kind == "least":
        return min(found, default=None)
    return max(found, default=None)


def sustained(own: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float | None:
    """Return how many times the load of ``others`` is sustained at the same level of a measure, at best.

    Args:
        own: pairs of a load and the measure there, by ascending load. The measure rises with the load.
        others: likewise, of the system to compare with.

    Returns:
        The largest ratio of loads over the levels that both reach; None if there is no such level.
    """
    low = max(own[0][1], others[0][1]) if own and others else math.inf
    high = min(max(v for _, v in own), max(v for _, v in others)) if own and others else -math.inf
    if not 0 < low < high:
        return None
    ratios = []
    for step in range(1, LEVELS + 1):
        level = low * (high / low) ** (step / LEVELS)
        mine, theirs = load_at(own, level), load_at(others, level)
        if mine is not None and theirs is not None:
            ratios.append(mine / theirs)
    return max(ratios, default=None)


def load_at(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """Return the load at which a curve first exceeds ``level``, between two points in proportion; None: it does not."""
    for (low_load, low), (high_load, high) in pairwise(curve):
        if low <= level <= high and high > low:
            return low_load + (high_load - low_load) * (level - low) / (high - low)
    return None
