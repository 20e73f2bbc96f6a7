"""The base class of all stores: connections to Redis, timeouts, Lua scripts, and counters of failures.

Only the modules of `cluster.store` import redis.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cluster.core.clock import Clock
from cluster.core.errors import ConfigError
from cluster.core.timeouts import stall_tolerant_timeout

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class StoreFailure(StrEnum):
    """The reason why a call failed, or why a value that it read was left out."""

    TIMEOUT = "timeout"
    """There was no answer in time. It is unknown whether something was written, so that it has to be written again."""
    UNREACHABLE = "unreachable"
    """No server answers at the address, or it is not a Redis."""
    REFUSED = "refused"
    """Redis rejects the call: wrong password, no permission, loading, read-only, or out of memory."""
    CORRUPT = "corrupt"
    """A value was damaged, too large or in an unknown format. The other values were read."""


class StoreUnavailable(Exception):
    """A call failed. `RedisStore.failures` has counted it."""

    def __init__(self, reason: StoreFailure) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The memory of a Redis in bytes. It rejects writes, or evicts keys, where it would use more than ``max_bytes``."""

    used_bytes: int
    max_bytes: int
    """0: there is no limit."""

    @property
    def share(self) -> float:
        """The used share of the limit; 0 without a limit."""
        return self.used_bytes / self.max_bytes if self.max_bytes else 0.0


class RedisStore:
    """The base class of stores, with connections, a timeout for every call, and counters of failures.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, see `connect`.
        name: the store's name in log messages.
        degraded: the log message when calls begin to fail.
        timeout_s: timeout of each call in seconds.
        clock: measures how long the store was unavailable.
        connections: maximum number of connections; None: no limit.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(
        self, url: str, *, name: str, degraded: str, timeout_s: float, clock: Clock, connections: int | None = None
    ) -> None:
        self.failures: Counter[StoreFailure] = Counter()
        """Number of calls that failed, and of values that were left out (CORRUPT), since the start, by reason."""
        self.healthy = True
        """Whether the last call succeeded."""
        self.redis = connect(url, connections=connections)
        self._name, self._degraded = name, degraded
        self._timeout_s = timeout_s
        self._clock = clock
        self._last_answer_s = clock.now_s()

    @asynccontextmanager
    async def request(self, extra_s: float = 0.0) -> AsyncIterator[None]:
        """Apply the timeout to the calls in the context, and count a failure.

        Args:
            extra_s: seconds that are added to the timeout.

        Raises:
            StoreUnavailable: a call failed.
        """
        try:
            async with stall_tolerant_timeout(self._timeout_s + extra_s):
                yield
        except CALL_ERRORS as error:
            raise StoreUnavailable(self.count(error)) from error
        now_s = self._clock.now_s()
        if not self.healthy:
            logger.warning("%s answers again after %.1f s", self._name, now_s - self._last_answer_s)
        self._last_answer_s, self.healthy = now_s, True

    def count(self, error: Exception) -> StoreFailure:
        """Count a call's exception, and return the reason of the failure."""
        failure = failure_of(error)
        self.failures[failure] += 1
        if self.healthy:
            logger.warning("%s (%s): %s", self._degraded, failure, error)
        self.healthy = False
        return failure

    async def run(self, script: str, keys: Sequence[str], arguments: Sequence[Any], kind: type[_Answer]) -> _Answer:
        """Run a Lua script in a `request` of its own.

        Args:
            script: the text of the script.
            keys: the keys that it accesses.
            arguments: its other arguments.
            kind: the type to which its answer is converted.

        Raises:
            StoreUnavailable: the call failed.
        """
        async with self.request():
            return await self.evaluate(script, keys, arguments, kind)

    async def evaluate(
        self, script: str, keys: Sequence[str], arguments: Sequence[Any], kind: type[_Answer]
    ) -> _Answer:
        """Run a Lua script as a part of a `request`, see `run`."""
        return msgspec.convert(await cast(Any, self.redis.register_script(script))(keys, arguments), kind)

    async def memory(self) -> StoreMemory:
        """Return how much memory Redis uses, and how much it may use.

        Raises:
            StoreUnavailable: the call failed.
        """
        async with self.request():
            told = await self.redis.info("memory")
            return StoreMemory(int(told.get("used_memory", 0)), int(told.get("maxmemory", 0)))

    async def close(self) -> None:
        """Close the connections. Written values stay until they expire."""
        await self.redis.aclose()


def lua(package: str, name: str) -> str:
    """Return the text of a script in the directory of ``package``."""
    return (files(package) / name).read_text()


def quoted(text: str) -> str:
    """Quote ``text`` as a part of a key, so that a slash, a brace or a colon in it is no separator."""
    return quote(text, safe="", errors="surrogatepass")


def key_space(name: str) -> str:
    """Return the prefix of the keys of a model. Its braces put all of them on one node of a Redis cluster."""
    return f"caesura:v1:{{{quoted(name)}}}"


def milliseconds(seconds: float) -> int:
    """Convert seconds to milliseconds, at least 1, since Redis rejects an expiry of 0."""
    return max(1, int(seconds * 1000))


def connect(url: str, *, connections: int | None = None) -> redis.asyncio.Redis:
    """Make a client without retries and timeouts, since `RedisStore.request` has the timeout.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``. With ``?password_file=PATH``, the password is read from this
            file.
        connections: maximum number of connections. A call waits if none is free. None: no limit.

    Raises:
        ConfigError: the URL is invalid, or the password's file cannot be read.
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
        raise ConfigError(f"redis.url: {error}") from error
    return redis.asyncio.Redis.from_pool(pool)


def _with_password(url: str) -> tuple[str, str | None]:
    """Return the URL without ``password_file``, and the password from that file; None: the URL names no such file."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    path = query.pop("password_file", None)
    if path is None:
        return url, None
    try:
        password = Path(path).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"redis.url: password_file: cannot be read: {error}") from error
    return parts._replace(query=urlencode(query)).geturl(), password


CALL_ERRORS = (redis.RedisError, OSError, UnicodeError, msgspec.ValidationError)
"""Exceptions of calls without a working Redis, or with invalid values in it. `failure_of` classifies them."""


def failure_of(error: Exception) -> StoreFailure:
    """Classify a call's exception. Any exception that fits no other reason is UNREACHABLE."""
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
