"""Requests under which replicas died: remembered for a while by what they ask, and refused.

What is remembered is a digest of tenant, method and body, without the fields that only say who asks: the same request
under another name kills as well.
"""

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from cluster.clock import Clock
from cluster.errors import Quarantined

NAMES = frozenset(
    {
        "user",
        "metadata",
        "request_id",
        "session_id",
        "prompt_cache_key",
        "safety_identifier",
        "stream",
        "stream_options",
    }
)
"""Fields of a body that do not change what the engine does."""

REMEMBERED = 1024
"""Requests; the oldest is forgotten."""

_JSON = msgspec.json.Encoder(order="deterministic")


def digest_of(method: str, tenant: str, body: Mapping[str, Any]) -> str:
    """A name for what a request asks."""
    asked = {name: value for name, value in body.items() if name not in NAMES}
    try:
        told = _JSON.encode(asked)
    except (TypeError, ValueError, OverflowError):  # lone surrogates, integers beyond 64 bits
        told = repr(sorted(asked.items(), key=str)).encode("utf-8", "surrogatepass")
    parts = (method.encode(), tenant.encode("utf-8", "surrogatepass"), told)
    return blake2b(b"\0".join(parts), digest_size=16).hexdigest()


class SharedQuarantine(Protocol):
    """Where ingresses tell each other."""

    @property
    def healthy(self) -> bool:
        """Whether it has answered of late; else it is not asked."""
        ...

    async def quarantine(self, digest: str, ttl_s: float) -> bool | None:
        """Remember it; None where nobody answers."""
        ...

    async def is_quarantined(self, digest: str) -> bool | None:
        """Whether anybody remembers it; None where nobody answers."""
        ...


class Quarantine:
    """What this ingress remembers, and the others.

    Args:
        clock: for the expiry.
        expiry_s: how long a request is refused.
        shared: asked too; None: there is only this ingress.
    """

    def __init__(self, clock: Clock, expiry_s: float, shared: SharedQuarantine | None = None) -> None:
        self._clock = clock
        self._expiry_s = expiry_s
        self._shared = shared
        self._until_s: OrderedDict[str, float] = OrderedDict()

    async def check(self, digest: str) -> None:
        """Let a request pass.

        Raises:
            Quarantined: replicas died under it.
        """
        until_s = self._until_s.get(digest)
        if until_s is not None and until_s <= self._clock.now_s():
            del self._until_s[digest]
            until_s = None
        if until_s is not None or await self._others_know(digest):
            raise Quarantined("replicas died under this request; it is refused for a while", code="quarantined")

    async def add(self, digest: str) -> None:
        """Refuse this request from now on."""
        self._until_s[digest] = self._clock.now_s() + self._expiry_s
        self._until_s.move_to_end(digest)
        if len(self._until_s) > REMEMBERED:
            self._until_s.popitem(last=False)
        if self._shared is not None:
            await self._shared.quarantine(digest, self._expiry_s)

    async def _others_know(self, digest: str) -> bool:
        shared = self._shared
        return shared is not None and shared.healthy and bool(await shared.is_quarantined(digest))
