"""ASGI middleware of Ray's HTTP proxy, loaded by ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``.

`HeaderGuard` rejects headers that are not UTF-8, which Ray would answer with a bare 500, and bounds X-Request-Id, which
Ray puts on every response. `StreamErrorTerminator` ends answers whose ingress died. `proxy_load_shedding` rejects
excess requests. Connections, below the headers, are `proxy_http_protocol`'s.
"""

import asyncio
import json
import logging
from collections import Counter
from functools import partial, wraps
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.openai import (
    REQUEST_ID,
    RESPONSES,
    RETRY_AFTER_S,
    SSE_DONE,
    clean_request_id,
    error_event,
    error_response,
)
from cluster.core.clock import MonotonicClock
from cluster.core.errors import BadRequest, HttpError, UpstreamFailed
from cluster.core.malloc_trim import keep_trimmed
from cluster.core.slo import Outcome
from cluster.observing.catalogue import REQUESTS, REQUESTS_REJECTED
from cluster.observing.meter import Meter
from cluster.proxy.http_protocol import install as install_protocol
from cluster.proxy.load_shedding import LoadShedder, RateLimitCache, max_in_flight

logger = logging.getLogger("ray.serve")

IMPORT_PATH = "cluster.proxy.middleware.middlewares"

ROUTE = "/internal/route"
"""Where HAProxy asks for a replica in the direct data plane: a path of Ray's, on a port of its own."""

RAY_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
"""Ray's own headers. A client must not decide how long it waits, or whether its disconnect is noticed."""

RECORD_DELAY_S = 0.2
"""Rejections appear in the metrics this late. Recording each by itself took a third of the time of rejecting it."""

EVENT_STREAM = b"text/event-stream"
LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed", b"event: error")


def middlewares() -> list[Middleware]:
    """The callback that Ray's proxy calls before it listens."""
    install_protocol()
    free_ended_answers()
    keep_trimmed()
    rejections = Rejections(Meter())
    return [  # the innermost first: Ray puts each around those before it
        Middleware(StreamErrorTerminator),
        Middleware(HeaderGuard),
        Middleware(LoadShedder, limit=max_in_flight(), on_rejection=partial(rejections.count, "overload")),
        # Outside the LoadShedder: rejections that wait must not count as requests in flight.
        Middleware(RateLimitCache, clock=MonotonicClock(), on_rejection=rejections.count),
    ]


def free_ended_answers() -> None:
    """Let the objects of an answer be freed as soon as the answer has ended. Calling this again is harmless.

    In Ray Serve 2.60, the exception that ends a stream references the frame that waited for it, and that frame
    references the task that ended with it. Some hundred objects for each request were left to the garbage collector,
    and the process grew for hours. A test in tests/serving/test_proxy_memory.py fails when this can go.
    """
    # Imported late: whoever starts a cluster imports this module before it sets what Ray reads at import.
    from ray.serve._private.proxy_response_generator import ProxyResponseGenerator

    original = ProxyResponseGenerator._get_next_streaming_result
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    async def without_frames(self: ProxyResponseGenerator) -> Any:
        try:
            return await original(self)
        except StopAsyncIteration as end:
            raise end.with_traceback(None)  # noqa: B904 - it is the same exception

    ProxyResponseGenerator._get_next_streaming_result = without_frames


class Rejections:
    """Counts rejections by reason. The model, tenant and program of each are not known in the proxy."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._unrecorded: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        """Add one; needs a running event loop."""
        if not self._unrecorded:
            asyncio.get_running_loop().call_later(RECORD_DELAY_S, self._record)
        self._unrecorded[reason] += 1

    def _record(self) -> None:
        unrecorded, self._unrecorded = self._unrecorded, Counter()
        for reason, number in unrecorded.items():
            self._meter.add(REQUESTS_REJECTED, number, model="", reason=reason)
        self._meter.add(REQUESTS, unrecorded.total(), model="", tenant="", outcome=Outcome.REJECTED.value)


class HeaderGuard:
    """Pure ASGI middleware: rejects headers that are not UTF-8, cleans X-Request-Id, removes Ray's own headers.

    From HAProxy's question for a replica it only removes them: the replica itself rejects the request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http":
            if scope["path"] == ROUTE:
                scope["headers"] = [header for header in scope["headers"] if _is_text(*header)]
            try:
                scope["headers"] = [_checked(*header) for header in scope["headers"] if header[0] not in RAY_HEADERS]
            except BadRequest as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _checked(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    if name == REQUEST_ID.encode():
        return name, clean_request_id(value.decode(errors="ignore")).encode()
    if not _is_text(name, value):
        raise BadRequest(f"the header {name[:64]!r} is not UTF-8", code="invalid_header")
    return name, value


def _is_text(name: bytes, value: bytes) -> bool:
    try:
        name.decode()
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


class StreamErrorTerminator:
    """Pure ASGI middleware: ends an answer whose ingress died with an error, where Ray's proxy breaks it off.

    A stream that has begun gets an error event. A request without an answer gets 502 with `Retry-After`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer()

        async def observe(message: Message) -> None:
            answer.see(message)
            await send(message)

        await self._app(scope, receive, observe)
        if answer.over:
            return
        logger.warning("%s %s: its ingress died", scope["method"], scope["path"])
        if not answer.begun:
            error = UpstreamFailed("the process that had this request died", retry_after_s=RETRY_AFTER_S)
            await error_response(error)(scope, receive, send)
        elif answer.is_stream:
            error = UpstreamFailed("the process that had this stream died")
            await send({"type": "http.response.body", "body": answer.ending(scope["path"], error), "more_body": False})


class _Answer:
    """How far an answer has come."""

    def __init__(self) -> None:
        self.begun = self.over = self.is_stream = False
        self._last_event = b""

    def see(self, message: Message) -> None:
        """Take note of a part of the answer. An ingress sends whole events."""
        if message["type"] == "http.response.start":
            self.begun = True
            self.is_stream = any(
                name.lower() == b"content-type" and value.startswith(EVENT_STREAM) for name, value in message["headers"]
            )
        elif message["type"] == "http.response.body":
            self.over = not message.get("more_body", False)
            if self.is_stream and (events := message.get("body", b"").removesuffix(b"\n\n")):
                self._last_event = events.rpartition(b"\n\n")[2]

    def ending(self, path: str, error: HttpError) -> bytes:
        """What the stream lacks. Streams of responses have OpenAI's numbered events, and end with one of them."""
        if path.startswith(RESPONSES):
            return b"" if self._last_event.startswith(LAST_EVENTS) else self._numbered(error)
        return b"" if self._last_event == SSE_DONE.strip() else error_event(error)

    def _numbered(self, error: HttpError) -> bytes:
        event = {
            "type": "error",
            "message": error.message,
            "code": error.code,
            "param": None,
            "sequence_number": self._next_number(),
        }
        return f"event: error\ndata: {json.dumps(event)}\n\n".encode()

    def _next_number(self) -> int:
        """0 where the last event has no number, as when its ingress died in the middle of it."""
        try:
            return int(json.loads(self._last_event.partition(b"data: ")[2])["sequence_number"]) + 1
        except (ValueError, TypeError, KeyError):
            return 0
