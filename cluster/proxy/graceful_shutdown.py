"""ASGI middleware for the end of an ingress: it accepts no more requests, waits for those in flight, and ends the rest
with an error.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.anthropic.errors import response_of
from cluster.core.errors import Overloaded
from cluster.proxy.answer_progress import AnswerProgress

RETRY_AFTER_S = 30
"""Seconds after which a client may try again. The server has to be started again first."""
LAST_EVENT_S = 1.0
"""Seconds that the last bytes of an answer may take. A client that reads more slowly does not get them."""


class GracefulShutdown:
    """Knows the requests in flight, and can end them.

    To the application, the end of a request is the same as the disconnect of its client.

    Args:
        app: the application.
        before_end: called before requests are ended. The application may then leave the programs open whose clients
            disconnect, so that another ingress continues them.
    """

    def __init__(self, app: ASGIApp, before_end: Callable[[], object]) -> None:
        self._app = app
        self._before_end = before_end
        self._in_flight: set[_Request] = set()
        self._stopping = False
        self._ended = asyncio.Event()
        """Set when the last request in flight has ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _Request(scope, receive, send)
        if self._stopping:
            await request.end()
            return
        self._in_flight.add(request)
        try:
            await self._app(scope, receive, request.send)
        finally:
            self._in_flight.discard(request)
            if not self._in_flight:
                self._ended.set()

    async def shut_down(self, within_s: float) -> int:
        """Reject new requests, and return when none is in flight.

        Args:
            within_s: seconds after which the requests in flight end with an error: 503 with Retry-After, or an error
                event as the last event of a stream.

        Returns:
            The number of requests that ended with an error.
        """
        self._stopping = True
        if not self._in_flight:
            return 0
        self._ended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        self._before_end()
        left = [request.end() for request in self._in_flight]
        await asyncio.gather(*left)
        return len(left)


class _Request:
    """A request in flight."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._progress = AnswerProgress()
        self._cut = False

    async def send(self, message: Message) -> None:
        """Send a message of the application, unless the request was ended."""
        if not self._cut:
            self._progress.see(message)
            await self._send(message)

    async def end(self) -> None:
        """Send the end of an answer that has not ended."""
        if self._progress.over or self._cut:
            return
        self._cut = True
        error = Overloaded("the server shuts down", retry_after_s=RETRY_AFTER_S, code="shutting_down")
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(LAST_EVENT_S):
                if not self._progress.begun:
                    await response_of(self._scope, error)(self._scope, self._receive, self._closing)
                elif self._progress.is_stream:
                    last = self._progress.ending(self._scope["path"], error)
                    await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _closing(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        await self._send(message)
