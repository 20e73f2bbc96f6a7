"""Statistics of the durations of each tool's calls: this process's observations, merged with those of others.

The module has no I/O and no clock.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

import msgspec

from cluster.core.program import KEY_MARK, without_class
from cluster.durations.concurrent import Slowest
from cluster.durations.statistics import Durations, DurationStatistics

MAX_TOOLS = 1024
"""Maximum number of tools in a table. Beyond it, the least recently observed tool is dropped."""
MAX_TOOL_NAME_BYTES = 256
"""Maximum size of a tool's name, which comes from a model's output. Durations under longer names count only overall."""
OVERALL = ""
"""The key for all tools together."""


class DurationTable:
    """Durations by tool and of all tools: this writer's observations, merged with those of the other writers.

    Only this writer's observations (its *own* part) are sent to others. The others' parts are replaced as a whole. The
    returned statistics are not copied, so that callers must not change them.
    """

    def __init__(self) -> None:
        self._own: OrderedDict[str, DurationStatistics] = OrderedDict()
        self._own_overall = DurationStatistics()
        self._others: dict[str, DurationStatistics] = {}
        self._merged: dict[str, DurationStatistics] = {}
        """The merged own and others' statistics of tools that both have observed. A change of either drops the
        entry."""

    @classmethod
    def of(cls, own: Mapping[str, DurationStatistics]) -> "DurationTable":
        """Make a table whose own part is ``own``: statistics by tool, and of all tools under OVERALL."""
        table = cls()
        parts = _bounded(own)
        table._own_overall = parts.pop(OVERALL, table._own_overall)
        table._own.update(parts)
        return table

    def observe(self, tool: str, seconds: float) -> None:
        """Add one duration of ``tool``. If the name has a class of arguments, it counts for the tool without the class
        too.

        If the name is empty or longer than MAX_TOOL_NAME_BYTES, the duration counts only overall.

        Raises:
            ValueError: see ``DurationStatistics.observe``. Nothing was changed.
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
        """Return the statistics of one tool from all writers; None: no writer has observed it."""
        own, others = self._own.get(name), self._others.get(name)
        if own is None or others is None:
            return others if own is None else own
        return self._both(name, own, others)

    def levels(self, name: str) -> Iterator[Durations]:
        """Yield the distributions that are known for a tool key, from the most special to the most general.

        They are those of the tool with its class of arguments, of the tool without it, and of all tools. For tools that
        run together, the `Slowest` of the single tools, with and without classes, comes before that of all tools.
        Levels without observations are left out.
        """
        general = without_class(name)
        together = KEY_MARK in name
        for level in dict.fromkeys((name, general)):
            # bash:cd+bash:ls without its classes is the key of a single call of bash, but two calls ran.
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
        """Statistics of all tools together, from all writers. They may be empty."""
        others = self._others.get(OVERALL)
        return self._own_overall if others is None else self._both(OVERALL, self._own_overall, others)

    def names(self) -> list[str]:
        """Return the tools that any writer has observed, with and without classes, in alphabetical order."""
        return sorted((self._own.keys() | self._others.keys()) - {OVERALL})

    def own(self) -> Mapping[str, DurationStatistics]:
        """Return the own part: statistics by tool, and of all tools under OVERALL. Statistics in it continue to
        change.
        """
        return MappingProxyType({OVERALL: self._own_overall, **self._own})

    def replace_others(self, others: Mapping[str, DurationStatistics]) -> None:
        """Replace the other writers' statistics with ``others``: by tool, and of all tools under OVERALL."""
        self._others = _bounded(others)
        self._merged.clear()

    def update_others(self, changed: Mapping[str, DurationStatistics], forgotten: Collection[str] = ()) -> None:
        """Replace the other writers' statistics of the tools in ``changed``, and drop those of the tools in
        ``forgotten``.
        """
        others = {name: part for name, part in self._others.items() if name not in forgotten}
        self._others = _bounded({**others, **changed})
        for name in (*changed, *forgotten):
            self._merged.pop(name, None)

    def to_bytes(self) -> bytes:
        """Serialize the own part as msgpack: a map from the tool's name to its statistics, both as bytes."""
        return msgspec.msgpack.encode({encode_tool(name): part.to_bytes() for name, part in self.own().items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> "DurationTable":
        """Read a table whose own part ``to_bytes`` wrote.

        Raises:
            ValueError: the bytes were not written by ``to_bytes``, or are damaged.
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
    """Encode a tool's name. A model can write any code point, including lone surrogates."""
    return name.encode("utf-8", "surrogatepass")


def decode_tool(name: bytes) -> str:
    """Decode what ``encode_tool`` wrote.

    Raises:
        ValueError: the bytes are longer than MAX_TOOL_NAME_BYTES or not UTF-8.
    """
    if len(name) > MAX_TOOL_NAME_BYTES:
        raise ValueError(f"a tool's name has at most {MAX_TOOL_NAME_BYTES} bytes, not {len(name)}")
    return name.decode("utf-8", "surrogatepass")


def _bounded(parts: Mapping[str, DurationStatistics]) -> dict[str, DurationStatistics]:
    """Return at most MAX_TOOLS tools, those with the most observations, and the entry of all tools."""
    tools = parts.keys() - {OVERALL}
    if len(tools) <= MAX_TOOLS:
        return dict(parts)
    kept = sorted(tools, key=lambda name: -parts[name].count)[:MAX_TOOLS]
    return {name: parts[name] for name in (OVERALL, *kept) if name in parts}
