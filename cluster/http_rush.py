"""In the proxy's process: a rush is turned away before it costs anything.

The ingress refuses what is more than it may have in flight, but a request that reaches it has cost two processes some
milliseconds each: where many times as many come as can be served, they wait in line to be refused. For the same reason
those that are served enter one by one, each in a turn of the event loop in which nobody is refused.
"""

import asyncio
import os
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import Overloaded
from cluster.http_errors import RETRY_AFTER_S, error_response
from cluster.http_paths import LIMITED_PATHS

VARIABLE = "CAESURA_MAX_IN_FLIGHT"
"""Environment variable with what all ingresses together may have in flight; without it there is no bound here."""

GIVES_WAY_S = 0.1
"""A request that is served waits no longer for others to be refused."""


def bound() -> int | None:
    """Requests in flight in this proxy, as the environment says; None: no bound."""
    said = os.environ.get(VARIABLE, "")
    return int(said) if said.isdecimal() else None


class RushBound:
    """Pure ASGI middleware: 503 with `Retry-After` for requests that make work, above so many in flight.

    Args:
        app: what does the work.
        most: so many; None: any number.
        on_refusal: called for each.
    """

    def __init__(self, app: ASGIApp, most: int | None, on_refusal: Callable[[], None]) -> None:
        self._app = app
        self._most = most
        self._on_refusal = on_refusal
        self._refusal = error_response(Overloaded("too many requests are in flight", retry_after_s=RETRY_AFTER_S))
        self._in_flight = self._refused = 0
        self._door = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if self._most is None or not makes_work(scope):
            await self._app(scope, receive, send)
            return
        if self._in_flight >= self._most:
            self._refused += 1
            self._on_refusal()
            await self._refusal(scope, receive, send)
            return
        self._in_flight += 1
        try:
            await self._refusals_first()
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1

    async def _refusals_first(self) -> None:
        """Let this one in after all others that came before, and after those that are refused, but soon."""
        loop = asyncio.get_running_loop()
        give_way_until_s = loop.time() + GIVES_WAY_S
        async with self._door:
            refused_before = None
            while self._refused != refused_before and loop.time() < give_way_until_s:
                refused_before = self._refused
                await asyncio.sleep(0)


def makes_work(scope: Scope) -> bool:
    """Whether it is one of those that are counted; nobody is kept from anything else by a rush."""
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in LIMITED_PATHS
