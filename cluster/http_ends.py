"""In the proxy's process: an answer whose ingress died is ended in words, where Ray's proxy would break it off.

A stream that has begun gets an error event; a request of which nothing was answered a 502 with `Retry-After`.
"""

import json
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import HttpError, UpstreamFailed
from cluster.http_errors import RETRY_AFTER_S, SSE_DONE, error_event, error_response
from cluster.http_paths import RESPONSES

logger = logging.getLogger("ray.serve")

EVENT_STREAM = b"text/event-stream"
LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed", b"event: error")


class EndedInWords:
    """Pure ASGI middleware around Ray's proxy, which only returns when the ingress that answers is gone."""

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
        """A part of it. An ingress sends whole events."""
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
        last = self._last_event.partition(b"data: ")[2]
        number = json.loads(last)["sequence_number"] + 1 if last else 0
        told = {"type": "error", "message": error.message, "code": error.code, "param": None, "sequence_number": number}
        return f"event: error\ndata: {json.dumps(told)}\n\n".encode()
