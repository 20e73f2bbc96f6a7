"""How long tool calls take: distributions that are fed one duration at a time and merged across processes. Pure.

Moments are Welford's, merged as Chan, Golub and LeVeque (1983) describe; the distribution's shape is counted in bins
(`cluster.log_histogram`), exact for few durations. What was observed decides what is answered, never chance. Durations
are seconds.
"""

import math
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from cluster.durations import Durations, empirical_bernstein_s
from cluster.log_histogram import LogHistogram
from cluster.parallel import Slowest
from cluster.program import KEY_MARK, without_class

LONGEST_S = 1e9
"""No duration is longer (31 years)."""
MAX_STATISTICS_BYTES = 64 << 10
"""Of one serialized DurationStatistics; it never needs half of it, whatever was observed."""
MAX_TOOLS = 1024
"""Tools that a table tells apart; the least recently observed is forgotten first."""
MAX_TOOL_NAME_BYTES = 256
"""Tool names come from a model's output: longer ones count for the overall only."""
OVERALL = ""
"""The key that stands for all tools together."""

_VERSION = 2
_MAX_COUNT = 1 << 53
_ENVELOPE = struct.Struct("<BI")
"""Version; CRC-32 of all that follows."""
_MOMENTS = struct.Struct("<Qdddd")
"""Count; mean, M2, shortest and longest in seconds (M2: squared). The histogram's own format follows."""


class DurationStatistics:
    """What is known of some durations: count, mean, variance, range and the distribution's shape."""

    __slots__ = ("_bytes", "_histogram", "count", "m2", "max_s", "mean_s", "min_s")

    def __init__(self) -> None:
        self.count = 0
        self.mean_s = 0.0
        self.m2 = 0.0
        """Sum of the squared distances from the mean."""
        self.min_s = math.inf
        self.max_s = 0.0
        self._histogram = LogHistogram()
        self._bytes: bytes | None = None

    def __repr__(self) -> str:
        return f"DurationStatistics(count={self.count}, mean_s={self.mean_s:.6g}, range_s={self.range_s:.6g})"

    def observe(self, seconds: float) -> None:
        """Add one duration.

        Raises:
            ValueError: it is negative, not a number, or longer than LONGEST_S; nothing was changed.
        """
        if not 0 <= seconds <= LONGEST_S:
            raise ValueError(f"not a duration: {seconds} s")
        self.count += 1
        distance = seconds - self.mean_s
        self.mean_s += distance / self.count
        self.m2 += distance * (seconds - self.mean_s)
        if seconds < self.min_s:
            self.min_s = seconds
        if seconds > self.max_s:
            self.max_s = seconds
        self._histogram.add(seconds)
        self._bytes = None

    def merge(self, other: "DurationStatistics") -> "DurationStatistics":
        """A new object that has seen what both have; neither is changed."""
        merged = DurationStatistics()
        merged.count = count = self.count + other.count
        if count == 0:
            return merged
        merged.min_s = min(self.min_s, other.min_s)
        merged.max_s = max(self.max_s, other.max_s)
        distance = other.mean_s - self.mean_s
        mean_s = self.mean_s + distance * (other.count / count)
        merged.mean_s = min(max(mean_s, merged.min_s), merged.max_s)
        merged.m2 = self.m2 + other.m2 + distance * distance * (self.count * (other.count / count))
        merged._histogram.merge(self._histogram)
        merged._histogram.merge(other._histogram)
        return merged

    @property
    def variance(self) -> float:
        """Population variance, seconds squared; 0 below two durations."""
        return self.m2 / self.count if self.count > 1 else 0.0

    @property
    def range_s(self) -> float:
        """Longest minus shortest; 0 when nothing was observed."""
        return self.max_s - self.min_s if self.count else 0.0

    @property
    def steps_s(self) -> Sequence[float]:
        """The durations at which the survival falls, in ascending order; to be read only."""
        return self._histogram.steps()

    def quantile(self, q: float) -> float:
        """The duration, seconds, that a share ``q`` of all does not exceed.

        Raises:
            ValueError: ``q`` is not in [0, 1], or nothing was observed.
        """
        self._need_observations()
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile's rank is between 0 and 1, not {q}")
        if q in (0, 1):
            return self.min_s if q == 0 else self.max_s
        return self._histogram.quantile(q)

    def survival(self, t: float) -> float:
        """The share of durations longer than ``t`` seconds; never rises with ``t``.

        Raises:
            ValueError: ``t`` is not a number, or nothing was observed.
        """
        self._need_observations()
        if math.isnan(t):
            raise ValueError("survival needs a time")
        if t < self.min_s:
            return 1.0
        return 0.0 if t >= self.max_s else 1.0 - self._histogram.share_up_to(t)

    def hazard(self, t: float, window_s: float) -> float:
        """P(ends within ``window_s`` | still running at ``t``) / ``window_s``, per second.

        0 where no observed duration was longer than ``t``: nothing is known of when such a call ends.

        Raises:
            ValueError: ``window_s`` is not positive, ``t`` is not a number, or nothing was observed.
        """
        if not window_s > 0:
            raise ValueError(f"a window must be positive, not {window_s} s")
        running = self.survival(t)
        return (running - self.survival(t + window_s)) / running / window_s if running > 0 else 0.0

    def bernstein_bound_s(self, delta: float) -> float:
        """The empirical Bernstein bound on the mean, that holds with probability 1 - ``delta``; Continuum's u.

        Raises:
            ValueError: ``delta`` is not in (0, 1), or nothing was observed.
        """
        self._need_observations()
        return empirical_bernstein_s(self.count, self.mean_s, self.variance, self.range_s, delta)

    def to_bytes(self) -> bytes:
        """Versioned and checksummed; 45 bytes and 8 for each of few durations, or 16 for each bin of many."""
        if self._bytes is None:
            moments = _MOMENTS.pack(self.count, self.mean_s, self.m2, self.min_s, self.max_s)
            body = moments + self._histogram.to_bytes()
            self._bytes = _ENVELOPE.pack(_VERSION, zlib.crc32(body)) + body
        return self._bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> "DurationStatistics":
        """The inverse of ``to_bytes``.

        Raises:
            ValueError: these are not bytes of ``to_bytes`` of this version, or they were damaged.
        """
        if not _ENVELOPE.size + _MOMENTS.size <= len(data) <= MAX_STATISTICS_BYTES:
            raise ValueError(f"not duration statistics: {len(data)} bytes")
        version, checksum = _ENVELOPE.unpack_from(data)
        if version != _VERSION:
            raise ValueError(f"not duration statistics of version {_VERSION}: {version}")
        if checksum != zlib.crc32(memoryview(data)[_ENVELOPE.size :]):
            raise ValueError("damaged duration statistics: the checksum differs")
        statistics = cls()
        count, mean_s, m2, min_s, max_s = _MOMENTS.unpack_from(data, _ENVELOPE.size)
        shape = data[_ENVELOPE.size + _MOMENTS.size :]
        if count == 0:
            if shape:
                raise ValueError("damaged duration statistics: of nothing, but with a shape")
            return statistics
        in_order = 0 <= min_s <= mean_s <= max_s <= LONGEST_S
        if count > _MAX_COUNT or not in_order or not 0 <= m2 <= count * LONGEST_S**2:
            raise ValueError(f"nonsensical duration statistics: {count}, {mean_s} s in [{min_s} s, {max_s} s], M2 {m2}")
        try:
            statistics._histogram = LogHistogram.from_bytes(shape, count)
        except ValueError as error:
            raise ValueError(f"damaged duration statistics: {error}") from error
        statistics.count, statistics.mean_s, statistics.m2 = count, mean_s, m2
        statistics.min_s, statistics.max_s = min_s, max_s
        statistics._bytes = bytes(data)
        return statistics

    def _need_observations(self) -> None:
        if self.count == 0:
            raise ValueError("nothing was observed")


class DurationTable:
    """Durations per tool and of all tools: what this writer observed, merged with what the others did.

    Only what this writer observed (its *own* part) is shipped; the others' parts are replaced as a whole. The
    statistics that it gives out are shared, not copied: they are to be read only.
    """

    def __init__(self) -> None:
        self._own: OrderedDict[str, DurationStatistics] = OrderedDict()
        self._own_overall = DurationStatistics()
        self._others: dict[str, DurationStatistics] = {}
        self._merged: dict[str, DurationStatistics] = {}
        """Own and others' together, where both exist; an entry is dropped when either side changes."""

    @classmethod
    def of(cls, own: Mapping[str, DurationStatistics]) -> "DurationTable":
        """A table whose own part is ``own``: per tool, and overall under OVERALL."""
        table = cls()
        parts = _bounded(own)
        table._own_overall = parts.pop(OVERALL, table._own_overall)
        table._own.update(parts)
        return table

    def observe(self, tool: str, seconds: float) -> None:
        """Add one duration of ``tool``, and if that has a class of arguments, of the tool without it.

        It counts overall only, if the name is empty or longer than MAX_TOOL_NAME_BYTES.

        Raises:
            ValueError: see ``DurationStatistics.observe``; nothing was changed.
        """
        self._own_overall.observe(seconds)
        self._merged.pop(OVERALL, None)
        for name in dict.fromkeys((tool, without_class(tool))):
            if name != OVERALL and len(encode_tool(name)) <= MAX_TOOL_NAME_BYTES:
                self._observe(name, seconds)

    def _observe(self, tool: str, seconds: float) -> None:
        own = self._own.get(tool)
        if own is None:
            own = self._own[tool] = DurationStatistics()
            if len(self._own) > MAX_TOOLS:
                forgotten, _ = self._own.popitem(last=False)
                self._merged.pop(forgotten, None)
        else:
            self._own.move_to_end(tool)
        own.observe(seconds)
        self._merged.pop(tool, None)

    def tool(self, name: str) -> DurationStatistics | None:
        """What all writers know of one tool; None if none has observed it."""
        own, others = self._own.get(name), self._others.get(name)
        if own is None or others is None:
            return others if own is None else own
        return self._both(name, own, others)

    def levels(self, name: str) -> Iterator[Durations]:
        """What is known, from the special to the general: of this tool with such arguments, of the tool, of all tools.

        Of tools that ran together, before all tools, also the slowest of what is known of each alone: with such
        arguments, and without. Only what has been observed at all.
        """
        general = without_class(name)
        together = KEY_MARK in name
        for level in dict.fromkeys((name, general)):
            # bash:cd+bash:ls without its classes is one bash, which is not what ran.
            statistics = self.tool(level) if not together or KEY_MARK in level else None
            if statistics is not None and statistics.count:
                yield statistics
        if together:
            tools = tuple(name.split(KEY_MARK))
            for alone in dict.fromkeys((tools, tuple(map(without_class, tools)))):
                known = [part for tool in alone if tool and (part := self.tool(tool)) is not None and part.count]
                if len(known) == len(alone):
                    yield Slowest(known)
        if self.overall.count:
            yield self.overall

    @property
    def overall(self) -> DurationStatistics:
        """What all writers know of all tools together; it may be empty."""
        others = self._others.get(OVERALL)
        return self._own_overall if others is None else self._both(OVERALL, self._own_overall, others)

    def names(self) -> list[str]:
        """The tools that any writer has observed, with classes and without, in alphabetical order."""
        return sorted((self._own.keys() | self._others.keys()) - {OVERALL})

    def own(self) -> Mapping[str, DurationStatistics]:
        """What this writer observed: per tool, and overall under OVERALL. A snapshot of names, not of statistics."""
        return MappingProxyType({OVERALL: self._own_overall, **self._own})

    def replace_others(self, others: Mapping[str, DurationStatistics]) -> None:
        """From now on, ``others`` is what the other writers have observed: per tool, and overall under OVERALL."""
        self._others = _bounded(others)
        self._merged.clear()

    def to_bytes(self) -> bytes:
        """The own part, as msgpack: the tool's name to its statistics, both as bytes."""
        return msgspec.msgpack.encode({encode_tool(name): part.to_bytes() for name, part in self.own().items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> "DurationTable":
        """The inverse of ``to_bytes``.

        Raises:
            ValueError: these are not bytes of ``to_bytes``, or they were damaged.
        """
        try:
            parts = msgspec.msgpack.decode(data, type=dict[bytes, bytes])
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a table of durations: {error}") from error
        if len(parts) > MAX_TOOLS + 1:
            raise ValueError(f"a table of durations has at most {MAX_TOOLS} tools, not {len(parts) - 1}")
        return cls.of({decode_tool(name): DurationStatistics.from_bytes(part) for name, part in parts.items()})

    def _both(self, name: str, own: DurationStatistics, others: DurationStatistics) -> DurationStatistics:
        merged = self._merged.get(name)
        if merged is None:
            merged = self._merged[name] = own.merge(others)
        return merged


def encode_tool(name: str) -> bytes:
    """A tool's name as bytes. A model can write any code point, halves of surrogate pairs too."""
    return name.encode("utf-8", "surrogatepass")


def decode_tool(name: bytes) -> str:
    """The inverse of ``encode_tool``.

    Raises:
        ValueError: the bytes are longer than MAX_TOOL_NAME_BYTES or not UTF-8.
    """
    if len(name) > MAX_TOOL_NAME_BYTES:
        raise ValueError(f"a tool's name has at most {MAX_TOOL_NAME_BYTES} bytes, not {len(name)}")
    return name.decode("utf-8", "surrogatepass")


def _bounded(parts: Mapping[str, DurationStatistics]) -> dict[str, DurationStatistics]:
    """At most MAX_TOOLS of them, the most observed, and the overall."""
    tools = parts.keys() - {OVERALL}
    if len(tools) <= MAX_TOOLS:
        return dict(parts)
    kept = sorted(tools, key=lambda name: -parts[name].count)[:MAX_TOOLS]
    return {name: parts[name] for name in (OVERALL, *kept) if name in parts}
