"""Exchanges tool durations between a scheduler and its replica.

Only statistics that changed since the last exchange are sent. One exchange has at most MAX_PARTS statistics in each
direction, which bounds its cost for a step of the engine. A part is a tool's complete statistics: when an answer was
lost and a part is sent twice, the second one changes nothing.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

import msgspec

from cluster.core.program import without_class
from cluster.durations.statistics import DurationStatistics
from cluster.durations.table import MAX_TOOLS, OVERALL, DurationTable, encode_tool

MAX_PARTS = 32
"""Largest number of statistics per exchange and direction. Parsing and merging one takes up to about 0.1 ms."""


class DurationChanges:
    """The scheduler's side: which tools were observed, in the order of their latest observation."""

    def __init__(self) -> None:
        self._revision = 0
        self._changed: OrderedDict[str, int] = OrderedDict()

    def note(self, tool: str) -> None:
        """Record that a duration of this tool was observed."""
        for name in dict.fromkeys((OVERALL, tool, without_class(tool))):
            self._revision += 1
            self._changed[name] = self._revision
            self._changed.move_to_end(name)
        while len(self._changed) > MAX_TOOLS + 1:
            self._changed.popitem(last=False)

    def since(self, revision: int, table: DurationTable) -> tuple[int, bytes]:
        """Return the own parts that changed after a revision, and the revision that the receiver has then.

        The parts are packed, at most MAX_PARTS, those with the oldest change first.
        """
        names = []
        for name, at in reversed(self._changed.items()):
            if at <= revision:
                break
            names.append(name)
        names = names[::-1][:MAX_PARTS]
        if not names:
            return revision, b""
        own = table.own()
        return self._changed[names[-1]], pack_parts({name: own[name] for name in names if name in own})


class DurationSync:
    """The replica's side: what its scheduler observed, and which of the others' observations the scheduler has."""

    def __init__(self) -> None:
        self._revision = 0
        self._own: OrderedDict[str, DurationStatistics] = OrderedDict()
        self._others: Mapping[str, DurationStatistics] = {}
        self._sent: dict[str, DurationStatistics] = {}
        self._sending: dict[str, DurationStatistics] = {}
        self._forgetting: Collection[str] = ()

    @property
    def own(self) -> Mapping[str, DurationStatistics]:
        """Statistics that the scheduler observed, by tool. The key OVERALL has those of all tools."""
        return self._own

    def set_others(self, others: Mapping[str, DurationStatistics]) -> None:
        """Set the statistics that the other replicas have observed."""
        self._others = others

    def payload(self) -> dict[str, Any]:
        """Return the arguments of the next exchange; see `replicas.control`."""
        changed = ((name, part) for name, part in self._others.items() if _differs(self._sent.get(name), part))
        self._sending = dict(islice(changed, MAX_PARTS))
        self._forgetting = list(islice((name for name in self._sent if name not in self._others), MAX_PARTS))
        payload: dict[str, Any] = {"revision": self._revision}
        if self._sending or self._forgetting:
            payload |= {"durations": pack_parts(self._sending), "forgotten": list(self._forgetting)}
        return payload

    def answered(self, revision: int, durations: bytes) -> None:
        """Apply the answer to the last payload.

        Args:
            revision: the scheduler's revision that the answer leads to.
            durations: the scheduler's parts, packed.
        """
        self._revision = revision
        for name, part in unpack_parts(durations).items():
            self._own[name] = part
            self._own.move_to_end(name)
        while len(self._own) > MAX_TOOLS + 1:
            self._own.popitem(last=False)
        self._sent.update(self._sending)
        for name in self._forgetting:
            self._sent.pop(name, None)


def _differs(sent: DurationStatistics | None, part: DurationStatistics) -> bool:
    return sent is not part and (sent is None or sent.to_bytes() != part.to_bytes())


def pack_parts(parts: Mapping[str, DurationStatistics]) -> bytes:
    """Pack the statistics of some tools for `unpack_parts`."""
    return msgspec.msgpack.encode({encode_tool(name): part.to_bytes() for name, part in parts.items()})


def unpack_parts(data: bytes) -> dict[str, DurationStatistics]:
    """Unpack the result of ``pack_parts``. No bytes give an empty result.

    Raises:
        ValueError: the bytes are not of ``pack_parts``, or they are damaged.
    """
    parts = DurationTable.from_bytes(data).own() if data else {}
    return {name: part for name, part in parts.items() if part.count}
