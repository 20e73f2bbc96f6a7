"""The progress of an answer that passes, and the end that it lacks if its process cannot complete it."""

import json

from starlette.types import Message

from cluster.api.anthropic.errors import error_event as anthropic_event
from cluster.api.anthropic.errors import is_messages
from cluster.api.openai import RESPONSES, SSE_DONE, error_event
from cluster.core.errors import HttpError

EVENT_STREAM = b"text/event-stream"
MESSAGE_ENDS = (b"event: message_stop", b"event: error")
LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed", b"event: error")


class AnswerProgress:
    """The progress of an answer."""

    def __init__(self) -> None:
        self.begun = self.over = self.is_stream = False
        self._last_event = b""

    def see(self, message: Message) -> None:
        """Record a part of the answer. An ingress sends only complete events."""
        if message["type"] == "http.response.start":
            self.begun = True
            self.is_stream = any(
                name.lower() == b"content-type" and value.startswith(EVENT_STREAM) for name, value in message["headers"]
            )
        elif message["type"] == "http.response.body":
            self.over = not message.get("more_body", False)
            events = message.get("body", b"").removesuffix(b"\n\n")
            if self.is_stream and events and not events.startswith(b":"):  # a comment is no event
                self._last_event = events.rpartition(b"\n\n")[2]

    def ending(self, path: str, error: HttpError) -> bytes:
        """Return the missing end of a stream; empty: it is complete.

        Streams of responses have OpenAI's numbered events, and end with one of `LAST_EVENTS`.
        """
        if path.startswith(RESPONSES):
            return b"" if self._last_event.startswith(LAST_EVENTS) else self._numbered(error)
        if is_messages(path):
            return b"" if self._last_event.startswith(MESSAGE_ENDS) else anthropic_event(error)
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
        """Return the next event's number, or 0 if the last event has no number because the ingress died within it."""
        try:
            return int(json.loads(self._last_event.partition(b"data: ")[2])["sequence_number"]) + 1
        except (ValueError, TypeError, KeyError):
            return 0
