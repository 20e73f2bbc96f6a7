"""Tool durations between a scheduler and its replica: only what changed since the last exchange travels, and not all
of it at once, so that an exchange costs a step of the engine no more than MAX_PARTS statistics.

Parts are whole: one that travels twice, because an answer was lost, changes nothing.
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
"""Statistics of one exchange and direction. Parsing and merging one takes up to about 0.1 ms."""


class DurationChanges:
    """The scheduler's end: which tools were observed, in the order of their latest observation."""

    def __init__(self) -> None:
        self._revision = 0
        self._changed: OrderedDict[str, int] = OrderedDict()

    def note(self, tool: str) -> None:
        """A duration of this tool was observed."""
        for name in dict.fromkeys((OVERALL, tool, without_class(tool))):
            self._revision += 1
            self._changed[name] = self._revision
            self._changed.move_to_end(name)
        while len(self._changed) > MAX_TOOLS + 1:
            self._changed.popitem(last=False)

    def since(self, revision: int, table: DurationTable) -> tuple[int, bytes]:
        """The own parts that changed after a revision, oldest change first, and the revision that they lead to."""
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
    """The replica's end: what its scheduler observed, and what of the others' observations the scheduler has."""

    def __init__(self) -> None:
        self._revision = 0
        self._own: OrderedDict[str, DurationStatistics] = OrderedDict()
        self._others: Mapping[str, DurationStatistics] = {}
        self._sent: dict[str, DurationStatistics] = {}
        self._sending: dict[str, DurationStatistics] = {}
        self._forgetting: Collection[str] = ()

    @property
    def own(self) -> Mapping[str, DurationStatistics]:
        """What the scheduler observed: per tool, and overall under OVERALL."""
        return self._own

    def set_others(self, others: Mapping[str, DurationStatistics]) -> None:
        """What the other replicas have observed."""
        self._others = others

    def payload(self) -> dict[str, Any]:
        """Arguments of the next exchange; see `replicas.control`."""
        changed = ((name, part) for name, part in self._others.items() if _differs(self._sent.get(name), part))
        self._sending = dict(islice(changed, MAX_PARTS))
        self._forgetting = list(islice((name for name in self._sent if name not in self._others), MAX_PARTS))
        payload: dict[str, Any] = {"revision": self._revision}
        if self._sending or self._forgetting:
            payload |= {"durations": pack_parts(self._sending), "forgotten": list(self._forgetting)}
        return payload

    def answered(self, revision: int, durations: bytes) -> None:
        """The exchange of the last payload went through."""
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
    """Some tools' statistics as `unpack_parts` reads them."""
    return msgspec.msgpack.encode({encode_tool(name): part.to_bytes() for name, part in parts.items()})


def unpack_parts(data: bytes) -> dict[str, DurationStatistics]:
    """The inverse of ``pack_parts``; nothing of no bytes.

    Raises:
        ValueError: these are not its bytes, or they were damaged.
    """
    parts = DurationTable.from_bytes(data).own() if data else {}
    return {name: part for name, part in parts.items() if part.count}
