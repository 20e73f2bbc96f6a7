"""Transports of MCP messages: a process's pipes, or HTTP. Both cut messages that are too long before they are stored.

An answer to `tools/call` is cut within its text, and the result is a complete message. The beginning of the message
shows which call it answers. The rest is dropped while it is read, or not fetched at all. Other messages that are too
long become errors.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, NamedTuple

import anyio
import httpx2
import pydantic_core
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, METHOD_NOT_FOUND, jsonrpc_message_adapter

from cluster.core.errors import ToolError, ToolFailed, ToolRefused
from tools_runtime.addresses import Resolver
from tools_runtime.processes import READ_BYTES, Child, spawn

CUT = "caesura/cut"
"""The key in `_meta` of a result that was cut."""

STATUS = "caesura/status"
"""The key in `data` of an error that stands for an HTTP status."""

LOST = "caesura/lost"
"""The key in `data` of an error that stands for a request without a usable answer. Its value is a `Loss`."""


class Loss(StrEnum):
    """What is known of such a request."""

    REFUSED = "refused"
    """It was not sent, because its address is not allowed."""
    UNSENT = "unsent"
    """It was not sent, because there was no connection."""
    UNUSABLE = "unusable"
    """It was answered in a way that is not supported."""
    UNKNOWN = "unknown"
    """It may have been sent."""


CLOSE_S = 2.0
"""Seconds for which a server may take to end a session."""

CALL_METHOD = "tools/call"

TAIL_BYTES = 512
"""Bytes that are kept of the end of a message. It may have the id of the answered call where the beginning has not."""

HEAD_BYTES = 256
"""Bytes of the beginning of a message, which decide its largest length."""

_ID_AT_START = re.compile(rb'"id"\s*:\s*(\d+)\s*[,}]')
_ID_AT_END = re.compile(rb'"id"\s*:\s*(\d+|"(?:[^"\\]|\\.){0,200}")\s*[,}][^{}]*\}?\s*$')

_BEGINNING = frozenset(("initialize", "server/discover"))
"""Methods with which a connection begins. Nothing else is in progress then, and the library judges their errors."""

_NOT_CONNECTED = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)
"""Errors before anything was sent."""

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


_IMAGE = re.compile(
    rb'"type"\s*:\s*"image"|"mimeType"\s*:\s*"image/|"(?:data|blob)"\s*:\s*"(?:iVBORw0KGgo|\\?/9j\\?/|R0lGOD|UklGR)'
)
"""The beginning of an image, whose type may stand behind its data: PNG, JPEG, GIF and WebP in base64.

In a JSON text, this is no part of a string: its quotation marks would be escaped.
"""


class Room(NamedTuple):
    """Largest length of one message, in bytes."""

    text: int
    images: int = 0
    """Bytes beyond those, if an image begins within them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest lengths of messages."""

    answer: Room
    """Of an answer to `tools/call`."""
    other: Room
    """Of any other message, such as a listing of tools."""

    @property
    def longest(self) -> int:
        """Bytes of the longest message."""
        return max(sum(self.answer), sum(self.other))


@dataclass(slots=True)
class Message:
    """One message: complete, or its beginning and its end."""

    text: bytearray
    tail: bytes | None = None
    """The last bytes of a message that was cut. None: ``text`` is the complete message."""


class Messages:
    """Splits the input into lines, or treats it as one message, and keeps a bounded beginning of each message.

    Args:
        room_of: returns the largest length of a message, given its first bytes.
        lines: whether each line is a message. Otherwise the whole input is one.
    """

    def __init__(self, room_of: Callable[[bytes], Room], *, lines: bool = True) -> None:
        self._room_of = room_of
        self._room: Room | None = None
        self._lines = lines
        self._text = bytearray()
        self._tail: bytes | None = None

    @property
    def begun(self) -> Message | None:
        """A message that is already too long and has not ended, or None."""
        return None if self._tail is None else Message(self._text, self._tail)

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """Yield the messages that end in ``chunk``."""
        start = 0
        while self._lines and (end := chunk.find(b"\n", start)) >= 0:
            self._add(chunk[start:end])
            yield self._taken()
            start = end + 1
        self._add(chunk[start:] if start else chunk)

    def end(self) -> Iterator[Message]:
        """Yield the message that the end of the input ends, if there is one."""
        if self._text:
            yield self._taken()

    def _add(self, part: bytes) -> None:
        if self._room is None and len(self._text) + len(part) > HEAD_BYTES:
            self._room = self._room_of(bytes(self._text[:HEAD_BYTES]) + part[:HEAD_BYTES])
        room = len(part) if self._room is None else self._room.text - len(self._text)
        self._text += part[:room]
        if len(part) > room and self._tail is None and self._room is not None and self._grows(self._room):
            self._room = Room(sum(self._room))
            more = self._room.text - len(self._text)
            self._text += part[room : room + more]
            room += more
        if len(part) > room or self._tail is not None:
            self._tail = ((self._tail or b"") + part[room:][-TAIL_BYTES:])[-TAIL_BYTES:]

    def _grows(self, room: Room) -> bool:
        return room.images > 0 and _IMAGE.search(self._text) is not None

    def _taken(self) -> Message:
        message = Message(self._text, self._tail)
        self._text, self._tail, self._room = bytearray(), None, None
        return message


def shortened(message: Message) -> dict[str, Any] | None:
    """Return a shorter form of a message that is too long.

    It is None if the message is no answer, or its call is not known.
    """
    size = len(message.text)
    try:
        value = pydantic_core.from_json(message.text, allow_partial="trailing-strings")
    except ValueError as error:
        return _unreadable(message, error)
    if not isinstance(value, dict) or "method" in value:
        return None
    id_ = value.get("id", _id_at_end(message.tail or b""))
    if id_ is None:
        return None
    result = value.get("result")
    content = result.get("content") if isinstance(result, dict) else None
    parts = [part for part in content or () if isinstance(part, dict)]
    texts = [part["text"] if isinstance(part.get("text"), str) else _left_out(part, size) for part in parts]
    if not isinstance(result, dict) or not any(texts):
        return _error(id_, f"the answer is longer than {size} bytes")
    # With the structured form begun, the text before it was complete.
    cut = {CUT: "structuredContent" not in result}
    kept = [{"type": "text", "text": text} for text in texts if text is not None]
    is_error = result.get("isError") is True
    return {
        "jsonrpc": "2.0",
        "id": id_,
        "result": {"resultType": "complete", "content": kept, "isError": is_error, "_meta": cut},
    }


def _left_out(part: Mapping[str, Any], size: int) -> str | None:
    is_image = part.get("type") == "image" or isinstance(part.get("data"), str)  # its type may stand behind its data
    return f"[image left out: the answer is longer than {size} bytes]" if is_image else None


def _unreadable(message: Message, error: ValueError) -> dict[str, Any] | None:
    """Return an error answer in place of a message that cannot be read. It is None if its call is not known."""
    head = message.text[:HEAD_BYTES]
    found = _ID_AT_START.search(head)
    if found is None or b'"method"' in head:
        return None
    return _error(int(found[1]), f"not a message: {str(error)[:200]}")


def _error(id_: Any, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id_, "error": {"code": INTERNAL_ERROR, "message": message}}


def _id_at_end(tail: bytes) -> Any:
    found = _ID_AT_END.search(tail)
    return pydantic_core.from_json(found[1]) if found else None


class PipeStreams:
    """The streams of an MCP server in a child process. It is an async context manager for `mcp.Client`.

    Args:
        argv: the command that starts the server.
        environment: its whole environment.
        limits: lengths above which messages are cut.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], limits: Limits) -> None:
        self._argv = argv
        self._environment = environment
        self._limits = limits
        self._calls: set[str] = set()
        """Ids of the tool calls that have no answer yet."""
        self._stack = AsyncExitStack()
        self.ended = asyncio.Event()
        """Set when the server's output has ended. The server is gone then, or of no more use."""

    async def __aenter__(self) -> Streams:
        """Start the server.

        Raises:
            ToolRefused: it cannot be started.
        """
        child = await spawn(self._argv, self._environment, feed=True, join_errors=False)
        incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        pumps = [asyncio.create_task(self._read(child, incoming)), asyncio.create_task(self._write(child, outgoing))]

        async def shut_down() -> None:
            assert child.process.stdin is not None
            child.process.stdin.close()
            child.end()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, child.reaped(), return_exceptions=True)
            for stream in (incoming, read_stream, write_stream, outgoing):
                stream.close()

        self._stack.push_async_callback(shut_down)
        return read_stream, write_stream

    async def __aexit__(self, *_: object) -> None:
        """End the server."""
        await self._stack.aclose()

    async def _read(self, child: Child, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        messages = Messages(self._room_of)
        try:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                while chunk := await child.output.read(READ_BYTES):
                    for message in messages.feed(chunk):
                        parsed = _parsed(message)
                        del message
                        if isinstance(parsed, SessionMessage):
                            self._calls.discard(str(getattr(parsed.message, "id", None)))
                        if parsed is not None:
                            await incoming.send(parsed)
        finally:
            self.ended.set()
            incoming.close()

    async def _write(self, child: Child, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        assert child.process.stdin is not None
        with suppress(ConnectionError, anyio.ClosedResourceError):  # that it died shows when it is read
            async for message in outgoing:
                if getattr(message.message, "method", None) == CALL_METHOD:
                    self._calls.add(str(getattr(message.message, "id", None)))
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                child.process.stdin.write(text.encode() + b"\n")
                await child.process.stdin.drain()

    def _room_of(self, head: bytes) -> Room:
        found = _ID_AT_START.search(head)
        return self._limits.answer if found and found[1].decode() in self._calls else self._limits.other


def _parsed(message: Message) -> SessionMessage | Exception | None:
    if not message.text.strip():
        return None
    try:
        if message.tail is None:
            return SessionMessage(jsonrpc_message_adapter.validate_json(message.text, by_name=False))
        value = shortened(message)
    except ValueError as error:
        value = _unreadable(message, error)
        if value is None:
            return error
    if value is None:
        return None
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_python(value, by_name=False))
    except ValueError as error:
        return error


@asynccontextmanager
async def http_streams(
    url: str, headers: Mapping[str, str], limits: Limits, timeout_s: float, resolver: Resolver | None
) -> AsyncIterator[Any]:
    """Open the streams of an MCP server behind a URL.

    Args:
        url: the URL of its one endpoint.
        headers: headers of each request.
        limits: lengths above which messages are cut.
        timeout_s: largest number of seconds between two parts of an answer.
        resolver: checks the addresses of connections. None allows any address.
    """
    # A connection to a checked address is not kept: another name at that address would be sent through it.
    kept = httpx2.Limits(max_connections=None, max_keepalive_connections=20 if resolver is None else 0)
    transport = _BoundedTransport(httpx2.AsyncHTTPTransport(limits=kept), limits, resolver)
    timeout = httpx2.Timeout(10.0, read=timeout_s, pool=None)
    async with (
        httpx2.AsyncClient(transport=transport, headers=dict(headers), timeout=timeout, trust_env=False) as client,
        # An event of many short lines is bounded by the library.
        streamable_http_client(url, http_client=client, max_sse_event_size=2 * limits.longest) as streams,
    ):
        yield streams


class _BoundedTransport(httpx2.AsyncBaseTransport):
    def __init__(self, inner: httpx2.AsyncHTTPTransport, limits: Limits, resolver: Resolver | None) -> None:
        self._inner = inner
        self._limits = limits
        self._resolver = resolver

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "DELETE":  # of a session that is over
            async with asyncio.timeout(CLOSE_S):
                return await _whole(await self._answered(request, is_request=False))
        if request.method != "POST":
            return await self._answered(request, is_request=False)
        message = pydantic_core.from_json(await request.aread())
        try:
            return await self._answered(request, is_request="id" in message and "method" in message)
        except (httpx2.TransportError, ToolError) as error:
            # The library would end the connection, with all that is in progress.
            if message.get("method") in _BEGINNING:
                raise
            return _lost(error)

    async def _answered(self, request: httpx2.Request, *, is_request: bool) -> httpx2.Response:
        request.headers["Accept-Encoding"] = "identity"
        sent = request if self._resolver is None else await self._pinned(request, self._resolver)
        response = await self._inner.handle_async_request(sent)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise ToolFailed("the answer is compressed, although that was not asked for")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        media_type = response.headers.get("content-type", "").lower()
        is_call = CALL_METHOD.encode() in (await request.aread())[:HEAD_BYTES]
        room = self._limits.answer if is_call else self._limits.other
        stream = _BoundedStream(response.stream, room, events=media_type.startswith("text/event-stream"))
        headers = [(name, value) for name, value in response.headers.raw if name.lower() != b"content-length"]
        status = response.status_code
        answer = httpx2.Response(status, headers=headers, stream=stream, extensions=response.extensions)
        # The library does not report the status. It reads a 404 within a session as the end of the session.
        ended = status == HTTPStatus.NOT_FOUND and MCP_SESSION_ID in request.headers
        if status >= HTTPStatus.BAD_REQUEST:
            return answer if ended else await _with_status(answer)
        is_read = is_request and status != HTTPStatus.ACCEPTED and media_type.startswith("application/json")
        return await _whole(answer) if is_read else answer

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _pinned(self, request: httpx2.Request, resolver: Resolver) -> httpx2.Request:
        """Return the same request to the checked address. Redirects are still judged by the request with the name."""
        host, port = request.url.host, request.url.port or (443 if request.url.scheme == "https" else 80)
        address = await resolver.public_address(host, port)
        return httpx2.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,
            content=await request.aread(),
            extensions={**request.extensions, "sni_hostname": request.url.raw_host.decode("ascii")},
        )


async def _whole(answer: httpx2.Response) -> httpx2.Response:
    """Return the same answer with its body. An error of its reading shows here, and not in the library."""
    try:
        body = await answer.aread()
    finally:
        await answer.aclose()
    return httpx2.Response(answer.status_code, headers=answer.headers, content=body, extensions=answer.extensions)


def _lost(error: httpx2.TransportError | ToolError) -> httpx2.Response:
    """Return an error answer in place of none. To what is no request, any answer is ignored."""
    if isinstance(error, ToolRefused):
        loss = Loss.REFUSED
    elif isinstance(error, ToolFailed):
        loss = Loss.UNSENT if error.transient else Loss.UNUSABLE
    else:
        loss = Loss.UNSENT if isinstance(error, _NOT_CONNECTED) else Loss.UNKNOWN
    said = {"code": INTERNAL_ERROR, "message": str(error) or type(error).__name__, "data": {LOST: loss}}
    return _error_answer(HTTPStatus.SERVICE_UNAVAILABLE, pydantic_core.to_json(_without_id(said)))


async def _with_status(answer: httpx2.Response) -> httpx2.Response:
    """Return an error answer whose body is a JSON-RPC error: the server's own, or one that names the HTTP status."""
    body = None
    if answer.headers.get("content-type", "").lower().startswith("application/json"):
        body = await answer.aread()
    await answer.aclose()
    if body is None or not _is_error(body):
        status = answer.status_code
        code = METHOD_NOT_FOUND if status == HTTPStatus.NOT_FOUND else INTERNAL_ERROR
        said = {"code": code, "message": f"HTTP {status} {answer.reason_phrase}".rstrip(), "data": {STATUS: status}}
        body = pydantic_core.to_json(_without_id(said))
    return _error_answer(answer.status_code, body)


def _without_id(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error message without an id. The library knows which request it answers."""
    return {"jsonrpc": "2.0", "id": None, "error": said}


def _error_answer(status: int, body: bytes) -> httpx2.Response:
    return httpx2.Response(status, headers={"Content-Type": "application/json"}, content=body)


def _is_error(body: bytes) -> bool:
    try:
        value = pydantic_core.from_json(body)
    except ValueError:
        return False
    return isinstance(value, dict) and isinstance(value.get("error"), dict)


class _BoundedStream(httpx2.AsyncByteStream):
    """A body whose messages have bounded length: one message, or the events of a stream with one line each."""

    def __init__(self, inner: httpx2.AsyncByteStream, room: Room, *, events: bool) -> None:
        self._inner = inner
        self._room = room
        self._prefix = b"data:" if events else b""
        self._suffix = b"\n" if events else b""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        messages = Messages(lambda _: self._room, lines=bool(self._prefix))
        tried = False  # whether the message that has begun was already read in vain: its text does not change
        async for chunk in self._inner:
            for message in messages.feed(chunk):
                yield self._line(message)
                tried = False
            if messages.begun is None or tried:
                continue
            tried = True
            if (short := self._short(messages.begun)) is not None:
                yield short + self._suffix  # the rest need not be fetched
                return
        for message in messages.end():
            yield self._line(message)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _line(self, message: Message) -> bytes:
        if message.tail is None:
            message.text += self._suffix
            return bytes(message.text)
        return self._short(message) or self._suffix

    def _short(self, message: Message) -> bytes | None:
        if not message.text.startswith(self._prefix):
            return None
        value = shortened(Message(message.text[len(self._prefix) :], message.tail))
        return None if value is None else self._prefix + pydantic_core.to_json(value) + self._suffix
