"""OpenAI's HTTP API as all processes use it: paths, request ids, error bodies, and the usage of an answer.

`ErrorBoundary` renders every exception as an OpenAI error. `cluster.api.ray_errors` maps exceptions of libraries.
"""

import json
import logging
import re
from collections.abc import Callable
from math import ceil
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.core.errors import OVERLOAD, BadRequest, HttpError, Overloaded

logger = logging.getLogger("caesura.http")

TURN_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/inference/v1/generate",
}
TOKEN_PATHS = {"tokenize": "/tokenize", "detokenize": "/detokenize"}
RESPONSES = "/v1/responses"
CONNECTION = "caesura.connection"
"""Key of an ASGI scope: the responses that were made over the same WebSocket and are not stored."""
BATCH_LINE = "caesura.batch_line"
"""Key of an ASGI scope: the request is a line of a batch. It yields to all other work, and is sent again if it is
rejected."""
CONVERSATIONS = "/v1/conversations"
FILES = "/v1/files"
BATCHES = "/v1/batches"
RESPONSE_COMPACTION = RESPONSES + "/compact"
RESPONSE_TOKENS = RESPONSES + "/input_tokens"
MESSAGE_PATHS = {"create_message": "/v1/messages", "count_tokens": "/v1/messages/count_tokens"}
"""Anthropic's Messages API, see `cluster.api.anthropic`."""

PREFILL = TURN_PATHS["chat"] + "/prefill"
"""An extension of ours, see `cluster.http.early_prefill`."""

LIMITED_PATHS = frozenset(
    {
        *TURN_PATHS.values(),
        PREFILL,
        *TOKEN_PATHS.values(),
        *MESSAGE_PATHS.values(),
        RESPONSES,
        RESPONSE_TOKENS,
        RESPONSE_COMPACTION,
    }
)
"""The paths whose requests make work for a replica. Limits on requests apply to these paths only."""

REQUEST_ID = "x-request-id"
MAX_REQUEST_ID_LENGTH = 128
_NOT_PRINTABLE = re.compile(r"[^!-~]")

RETRY_AFTER_MS = "retry-after-ms"
RETRY_AFTER_S = 1
"""Default of `Retry-After` in seconds."""

SSE_DONE = b"data: [DONE]\n\n"
"""The event that ends every stream."""

MAX_MESSAGE_LENGTH = 2000
"""Maximum length of an error message (characters). A longer one is cut, since it quotes too much of the request."""

CLIENT_ERROR_TYPES = {404: "not_found_error", 429: "rate_limit_error"}

ErrorMap = Callable[[BaseException], HttpError]

ErrorForm = Callable[[Scope, HttpError], Response]
"""A function that makes the response of an error, in the form that clients of the request's path read."""


def no_model(name: str) -> BadRequest:
    """Make the 404 error for a model that is not served."""
    return BadRequest(f"the model {name[:256]!r} does not exist", status=404, param="model", code="model_not_found")


def error_body(error: HttpError) -> dict[str, Any]:
    """Return ``{"error": {message, type, param, code}}``. An error without a code has its HTTP status as ``code``."""
    kind = CLIENT_ERROR_TYPES.get(error.status, error.type)
    message = error.message[:MAX_MESSAGE_LENGTH]
    code = error.code if error.code is not None else error.status
    return {"error": {"message": message, "type": kind, "param": error.param, "code": code}}


def error_response(error: HttpError) -> Response:
    """Make a JSON response of an error, with its status and, if it has ``retry_after_s``, `Retry-After`.

    If ``retry_after_s`` is not a whole number, `retry-after-ms` has the exact time. OpenAI's clients prefer it.
    """
    return JSONResponse(error_body(error), status_code=error.status, headers=retry_headers(error))


def retry_headers(error: HttpError) -> dict[str, str]:
    """Return the headers of an error's response: when to retry, and how to authenticate."""
    headers = {}
    if (seconds := error.retry_after_s) is not None:
        headers["retry-after"] = str(max(1, ceil(seconds)))
        if seconds != int(seconds):
            headers[RETRY_AFTER_MS] = str(ceil(1e3 * seconds))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_event(error: HttpError) -> bytes:
    """Return an error as the last events of a stream, whose status has already been sent."""
    return b"data: " + json.dumps(error_body(error), separators=(",", ":")).encode() + b"\n\n" + SSE_DONE


_ERROR_EVENT = b'data: {"error"'


def contains_error(events: bytes) -> bool:
    """Return whether one of a stream's events is an error."""
    return _ERROR_EVENT in events


def clean_request_id(value: str) -> str:
    """Return the printable characters of the client's id, up to the maximum length, or a new id if there are none."""
    return _NOT_PRINTABLE.sub("", value)[:MAX_REQUEST_ID_LENGTH] or uuid4().hex


class ErrorBoundary:
    """ASGI middleware that limits headers and requests in flight, and turns every exception into an OpenAI error.

    Args:
        app: the protected application.
        error_map: maps every exception to an HTTP error.
        max_header_bytes: maximum size of the names and values of all headers. Larger headers get 431.
        max_in_flight: maximum number of requests to ``limited_paths`` in flight. Further ones get 503 with
            `Retry-After`.
        limited_paths: the paths that make work for a replica. Probes and admin routes are served under overload too.
        on_overload: called with the headers of each request that is rejected because too many are in flight.
        form: makes the response of an error.
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
        form: ErrorForm = lambda scope, error: error_response(error),
    ) -> None:
        self._app = app
        self._form = form
        self._error_map = error_map
        self._max_header_bytes = max_header_bytes
        self._max_in_flight = max_in_flight
        self._limited_paths = limited_paths
        self._on_overload = on_overload
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
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
            await self._form(scope, error)(scope, receive, send)
            return
        self._in_flight += limited
        try:
            await self._app(scope, receive, observe)
        except Exception as exception:  # an unexpected exception gives 500, and is logged
            mapped = self._error_map(exception)
            if mapped.status >= 500:
                logger.error("%s %s failed", scope["method"], scope["path"], exc_info=exception)
            if started:
                raise
            await self._form(scope, mapped)(scope, receive, send)
        finally:
            self._in_flight -= limited

    def _check(self, scope: Scope, limited: bool) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes:
            raise BadRequest(f"headers of {size} bytes; at most {self._max_header_bytes} are accepted", status=431)
        if limited and self._in_flight >= self._max_in_flight:
            why = f"{self._max_in_flight} requests are in flight; retry later"
            raise Overloaded(why, retry_after_s=RETRY_AFTER_S, code=OVERLOAD)
