"""OpenAI's error body, and the ASGI boundary behind which no exception is seen by a client.

What a foreign exception means is decided in one place, `cluster.ingress.as_http_error`; here it is only told.
"""

import json
import logging
from collections.abc import Callable
from math import ceil
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import BadRequest, HttpError, Overloaded

logger = logging.getLogger("caesura.http")

RETRY_AFTER_MS = "retry-after-ms"
RETRY_AFTER_S = 1
"""What `Retry-After` says when nothing better is known."""

SSE_DONE = b"data: [DONE]\n\n"
"""The event that ends every stream."""

MAX_MESSAGE_LENGTH = 2000
"""Characters of an error message; a longer one quotes too much of the request back."""

CLIENT_ERROR_TYPES = {404: "not_found_error", 429: "rate_limit_error"}

ErrorMap = Callable[[BaseException], HttpError]


def error_body(error: HttpError) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``; ``code`` falls back to the HTTP status."""
    kind = CLIENT_ERROR_TYPES.get(error.status, error.type)
    message = error.message[:MAX_MESSAGE_LENGTH]
    code = error.code if error.code is not None else error.status
    return {"error": {"message": message, "type": kind, "param": error.param, "code": code}}


def error_response(error: HttpError) -> Response:
    """The error as a JSON response with its status and, where a retry makes sense, `Retry-After`.

    Where less or more than whole seconds are known, `retry-after-ms` says it, which OpenAI's clients look for first.
    """
    headers = {}
    if (seconds := error.retry_after_s) is not None:
        headers["retry-after"] = str(max(1, ceil(seconds)))
        if seconds != int(seconds):
            headers[RETRY_AFTER_MS] = str(ceil(1e3 * seconds))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def error_event(error: HttpError) -> bytes:
    """The error as the last events of a stream that has begun and cannot change its status any more."""
    return b"data: " + json.dumps(error_body(error), separators=(",", ":")).encode() + b"\n\n" + SSE_DONE


class Boundary:
    """Pure ASGI middleware: bounds on headers and on requests in flight; every exception becomes an OpenAI error.

    Args:
        app: what is protected.
        error_map: what an exception means to a client; total.
        max_header_bytes: sum of the names and values of the headers; more get 431.
        max_in_flight: requests under ``limited_paths`` at a time; more get 503 with `Retry-After`.
        limited_paths: the paths that make work for a replica. Probes and the admin routes answer under overload too.
        on_overload: told the headers of each request that is refused because too many are in flight.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        error_map: ErrorMap,
        max_header_bytes: int,
        max_in_flight: int,
        limited_paths: frozenset[str],
        on_overload: Callable[[Headers], None] = lambda headers: None,
    ) -> None:
        self._app = app
        self._error_map = error_map
        self._max_header_bytes = max_header_bytes
        self._max_in_flight = max_in_flight
        self._limited_paths = limited_paths
        self._on_overload = on_overload
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def observe(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        limited = scope["path"] in self._limited_paths
        try:
            self._check(scope, limited)
        except HttpError as error:
            if isinstance(error, Overloaded):
                self._on_overload(Headers(scope=scope))
            await error_response(error)(scope, receive, send)
            return
        self._in_flight += limited
        try:
            await self._app(scope, receive, observe)
        except Exception as exception:  # the boundary: what was not foreseen is a 500, and is logged
            told = self._error_map(exception)
            if told.status >= 500:
                logger.error("%s %s failed", scope["method"], scope["path"], exc_info=exception)
            if started:
                raise
            await error_response(told)(scope, receive, send)
        finally:
            self._in_flight -= limited

    def _check(self, scope: Scope, limited: bool) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes:
            raise BadRequest(f"headers of {size} bytes; at most {self._max_header_bytes} are accepted", status=431)
        if limited and self._in_flight >= self._max_in_flight:
            raise Overloaded(f"{self._max_in_flight} requests are in flight; retry later", retry_after_s=RETRY_AFTER_S)
