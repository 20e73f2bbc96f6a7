"""Server-sent events: responses that stream events or a replica's answer, and detection of clients that disconnect."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Protocol, Self, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.openai import RETRY_AFTER_S, SSE_DONE, ErrorMap, error_event
from cluster.core.errors import HttpError, UpstreamFailed

T = TypeVar("T")

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answers(Protocol):
    """The pieces of a replica's answer, such as Ray Serve's DeploymentResponseGenerator."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes | HttpError: ...

    def cancel(self) -> None:
        """Stop the replica's work on the answer. After its end, it has no effect."""
        ...


async def first_answer(answers: Answers, deadline_s: float) -> bytes:
    """Wait for the first piece of an answer. If there is none, the call is cancelled.

    Args:
        answers: the answer of a new call.
        deadline_s: the deadline, as a time of the running event loop's clock.

    Raises:
        HttpError: the replica rejected the request, or ended without an answer (UpstreamFailed).
        TimeoutError: the deadline passed.
        Exception: the call raised it.
    """
    try:
        async with asyncio.timeout_at(deadline_s):
            first = await anext(answers)
    except StopAsyncIteration:
        raise UpstreamFailed("the replica ended without an answer", retry_after_s=RETRY_AFTER_S) from None
    except BaseException:
        answers.cancel()
        raise
    if isinstance(first, HttpError):
        raise first
    return first


class EventStream(Response):
    """Server-sent events as an ASGI response.

    Args:
        events: the events as bytes; None: a subclass sends them.
        on_disconnect: called if the client disconnects before the end; None: nothing is called.
        headers: further headers of the response.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes] | None,
        on_disconnect: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._events = events
        self._on_disconnect = on_disconnect
        self.added_headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        """Names and values of headers that are sent beside `EVENT_STREAM_HEADERS`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            self._disconnected()
        except BaseException:  # the task or the connection ended, so that the client receives nothing more
            self._disconnected()
            raise

    def _disconnected(self) -> None:
        if self._on_disconnect is not None:
            self._on_disconnect()

    async def _send_all(self, send: Send) -> None:
        headers = [*EVENT_STREAM_HEADERS, *self.added_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        ending = await self._send_events(send)
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _send_events(self, send: Send) -> bytes:
        """Send all events. Return the bytes that complete the stream."""
        assert self._events is not None
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        return b""


class RelayedStream(EventStream):
    """Passes the events of a replica on unchanged. The stream always ends with ``[DONE]``.

    If an exception is raised, the deadline passes, or the replica ends without ``[DONE]``, the client receives an error
    event and ``[DONE]``. The call is cancelled at the end.

    Args:
        first: the first piece. It has already arrived, so that a call that fails early gets an HTTP error status.
        rest: the other pieces.
        deadline_s: the deadline, as a time of the running event loop's clock.
        error_map: maps every exception to an HTTP error.
        on_break: called with the error with which a broken stream ended, and its exception if there is one.
    """

    def __init__(
        self,
        first: bytes,
        rest: Answers,
        *,
        deadline_s: float,
        error_map: ErrorMap,
        on_break: Callable[[HttpError, BaseException | None], None],
    ) -> None:
        super().__init__(None)
        self._first = first
        self._rest = rest
        self._deadline_s = deadline_s
        self._error_map = error_map
        self._on_break = on_break

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope. Ray's proxy cancels this task when the client disconnects."""
        try:
            await self._send_all(send)
        finally:
            self._rest.cancel()

    async def _send_events(self, send: Send) -> bytes:
        piece = self._first
        try:
            async with asyncio.timeout_at(self._deadline_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                async for answer in self._rest:
                    if isinstance(answer, HttpError):
                        return self._broken(answer, None)
                    piece = answer
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as exception:  # noqa: BLE001 - mapped, sent to the client and reported
            return self._broken(self._error_map(exception), exception)
        if not piece.endswith(SSE_DONE):
            return self._broken(UpstreamFailed("the replica ended before the stream was complete"), None)
        return b""

    def _broken(self, error: HttpError, exception: BaseException | None) -> bytes:
        self._on_break(error, exception)
        return error_event(error)


class ClientGone(Exception):
    """The client has disconnected."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and return its result, unless the client disconnects first. In both cases ``work`` has ended.

    Args:
        receive: the ASGI function of the request, whose body has been read.
        work: the work, which is cancelled if the client disconnects.

    Raises:
        ClientGone: the client has disconnected.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
