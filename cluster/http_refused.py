"""In the proxy's process: a tenant at its bound is refused here, as the ingress refused it a moment ago.

Clients that ask again at once, whatever they are told, would otherwise take the ingress's time from all others. Their
answers wait, one after the other, so that they do not take the proxy's either.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.clock import Clock
from cluster.errors import TooManyRequests
from cluster.http_errors import RETRY_AFTER_S, error_response
from cluster.http_rush import makes_work
from cluster.tenant_limits import AT_ONCE

KNOWN_FOR_S = 1.0
"""Then the ingress is asked again: the bound is one ingress's, and limits change."""

ANSWERED_AFTER_S = 0.05
"""What a repeated refusal waits after the one before it of the same key; `RETRY_AFTER_S` at most in all."""

KEYS = (b"authorization", b"x-api-key")


@dataclass(frozen=True, slots=True)
class _Refusal:
    until_s: float
    most: int
    """In flight when it was refused, or more: as many are refused again."""
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
    """Pure ASGI middleware: repeats the refusal of a key with too many requests in flight, while it has as many.

    Args:
        app: what refuses.
        clock: for how long a refusal is known.
        on_refusal: called for each that is repeated.
    """

    def __init__(self, app: ASGIApp, clock: Clock, on_refusal: Callable[[], None]) -> None:
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
            self._on_refusal()
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
        finally:
            client.in_flight -= 1
            if not answer:
                client.served += 1
            if not client.in_flight:
                del self._clients[key]
        if (error := _of_the_bound(answer)) is not None:
            # Those in flight when it was refused are in flight still, or have been served since it came.
            most = client.in_flight + client.served - served_before
            known = client.refusal or _Refusal(self._clock.now_s() + KNOWN_FOR_S, most, error)
            client.refusal = replace(known, most=min(known.most, most))


def _of_the_bound(answer: list[Message]) -> TooManyRequests | None:
    """The error, if the answer is that so many are in flight."""
    if not answer:
        return None
    told = json.loads(b"".join(message.get("body", b"") for message in answer))["error"]
    if told["code"] != AT_ONCE:
        return None
    return TooManyRequests(told["message"], code=AT_ONCE, retry_after_s=RETRY_AFTER_S)
