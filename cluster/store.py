"""Tool statistics shared through Redis. Beside `cluster.run_store` the only module that imports redis.

Each writer owns one hash, its *part*, with the durations that it observed itself; whoever reads merges all parts. So
no update is lost and nothing is locked. Without Redis everything goes on with what was read last.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cluster.clock import Clock
from cluster.errors import ConfigError
from cluster.patience import answered_within
from cluster.statistics import MAX_STATISTICS_BYTES, MAX_TOOLS, DurationStatistics, decode_tool, encode_tool

logger = logging.getLogger(__name__)

MAX_WRITERS = 256
"""Parts that an exchange reads, those written last first."""
MAX_READ_BYTES = 8 << 20
"""Of all parts in one exchange."""

# KEYS: writers, the own part. ARGV: the own name, what a part's key begins with, expiry in ms, MAX_WRITERS, most fields
# of a part, most bytes of a value, most bytes of all, whether the part is whole, number of changed fields, these fields
# and their values by turns, the fields to forget.
# Answers: whether the own part is now there, parts and values that were left out, and the parts.
# One script, so that nobody sees half a part and a reader's memory is bounded before anything is sent.
_EXCHANGE = """
local writers, own = KEYS[1], KEYS[2]
local writer, prefix, expiry_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local most_writers, most_fields = tonumber(ARGV[4]), tonumber(ARGV[5])
local most_value, most_bytes = tonumber(ARGV[6]), tonumber(ARGV[7])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function free_of_others(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end
free_of_others(writers, 'zset')
free_of_others(own, 'hash')

if ARGV[8] == '1' then
  redis.call('DEL', own)
elseif redis.call('EXISTS', own) == 0 then
  return {0, 0, {}}
end
local forget = 10 + 2 * tonumber(ARGV[9])
for i = 10, forget - 1, 2 do redis.call('HSET', own, ARGV[i], ARGV[i + 1]) end
for i = forget, #ARGV do redis.call('HDEL', own, ARGV[i]) end
redis.call('PEXPIRE', own, expiry_ms)
redis.call('ZADD', writers, now_ms, writer)
redis.call('PEXPIRE', writers, expiry_ms)
redis.call('ZREMRANGEBYSCORE', writers, '-inf', now_ms - expiry_ms)
redis.call('ZREMRANGEBYRANK', writers, 0, -2 - most_writers)

local parts, left_out, bytes = {}, 0, 0
for _, other in ipairs(redis.call('ZREVRANGE', writers, 0, -1)) do
  local fields = other ~= writer and redis.pcall('HLEN', prefix .. other) or 0
  if type(fields) ~= 'number' or fields > most_fields then
    left_out = left_out + 1
  elseif fields > 0 then
    local all, kept = redis.call('HGETALL', prefix .. other), {}
    for i = 1, #all, 2 do
      local size = #all[i] + #all[i + 1]
      if #all[i + 1] > most_value or bytes + size > most_bytes then
        left_out = left_out + 1
      else
        bytes = bytes + size
        kept[#kept + 1] = all[i]
        kept[#kept + 1] = all[i + 1]
      end
    end
    parts[#parts + 1] = {other, kept}
  end
end
return {1, left_out, parts}
"""

_Part = tuple[bytes, list[bytes]]
"""A writer; its fields and values by turns."""


class StoreFailure(StrEnum):
    """Why a call, or one of the values that it read, came to nothing."""

    TIMEOUT = "timeout"
    """No answer in time. Whether something was written is unknown; it has to be written again."""
    UNREACHABLE = "unreachable"
    """Nobody answers there, or not as a Redis does."""
    REFUSED = "refused"
    """Redis answers that it will not: password, rights, loading, read-only, out of memory."""
    CORRUPT = "corrupt"
    """Something that is no part of ours, or damaged, or too large; the rest was taken."""


class StoreHealth:
    """What became of the calls to a store; a change is logged once.

    Args:
        gone: what the log says when calls begin to fail.
        back: what answers again.
        clock: tells how long the store was gone.
    """

    def __init__(self, gone: str, back: str, clock: Clock) -> None:
        self.failures: Counter[StoreFailure] = Counter()
        self.healthy = True
        self._gone, self._back = gone, back
        self._clock = clock
        self._last_answer_s = clock.now_s()

    def fail(self, error: Exception) -> StoreFailure:
        """Count what a call's exception means."""
        failure = failure_of(error)
        self.failures[failure] += 1
        if self.healthy:
            logger.warning("%s (%s): %s", self._gone, failure, error)
        self.healthy = False
        return failure

    def recover(self) -> None:
        """A call went through."""
        now_s = self._clock.now_s()
        if not self.healthy:
            logger.warning("%s answers again after %.1f s", self._back, now_s - self._last_answer_s)
        self._last_answer_s = now_s
        self.healthy = True


class StatisticsStore:
    """One writer's way to the shared statistics.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        model: statistics are shared by the writers of one model.
        writer: this writer's name, unique among them and never used again: what it had written would be replaced.
        timeout_s: bounds every exchange.
        expiry_s: a part that its writer has not touched for so long is forgotten; by the time of the Redis server.
        clock: tells how long the store was gone.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, url: str, *, model: str, writer: str, timeout_s: float, expiry_s: float, clock: Clock) -> None:
        self._health = StoreHealth("tool statistics go on without the store", "the tool statistics store", clock)
        self.failures = self._health.failures
        """Exchanges that failed, and values that were left out (CORRUPT), since the start."""
        self._timeout_s = timeout_s
        self._expiry_ms = max(1, int(expiry_s * 1000))
        self._writer = writer
        # The braces put all keys of a model on one node of a Redis cluster.
        space = f"caesura:v1:{{{quote(model, safe='')}}}"
        self._writers_key, self._prefix = f"{space}:writers", f"{space}:durations:"
        self._written: Mapping[bytes, bytes] | None = None
        """The own part as Redis has it; None: unknown."""
        self._parts: dict[tuple[bytes, bytes], DurationStatistics] = {}
        self._merged: dict[str, tuple[list[DurationStatistics], DurationStatistics]] = {}
        """Per tool: the parts, and all of them merged."""
        self._redis = connect(url)

    @property
    def healthy(self) -> bool:
        """Whether the last exchange went through."""
        return self._health.healthy

    async def exchange(self, own: Mapping[str, DurationStatistics]) -> Mapping[str, DurationStatistics] | None:
        """Write this writer's part and read the others', one call at a time.

        Args:
            own: all that this writer has observed, as ``DurationTable.own`` gives it. Only what changed is written.

        Returns:
            What all other writers have observed, merged, to be read only; None if it came to nothing, within about
            ``timeout_s``: ``failures`` says why.
        """
        fields = {encode_tool(name): part.to_bytes() for name, part in own.items()}
        try:
            async with answered_within(self._timeout_s):
                there, left_out, parts = await self._call(fields, whole=self._written is None)
                if not there:
                    _, left_out, parts = await self._call(fields, whole=True)
        except CALL_ERRORS as error:
            self._health.fail(error)
            # It may be another Redis, or one without our data, that answers next.
            self._written = None
            return None
        self._written = fields
        self._health.recover()
        return self._merge(parts, left_out)

    async def close(self) -> None:
        """Close the connection. The part stays until it expires."""
        await self._redis.aclose()

    async def _call(self, fields: Mapping[bytes, bytes], *, whole: bool) -> tuple[int, int, list[_Part]]:
        written = {} if whole or self._written is None else self._written
        changed = [word for field, value in fields.items() if written.get(field) != value for word in (field, value)]
        arguments: list[Any] = [self._writer, self._prefix, self._expiry_ms, MAX_WRITERS, MAX_TOOLS + 1]
        arguments += [MAX_STATISTICS_BYTES, MAX_READ_BYTES, int(whole), len(changed) // 2, *changed]
        arguments += [field for field in written if field not in fields]
        keys = [self._writers_key, self._prefix + self._writer]
        answer = await cast(Any, self._redis.eval(_EXCHANGE, len(keys), *keys, *arguments))
        return msgspec.convert(answer, tuple[int, int, list[_Part]])

    def _merge(self, parts: list[_Part], left_out: int) -> Mapping[str, DurationStatistics]:
        """Everything of ``parts`` that makes sense, per tool. What has not changed is not parsed and merged again."""
        before, self._parts = self._parts, {}
        by_tool: dict[str, list[DurationStatistics]] = {}
        for writer, words in parts:
            for field, value in zip(words[::2], words[1::2], strict=False):
                part = before.get((writer, field))
                try:
                    if part is None or part.to_bytes() != value:
                        part = DurationStatistics.from_bytes(value)
                    by_tool.setdefault(decode_tool(field), []).append(part)
                except ValueError as error:
                    left_out += 1
                    logger.debug("tool statistics of %r, %r: %s", writer, field, error)
                    continue
                self._parts[writer, field] = part
        self._count_corrupt(left_out)
        merged_before, self._merged = self._merged, {}
        for tool, seen in by_tool.items():
            known = merged_before.get(tool)
            together = known[1] if known and known[0] == seen else reduce(DurationStatistics.merge, seen)
            self._merged[tool] = (seen, together)
        return MappingProxyType({tool: together for tool, (_, together) in self._merged.items()})

    def _count_corrupt(self, left_out: int) -> None:
        if left_out and StoreFailure.CORRUPT not in self.failures:
            logger.warning("tool statistics: %d values of other writers are damaged or too large", left_out)
        if left_out:
            self.failures[StoreFailure.CORRUPT] += left_out


def connect(url: str, *, connections: int | None = None) -> redis.asyncio.Redis:
    """A client that never retries, and waits for ever: whoever calls has the limit, by `cluster.patience`.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``; with ``?password_file=PATH`` the file says the password.
        connections: most that it opens; whoever finds none free waits. None: no bound.

    Raises:
        ConfigError: the URL cannot be used.
    """
    settings: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    url, password = _with_password(url)
    if password is not None:
        settings["password"] = password
    try:
        pool: Any
        if connections is None:
            pool = redis.asyncio.ConnectionPool.from_url(url, **settings)
        else:
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url, max_connections=connections, timeout=None, **settings
            )
        pool.make_connection()
    except (ValueError, TypeError) as error:
        raise ConfigError(f"store.url: {error}") from error
    return redis.asyncio.Redis.from_pool(pool)


def _with_password(url: str) -> tuple[str, str | None]:
    """The URL without ``password_file``, and what that file says: a secret need not stand in a configuration."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    path = query.pop("password_file", None)
    if path is None:
        return url, None
    try:
        password = Path(path).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"store.url: password_file: cannot be read: {error}") from error
    return parts._replace(query=urlencode(query)).geturl(), password


CALL_ERRORS = (redis.RedisError, OSError, UnicodeError, msgspec.ValidationError)
"""What a call may raise that finds no Redis, or strange things in it; :func:`failure_of` says what it means."""


def failure_of(error: Exception) -> StoreFailure:
    """What a call's exception means; UNREACHABLE is what is left."""
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return StoreFailure.TIMEOUT
    if isinstance(error, msgspec.ValidationError):
        return StoreFailure.CORRUPT
    refusals = (
        redis.ResponseError,
        redis.AuthenticationError,
        redis.exceptions.AuthorizationError,
        redis.BusyLoadingError,
    )
    return StoreFailure.REFUSED if isinstance(error, refusals) else StoreFailure.UNREACHABLE
