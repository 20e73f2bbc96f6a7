"""Quarantine of requests under which replicas died: they are rejected for a while.

A request is known by a digest of its tenant, method and body, without the fields that only identify the client. The
same request with another user or id kills replicas as well. An ingress follows the list of what other ingresses
quarantine, so that a request that nobody has quarantined needs no call of the store.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, NoReturn, Protocol

import msgspec

from cluster.core.clock import Clock
from cluster.core.errors import Quarantined

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
"""Fields of a body that do not change the engine's work."""

REMEMBERED = 1024
"""Largest number of requests in it. The oldest are dropped when there are more."""

RETRY_S = 1.0
"""Seconds between two calls of a store that does not answer."""

_JSON = msgspec.json.Encoder(order="deterministic")


def digest_of(method: str, tenant: str, body: Mapping[str, Any]) -> str:
    """Return a digest of the request's content."""
    content = {name: value for name, value in body.items() if name not in NAMES}
    try:
        packed = _JSON.encode(content)
    except (TypeError, ValueError, OverflowError):  # lone surrogates, integers beyond 64 bits
        packed = repr(sorted(content.items(), key=str)).encode("utf-8", "surrogatepass")
    parts = (method.encode(), tenant.encode("utf-8", "surrogatepass"), packed)
    return blake2b(b"\0".join(parts), digest_size=16).hexdigest()


class SharedQuarantine(Protocol):
    """The quarantine that all ingresses share."""

    @property
    def healthy(self) -> bool:
        """Whether its last call was answered; otherwise it is not called."""
        ...

    async def quarantine(self, digest: str, ttl_s: float) -> bool | None:
        """Add a request. Return None if the store does not answer."""
        ...

    async def is_quarantined(self, digest: str) -> bool | None:
        """Return whether a request is in it, or None if the store does not answer."""
        ...

    async def quarantined_after(self, entry: str) -> tuple[str, list[str]] | None:
        """Wait for requests that were added after an entry of the list; see `PlacementStore.quarantined_after`."""
        ...


class Quarantine:
    """The quarantine of this ingress, and the shared one.

    Args:
        clock: the clock of the expiry.
        expiry_s: seconds for which a request is rejected.
        shared: the shared quarantine. None: there is only this ingress.
    """

    def __init__(self, clock: Clock, expiry_s: float, shared: SharedQuarantine | None = None) -> None:
        self._clock = clock
        self._expiry_s = expiry_s
        self._shared = shared
        self._until_s: OrderedDict[str, float] = OrderedDict()
        """The times at which requests of this ingress leave it, the earliest first."""
        self._listed: OrderedDict[str, float] = OrderedDict()
        """The latest times at which requests that some ingress has added leave it, the earliest first. The store knows
        whether they have left it before."""
        self._follows = False
        """Whether ``_listed`` is up to date. Otherwise the store is asked for each request."""

    async def follow(self) -> NoReturn:
        """Learn of the requests that other ingresses add, as soon as they are added."""
        assert self._shared is not None
        entry = "0"
        while True:
            found = await self._shared.quarantined_after(entry)
            self._follows = found is not None
            if found is None:
                await asyncio.sleep(RETRY_S)
                continue
            entry, digests = found
            for digest in digests:
                self._remember(self._listed, digest)

    async def check(self, digest_of_request: Callable[[], str]) -> None:
        """Check a request. Its digest is made only if some request is in quarantine.

        Raises:
            Quarantined: replicas died under it.
        """
        now_s = self._clock.now_s()
        for entries in (self._until_s, self._listed):
            while entries and next(iter(entries.values())) <= now_s:
                entries.popitem(last=False)
        if not self._until_s and not self._asks_shared:
            return
        digest = digest_of_request()
        if digest in self._until_s or await self._in_shared(digest):
            raise Quarantined("replicas died under this request; it is rejected for a while", code="quarantined")

    async def add(self, digest: str) -> None:
        """Reject this request from now on."""
        self._remember(self._until_s, digest)
        if self._shared is not None:
            await self._shared.quarantine(digest, self._expiry_s)

    @property
    def _asks_shared(self) -> bool:
        """Whether the store may have to be asked for a request."""
        return self._shared is not None and self._shared.healthy and not (self._follows and not self._listed)

    def _remember(self, entries: OrderedDict[str, float], digest: str) -> None:
        entries[digest] = self._clock.now_s() + self._expiry_s
        entries.move_to_end(digest)
        if len(entries) > REMEMBERED:
            entries.popitem(last=False)

    async def _in_shared(self, digest: str) -> bool:
        if self._shared is None or not self._asks_shared or (self._follows and digest not in self._listed):
            return False
        return bool(await self._shared.is_quarantined(digest))
