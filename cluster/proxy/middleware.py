"""ASGI middleware in the process that has a client's connection: an ingress, or Ray's HTTP proxy.

Ray Serve loads it by ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``: in its proxy, or with HAProxy in the ingress.

`HeaderGuard` rejects headers that are not UTF-8, which Ray would answer with a bare 500. It also limits X-Request-Id,
which Ray puts on every response. `StreamErrorTerminator` ends answers whose ingress died. The module `load_shedding`
rejects excess requests, and `http_protocol` handles connections.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial, wraps
from http import HTTPStatus
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.anthropic.errors import response_of
from cluster.api.openai import REQUEST_ID, RETRY_AFTER_S, clean_request_id
from cluster.core.clock import MonotonicClock
from cluster.core.errors import OVERLOAD, BadRequest, UpstreamFailed
from cluster.core.malloc_trim import keep_trimmed
from cluster.core.slo import Outcome
from cluster.observing.catalogue import HTTP_REFUSALS, REQUESTS, REQUESTS_REJECTED
from cluster.observing.http_metrics import NO_ROUTE
from cluster.observing.meter import Meter
from cluster.proxy.answer_progress import AnswerProgress
from cluster.proxy.http_protocol import install as install_protocol
from cluster.proxy.load_shedding import LoadShedder, RateLimitCache, max_in_flight

logger = logging.getLogger("ray.serve")

IMPORT_PATH = "cluster.proxy.middleware.middlewares"

RAY_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
"""Ray's own headers. They are removed, so that a client cannot set its timeout or hide its disconnect."""

"""The reason of a rejection because too many requests are in flight."""
RECORD_DELAY_S = 0.2
"""Seconds after which rejections appear in the metrics. Recording each one by itself would take a third of the time of
a rejection."""


def middlewares() -> list[Middleware]:
    """Install the protocol, and return the middleware. Ray Serve calls it before the process listens."""
    install_protocol()
    keep_trimmed()
    rejections = Rejections(Meter())
    in_proxy = []
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":  # Ray's proxy: answers come from other processes
        free_ended_answers()
        in_proxy = [Middleware(StreamErrorTerminator)]
    return [  # the innermost is the first, since Ray puts each around those before it
        *in_proxy,
        Middleware(HeaderGuard),
        Middleware(LoadShedder, limit=max_in_flight(), on_rejection=partial(rejections.count, OVERLOAD)),
        # It is outside of the LoadShedder, since rejections that wait must not count as requests in flight.
        Middleware(RateLimitCache, clock=MonotonicClock(), on_rejection=rejections.count),
    ]


def guarded(app: ASGIApp, max_in_flight: int, outside: Sequence[Middleware] = ()) -> ASGIApp:
    """Return the application of an ingress with the middleware around it. The ingress has its own server.

    Args:
        app: the application.
        max_in_flight: maximum number of requests in flight.
        outside: middleware around it, the outermost first. It sees rejections too.
    """
    rejections = Rejections(Meter())
    app = LoadShedder(HeaderGuard(CancelOnDisconnect(app)), max_in_flight, partial(rejections.count, OVERLOAD))
    app = RequestId(RateLimitCache(app, MonotonicClock(), rejections.count))
    for one in reversed(outside):
        app = one.cls(app, *one.args, **one.kwargs)
    return app


def free_ended_answers() -> None:
    """Patch Ray's proxy, so that the objects of an answer are freed when the answer has ended. A second call does
    nothing.

    In Ray Serve 2.60, the exception that ends a stream references the frame that waited for it, and that frame
    references the task that ended with it. Without the patch, about a hundred objects of each request are left to the
    garbage collector, and the memory of the process grows. tests/serving/test_proxy_memory.py fails when a version of
    Ray no longer needs the patch.
    """
    # It is imported late, since a process that starts a cluster imports this module before it sets the environment
    # that Ray reads at import.
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
    """Counts rejections by reason. The proxy does not know the model, tenant and program of a request."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._unrecorded: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        """Count one rejection. It needs a running event loop."""
        if not self._unrecorded:
            asyncio.get_running_loop().call_later(RECORD_DELAY_S, self._record)
        self._unrecorded[reason] += 1

    def _record(self) -> None:
        unrecorded, self._unrecorded = self._unrecorded, Counter()
        for reason, number in unrecorded.items():
            self._meter.add(REQUESTS_REJECTED, number, model="", reason=reason)
            status = HTTPStatus.SERVICE_UNAVAILABLE if reason == OVERLOAD else HTTPStatus.TOO_MANY_REQUESTS
            self._meter.add(HTTP_REFUSALS, number, route=NO_ROUTE, status=str(status.value), code=reason)
        self._meter.add(REQUESTS, unrecorded.total(), model="", tenant="", outcome=Outcome.REJECTED.value)


class CancelOnDisconnect:
    """ASGI middleware that cancels the application's work if the client disconnects, as Ray's proxy does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        work = asyncio.current_task()
        assert work is not None
        gone = asyncio.Event()
        complete = False
        watcher: asyncio.Task[None] | None = None

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()
            if not complete:  # the server says the same at the end of a response
                work.cancel()

        async def watched() -> Message:
            nonlocal watcher
            if watcher is not None:
                await gone.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            if not message.get("more_body", False):  # the body has been read
                watcher = asyncio.create_task(watch())
            return message

        async def observed(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, watched, observed)
        except asyncio.CancelledError:
            if complete or not gone.is_set():
                raise
            work.uncancel()
        finally:
            if watcher is not None:
                watcher.cancel()


class RequestId:
    """ASGI middleware that gives each request an id, and puts it on the response, as Ray's proxy does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        name = REQUEST_ID.encode()
        sent = next((value for header, value in scope["headers"] if header == name), b"")
        own = name, clean_request_id(sent.decode(errors="ignore")).encode()
        scope["headers"] = [*(header for header in scope["headers"] if header[0] != name), own]

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], own]
            await send(message)

        await self._app(scope, receive, with_id)


class HeaderGuard:
    """ASGI middleware that rejects headers that are not UTF-8, cleans X-Request-Id, and removes Ray's own headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http":
            try:
                scope["headers"] = [_checked(*header) for header in scope["headers"] if header[0] not in RAY_HEADERS]
            except BadRequest as error:
                await response_of(scope, error)(scope, receive, send)
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
    """ASGI middleware that ends an answer with an error if its ingress died. Ray's proxy alone would cut the answer.

    A stream that has begun gets an error event. A request without an answer gets 502 with `Retry-After`. The answer of
    a client that has left ends early too, and nothing is wrong then.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = AnswerProgress()
        gone = False

        async def watch() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or message["type"] == "http.disconnect"
            return message

        async def observe(message: Message) -> None:
            answer.see(message)
            await send(message)

        await self._app(scope, watch, observe)
        if answer.over or gone:
            return
        logger.warning("%s %s: its ingress died", scope["method"], scope["path"])
        if not answer.begun:
            error = UpstreamFailed("the process that had this request died", retry_after_s=RETRY_AFTER_S)
            await response_of(scope, error)(scope, receive, send)
        elif answer.is_stream:
            error = UpstreamFailed("the process that had this stream died")
            await send({"type": "http.response.body", "body": answer.ending(scope["path"], error), "more_body": False})
