"""How long the calls of each tool take: what this process observed, merged with what the others did. Pure."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

import msgspec

from cluster.core.program import KEY_MARK, without_class
from cluster.durations.concurrent import Slowest
from cluster.durations.statistics import Durations, DurationStatistics

MAX_TOOLS = 1024
"""Tools that a table distinguishes; the least recently observed is forgotten first."""
MAX_TOOL_NAME_BYTES = 256
"""Tool names come from a model's output: longer ones count for the overall only."""
OVERALL = ""
"""The key that stands for all tools together."""


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

    def update_others(self, changed: Mapping[str, DurationStatistics], forgotten: Collection[str] = ()) -> None:
        """Replace what the other writers have observed of some tools, and forget others."""
        others = {name: part for name, part in self._others.items() if name not in forgotten}
        self._others = _bounded({**others, **changed})
        for name in (*changed, *forgotten):
            self._merged.pop(name, None)

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
