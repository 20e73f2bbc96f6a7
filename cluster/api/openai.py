"""What OpenAI's API looks like to every process: paths, request ids, error bodies, and the usage of an answer.

`ErrorBoundary` renders every exception as an OpenAI error; `cluster.api.ray_errors` maps foreign exceptions.
"""

import json
import logging
import re
from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.core.errors import BadRequest, HttpError, Overloaded

logger = logging.getLogger("caesura.http")

TURN_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TOKEN_PATHS = {"tokenize": "/tokenize", "detokenize": "/detokenize"}
RESPONSES = "/v1/responses"

LIMITED_PATHS = frozenset({*TURN_PATHS.values(), *TOKEN_PATHS.values(), RESPONSES})
"""The paths that make work for a replica. Their requests are counted and bounded; everything else always passes."""

REQUEST_ID = "x-request-id"
MAX_REQUEST_ID_LENGTH = 128
_NOT_PRINTABLE = re.compile(r"[^!-~]")

RETRY_AFTER_MS = "retry-after-ms"
RETRY_AFTER_S = 1
"""The default of `Retry-After`."""

SSE_DONE = b"data: [DONE]\n\n"
"""The event that ends every stream."""

MAX_MESSAGE_LENGTH = 2000
"""Characters of an error message; a longer one quotes too much of the request back."""

CLIENT_ERROR_TYPES = {404: "not_found_error", 429: "rate_limit_error"}

ErrorMap = Callable[[BaseException], HttpError]


def no_model(name: str) -> BadRequest:
    """404: this model is not served."""
    return BadRequest(f"the model {name[:256]!r} does not exist", status=404, param="model", code="model_not_found")


def error_body(error: HttpError) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``; ``code`` falls back to the HTTP status."""
    kind = CLIENT_ERROR_TYPES.get(error.status, error.type)
    message = error.message[:MAX_MESSAGE_LENGTH]
    code = error.code if error.code is not None else error.status
    return {"error": {"message": message, "type": kind, "param": error.param, "code": code}}


def error_response(error: HttpError) -> Response:
    """The error as a JSON response with its status and, where a retry makes sense, `Retry-After`.

    `retry-after-ms` carries fractions of a second; OpenAI's clients look for it first.
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


USAGE_BYTES = 4096
"""The usage of an answer is looked for in this many bytes at its end."""
_USAGE = re.compile(rb'"(prompt|completion)_tokens":\s*(\d{1,9})')
_ERROR_EVENT = b'data: {"error"'


class Usage(NamedTuple):
    """Tokens; None: the answer does not say."""

    prompt: int | None
    completion: int | None


def usage_of(answer: bytes) -> Usage:
    """The usage of an answer that is not a stream."""
    used = {name: int(number) for name, number in _USAGE.findall(answer[-USAGE_BYTES:])}
    return Usage(used.get(b"prompt"), used.get(b"completion"))


def contains_error(events: bytes) -> bool:
    """Whether one of a stream's events is an error."""
    return _ERROR_EVENT in events


def clean_request_id(value: str) -> str:
    """The client's id as far as it is printable and short; a new one if nothing is left."""
    return _NOT_PRINTABLE.sub("", value)[:MAX_REQUEST_ID_LENGTH] or uuid4().hex


class ErrorBoundary:
    """Pure ASGI middleware: bounds on headers and on requests in flight; every exception becomes an OpenAI error.

    Args:
        app: what is protected.
        error_map: what an exception means to a client; total.
        max_header_bytes: sum of the names and values of the headers; more get 431.
        max_in_flight: requests under ``limited_paths`` at a time; more get 503 with `Retry-After`.
        limited_paths: the paths that make work for a replica. Probes and the admin routes answer under overload too.
        on_overload: called with the headers of each request that is rejected because too many are in flight.
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
        except Exception as exception:  # the boundary: an unexpected exception is a 500, and is logged
            mapped = self._error_map(exception)
            if mapped.status >= 500:
                logger.error("%s %s failed", scope["method"], scope["path"], exc_info=exception)
            if started:
                raise
            await error_response(mapped)(scope, receive, send)
        finally:
            self._in_flight -= limited

    def _check(self, scope: Scope, limited: bool) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes:
            raise BadRequest(f"headers of {size} bytes; at most {self._max_header_bytes} are accepted", status=431)
        if limited and self._in_flight >= self._max_in_flight:
            raise Overloaded(f"{self._max_in_flight} requests are in flight; retry later", retry_after_s=RETRY_AFTER_S)
