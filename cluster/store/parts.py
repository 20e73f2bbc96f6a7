"""State that many writers share through Redis: each owns one hash, its *part*, and whoever reads takes all parts.

So no update is lost and nothing is locked. A part outlives its writer until it expires. Without Redis everything goes
on with what was read last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from cluster.store.client import RedisStore, StoreFailure, StoreUnavailable, lua, milliseconds

MAX_HELD_BYTES = 64 << 20
"""Of all parts that a reader keeps between two exchanges; the longest unchanged are dropped, and read again."""

_EXCHANGE = lua("cluster.store", "parts.lua")
_News = tuple[bytes, bytes, list[bytes]]
"""A writer, the version of its part, its fields and values by turns."""
_Answer = tuple[int, int, list[bytes], list[_News]]
_ANSWER: type[_Answer] = cast(Any, _Answer)


@dataclass(frozen=True, slots=True)
class PartLimits:
    """What an exchange reads at most."""

    writers: int
    """Parts that are kept: those written last."""
    fields: int
    """Of a part; one with more is left out."""
    value_bytes: int
    """Of one value; a larger one is left out."""
    read_bytes: int
    """Of all parts in one exchange; the next exchange reads the rest."""


class SharedParts(RedisStore):
    """One writer's part, and what it knows of the others'.

    Args:
        url: see `RedisStore`.
        writers: the key of the set of writers.
        prefix: what the key of a part begins with.
        writer: this writer's name, unique among them and never used again: what it had written would be replaced.
        limits: bound what is read.
        expiry_s: a part that its writer has not touched for so long is forgotten; by the time of the Redis server.
        more: see `RedisStore`.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(
        self, url: str, *, writers: str, prefix: str, writer: str, limits: PartLimits, expiry_s: float, **more: Any
    ) -> None:
        super().__init__(url, **more)
        self._keys, self._writer, self._prefix = [writers, prefix + writer], writer, prefix
        self._limits = limits
        self._expiry_ms = milliseconds(expiry_s)
        self._written: Mapping[bytes, bytes] | None = None
        """The own part as Redis has it; None: unknown."""
        self._known: dict[bytes, tuple[bytes, Mapping[bytes, bytes]]] = {}
        """By writer: the version of its part, and the part."""

    async def exchange_parts(self, own: Mapping[bytes, bytes] | None) -> Mapping[bytes, Mapping[bytes, bytes]] | None:
        """Write this writer's part and read the others', one call at a time.

        Args:
            own: the whole part, of which only what has changed is written; None: this writer has none.

        Returns:
            The other parts by writer, the last written first; None if the exchange came to nothing.
        """
        mode = "read" if own is None else "replace" if self._written is None else "update"
        try:
            async with self.request():
                there, left_out, names, news = await self._exchange(mode, own or {})
                if not there:
                    _, left_out, names, news = await self._exchange("replace", own or {})
        except StoreUnavailable:
            # The Redis that answers next may be another, or one without our data.
            self._written = None
            return None
        self._written = own
        if left_out:
            self.failures[StoreFailure.CORRUPT] += left_out
        for writer, version, words in news:
            self._known[writer] = version, dict(zip(words[::2], words[1::2], strict=False))
        self._known = self._bounded(names)
        return {writer: part for writer, (_, part) in self._known.items()}

    async def _exchange(self, mode: str, own: Mapping[bytes, bytes]) -> _Answer:
        written = self._written if mode == "update" and self._written is not None else {}
        changed = [word for field, value in own.items() if written.get(field) != value for word in (field, value)]
        removed = [field for field in written if field not in own]
        known = [word for writer, (version, _) in self._known.items() if version for word in (writer, version)]
        limits = self._limits
        arguments: list[Any] = [self._writer, self._prefix, self._expiry_ms, limits.writers, limits.fields]
        arguments += [limits.value_bytes, limits.read_bytes, mode, len(changed) // 2, *changed]
        arguments += [len(removed), *removed, *known]
        return await self.evaluate(_EXCHANGE, self._keys, arguments, _ANSWER)

    def _bounded(self, names: list[bytes]) -> dict[bytes, tuple[bytes, Mapping[bytes, bytes]]]:
        kept, left = {}, MAX_HELD_BYTES
        for name in names:
            if (found := self._known.get(name)) is not None:
                left -= sum(len(field) + len(value) for field, value in found[1].items())
                if left < 0:
                    break
                kept[name] = found
        return kept
