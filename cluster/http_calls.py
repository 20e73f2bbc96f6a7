"""A call of a replica as an HTTP response: one JSON body, or a stream of events that never ends silently."""

import asyncio
from collections.abc import Callable
from typing import Protocol, Self

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import HttpError, UpstreamFailed
from cluster.http_errors import RETRY_AFTER_S, SSE_DONE, ErrorMap, error_event

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answers(Protocol):
    """What a replica answers, piece by piece: Ray Serve's DeploymentResponseGenerator."""

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
    """Server-sent events of a replica, passed on as they are.

    Whatever happens after the first byte - an exception, the deadline, or a replica that ends without saying that it is
    done - becomes an error event followed by ``[DONE]``. A client that goes away cancels the call.

    Args:
        first: the first piece, already there, so that a call that fails early got a proper status.
        rest: the others.
        deadline_s: a time of the running event loop's clock.
        error_map: what an exception means to a client; total.
        on_break: told the error that a broken stream ended with.
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
        super().__init__()
        self._first = first
        self._rest = rest
        self._deadline_s = deadline_s
        self._error_map = error_map
        self._on_break = on_break

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
            ending = await self._pass_on(send)
            await send({"type": "http.response.body", "body": ending, "more_body": False})
        finally:
            self._rest.cancel()

    async def _pass_on(self, send: Send) -> bytes:
        """Send all pieces; what must still be sent for the stream to be complete."""
        piece = self._first
        try:
            async with asyncio.timeout_at(self._deadline_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                async for answer in self._rest:
                    if isinstance(answer, HttpError):
                        return self._broken(answer, None)
                    piece = answer
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as exception:  # noqa: BLE001 - mapped, told to the client and reported; the status is sent
            return self._broken(self._error_map(exception), exception)
        if not piece.endswith(SSE_DONE):
            return self._broken(UpstreamFailed("the replica ended before the stream was complete"), None)
        return b""

    def _broken(self, error: HttpError, exception: BaseException | None) -> bytes:
        self._on_break(error, exception)
        return error_event(error)
