"""Server-sent events: responses that stream events or a replica's answer, and detection of clients that disconnect."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol, Self, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cluster.api.openai import RETRY_AFTER_S, SSE_DONE, ErrorMap, error_event
from cluster.core.errors import HttpError, UpstreamFailed

T = TypeVar("T")

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


COMMENT = b": keep-alive\n\n"
"""An event stream's comment. Clients ignore it, and proxies see that the connection is in use."""
COMMENT_S = 12.0
"""Seconds without an event after which a stream gets a comment. Common proxies close a connection after 60 s."""
LOOK_S = 2.0
"""Seconds between two looks for such streams."""


class Answers(Protocol):
    """The pieces of a replica's answer, such as Ray Serve's DeploymentResponseGenerator."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes | HttpError: ...

    def cancel(self) -> None:
        """Stop the replica's work on the answer. After its end, it has no effect."""
        ...


async def first_answer(answers: Answers, deadline_s: float) -> bytes:
    """Wait for the first piece of an answer. If there is none, or it is a rejection, the call is cancelled.

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
        answers.cancel()
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
        self._send: Send | None = None
        self._sent_s = 0.0
        """Time of the last event or comment, by the event loop's clock."""
        self._commenting: asyncio.Task[None] | None = None
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
        now_s = asyncio.get_running_loop().time

        async def sent(message: Message) -> None:
            self._sent_s = now_s()
            await send(message)

        headers = [*EVENT_STREAM_HEADERS, *self.added_headers]
        await sent({"type": "http.response.start", "status": 200, "headers": headers})
        self._send = send
        _open_streams.add(self)
        try:
            ending = await self._send_events(sent)
        finally:
            _open_streams.discard(self)
        if self._commenting is not None:
            await asyncio.wait({self._commenting})
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    def comment_if_idle(self, now_s: float) -> None:
        """Send a comment if the stream has been idle for `COMMENT_S`."""
        if self._send is None or now_s - self._sent_s < COMMENT_S:
            return
        if self._commenting is None or self._commenting.done():
            self._sent_s = now_s
            self._commenting = asyncio.create_task(self._comment(self._send))

    async def _comment(self, send: Send) -> None:
        with suppress(Exception):  # the connection is gone, which the stream itself notices
            await send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def _send_events(self, send: Send) -> bytes:
        """Send all events. Return the bytes that complete the stream."""
        assert self._events is not None
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        return b""


class _OpenStreams:
    """The streams of this process that are open. One timer for all of them looks for idle ones."""

    def __init__(self) -> None:
        self._streams: set[EventStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: EventStream) -> None:
        self._streams.add(stream)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def discard(self, stream: EventStream) -> None:
        self._streams.discard(stream)
        if not self._streams and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_S, self._look)
        for stream in tuple(self._streams):
            stream.comment_if_idle(loop.time())


_open_streams = _OpenStreams()


class RelayedStream(EventStream):
    """Passes the events of a replica on unchanged. The stream always ends with ``[DONE]``.

    If an exception is raised, the deadline passes, or the replica ends without ``[DONE]``, the client receives an error
    event and ``[DONE]``. The call is cancelled at the end.

    Args:
        first: the first piece. Where it has arrived, a call that failed early has got an HTTP error status.
        rest: the other pieces.
        deadline_s: the deadline, as a time of the running event loop's clock.
        error_map: maps every exception to an HTTP error.
        on_break: called with the error with which a broken stream ended, and its exception if there is one.
    """

    def __init__(
        self,
        first: asyncio.Future[bytes],
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
            self._first.cancel()
            self._rest.cancel()

    async def _send_events(self, send: Send) -> bytes:
        try:
            async with asyncio.timeout_at(self._deadline_s):
                piece = await self._first
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
