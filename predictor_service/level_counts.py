"""Counts at levels from the general to the particular, each level drawn to the one above it.

A level that has seen n values forecasts (counts + κ · parent) / (n + κ): one that has seen little says what its parent
says. Of the levels that were not added to for longest those that have seen least are forgotten, and where a level has
seen much its old counts fade.
"""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cluster.durations.table import decode_tool, encode_tool
from predictor_service.distribution import Floats

Key = tuple[str, ...]
"""A level's name; ``()`` stands above all."""
HistogramRow = tuple[list[bytes], bytes, bytes]
"""A level as it is stored: its name, the numbers of its bins (uint16) and their counts (float32), little-endian."""
NameRow = tuple[list[bytes], dict[bytes, float]]
"""The same of names: each with its count."""

MOST_LEVELS = 8192
OLDEST = 16
"""Levels not added to for longest, of which the one that has seen least is forgotten when there are too many."""
MOST_SEEN = 4096.0
"""A level that has seen more halves its counts: what changes is learnt anew."""
MOST_NAMES = 128
"""Names that a level tells apart; beyond them the least seen is forgotten."""
MOST_PARTS = 8
"""Of a level's name."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is counted and looked up."""

    trunk: Sequence[Key]
    """The general first."""
    views: Sequence["View"] = ()
    """Of other things that are known, beside one another."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """All of them."""
        return (*self.trunk, *(view.key for view in self.views))


@dataclass(frozen=True, slots=True)
class View:
    """A level beside the trunk's later ones."""

    key: Key
    depth: int
    """Of the trunk's level that it is drawn to, and that it is compared with: what it adds to that is what it tells."""


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """How much a level leans on what is above it, in values seen."""

    trunk: Sequence[float]
    """κ of its levels, the general first; the last one is that of all later levels, too."""
    view: float = 8.0
    """κ of a view."""
    weight: float = 0.7
    """Of what a view adds to the trunk; views tell in part the same, so that 1 would be too sure."""
    general: float = 0.05
    """Share that the trunk's second level has in every answer: tasks differ more than one task's turns tell."""


class LevelHistograms:
    """Numbers in bins.

    Args:
        edges: ascending, shape [bins + 1].
        typical: the mean that is expected where nothing was seen.
        shrinkage: of all its levels.
        most_levels: kept at a time.
    """

    def __init__(self, edges: Floats, typical: float, shrinkage: Shrinkage, most_levels: int = MOST_LEVELS) -> None:
        self._edges: list[float] = edges.tolist()
        self._bins = len(edges) - 1
        self._shrinkage = shrinkage
        self._most = most_levels
        self._own: OrderedDict[Key, Floats] = OrderedDict()
        self._others: Mapping[Key, Floats] = {}
        # Lomax's distribution of shape 2: the tail is long, and yet there is a mean.
        below = 1 - (1 + np.maximum(edges, 0.0) / typical) ** -2.0
        self._nothing: Floats = np.diff(below) / (below[-1] - below[0])

    def add(self, place: Place, value: float) -> None:
        """A number was seen at every level of ``place``."""
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
        """Of the bins, together 1.

        Views are pooled as if what each adds to its parent, the ratio of their shares, were evidence of its own.
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
        """What a level says; ``parent`` itself where it has seen nothing."""
        counts = self._counts(key)
        if counts is None:
            return parent
        shares: Floats = (counts + kappa * parent) / (counts.sum() + kappa)
        return shares

    def rows(self) -> list[HistogramRow]:
        """One's own counts, the levels that were added to last at the end."""
        rows = []
        for key, counts in self._own.items():
            numbers = np.flatnonzero(counts)
            rows.append((encode_key(key), numbers.astype("<u2").tobytes(), counts[numbers].astype("<f4").tobytes()))
        return rows

    def put(self, rows: Iterable[HistogramRow]) -> None:
        """Add what ``rows`` gave, to one's own.

        Raises:
            ValueError: they are not rows of such counts; nothing was changed.
        """
        for key, counts in self._read(rows).items():
            before = self._own.pop(key, None)
            self._own[key] = counts if before is None else before + counts
        self._forget()

    def replace_others(self, others: Iterable[Iterable[HistogramRow]]) -> None:
        """From now on these are the counts of others, each writer's ``rows``.

        Raises:
            ValueError: see ``put``.
        """
        total: dict[Key, Floats] = {}
        for rows in others:
            for key, counts in self._read(rows).items():
                total[key] = total[key] + counts if key in total else counts
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
    """Names. A level is drawn to its parent by as much as it tells names apart (Witten and Bell, 1991).

    Args:
        most_levels: kept at a time.
    """

    def __init__(self, most_levels: int = MOST_LEVELS) -> None:
        self._most = most_levels
        self._own: OrderedDict[Key, dict[str, float]] = OrderedDict()
        self._others: Mapping[Key, Mapping[str, float]] = {}

    def add(self, path: Sequence[Key], name: str) -> None:
        """A name was seen at every level of ``path``, the general first."""
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
        """Of the names that were seen, together 1; empty if none was."""
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

    def rows(self) -> list[NameRow]:
        """See `LevelHistograms.rows`."""
        return [
            (encode_key(key), {encode_tool(name): count for name, count in seen.items()})
            for key, seen in self._own.items()
        ]

    def put(self, rows: Iterable[NameRow]) -> None:
        """See `LevelHistograms.put`."""
        for key, seen in self._read(rows).items():
            before = self._own.pop(key, {})
            self._own[key] = _most_seen(_sum(before, seen))
        self._forget()

    def replace_others(self, others: Iterable[Iterable[NameRow]]) -> None:
        """See `LevelHistograms.replace_others`."""
        total: dict[Key, dict[str, float]] = {}
        for rows in others:
            for key, seen in self._read(rows).items():
                total[key] = _sum(total.get(key, {}), seen)
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


def encode_key(key: Key) -> list[bytes]:
    """A level's name as bytes; tools are named by models, which can write any code point."""
    return [encode_tool(part) for part in key]


def decode_key(name: Sequence[bytes]) -> Key:
    """The inverse of ``encode_key``.

    Raises:
        ValueError: it has too many parts, or one that is too long or no text.
    """
    if len(name) > MOST_PARTS:
        raise ValueError(f"a level's name has at most {MOST_PARTS} parts, not {len(name)}")
    return tuple(decode_tool(part) for part in name)


def checked_count(count: float) -> float:
    """``count``.

    Raises:
        ValueError: it counts nothing.
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
