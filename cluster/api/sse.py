"""Server-sent events: a stream of events as a response, a replica's answer as events, and clients that disconnect."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
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
    """The pieces of a replica's answer: Ray Serve's DeploymentResponseGenerator."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes | HttpError: ...

    def cancel(self) -> None:
        """Stop the replica's work on it; harmless after the end."""
        ...


async def first_answer(answers: Answers, deadline_s: float) -> bytes:
    """The first piece; the call is cancelled if there will be none.

    Args:
        answers: a call just made.
        deadline_s: a time of the running event loop's clock.

    Raises:
        HttpError: the replica's refusal, or UpstreamFailed if it ended without an answer.
        TimeoutError: the deadline passed.
        Exception: what the call raised.
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
        on_disconnect: called if the client disconnects before the end; None: nothing else has to know.
    """

    def __init__(self, events: AsyncIterator[bytes] | None, on_disconnect: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._events = events
        self._on_disconnect = on_disconnect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            self._disconnected()
        except BaseException:  # whatever ends this task or the connection: the client gets no more
            self._disconnected()
            raise

    def _disconnected(self) -> None:
        if self._on_disconnect is not None:
            self._on_disconnect()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        ending = await self._send_events(send)
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _send_events(self, send: Send) -> bytes:
        """Send all events; return the bytes that complete the stream."""
        assert self._events is not None
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        return b""


class RelayedStream(EventStream):
    """The events of a replica, passed on as they are, in a stream that is always complete.

    Whatever happens after the first byte - an exception, the deadline, or a replica that ends without ``[DONE]`` -
    becomes an error event followed by ``[DONE]``. The call is cancelled at the end.

    Args:
        first: the first piece. It has already come, so that a call that fails early gets a proper status.
        rest: the other pieces.
        deadline_s: a time of the running event loop's clock.
        error_map: what an exception means to a client; total.
        on_break: called with the error that a broken stream ended with.
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
        """ASGI entry. Ray's proxy cancels this task when the client disconnects."""
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
    """Return what ``work`` returns, unless the client disconnects first. In any case ``work`` has ended then.

    Args:
        receive: of the request, whose body has been read.
        work: cancelled if the client disconnects.

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
