"""Where programs live, in Redis: written once each, so that all ingresses agree; and requests that kill replicas.

A home is a replica and an epoch, which grows with each move (fencing). Each write is one script on one key, so that of
two ingresses that race exactly one wins, and both learn who. Nothing here raises: without Redis the answer is None.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import quote

import msgspec

from cluster.clock import Clock
from cluster.patience import answered_within
from cluster.routing import Home
from cluster.store import CALL_ERRORS, StoreFailure, StoreHealth, connect

MAX_CONNECTIONS = 16
"""For calls; more wait for one."""
MAX_TOUCHED = 512
"""Homes that one script touches, so that it does not hold up the others."""

# A value is "<epoch> <replica>", the epoch below 10^12: Lua's numbers are exact that far. `held` answers both, or
# nothing; a strange value counts as none.
_HELD = """
local corrupt = 0
local function held(key)
  if redis.call('TYPE', key).ok == 'none' then return nil end
  local value = redis.call('TYPE', key).ok == 'string' and redis.call('STRLEN', key) <= 512 and redis.call('GET', key)
  local epoch, replica = string.match(value or '', '^([1-9]%d*) ([!-~]+)$')
  if epoch == nil or #epoch > 12 then corrupt = 1 return nil end
  return tonumber(epoch), replica
end
local function set(key, epoch, replica, expiry_ms)
  redis.call('SET', key, string.format('%.0f %s', epoch, replica), 'PX', expiry_ms)
  return {string.format('%.0f', epoch), replica, corrupt}
end
"""

# ARGV: replica, epoch, expiry in ms. A home of an older epoch is that of a Redis that has lost the newer ones.
_CLAIM = (
    _HELD
    + """
local epoch, replica = held(KEYS[1])
if epoch == nil or epoch < tonumber(ARGV[2]) then return set(KEYS[1], tonumber(ARGV[2]), ARGV[1], ARGV[3]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {string.format('%.0f', epoch), replica, corrupt}
"""
)

# ARGV: the epoch that is left, replica, expiry in ms.
_MOVE = (
    _HELD
    + """
local epoch, replica = held(KEYS[1])
if epoch == nil or epoch <= tonumber(ARGV[1]) then return set(KEYS[1], tonumber(ARGV[1]) + 1, ARGV[2], ARGV[3]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {string.format('%.0f', epoch), replica, corrupt}
"""
)

_GET = (
    _HELD
    + """
local epoch, replica = held(KEYS[1])
if epoch == nil then return {false, false, corrupt} end
return {string.format('%.0f', epoch), replica, corrupt}
"""
)

# ARGV: the epoch that has ended.
_FORGET = (
    _HELD
    + """
local epoch = held(KEYS[1])
if epoch == nil or epoch <= tonumber(ARGV[1]) then return redis.call('DEL', KEYS[1]) end
return 0
"""
)

# ARGV: expiry in ms, and what is expected of each key. Answers the places of those that are not so, from 1.
_TOUCH = (
    _HELD
    + """
local others = {}
for i, key in ipairs(KEYS) do
  local epoch, replica = held(key)
  if epoch == nil or string.format('%.0f %s', epoch, replica) ~= ARGV[i + 1] then
    others[#others + 1] = i
  else
    redis.call('PEXPIRE', key, ARGV[1])
  end
end
return others
"""
)

_Answer = TypeVar("_Answer")
_Held = tuple[bytes | None, bytes | None, int]
_HELD_ANSWER: type[_Held] = cast(Any, _Held)


class PlacementStore:
    """One ingress's way to the homes of programs and to the marks of quarantined requests.

    Every call ends within about ``timeout_s`` and raises nothing: None means that the store did not answer, and
    `failures` says why; whether something was written is then unknown, and it may be repeated.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        model: programs have a home for each model.
        timeout_s: bounds every call.
        expiry_s: a home that nobody has touched for so long is forgotten.
        clock: tells how long the store was gone.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, url: str, *, model: str, timeout_s: float, expiry_s: float, clock: Clock) -> None:
        self._health = StoreHealth("programs are placed without the store", "the store of placements", clock)
        self.failures = self._health.failures
        """Calls that failed, and damaged homes that were replaced (CORRUPT), since the start."""
        self._timeout_s = timeout_s
        self._expiry_ms = max(1, int(expiry_s * 1000))
        # The braces put all keys of a model on one node of a Redis cluster.
        self._space = f"caesura:v1:{{{quote(model, safe='')}}}"
        self._redis = connect(url, connections=MAX_CONNECTIONS)

    @property
    def healthy(self) -> bool:
        """Whether the last call went through."""
        return self._health.healthy

    # --- homes --------------------------------------------------------------------------------------------------------

    async def claim(self, key: str, home: Home) -> Home | None:
        """Make ``home`` the program's, unless it has one of the same epoch or a later one; the home that it has now."""
        return self._home(
            await self._call(_CLAIM, [self._of(key)], [home.replica, max(1, home.epoch), self._expiry_ms], _HELD_ANSWER)
        )

    async def move(self, key: str, from_epoch: int, replica: str) -> Home | None:
        """Make ``replica`` the home, with the next epoch, unless there is one of a later epoch than ``from_epoch``.

        Returns:
            The home that the program has now: another's, if that was faster.
        """
        arguments = [from_epoch, replica, self._expiry_ms]
        return self._home(await self._call(_MOVE, [self._of(key)], arguments, _HELD_ANSWER))

    async def get(self, key: str) -> tuple[Home | None] | None:
        """``(home,)``, or ``(None,)`` if the program has none; None: the store did not answer."""
        held = await self._call(_GET, [self._of(key)], [], _HELD_ANSWER)
        return None if held is None else (self._home(held),)

    async def touch(self, homes: Mapping[str, Home]) -> frozenset[str] | None:
        """Renew the expiry of homes; the programs that have another in the store, or none.

        Without homes it only asks whether the store answers.
        """
        others: set[str] = set()
        keys = list(homes)
        for start in range(0, max(1, len(keys)), MAX_TOUCHED):
            batch = keys[start : start + MAX_TOUCHED]
            expected = [f"{homes[key].epoch} {homes[key].replica}" for key in batch]
            places = await self._call(_TOUCH, [self._of(key) for key in batch], [self._expiry_ms, *expected], list[int])
            if places is None:
                return None
            others |= {batch[place - 1] for place in places}
        return frozenset(others)

    async def forget(self, key: str, epoch: int) -> bool | None:
        """The program has ended; a home of a later epoch stays. Whether there was one to be forgotten."""
        forgotten = await self._call(_FORGET, [self._of(key)], [epoch], int)
        return None if forgotten is None else bool(forgotten)

    # --- requests that kill replicas ----------------------------------------------------------------------------------

    async def quarantine(self, digest: str, ttl_s: float) -> bool | None:
        """Remember for ``ttl_s`` that the request with this digest has ended replicas."""
        try:
            async with answered_within(self._timeout_s):
                await self._redis.set(self._mark(digest), b"1", px=max(1, int(ttl_s * 1000)))
        except CALL_ERRORS as error:
            self._health.fail(error)
            return None
        self._health.recover()
        return True

    async def is_quarantined(self, digest: str) -> bool | None:
        """Whether it is remembered."""
        try:
            async with answered_within(self._timeout_s):
                found = bool(await self._redis.exists(self._mark(digest)))
        except CALL_ERRORS as error:
            self._health.fail(error)
            return None
        self._health.recover()
        return found

    async def close(self) -> None:
        """Close the connections. Homes stay until they expire."""
        await self._redis.aclose()

    # --- Redis --------------------------------------------------------------------------------------------------------

    def _of(self, key: str) -> str:
        return f"{self._space}:home:{quote(key, safe='', errors='surrogatepass')}"

    def _mark(self, digest: str) -> str:
        return f"{self._space}:quarantine:{quote(digest, safe='', errors='surrogatepass')}"

    async def _call(
        self, script: str, keys: Sequence[str], arguments: Sequence[Any], kind: type[_Answer]
    ) -> _Answer | None:
        try:
            async with answered_within(self._timeout_s):
                answer = await cast(Any, self._redis.register_script(script))(list(keys), list(arguments))
            converted = msgspec.convert(answer, kind)
        except CALL_ERRORS as error:
            self._health.fail(error)
            return None
        self._health.recover()
        return converted

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
            self._health.fail(msgspec.ValidationError(f"no home of ours: {error}"))
            return None
