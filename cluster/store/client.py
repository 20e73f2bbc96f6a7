"""What every store has: connections to Redis, time limits, scripts, and the outcomes of the calls.

Only the modules of `cluster.store` import redis.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
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
    """Why a call, or one of the values that it read, came to nothing."""

    TIMEOUT = "timeout"
    """There was no answer in time. Whether something was written is unknown; it has to be written again."""
    UNREACHABLE = "unreachable"
    """Nobody answers there, or not as a Redis does."""
    REFUSED = "refused"
    """Redis refuses the call: password, rights, loading, read-only, out of memory."""
    CORRUPT = "corrupt"
    """A value was damaged, too large or not one of ours; the rest was taken."""


class StoreUnavailable(Exception):
    """A call came to nothing; it has been counted."""

    def __init__(self, reason: StoreFailure) -> None:
        super().__init__(reason)
        self.reason = reason


class RedisStore:
    """What all stores have: connections, a time limit for every call, and the outcomes of the calls.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, see `connect`.
        name: what the log calls the store.
        degraded: what the log reports when calls begin to fail.
        timeout_s: bounds every call.
        clock: measures how long the store was gone.
        connections: most that it opens; None: no bound.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(
        self, url: str, *, name: str, degraded: str, timeout_s: float, clock: Clock, connections: int | None = None
    ) -> None:
        self.failures: Counter[StoreFailure] = Counter()
        """Calls that failed, and values that were left out (CORRUPT), since the start."""
        self.healthy = True
        """Whether the last call went through."""
        self.redis = connect(url, connections=connections)
        self._name, self._degraded = name, degraded
        self._timeout_s = timeout_s
        self._clock = clock
        self._last_answer_s = clock.now_s()

    @asynccontextmanager
    async def request(self, extra_s: float = 0.0) -> AsyncIterator[None]:
        """Bound and count the calls of the block; ``extra_s`` is added to the time limit.

        Raises:
            StoreUnavailable: they came to nothing.
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
        """Count what a call's exception means."""
        failure = failure_of(error)
        self.failures[failure] += 1
        if self.healthy:
            logger.warning("%s (%s): %s", self._degraded, failure, error)
        self.healthy = False
        return failure

    async def run(self, script: str, keys: Sequence[str], arguments: Sequence[Any], kind: type[_Answer]) -> _Answer:
        """Run a Lua script and convert its answer.

        Raises:
            StoreUnavailable: it came to nothing.
        """
        async with self.request():
            return await self.evaluate(script, keys, arguments, kind)

    async def evaluate(
        self, script: str, keys: Sequence[str], arguments: Sequence[Any], kind: type[_Answer]
    ) -> _Answer:
        """The same as a part of a `request`."""
        return msgspec.convert(await cast(Any, self.redis.register_script(script))(keys, arguments), kind)

    async def close(self) -> None:
        """Close the connections. What was written stays until it expires."""
        await self.redis.aclose()


def lua(package: str, name: str) -> str:
    """The text of a script that lies beside the modules of ``package``."""
    return (files(package) / name).read_text()


def quoted(text: str) -> str:
    """``text`` as a part of a key: a slash, a brace or a colon in it separates nothing."""
    return quote(text, safe="", errors="surrogatepass")


def key_space(name: str) -> str:
    """What the keys of a model begin with. The braces put all of them on one node of a Redis cluster."""
    return f"caesura:v1:{{{quoted(name)}}}"


def milliseconds(seconds: float) -> int:
    """At least 1, since Redis refuses an expiry of 0."""
    return max(1, int(seconds * 1000))


def connect(url: str, *, connections: int | None = None) -> redis.asyncio.Redis:
    """A client without retries and time limits of its own: `RedisStore.request` has the limit.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``; the file of ``?password_file=PATH`` has the password.
        connections: most that it opens; a call that finds none free waits. None: no bound.

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
        raise ConfigError(f"redis.url: {error}") from error
    return redis.asyncio.Redis.from_pool(pool)


def _with_password(url: str) -> tuple[str, str | None]:
    """The URL without ``password_file``, and that file's content: a secret need not stand in a configuration."""
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
"""What a call may raise that finds no Redis, or strange values in it; `failure_of` classifies them."""


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
