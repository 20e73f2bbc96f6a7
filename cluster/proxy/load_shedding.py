"""Rejects excess requests before anything is done for them.

The ingress rejects requests above its limits, but a request that reaches it has already cost some milliseconds.
`LoadShedder` limits the requests in flight. `RateLimitCache` repeats the ingress's 429 to a client
that retries at once.
"""

import asyncio
import json
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.anthropic.errors import response_of
from cluster.api.openai import LIMITED_PATHS, RETRY_AFTER_MS, RETRY_AFTER_S
from cluster.auth.middleware import key_of
from cluster.auth.tenants import TENANT_CONCURRENCY, TENANT_RATE
from cluster.core.clock import Clock
from cluster.core.errors import Overloaded, TooManyRequests, Unauthorized

MAX_IN_FLIGHT_VARIABLE = "CAESURA_MAX_IN_FLIGHT"
"""Environment variable with the maximum number of requests in flight in this process. Without it, there is no limit."""

REJECTIONS_FIRST_S = 0.1
"""Maximum time for which an accepted request waits while the proxy sends rejections (seconds)."""

CACHED_FOR_S = 1.0
"""Seconds for which a rejection is repeated. Then the ingress decides again, since its limits are those of one ingress
only, and they change."""

REJECTION_SPACING_S = 0.05
"""Seconds between two repeated rejections of one key. A rejection waits at most `RETRY_AFTER_S`."""


def max_in_flight() -> int | None:
    """Return the limit of requests in flight from the environment; None: there is no limit."""
    value = os.environ.get(MAX_IN_FLIGHT_VARIABLE, "")
    return int(value) if value.isdecimal() else None


def is_limited(scope: Scope) -> bool:
    """Return whether this request makes work for a replica. Only such requests are rejected by the proxy."""
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in LIMITED_PATHS


def _key(scope: Scope) -> str | None:
    """Return the key that the ingress will check; None if there is none, or if the ingress will reject two."""
    try:
        return key_of(scope)
    except Unauthorized:
        return None


class LoadShedder:
    """ASGI middleware that rejects requests above a number in flight with 503 and `Retry-After`.

    Accepted requests enter one by one, each in an iteration of the event loop in which no request was rejected.

    Args:
        app: serves accepted requests.
        limit: maximum number of requests in flight; None: no limit.
        on_rejection: called for each rejection.
    """

    def __init__(self, app: ASGIApp, limit: int | None, on_rejection: Callable[[], None]) -> None:
        self._app = app
        self._limit = limit
        self._on_rejection = on_rejection
        self._rejection = Overloaded("too many requests are in flight", retry_after_s=RETRY_AFTER_S)
        self._in_flight = self._rejected = 0
        self._entrance = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if self._limit is None or not is_limited(scope):
            await self._app(scope, receive, send)
            return
        if self._in_flight >= self._limit:
            self._rejected += 1
            self._on_rejection()
            await response_of(scope, self._rejection)(scope, receive, send)
            return
        self._in_flight += 1
        try:
            await self._let_rejections_go_first()
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1

    async def _let_rejections_go_first(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + REJECTIONS_FIRST_S
        async with self._entrance:
            rejected_before = None
            while self._rejected != rejected_before and loop.time() < deadline_s:
                rejected_before = self._rejected
                await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class _Rejection:
    until_s: float
    max_in_flight: int
    """The rejection is repeated while at least this number of requests is in flight. 0: it is repeated always."""
    error: TooManyRequests


@dataclass(slots=True)
class _Client:
    """The state of all requests with the same key."""

    in_flight: int = 0
    served: int = 0
    rejection: _Rejection | None = None
    last_rejection_s: float = 0.0
    """The time at which the last repeated rejection is sent."""


class RateLimitCache:
    """ASGI middleware that repeats the ingress's rejection of a key that exceeds a limit.

    A key with too many requests in flight is rejected again while it has as many. A key that exceeds its rate is
    rejected until its next request is allowed. Only digests of keys are kept.

    Args:
        app: the application, which decides about limits.
        clock: measures how long a rejection is repeated.
        on_rejection: called for each repeated rejection, with the error's code.
    """

    def __init__(self, app: ASGIApp, clock: Clock, on_rejection: Callable[[str], None]) -> None:
        self._app = app
        self._clock = clock
        self._on_rejection = on_rejection
        self._clients: dict[bytes, _Client] = {}
        self._expiries: deque[tuple[float, bytes]] = deque()
        """The times at which clients that exceeded their rate can be forgotten, in ascending order."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        self._forget_expired()
        key = _key(scope) if is_limited(scope) else None
        if key is None:
            await self._app(scope, receive, send)
            return
        digest = sha256(key.encode()).digest()
        client = self._clients.setdefault(digest, _Client())
        if (rejection := client.rejection) is not None and rejection.until_s <= self._clock.now_s():
            rejection = client.rejection = None
        if rejection is not None and client.in_flight >= rejection.max_in_flight:
            await self._repeat(client, rejection.error)
            await response_of(scope, rejection.error)(scope, receive, send)
            return
        served_before, answer = client.served, list[Message]()

        async def observe(message: Message) -> None:
            if answer or message.get("status") == HTTPStatus.TOO_MANY_REQUESTS:
                answer.append(message)
            await send(message)

        client.in_flight += 1
        try:
            await self._app(scope, receive, observe)
            if (error := _limit_error(answer)) is not None:
                client.rejection = self._rejection(client, error, served_before)
        finally:
            client.in_flight -= 1
            if not answer:
                client.served += 1
            if not client.in_flight:
                self._leave(digest, client)

    def _leave(self, digest: bytes, client: _Client) -> None:
        """Forget the client, either now or when its rejection has expired."""
        if client.rejection is not None and client.rejection.max_in_flight == 0:
            self._expiries.append((self._clock.now_s() + CACHED_FOR_S, digest))
        else:
            self._clients.pop(digest, None)

    def _forget_expired(self) -> None:
        now_s = self._clock.now_s()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, digest = self._expiries.popleft()
            client = self._clients.get(digest)
            if client is None or client.in_flight:
                continue
            if client.rejection is None or client.rejection.until_s <= now_s:
                del self._clients[digest]

    async def _repeat(self, client: _Client, error: TooManyRequests) -> None:
        """Wait before a rejection is repeated, so that rejections do not use up the proxy's time."""
        self._on_rejection(str(error.code))
        now_s = self._clock.now_s()
        next_s = max(client.last_rejection_s, now_s) + REJECTION_SPACING_S
        client.last_rejection_s = min(next_s, now_s + RETRY_AFTER_S)
        await asyncio.sleep(client.last_rejection_s - now_s)

    def _rejection(self, client: _Client, error: TooManyRequests, served_before: int) -> _Rejection:
        now_s = self._clock.now_s()
        if error.code == TENANT_RATE:
            return _Rejection(now_s + min(CACHED_FOR_S, error.retry_after_s or CACHED_FOR_S), 0, error)
        # Requests that were in flight when it was rejected are still in flight, or have been served since it arrived.
        most = client.in_flight - 1 + client.served - served_before
        known = client.rejection or _Rejection(now_s + CACHED_FOR_S, most, error)
        return replace(known, max_in_flight=min(known.max_in_flight, most))


def _limit_error(answer: list[Message]) -> TooManyRequests | None:
    """Return the error of an answer that rejects a tenant for exceeding its limit; None: the answer is another one."""
    if not answer:
        return None
    try:
        error = json.loads(b"".join(message.get("body", b"") for message in answer))["error"]
        code, message = error["code"], error["message"]
    except (ValueError, TypeError, KeyError):
        return None
    if code == TENANT_CONCURRENCY:
        return TooManyRequests(message, code=code, retry_after_s=RETRY_AFTER_S)
    if code == TENANT_RATE:
        return TooManyRequests(message, code=code, retry_after_s=_retry_after_s(Headers(raw=answer[0]["headers"])))
    return None


def _retry_after_s(headers: Headers) -> float:
    if (milliseconds := headers.get(RETRY_AFTER_MS)) is not None:
        return float(milliseconds) / 1e3
    return float(headers.get("retry-after", RETRY_AFTER_S))
