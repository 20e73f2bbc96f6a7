"""What predictors learn, shared through Redis: each writer owns one value, its *part*; whoever reads takes all parts.

So no update is lost and nothing is locked. A part outlives its writer, so that a restart loses only what had not been
written yet. Without Redis everything goes on with what was read last.
"""

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import quote

import msgspec

from cluster.clock import Clock
from cluster.patience import answered_within
from cluster.store import CALL_ERRORS, StoreFailure, StoreHealth, connect

MAX_WRITERS = 64
"""Parts that are kept, those written last."""
MAX_PART_BYTES = 8 << 20
MAX_READ_BYTES = 32 << 20
"""Of all parts in one exchange; what is left out is read at the next."""

# KEYS: writers, the own part. ARGV: the own name, what a part's key begins with, expiry in ms, MAX_WRITERS, most bytes
# of a part, most bytes of all, what is to be done with the own part ('put', 'keep', 'none'), the own part, and by turns
# the names of writers whose parts are known, and their versions.
# Answers: whether the own part is there if it should be, how many parts were too large, the names of all other writers,
# and those parts that are not known: name, version, part. A version is the server's time at which a part was written.
_EXCHANGE = """
local writers, own = KEYS[1], KEYS[2]
local writer, prefix, expiry_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local most_writers, most_part, most_bytes = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local time = redis.call('TIME')
local version = time[1] .. string.format('%06d', time[2])
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function free_of_others(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end
free_of_others(writers, 'zset')
free_of_others(own, 'hash')

if ARGV[7] == 'put' then
  redis.call('HSET', own, 'version', version, 'part', ARGV[8])
elseif ARGV[7] == 'keep' and redis.call('EXISTS', own) == 0 then
  return {0, 0, {}, {}}
end
if ARGV[7] ~= 'none' then
  redis.call('PEXPIRE', own, expiry_ms)
  redis.call('ZADD', writers, now_ms, writer)
  redis.call('PEXPIRE', writers, expiry_ms)
end
redis.call('ZREMRANGEBYSCORE', writers, '-inf', now_ms - expiry_ms)
for _, gone in ipairs(redis.call('ZRANGE', writers, 0, -1 - most_writers)) do
  redis.call('ZREM', writers, gone)
  redis.call('DEL', prefix .. gone)
end

local known = {}
for i = 9, #ARGV - 1, 2 do known[ARGV[i]] = ARGV[i + 1] end
local names, news, left_out, bytes = {}, {}, 0, 0
for _, other in ipairs(redis.call('ZREVRANGE', writers, 0, -1)) do
  local its = other ~= writer and redis.pcall('HGET', prefix .. other, 'version')
  if type(its) == 'string' then
    names[#names + 1] = other
    if known[other] ~= its then
      local size = redis.call('HSTRLEN', prefix .. other, 'part')
      if size > most_part then
        left_out = left_out + 1
      elseif bytes + size <= most_bytes then
        bytes = bytes + size
        news[#news + 1] = {other, its, redis.call('HGET', prefix .. other, 'part') or ''}
      end
    end
  end
end
return {1, left_out, names, news}
"""

_News = tuple[bytes, bytes, bytes]


class LearntStore:
    """One writer's way to what all have learnt.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        space: what is learnt is shared by the writers of one space.
        writer: this writer's name, unique among them and never used again: what it had written would be replaced.
        timeout_s: bounds every exchange.
        expiry_s: a part that its writer has not touched for so long is forgotten; by the time of the Redis server.
        clock: tells how long the store was gone.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, url: str, *, space: str, writer: str, timeout_s: float, expiry_s: float, clock: Clock) -> None:
        self._health = StoreHealth("forecasts go on without the store", "the store of what predictors learn", clock)
        self.failures = self._health.failures
        """Exchanges that failed, and parts that were left out (CORRUPT), since the start."""
        self._timeout_s = timeout_s
        self._expiry_ms = max(1, int(expiry_s * 1000))
        self._writer = writer
        # The braces put all keys of a space on one node of a Redis cluster.
        keys = f"caesura:v1:{{{quote(space, safe='')}}}"
        self._writers_key, self._prefix = f"{keys}:learners", f"{keys}:learnt:"
        self._written: bytes | None = None
        """The own part as Redis has it; None: unknown."""
        self._parts: dict[bytes, tuple[bytes, bytes]] = {}
        """By writer: version and part."""
        self._redis = connect(url)

    async def exchange(self, own: bytes | None) -> Mapping[str, bytes] | None:
        """Write this writer's part and read the others', one call at a time.

        Args:
            own: all that this writer has learnt; None: nothing. It is written only if it has changed.

        Returns:
            By writer, what the others have learnt; None if the exchange came to nothing, within about ``timeout_s``:
            ``failures`` says why.
        """
        if own is not None and len(own) > MAX_PART_BYTES:
            self.failures[StoreFailure.CORRUPT] += 1
            own = None
        what = "none" if own is None else ("keep" if own == self._written else "put")
        try:
            async with answered_within(self._timeout_s):
                there, left_out, names, news = await self._call(what, own)
                if not there:
                    _, left_out, names, news = await self._call("put", own)
        except CALL_ERRORS as error:
            self._health.fail(error)
            self._written = None
            return None
        self._written = own
        self._health.recover()
        if left_out:
            self.failures[StoreFailure.CORRUPT] += left_out
        self._parts |= {name: (version, part) for name, version, part in news}
        self._parts = {name: self._parts[name] for name in names if name in self._parts}
        return {name.decode("utf-8", "replace"): part for name, (_, part) in self._parts.items()}

    async def close(self) -> None:
        """Close the connection. The part stays until it expires."""
        await self._redis.aclose()

    async def _call(self, what: str, own: bytes | None) -> tuple[int, int, list[bytes], list[_News]]:
        known = [word for name, (version, _) in self._parts.items() for word in (name, version)]
        arguments: list[Any] = [self._writer, self._prefix, self._expiry_ms, MAX_WRITERS, MAX_PART_BYTES]
        arguments += [MAX_READ_BYTES, what, own if what == "put" and own is not None else b"", *known]
        keys = [self._writers_key, self._prefix + self._writer]
        answer = await cast(Any, self._redis.eval(_EXCHANGE, len(keys), *keys, *arguments))
        return msgspec.convert(answer, tuple[int, int, list[bytes], list[_News]])
