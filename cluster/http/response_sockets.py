"""OpenAI's WebSocket mode of `/v1/responses`: a connection over which a client makes one response after another.

Each message of the client becomes a request of the application, with the headers of the connection. Keys, limits,
errors and disconnects are therefore those of `POST /v1/responses`. The events of its answer are sent as messages.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.openai import CONNECTION, RESPONSES, RETRY_AFTER_S, error_response
from cluster.auth.keys import ANYBODY
from cluster.auth.middleware import CALLER
from cluster.core.errors import BadRequest, Forbidden, HttpError, Overloaded, TooManyRequests
from cluster.http.connection_responses import ConnectionResponses

CREATE = "response.create"
MAX_WAITING = 16
"""Messages that wait while a response is in progress. Further ones are refused."""
TENANT_SHARE = 4
"""One tenant may have one of this number of an ingress's connections."""
MAX_AGE_S = 3600.0
"""Seconds after which a connection is closed, which are OpenAI's. A response that is in progress ends before."""

CHECKED_PATH = "/version"
"""A path that needs the same role as a response. It is requested to check the key before the connection is accepted."""

_OF_HANDSHAKE = (b"connection", b"upgrade", b"content-length", b"content-type", b"accept", b"x-request-id")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Leaves the values of fields encoded: a message is read whole with the limits of a body, when its turn comes."""
_CREATE, _FALSE, _NULL = (msgspec.Raw(msgspec.json.encode(value)) for value in (CREATE, False, None))

_JSON = (b"content-type", b"application/json")


class ResponseSockets:
    """ASGI middleware that serves WebSockets on `/v1/responses` by requests of the application.

    Args:
        app: the application.
        origins: origins whose web pages may connect. Browsers send the origin, other clients do not. `*`: all.
        most: maximum number of connections. One tenant may have a quarter of them.
        max_bytes: size of the messages that may wait on a connection, and of the responses that are kept for it.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], most: int, max_bytes: int) -> None:
        self._app = app
        self._origins = origins
        self._open = _Open(most)
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        await receive()  # the event that the client wants to connect
        try:
            tenant = await self._tenant(scope)
            with self._open.one(tenant):
                await send({"type": "websocket.accept"})
                await _Socket(self._app, scope, receive, send, self._max_bytes).serve()
        except _Refused as refused:
            await _refuse(send, refused.response)

    async def _tenant(self, scope: Scope) -> str:
        """Return the tenant of a client that may connect.

        Raises:
            _Refused: the client may not connect.
        """
        origin = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"), None)
        if origin is not None and origin not in self._origins and "*" not in self._origins:
            raise _Refused(error_response(Forbidden("this origin may not connect (http.cors_origins)")))
        if scope["path"] != RESPONSES:
            raise _Refused(error_response(BadRequest(f"WebSockets are served on {RESPONSES} only", status=404)))
        asked, answer = _http(scope, "GET", CHECKED_PATH, b""), _Answer()
        await self._app(asked, _nothing_more(b""), answer.take)
        if answer.status >= 400:
            raise _Refused(Response(bytes(answer.whole), answer.status, media_type="application/json"))
        tenant: str = asked.get(CALLER, ANYBODY).tenant
        return tenant


class _Refused(Exception):
    """A connection is refused with this answer."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


class _Open:
    """The open connections, by tenant."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_of_tenant = max(1, most // TENANT_SHARE)
        self._numbers: Counter[str] = Counter()

    @contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """Count a connection in the block.

        Raises:
            _Refused: there are too many.
        """
        if self._numbers[tenant] >= self._most_of_tenant:
            message = f"{self._most_of_tenant} connections of this tenant are open; close some"
            code = "too_many_connections"
            raise _Refused(error_response(TooManyRequests(message, code=code, retry_after_s=RETRY_AFTER_S)))
        if self._numbers.total() >= self._most:
            message = f"{self._most} connections are open; retry later"
            raise _Refused(error_response(Overloaded(message, retry_after_s=RETRY_AFTER_S)))
        self._numbers[tenant] += 1
        try:
            yield
        finally:
            self._numbers[tenant] -= 1
            self._numbers += Counter()  # forgets tenants without connections


class _Answer:
    """An answer that is collected."""

    def __init__(self) -> None:
        self.status = 500
        self.is_stream = False
        self.whole = bytearray()

    async def take(self, message: Message) -> None:
        """Process a message of the application."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self.is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif message["type"] == "http.response.body":
            self.whole += message.get("body", b"")


class _Socket:
    """A WebSocket whose messages are requests for responses, which are run one after the other, in order."""

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, max_bytes: int) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        self._gone = asyncio.Event()
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_WAITING)
        self._max_bytes = max_bytes
        self._waiting_bytes = 0
        self._made = ConnectionResponses(max_bytes)

    async def serve(self) -> None:
        """Serve until the client disconnects, or the connection is too old."""
        until_s = asyncio.get_running_loop().time() + MAX_AGE_S
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            while await self._serve_one(until_s):
                pass
            if not self._gone.is_set():
                await self._close()

    async def _close(self) -> None:
        message = f"the connection is older than {MAX_AGE_S / 60:g} minutes; open a new one"
        old = BadRequest(message, code="websocket_connection_limit_reached")
        with suppress(OSError):  # the client has left meanwhile
            await self._tell(_error(old.status, _body(old)))
            self._gone.set()
            await self._send({"type": "websocket.close", "code": 1000})

    async def _read(self) -> None:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            sent = (message.get("text") or "").encode()
            if self._messages.full() or self._waiting_bytes + len(sent) > self._max_bytes:
                most = f"at most {MAX_WAITING} messages of {self._max_bytes} bytes together wait"
                full = TooManyRequests(f"{most}; send it again later", code="too_many_messages")
                await self._tell(_error(full.status, _body(full)))
            else:
                self._messages.put_nowait(sent)
                self._waiting_bytes += len(sent)
        self._gone.set()
        while not self._messages.empty():
            self._messages.get_nowait()
        self._messages.put_nowait(None)

    async def _next(self, until_s: float) -> bytes | None:
        """Return the next message. None: the client has left, or the connection is too old."""
        if asyncio.get_running_loop().time() >= until_s:
            return None
        try:
            async with asyncio.timeout_at(until_s):
                sent = await self._messages.get()
        except TimeoutError:
            return None
        if sent is None or self._gone.is_set():
            return None
        self._waiting_bytes -= len(sent)
        return sent

    async def _serve_one(self, until_s: float) -> bool:
        """Serve the next message. Return False if there is none."""
        if (sent := await self._next(until_s)) is None:
            return False
        try:
            body = _request(sent)
        except BadRequest as error:
            await self._tell(_error(error.status, _body(error)))
            return True
        scope = {**_http(self._scope, "POST", RESPONSES, body), CONNECTION: self._made}
        receive = self._body(body)
        del sent, body  # a response can take an hour
        await self._app(scope, receive, self._forward())
        return True

    def _body(self, body: bytes) -> Receive:
        unread = [body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        return receive

    def _forward(self) -> Send:
        """Return a function that sends the events of an answer, or its error, to the client."""
        answer = _Answer()

        async def send(message: Message) -> None:
            await answer.take(message)
            if message["type"] != "http.response.body":
                return
            if answer.is_stream:
                *events, rest = bytes(answer.whole).split(b"\n\n")
                answer.whole = bytearray(rest)
                for event in events:
                    await self._forward_event(event)
            elif not message.get("more_body", False) and answer.whole:
                await self._tell(_error(answer.status, json.loads(answer.whole)["error"]))

        return send

    async def _forward_event(self, event: bytes) -> None:
        _, _, data = event.partition(b"\ndata: ")
        if data:  # otherwise it is a comment
            await self._tell(data.decode())

    async def _tell(self, text: str) -> None:
        if not self._gone.is_set():
            await self._send({"type": "websocket.send", "text": text})


def _request(sent: bytes) -> bytes:
    """Return the body of the request that a message asks for.

    Raises:
        BadRequest: the message is not valid.
    """
    try:
        fields = _fields.decode(sent)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest("a message must be a JSON object", code="invalid_json") from error
    if fields.pop("type", None) != _CREATE:
        raise BadRequest(f"type: must be {CREATE}", param="type")
    if fields.pop("background", _FALSE) not in (_FALSE, _NULL):
        raise BadRequest("background: not over a WebSocket", param="background")
    return msgspec.json.encode({**fields, "stream": True})


def _http(scope: Scope, method: str, path: str, body: bytes) -> Scope:
    """Return the scope of a request with the headers of a connection."""
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in _OF_HANDSHAKE and not name.startswith(b"sec-websocket")
    ]
    return {
        "type": "http",
        "asgi": scope["asgi"],
        "http_version": "1.1",
        "method": method,
        "scheme": "https" if scope.get("scheme") == "wss" else "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": scope.get("root_path", ""),
        "headers": [*headers, _JSON, (b"content-length", str(len(body)).encode())],
        "client": scope.get("client"),
        "server": scope.get("server"),
        "state": {},
    }


def _nothing_more(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _body(error: HttpError) -> dict[str, Any]:
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def _error(status: int, error: Mapping[str, Any]) -> str:
    return json.dumps({"type": "error", "status": status, "error": error})


async def _refuse(send: Send, response: Response) -> None:
    start = {"type": "websocket.http.response.start", "status": response.status_code, "headers": response.raw_headers}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": response.body})
