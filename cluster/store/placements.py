"""The homes of programs in Redis, which all ingresses share, and the quarantine of requests.

A home is a replica and an epoch, which grows with each migration (fencing). Each write is one script on one key. Of two
concurrent writes by different ingresses exactly one succeeds, and both ingresses get the result. The methods do not
raise: without Redis they return None.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from cluster.core.clock import Clock
from cluster.core.replica_snapshot import Home
from cluster.store.client import (
    RedisStore,
    StoreFailure,
    StoreUnavailable,
    key_space,
    lua,
    milliseconds,
    quoted,
)
from cluster.store.script_batches import ScriptBatches

MAX_CONNECTIONS = 16
"""Maximum number of connections. Further calls wait for one."""
QUARANTINED_KEPT = 1024
"""Number of the newest quarantined requests of which other ingresses learn."""
WAIT_S = 5.0
"""Seconds for which a call waits for the next quarantined request."""
MAX_TOUCHED = 512
"""Maximum number of homes that one script touches, so that it does not delay other calls."""

_SCRIPT = lua("cluster.store", "placements.lua")

_Answer = TypeVar("_Answer")
_Held = tuple[bytes | None, bytes | None, int]
_HELD_ANSWER: type[_Held] = cast(Any, _Held)


class PlacementStore(RedisStore):
    """One ingress's access to the homes of programs and to the quarantine.

    Every call ends within about ``timeout_s`` and raises nothing. None means that the store did not answer. `failures`
    counts the reasons. It is then unknown whether something was written, and the call may be repeated.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        model: the model's id. A program has one home for each model.
        timeout_s: timeout of each call in seconds.
        expiry_s: seconds after which a home that was not touched expires.
        clock: measures how long the store was unavailable.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(self, url: str, *, model: str, timeout_s: float, expiry_s: float, clock: Clock) -> None:
        super().__init__(
            url,
            name="the store of placements",
            degraded="programs are placed without the store",
            timeout_s=timeout_s,
            clock=clock,
            connections=MAX_CONNECTIONS,
        )
        self._expiry_ms = milliseconds(expiry_s)
        self._space = key_space(model)
        self._scripts = ScriptBatches(self.redis, _SCRIPT, timeout_s)

    # --- homes --------------------------------------------------------------------------------------------------------

    async def claim(self, key: str, home: Home) -> Home | None:
        """Bind the program to ``home``, unless it has a home of the same or a later epoch. Return its home."""
        return self._home(await self._held("claim", key, home.replica, max(1, home.epoch), self._expiry_ms))

    async def move(self, key: str, from_epoch: int, replica: str) -> Home | None:
        """Bind the program to ``replica`` with the next epoch, unless its home has a later epoch than ``from_epoch``.

        Returns:
            The program's home after the call, which another ingress may have written.
        """
        return self._home(await self._held("move", key, from_epoch, replica, self._expiry_ms))

    async def get(self, key: str) -> tuple[Home | None] | None:
        """Return ``(home,)``, or ``(None,)`` if the program has no home; None: the store did not answer."""
        held = await self._held("get", key)
        return None if held is None else (self._home(held),)

    async def touch(self, homes: Mapping[str, Home]) -> frozenset[str] | None:
        """Renew the expiry of homes. Return the programs that have another home in the store, or no home.

        An empty mapping only probes the store.
        """
        others: set[str] = set()
        keys = list(homes)
        for start in range(0, max(1, len(keys)), MAX_TOUCHED):
            batch = keys[start : start + MAX_TOUCHED]
            expected = [f"{homes[key].epoch} {homes[key].replica}" for key in batch]
            keys_of_batch = [self._of(key) for key in batch]
            places = await self._call("touch", keys_of_batch, [self._expiry_ms, *expected], list[int])
            if places is None:
                return None
            others |= {batch[place - 1] for place in places}
        return frozenset(others)

    async def forget(self, key: str, epoch: int) -> bool | None:
        """Delete the home of a program that has ended, unless its epoch is later. Return whether it was deleted."""
        forgotten = await self._call("forget", [self._of(key)], [epoch], int)
        return None if forgotten is None else bool(forgotten)

    # --- quarantine ---------------------------------------------------------------------------------------------------

    async def quarantine(self, digest: str, ttl_s: float) -> bool | None:
        """Quarantine the request with this digest for ``ttl_s`` seconds. Return True."""
        ttl_ms, stream = milliseconds(ttl_s), self._mark("")
        try:
            async with self.request(), self.redis.pipeline(transaction=True) as calls:
                calls.set(self._mark(digest), b"1", px=ttl_ms)
                calls.xadd(stream, {"d": digest}, maxlen=QUARANTINED_KEPT, approximate=False)
                calls.pexpire(stream, ttl_ms)
                await calls.execute()
        except StoreUnavailable:
            return None
        return True

    async def quarantined_after(self, entry: str) -> tuple[str, list[str]] | None:
        """Wait up to `WAIT_S` for requests that were quarantined after an entry of their list.

        Args:
            entry: the entry. `0`: the beginning.

        Returns:
            The last entry now, and the digests. Some may not be in quarantine any more.
        """
        wait_ms = None if entry == "0" else milliseconds(WAIT_S)
        try:
            async with self.request(WAIT_S):
                found: Any = await self.redis.xread({self._mark(""): entry}, block=wait_ms)
        except StoreUnavailable:
            return None
        entries = found[0][1] if found else []
        last = entries[-1][0].decode() if entries else entry if entry != "0" else "0-0"
        return last, [fields[b"d"].decode() for _, fields in entries]

    async def is_quarantined(self, digest: str) -> bool | None:
        """Return whether the request with this digest is in quarantine."""
        try:
            async with self.request():
                return bool(await self.redis.exists(self._mark(digest)))
        except StoreUnavailable:
            return None

    # --- Redis --------------------------------------------------------------------------------------------------------

    def _of(self, key: str) -> str:
        return f"{self._space}:home:{quoted(key)}"

    def _mark(self, digest: str) -> str:
        return f"{self._space}:quarantine:{quoted(digest)}"

    async def _held(self, operation: str, key: str, *arguments: Any) -> _Held | None:
        return await self._call(operation, [self._of(key)], arguments, _HELD_ANSWER)

    async def _call(
        self, operation: str, keys: Sequence[str], arguments: Sequence[Any], kind: type[_Answer]
    ) -> _Answer | None:
        try:
            async with self.request():
                return msgspec.convert(await self._scripts.run(keys, [operation, *arguments]), kind)
        except StoreUnavailable:
            return None

    def _home(self, held: _Held | None) -> Home | None:
        if held is None:
            return None
        epoch, replica, corrupt = held
        if corrupt:
            self.failures[StoreFailure.CORRUPT] += 1
        if epoch is None or replica is None:
            return None
        try:
            return Home(replica.decode(), int(epoch))
        except ValueError as error:
            self.count(msgspec.ValidationError(f"no home of ours: {error}"))
            return None
