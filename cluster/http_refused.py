"""In the proxy's process: a tenant over a limit is refused here, as the ingress refused it a moment ago.

Clients that ask again at once, whatever they are told, would otherwise take the ingress's time from all others. Their
answers wait, one after the other, so that they do not take the proxy's either.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.clock import Clock
from cluster.errors import TooManyRequests
from cluster.http_errors import RETRY_AFTER_MS, RETRY_AFTER_S, error_response
from cluster.http_rush import makes_work
from cluster.tenant_limits import AT_ONCE, TOO_FAST

KNOWN_FOR_S = 1.0
"""Then the ingress is asked again: the limit is one ingress's, and limits change."""

ANSWERED_AFTER_S = 0.05
"""What a repeated refusal waits after the one before it of the same key; `RETRY_AFTER_S` at most in all."""

KEYS = (b"authorization", b"x-api-key")


@dataclass(frozen=True, slots=True)
class _Refusal:
    until_s: float
    most: int
    """In flight when it was refused, or more: as many are refused again. 0: all are."""
    error: TooManyRequests


@dataclass(slots=True)
class _Client:
    """Whoever sends the same key."""

    in_flight: int = 0
    served: int = 0
    refusal: _Refusal | None = None
    answered_s: float = 0.0
    """When the last repeated refusal is told."""


class RefusedAgain:
    """Pure ASGI middleware: repeats the refusal of a key with too many requests in flight, while it has as many, and of
    one whose requests come too fast, until its next one may come.

    Args:
        app: what refuses.
        clock: for how long a refusal is known.
        on_refusal: called for each that is repeated, with the error's code.
    """

    def __init__(self, app: ASGIApp, clock: Clock, on_refusal: Callable[[str], None]) -> None:
        self._app = app
        self._clock = clock
        self._on_refusal = on_refusal
        self._clients: dict[tuple[bytes, ...], _Client] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        key = tuple(value for name, value in scope.get("headers", ()) if name in KEYS)
        if not key or not makes_work(scope):
            await self._app(scope, receive, send)
            return
        client = self._clients.setdefault(key, _Client())
        if (refusal := client.refusal) is not None and refusal.until_s <= self._clock.now_s():
            refusal = client.refusal = None
        if refusal is not None and client.in_flight >= refusal.most:
            self._on_refusal(str(refusal.error.code))
            now_s = self._clock.now_s()
            client.answered_s = min(max(client.answered_s, now_s) + ANSWERED_AFTER_S, now_s + RETRY_AFTER_S)
            await asyncio.sleep(client.answered_s - now_s)
            await error_response(refusal.error)(scope, receive, send)
            return
        served_before, answer = client.served, list[Message]()

        async def observe(message: Message) -> None:
            if answer or message.get("status") == HTTPStatus.TOO_MANY_REQUESTS:
                answer.append(message)
            await send(message)

        client.in_flight += 1
        try:
            await self._app(scope, receive, observe)
            if (error := _of_a_limit(answer)) is not None:
                client.refusal = self._learnt(client, error, served_before)
        finally:
            client.in_flight -= 1
            if not answer:
                client.served += 1
            if not client.in_flight and (client.refusal is None or client.refusal.most):
                self._clients.pop(key, None)

    def _learnt(self, client: _Client, error: TooManyRequests, served_before: int) -> _Refusal:
        now_s = self._clock.now_s()
        if error.code == TOO_FAST:
            return _Refusal(now_s + min(KNOWN_FOR_S, error.retry_after_s or KNOWN_FOR_S), 0, error)
        # Those in flight when it was refused are in flight still, or have been served since it came.
        most = client.in_flight - 1 + client.served - served_before
        known = client.refusal or _Refusal(now_s + KNOWN_FOR_S, most, error)
        return replace(known, most=min(known.most, most))


def _of_a_limit(answer: list[Message]) -> TooManyRequests | None:
    """The error, if the answer is that a tenant is over one of its own limits."""
    if not answer:
        return None
    told = json.loads(b"".join(message.get("body", b"") for message in answer))["error"]
    if told["code"] == AT_ONCE:
        return TooManyRequests(told["message"], code=AT_ONCE, retry_after_s=RETRY_AFTER_S)
    if told["code"] == TOO_FAST:
        return TooManyRequests(told["message"], code=TOO_FAST, retry_after_s=_wait_s(Headers(raw=answer[0]["headers"])))
    return None


def _wait_s(headers: Headers) -> float:
    """Until it may come again, as it was told."""
    if (milliseconds := headers.get(RETRY_AFTER_MS)) is not None:
        return float(milliseconds) / 1e3
    return float(headers.get("retry-after", RETRY_AFTER_S))
