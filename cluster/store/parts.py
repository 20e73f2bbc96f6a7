"""State that many writers share through Redis. Each writer owns one hash, its *part*, and readers read all parts.

No update is lost, and no locks are needed. A part stays after its writer ends, until it expires. Without Redis, readers
continue with the parts that they read last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from cluster.store.client import RedisStore, StoreFailure, StoreUnavailable, lua, milliseconds

WRITERS_A_PERIOD = 32
"""Number of writers up to which each exchanges once a period. With more, a period is longer, because each reads what
all others have written: the work grows with their square."""
MAX_HELD_BYTES = 64 << 20
"""Maximum size of all parts that a reader keeps between two exchanges. Beyond it, the parts that have been unchanged
for longest are dropped, and read again."""

_EXCHANGE = lua("cluster.store", "parts.lua")
_News = tuple[bytes, bytes, list[bytes]]
"""A writer, the version of its part, and a list in which its fields and values alternate."""
_Answer = tuple[int, int, list[bytes], list[_News]]
_ANSWER: type[_Answer] = cast(Any, _Answer)


@dataclass(frozen=True, slots=True)
class PartLimits:
    """Limits on what an exchange reads."""

    writers: int
    """Maximum number of parts. Those that were written last are kept."""
    fields: int
    """Maximum number of fields of a part. A part with more is left out."""
    value_bytes: int
    """Maximum size of one value. A larger value is left out."""
    read_bytes: int
    """Maximum size of all parts in one exchange. The next exchange reads the rest."""


class SharedParts(RedisStore):
    """One writer's part, and its copies of the others' parts.

    Args:
        url: see `RedisStore`.
        writers: the key of the set of writers.
        prefix: the prefix of the keys of parts.
        writer: this writer's name. It must be unique and never be used again, since a new writer replaces the part of
            an earlier one with the same name.
        limits: limits on what is read.
        expiry_s: seconds after which a part that its writer has not touched expires, by the time of the Redis server.
        more: see `RedisStore`.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(
        self, url: str, *, writers: str, prefix: str, writer: str, limits: PartLimits, expiry_s: float, **more: Any
    ) -> None:
        super().__init__(url, **more)
        self._keys, self._writer, self._prefix = [writers, prefix + writer], writer, prefix
        self._limits = limits
        self._expiry_ms = milliseconds(expiry_s)
        self._written: Mapping[bytes, bytes] | None = None
        """The own part as it is in Redis; None: unknown."""
        self._known: dict[bytes, tuple[bytes, Mapping[bytes, bytes]]] = {}
        """The version of each part and the part, by writer."""
        self._others = 0

    def pause_s(self, period_s: float) -> float:
        """Return the seconds until the next exchange: ``period_s``, or longer if there are many writers."""
        return period_s * max(1.0, self._others / WRITERS_A_PERIOD)

    async def exchange_parts(self, own: Mapping[bytes, bytes] | None) -> Mapping[bytes, Mapping[bytes, bytes]] | None:
        """Write this writer's part and read the others'. Only one call may be in progress at a time.

        Args:
            own: the complete part, of which only the changes are written; None: this writer has no part.

        Returns:
            The other parts by writer, the last written first; None: the exchange failed.
        """
        mode = "read" if own is None else "replace" if self._written is None else "update"
        try:
            async with self.request():
                there, left_out, names, news = await self._exchange(mode, own or {})
                if not there:
                    _, left_out, names, news = await self._exchange("replace", own or {})
        except StoreUnavailable:
            # The Redis that answers next may be another one, or may have lost its data.
            self._written = None
            return None
        self._written = own
        if left_out:
            self.failures[StoreFailure.CORRUPT] += left_out
        for writer, version, words in news:
            self._known[writer] = version, dict(zip(words[::2], words[1::2], strict=False))
        self._known = self._bounded(names)
        self._others = len(names)
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
