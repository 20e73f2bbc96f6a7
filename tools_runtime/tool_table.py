"""The tools that can be called, by name."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cluster.errors import ToolRefused
from cluster.tool_config import ToolModel, owner_of
from tools_runtime.kind import Offer, ToolKind
from tools_runtime.slots import Slots

MAX_NAME_LENGTH = 200
"""Characters of a name that a refusal repeats."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the configuration, or of a request: a tool, or a server with several."""

    name: str
    config: ToolModel
    kind: ToolKind
    slots: Slots

    @classmethod
    def of(cls, name: str, config: ToolModel, kind: ToolKind) -> "Entry":
        """With places of its own."""
        return cls(name, config, kind, Slots(config.concurrency, config.max_queued))


class ToolTable:
    """Entries by name; those of a request beside the configuration's, which they cannot replace.

    Args:
        entries: the entries.
        below: tools that are there, too.
    """

    def __init__(self, entries: Iterable[Entry], below: "ToolTable | None" = None) -> None:
        self.own = {entry.name: entry for entry in entries}
        self.entries: Mapping[str, Entry] = {**self.own, **(below.entries if below else {})}

    def entry(self, tool: str) -> Entry:
        """The entry to which a tool belongs: its own, or that of its server, `SERVER__TOOL`.

        Raises:
            ToolRefused: there is none; with the names that are near.
        """
        name = owner_of(tool, self._kind)
        if name is None:
            raise self.unknown(tool)
        return self.entries[name]

    def offers(self) -> list[Offer]:
        """All tools that are known now, the configuration's first."""
        return [offer for entry in self.entries.values() for offer in entry.kind.offers()]

    def unknown(self, tool: str) -> ToolRefused:
        """The refusal of a tool that there is not."""
        names = sorted(offer.name for offer in self.offers())
        near = difflib.get_close_matches(tool[:MAX_NAME_LENGTH], names, n=3) or names[:10]
        there_are = f"; there are: {', '.join(near)}" if near else "; there are none"
        return ToolRefused(f"there is no tool {tool[:MAX_NAME_LENGTH]!r}{there_are}")

    @property
    def busy(self) -> bool:
        """A call of one of its own entries runs or waits."""
        return any(entry.slots.taken or entry.slots.waiting for entry in self.own.values())

    def _kind(self, name: str) -> str | None:
        entry = self.entries.get(name)
        return None if entry is None else entry.config.kind

    async def open(self) -> None:
        """Open its own entries' kinds.

        Raises:
            ConfigError: one cannot work as configured.
        """
        for entry in self.own.values():
            await entry.kind.open()

    async def aclose(self) -> None:
        """Close its own entries' kinds."""
        for entry in self.own.values():
            await entry.kind.aclose()
