"""OpenAI's WebSocket mode of `/v1/responses`: a connection over which a client makes one response after another.

Each message of the client becomes a request of the application, with the headers of the connection. Keys, limits,
errors and disconnects are therefore those of `POST /v1/responses`. The events of its answer are sent as messages.
"""

import asyncio
import json
from collections.abc import Collection, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.openai import CONNECTION, RESPONSES
from cluster.core.errors import BadRequest, HttpError
from cluster.http.connection_responses import ConnectionResponses

CREATE = "response.create"
MAX_WAITING = 16
"""Messages that wait while a response is in progress. Further ones are refused."""

CHECKED_PATH = "/version"
"""A path that needs the same role as a response. It is requested to check the key before the connection is accepted."""

_OF_HANDSHAKE = (b"connection", b"upgrade", b"content-length", b"content-type", b"accept", b"x-request-id")
_JSON = (b"content-type", b"application/json")


class ResponseSockets:
    """ASGI middleware that serves WebSockets on `/v1/responses` by requests of the application.

    Args:
        app: the application.
        origins: origins whose web pages may connect. Browsers send the origin, other clients do not. `*`: all.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        await receive()  # the event that the client wants to connect
        refusal = await self._refusal(scope)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        await send({"type": "websocket.accept"})
        await _Socket(self._app, scope, receive, send).serve()

    async def _refusal(self, scope: Scope) -> tuple[int, bytes] | None:
        """Return the status and the body with which the connection is refused. None: it is accepted."""
        origin = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"), None)
        if origin is not None and origin not in self._origins and "*" not in self._origins:
            error = HttpError("this origin may not connect (http.cors_origins)", status=403)
            return 403, json.dumps({"error": _body(error)}).encode()
        if scope["path"] != RESPONSES:
            error = HttpError(f"WebSockets are served on {RESPONSES} only", status=404)
            return 404, json.dumps({"error": _body(error)}).encode()
        answer = _Answer()
        await self._app(_http(scope, "GET", CHECKED_PATH, b""), _nothing_more(b""), answer.take)
        return None if answer.status < 400 else (answer.status, bytes(answer.whole))


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

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        self._gone = asyncio.Event()
        self._messages: asyncio.Queue[str | None] = asyncio.Queue(MAX_WAITING)
        self._made = ConnectionResponses()

    async def serve(self) -> None:
        """Serve until the client disconnects."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            while (text := await self._messages.get()) is not None and not self._gone.is_set():
                await self._serve_one(text)

    async def _read(self) -> None:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            try:
                self._messages.put_nowait(message.get("text") or "")
            except asyncio.QueueFull:
                full = HttpError(f"{MAX_WAITING} messages wait already; send it again later", status=429)
                await self._tell(_error(full.status, _body(full)))
        self._gone.set()
        while not self._messages.empty():
            self._messages.get_nowait()
        self._messages.put_nowait(None)

    async def _serve_one(self, text: str) -> None:
        try:
            body = _request(text)
        except BadRequest as error:
            await self._tell(_error(error.status, _body(error)))
            return
        scope = {**_http(self._scope, "POST", RESPONSES, body), CONNECTION: self._made}
        await self._app(scope, self._body(body), self._forward())

    def _body(self, body: bytes) -> Receive:
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
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


def _request(text: str) -> bytes:
    """Return the body of the request that a message asks for.

    Raises:
        BadRequest: the message is not valid.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest("a message must be a JSON object", code="invalid_json") from error
    if not isinstance(message, dict) or message.get("type") != CREATE:
        raise BadRequest(f"type: must be {CREATE}", param="type")
    if message.get("background"):
        raise BadRequest("background: not over a WebSocket", param="background")
    rest = {name: value for name, value in message.items() if name not in ("type", "background")}
    return json.dumps({**rest, "stream": True}).encode()


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


async def _refuse(send: Send, status: int, body: bytes) -> None:
    headers = [_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
