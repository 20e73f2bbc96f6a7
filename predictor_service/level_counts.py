"""Counts at levels from the general to the specific. Each level is shrunk towards its parent.

A level with n values predicts (counts + κ · parent) / (n + κ), so that a level with few values predicts what its parent
predicts. When there are too many levels, the one with the fewest values among the least recently used is dropped. The
counts of a level with many values are halved, so that old values lose weight.
"""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cluster.durations.table import decode_tool, encode_tool
from predictor_service.distribution import Floats

Key = tuple[str, ...]
"""Name of a level. ``()`` is the most general level."""
HistogramRow = tuple[list[bytes], bytes, bytes]
"""A stored level: its name, the indices of its bins (uint16) and their counts (float32), both little-endian."""
NameRow = tuple[list[bytes], dict[bytes, float]]
"""A stored level of names: its own name, and each counted name with its count."""

MOST_LEVELS = 8192
OLDEST = 16
"""Number of least recently used levels among which the one with the fewest values is dropped."""
MOST_SEEN = 4096.0
"""Values from which on a level halves its counts, so that it follows changes."""
MOST_NAMES = 128
"""Names that a level counts, at most. The name with the lowest count is dropped first."""
ROWS = 128
"""Levels that are encoded in one step, at most. It takes a few milliseconds."""
MOST_PARTS = 8
"""Parts of a level's name, at most."""


@dataclass(frozen=True, slots=True)
class Place:
    """The levels at which a value is counted and looked up."""

    trunk: Sequence[Key]
    """Levels of which each one refines the one before it. The most general level comes first."""
    views: Sequence["View"] = ()
    """Levels beside the trunk, each of which uses another feature."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of all levels."""
        return (*self.trunk, *(view.key for view in self.views))


@dataclass(frozen=True, slots=True)
class View:
    """A level beside the trunk's later ones."""

    key: Key
    depth: int
    """Index of its parent, the trunk's level that the view is shrunk towards and compared with."""


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """How strongly levels are shrunk towards their parents. κ is in numbers of values."""

    trunk: Sequence[float]
    """κ of each trunk level, with the most general level first. The last one also applies to all later levels."""
    view: float = 8.0
    """κ of every view."""
    weight: float = 0.7
    """Weight of the information that views add to the trunk. It is below 1 because views overlap."""
    general: float = 0.05
    """Share of the trunk's second level in every prediction, as tasks differ more than the turns of one task show."""


class LevelHistograms:
    """Histograms of numbers at levels.

    Args:
        edges: ascending edges of the bins, shape [bins + 1].
        typical: the expected mean before the first value.
        shrinkage: how its levels are shrunk towards their parents.
        most_levels: number of levels that are kept.
    """

    def __init__(self, edges: Floats, typical: float, shrinkage: Shrinkage, most_levels: int = MOST_LEVELS) -> None:
        self._edges: list[float] = edges.tolist()
        self._bins = len(edges) - 1
        self._shrinkage = shrinkage
        self._most = most_levels
        self._own: OrderedDict[Key, Floats] = OrderedDict()
        self._others: Mapping[Key, Floats] = {}
        # The prior is a Lomax distribution of shape 2, which has a long tail and a finite mean.
        below = 1 - (1 + np.maximum(edges, 0.0) / typical) ** -2.0
        self._nothing: Floats = np.diff(below) / (below[-1] - below[0])

    def add(self, place: Place, value: float) -> None:
        """Count a number at every level of ``place``."""
        number = min(max(bisect_left(self._edges, value) - 1, 0), self._bins - 1)
        for key in place.keys:
            counts = self._own.get(key)
            if counts is None:
                counts = self._own[key] = np.zeros(self._bins)
            else:
                self._own.move_to_end(key)
            counts[number] += 1.0
            if counts.sum() > MOST_SEEN:
                counts *= 0.5
        self._forget()

    def shares(self, place: Place) -> Floats:
        """Return the predicted shares of the bins, which sum up to 1.

        Each view contributes the ratio of its shares to its parent's. The ratios are multiplied, as if independent.
        """
        shares = self._nothing
        kappas = self._shrinkage.trunk
        trunk = []
        for depth, key in enumerate(place.trunk):
            shares = self._drawn(key, shares, kappas[min(depth, len(kappas) - 1)])
            trunk.append(shares)
        general = trunk[min(1, len(trunk) - 1)]
        told = None
        for view in place.views:
            parent = trunk[view.depth]
            seen = self._drawn(view.key, parent, self._shrinkage.view)
            if seen is not parent:
                ratio = seen / parent
                told = ratio if told is None else told * ratio
        if told is not None:
            shares = shares * told**self._shrinkage.weight
            shares /= shares.sum()
        answer: Floats = shares + self._shrinkage.general * (general - shares)
        return answer

    def _drawn(self, key: Key, parent: Floats, kappa: float) -> Floats:
        """Return the shares of a level after shrinkage; ``parent`` itself if the level has no values."""
        counts = self._counts(key)
        if counts is None:
            return parent
        shares: Floats = (counts + kappa * parent) / (counts.sum() + kappa)
        return shares

    def rows(self) -> Iterator[list[HistogramRow]]:
        """Encode this writer's counts in steps of `ROWS` levels, with the most recently used levels at the end.

        Values may be counted between two steps. Levels that are new since the first step, or were dropped, are left
        out.
        """
        for keys in _parts(list(self._own)):
            yield [_histogram_row(key, counts) for key in keys if (counts := self._own.get(key)) is not None]

    def put(self, rows: Iterable[HistogramRow]) -> None:
        """Add the result of ``rows`` to this writer's counts.

        Raises:
            ValueError: these are not rows of such counts; nothing was changed.
        """
        for key, counts in self._read(rows).items():
            before = self._own.pop(key, None)
            self._own[key] = counts if before is None else before + counts
        self._forget()

    def read_others(self, others: Iterable[Iterable[HistogramRow]]) -> Mapping[Key, Floats]:
        """Return the sums of the ``rows`` of other writers, for `use_others`. The table is not changed.

        Raises:
            ValueError: see ``put``.
        """
        total: dict[Key, Floats] = {}
        for rows in others:
            for key, counts in self._read(rows).items():
                total[key] = total[key] + counts if key in total else counts
        return total

    def use_others(self, total: Mapping[Key, Floats]) -> None:
        """Replace the counts of the other writers by the result of `read_others`."""
        self._others = total

    def _counts(self, key: Key) -> Floats | None:
        own, others = self._own.get(key), self._others.get(key)
        if own is None or others is None:
            return others if own is None else own
        return own + others

    def _read(self, rows: Iterable[HistogramRow]) -> dict[Key, Floats]:
        read: dict[Key, Floats] = {}
        for name, numbers, values in rows:
            at, seen = np.frombuffer(numbers, "<u2"), np.frombuffer(values, "<f4")
            if len(at) != len(seen) or (len(at) and (at.max() >= self._bins or not _are_counts(seen))):
                raise ValueError(f"not counts of {self._bins} bins")
            counts = read[decode_key(name)] = np.zeros(self._bins)
            counts[at] = seen
        return read

    def _forget(self) -> None:
        while len(self._own) > self._most:
            del self._own[min(islice(self._own, OLDEST), key=lambda key: self._own[key].sum())]


class LevelNames:
    """Counts of names at levels. κ of a level is its number of different names (Witten and Bell, 1991).

    Args:
        most_levels: number of levels that are kept.
    """

    def __init__(self, most_levels: int = MOST_LEVELS) -> None:
        self._most = most_levels
        self._own: OrderedDict[Key, dict[str, float]] = OrderedDict()
        self._others: Mapping[Key, Mapping[str, float]] = {}

    def add(self, path: Sequence[Key], name: str) -> None:
        """Count a name at every level of ``path``, whose most general level comes first."""
        for key in path:
            seen = self._own.setdefault(key, {})
            self._own.move_to_end(key)
            seen[name] = seen.get(name, 0.0) + 1.0
            if len(seen) > MOST_NAMES:
                del seen[min(seen, key=lambda other: (seen[other], other != name))]
            if sum(seen.values()) > MOST_SEEN:
                for other in seen:
                    seen[other] *= 0.5
        self._forget()

    def shares(self, path: Sequence[Key]) -> dict[str, float]:
        """Return the shares of all counted names, which sum up to 1; empty if there are none."""
        shares: dict[str, float] = {}
        rest = 1.0
        levels = [seen for key in path if (seen := self._seen(key))]
        for depth, seen in reversed(list(enumerate(levels))):
            drawn = float(len(seen)) if depth else 0.0
            total = sum(seen.values()) + drawn
            for name, count in seen.items():
                shares[name] = shares.get(name, 0.0) + rest * count / total
            rest *= drawn / total
        return shares

    def rows(self) -> Iterator[list[NameRow]]:
        """See `LevelHistograms.rows`."""
        for keys in _parts(list(self._own)):
            yield [
                (encode_key(key), {encode_tool(name): count for name, count in seen.items()})
                for key in keys
                if (seen := self._own.get(key)) is not None
            ]

    def put(self, rows: Iterable[NameRow]) -> None:
        """See `LevelHistograms.put`."""
        for key, seen in self._read(rows).items():
            before = self._own.pop(key, {})
            self._own[key] = _most_seen(_sum(before, seen))
        self._forget()

    def read_others(self, others: Iterable[Iterable[NameRow]]) -> Mapping[Key, Mapping[str, float]]:
        """See `LevelHistograms.read_others`."""
        total: dict[Key, dict[str, float]] = {}
        for rows in others:
            for key, seen in self._read(rows).items():
                total[key] = _sum(total.get(key, {}), seen)
        return total

    def use_others(self, total: Mapping[Key, Mapping[str, float]]) -> None:
        """See `LevelHistograms.use_others`."""
        self._others = total

    def _seen(self, key: Key) -> Mapping[str, float]:
        own, others = self._own.get(key), self._others.get(key)
        if own is None or others is None:
            return (others if own is None else own) or {}
        return _sum(own, others)

    def _read(self, rows: Iterable[NameRow]) -> dict[Key, dict[str, float]]:
        return {
            decode_key(key): {decode_tool(name): checked_count(count) for name, count in seen.items()}
            for key, seen in rows
        }

    def _forget(self) -> None:
        while len(self._own) > self._most:
            del self._own[min(islice(self._own, OLDEST), key=lambda key: sum(self._own[key].values()))]


def _parts(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    for start in range(0, len(keys), ROWS):
        yield keys[start : start + ROWS]


def _histogram_row(key: Key, counts: Floats) -> HistogramRow:
    numbers = np.flatnonzero(counts)
    return encode_key(key), numbers.astype("<u2").tobytes(), counts[numbers].astype("<f4").tobytes()


def encode_key(key: Key) -> list[bytes]:
    """Encode a level's name as bytes. Models name tools, and may write any code point."""
    return [encode_tool(part) for part in key]


def decode_key(name: Sequence[bytes]) -> Key:
    """Decode the result of ``encode_key``.

    Raises:
        ValueError: the name has too many parts, or a part is too long or is no text.
    """
    if len(name) > MOST_PARTS:
        raise ValueError(f"a level's name has at most {MOST_PARTS} parts, not {len(name)}")
    return tuple(decode_tool(part) for part in name)


def checked_count(count: float) -> float:
    """Return ``count``.

    Raises:
        ValueError: it is not finite or not positive.
    """
    if not (math.isfinite(count) and count > 0):
        raise ValueError(f"not a count: {count}")
    return count


def _are_counts(values: NDArray[np.float32]) -> bool:
    return bool(np.isfinite(values).all() and values.min() > 0)


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


def _most_seen(seen: dict[str, float]) -> dict[str, float]:
    if len(seen) <= MOST_NAMES:
        return seen
    return dict(sorted(seen.items(), key=lambda item: (-item[1], item[0]))[:MOST_NAMES])
