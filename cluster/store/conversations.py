"""Conversations in Redis: a creation time, metadata, and a list of entries that only grows.

Each write is one script. A writer that names the number of entries that it knows writes only if nobody was faster.
The conversations of a tenant are bounded together, in number and bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.core.clock import Clock
from cluster.store.client import RedisStore, lua, milliseconds, quoted

MAX_ENTRIES = 8192
MAX_BYTES = 64 << 20
"""Largest number of a conversation's entries, and largest size in bytes of them and the metadata."""
MAX_CONVERSATIONS = 10_000
"""Largest number of conversations of a tenant."""

RENEWED_SHARE = 1 / 8
"""Share of the retention time after which all responses of a conversation in use are renewed again."""

MAX_CONNECTIONS = 8
"""Maximum number of connections. Further calls wait for one."""

_SCRIPT = lua("cluster.store", "conversations.lua")


class Written(StrEnum):
    """What became of a write."""

    OK = "ok"
    UNKNOWN = "unknown"
    """There is no such conversation, or it has expired."""
    MOVED = "moved"
    """Somebody else has added entries."""
    FULL = "full"
    """The conversation would have more than `MAX_ENTRIES` or `MAX_BYTES`."""
    MANY = "many"
    """The tenant has `MAX_CONVERSATIONS`."""
    QUOTA = "quota"
    """The tenant's conversations would have too many bytes together."""


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation as it is stored."""

    created_s: float
    """Unix time in seconds."""
    metadata: bytes
    entries: tuple[bytes, ...]
    renewed: int = 0
    """Number of leading entries whose responses were renewed a short time ago. The caller renews the others, and then
    calls `ConversationStore.renewed`."""


class ConversationStore(RedisStore):
    """Access to the conversations of all tenants.

    Every call ends within about ``timeout_s``, and raises `StoreUnavailable` if it failed. It is then unknown whether
    something was written.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        timeout_s: timeout of each call in seconds.
        retention_s: seconds after its last use, after which a conversation is deleted.
        tenant_bytes: largest size of all conversations of a tenant in bytes.
        clock: measures how long the store was unavailable.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(self, url: str, *, timeout_s: float, retention_s: float, tenant_bytes: int, clock: Clock) -> None:
        super().__init__(
            url,
            name="the store of conversations",
            degraded="conversations are out of reach",
            timeout_s=timeout_s,
            clock=clock,
            connections=MAX_CONNECTIONS,
        )
        self._expiry_ms = milliseconds(retention_s)
        self._tenant_bytes = tenant_bytes

    async def create(
        self, tenant: str, name: str, created_s: float, metadata: bytes, entries: Sequence[bytes]
    ) -> Written:
        """Store a new conversation. The answer is OK, FULL, MANY or QUOTA."""
        return await self._write(tenant, name, "create", created_s, metadata, *entries)

    async def load(self, tenant: str, name: str) -> StoredConversation | None:
        """Return a conversation, or None if the tenant has none of this name."""
        answer = await self._call(tenant, name, "load", int(self._expiry_ms * RENEWED_SHARE))
        if answer[0] != b"ok":
            return None
        return StoredConversation(float(answer[1]), answer[2], tuple(answer[4:]), int(answer[3] or 0))

    async def renewed(self, tenant: str, name: str, number: int, *, is_all: bool) -> Written:
        """Record that responses were renewed. The answer is OK or UNKNOWN.

        Args:
            tenant: the tenant.
            name: the conversation.
            number: the number of leading entries whose responses are renewed.
            is_all: whether all of them were renewed now. Otherwise some were renewed earlier.
        """
        return await self._write(tenant, name, "renewed", number, int(is_all))

    async def append(self, tenant: str, name: str, entries: Sequence[bytes], known: int | None = None) -> Written:
        """Append entries.

        Args:
            tenant: the tenant.
            name: the conversation.
            entries: the new entries.
            known: the number of entries that the conversation must have before; None: any.
        """
        expected = -1 if known is None else known
        return await self._write(tenant, name, "append", expected, *entries)

    async def describe(self, tenant: str, name: str, metadata: bytes) -> Written:
        """Replace the metadata. The answer is OK, UNKNOWN, FULL or QUOTA."""
        return await self._write(tenant, name, "describe", metadata)

    async def delete(self, tenant: str, name: str) -> Written:
        """Delete a conversation. The answer is OK or UNKNOWN."""
        return await self._write(tenant, name, "delete")

    async def _write(self, tenant: str, name: str, operation: str, *arguments: Any) -> Written:
        [word] = await self._call(tenant, name, operation, *arguments)
        return Written(word.decode())

    async def _call(self, tenant: str, name: str, operation: str, *arguments: Any) -> list[bytes]:
        # The braces put all conversations of a tenant on one node of a Redis cluster, since they are bounded together.
        space = f"caesura:v1:{{conversations:{quoted(tenant)}}}"
        one = quoted(name)
        keys = [f"{space}:record:{one}", f"{space}:entries:{one}", f"{space}:kept", f"{space}:sizes"]
        limits = [MAX_ENTRIES, MAX_BYTES, MAX_CONVERSATIONS, self._tenant_bytes]
        return await self.run(_SCRIPT, keys, [operation, self._expiry_ms, one, *limits, *arguments], list[bytes])
