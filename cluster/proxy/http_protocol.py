"""The connections of Ray's HTTP proxy. Invalid HTTP is rejected with JSON, and headers are limited in size and time.

uvicorn alone would answer in plain text, and accept headers of any length for any time. A request for a WebSocket is
handled like any other request, unless it is for the path that has one.
"""

import asyncio

import uvicorn.config
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.api.openai import error_response
from cluster.core.errors import BadRequest

HEADERS_WITHIN_S = 20.0
"""Seconds within which the headers of a request must end. They count from the beginning of the connection, or from the
first byte of a later request on it."""

MAX_HEAD_BYTES = 2 << 20
"""Maximum size of a request line with headers (bytes). The application has the lower limit `http.max_header_bytes`."""

REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class HardenedHttpProtocol(HttpToolsProtocol):
    """The protocol of one connection."""

    upgraded_path: bytes | None = None
    """The only path on which WebSockets are accepted. None: there is none."""

    _in_head = False
    _head_bytes = 0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio when the connection begins."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection has ended."""
        self._head_ended()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio when data has arrived."""
        super().data_received(data)
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._reject(BadRequest(f"the headers are longer than {MAX_HEAD_BYTES} bytes", status=431))
        elif self._is_quiet():
            self._expect_head()  # bytes that do not begin a request have stopped uvicorn's own timeout

    def on_message_begin(self) -> None:
        """Called by the parser when a request begins."""
        self._in_head, self._head_bytes = True, 0
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Called by the parser when the headers have ended."""
        self._head_ended()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the data is not valid HTTP."""
        self._reject(BadRequest("this is not a valid HTTP request", code="invalid_http"))

    def _should_upgrade(self) -> bool:
        return self.url.partition(b"?")[0] == self.upgraded_path and super()._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """Called by uvicorn on a request for an upgrade. It writes no warning."""

    def _is_quiet(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADERS_WITHIN_S, self._on_late)

    def _head_ended(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _on_late(self) -> None:
        self._late = None
        if not self._is_quiet():
            self._expect_head()  # the answer to the previous request has not ended
        elif self._in_head:
            self._reject(BadRequest(f"the headers did not end within {HEADERS_WITHIN_S:g} s", status=408))
        else:
            self.transport.close()

    def _reject(self, error: BadRequest) -> None:
        """Send the error, unless an answer has begun, and close the connection."""
        self._head_ended()
        if self._is_quiet() or not self.cycle.response_started:
            self.transport.write(_as_bytes(error_response(error)))
        self.transport.close()


def _as_bytes(response: Response) -> bytes:
    status = b"HTTP/1.1 %d %s" % (response.status_code, REASONS[response.status_code])
    headers = [*response.raw_headers, (b"connection", b"close")]
    return b"\r\n".join((status, *(name + b": " + value for name, value in headers), b"", bytes(response.body)))


def install() -> None:
    """Make this the default protocol of every uvicorn in this process."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{HardenedHttpProtocol.__name__}"
