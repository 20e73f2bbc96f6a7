"""The ingress's HTTP client of the replicas' turn servers (`replicas.turn_server`)."""

import socket
from collections import deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Self

import aiohttp

from cluster.api.openai import RETRY_AFTER_S
from cluster.core.errors import ReplicaGone, ReplicaLost, UpstreamFailed
from cluster.core.frames import TURN_PATH, Answer, FrameDecoder, TurnCall, encode_call
from cluster.core.turn_address import TurnAddress

CONNECT_WITHIN_S = 3.0
"""Seconds after which a replica that does not accept a connection is gone."""
IDLE_CONNECTION_S = 5.0
"""Seconds for which an unused connection is kept."""

DEAD_PEER = {
    socket.SO_KEEPALIVE: (socket.SOL_SOCKET, 1),
    socket.TCP_KEEPIDLE: (socket.IPPROTO_TCP, 2),
    socket.TCP_KEEPINTVL: (socket.IPPROTO_TCP, 1),
    socket.TCP_KEEPCNT: (socket.IPPROTO_TCP, 3),
    socket.TCP_USER_TIMEOUT: (socket.IPPROTO_TCP, 5000),
}
"""Socket options by which a connection to a node that is gone breaks within about 5 s."""

Find = Callable[[], Awaitable[TurnAddress]]
"""Finds the replica for a turn. It raises ReplicaGone if the replica is gone."""


class TurnClient:
    """Sends turns to replicas, over connections that are used again."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def call(self, call: TurnCall, find: Find, on_end: Callable[[], None] = lambda: None) -> "TurnAnswers":
        """Return the answer of a turn. The turn is sent when its first piece is awaited.

        Args:
            call: the turn.
            find: finds its replica.
            on_end: called once when the answer has ended, was cancelled, or has failed.
        """

        async def send() -> aiohttp.ClientResponse:
            return await self._send(call, await find())

        return TurnAnswers(send, on_end)

    async def aclose(self) -> None:
        """Close all connections. Turns that are still open end with an error."""
        if self._session is not None:
            await self._session.close()

    async def _send(self, call: TurnCall, address: TurnAddress) -> aiohttp.ClientResponse:
        if self._session is None:  # aiohttp makes it within an event loop only
            self._session = _new_session()
        host = f"[{address.host}]" if ":" in address.host else address.host
        url = f"http://{host}:{address.port}{TURN_PATH}"
        headers = {"authorization": f"Bearer {address.token}"}
        try:
            response = await self._session.post(url, data=encode_call(call), headers=headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ReplicaGone(f"no connection to the replica at {address.host}:{address.port}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from error
        if response.status != HTTPStatus.OK:
            response.close()
            raise UpstreamFailed(f"the replica rejected the ingress's call: HTTP status {response.status}")
        return response


class TurnAnswers:
    """The pieces of a turn's answer: a `cluster.dispatch.placed_calls.Calls`.

    A slow reader stops the replica's work on this turn, because the buffers of its connection fill.
    """

    def __init__(self, send: Callable[[], Awaitable[aiohttp.ClientResponse]], on_end: Callable[[], None]) -> None:
        self._send = send
        self._on_end = on_end
        self._response: aiohttp.ClientResponse | None = None
        self._decoder = FrameDecoder()
        self._pieces: deque[Answer] = deque()
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Return the next piece.

        Raises:
            ReplicaGone: the turn did not reach the replica.
            ReplicaLost: the connection broke before the answer was complete.
        """
        while not self._pieces:
            if self._ended:
                raise StopAsyncIteration
            try:
                await self._receive()
            except BaseException:
                self.cancel()
                raise
        return self._pieces.popleft()

    def cancel(self) -> None:
        """Stop the replica's work on it. After the end this does nothing."""
        if not self._ended:
            self._end()
            if self._response is not None:
                self._response.close()

    async def _receive(self) -> None:
        if self._response is None:
            self._response = await self._send()
        try:
            data = await self._response.content.readany()
            self._pieces.extend(self._decoder.feed(data))
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from error
        if not data:
            if not self._decoder.between_frames:
                raise _lost(EOFError("an incomplete frame"))
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._on_end()


def _new_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S, socket_factory=_socket)
    # A turn's own deadline ends it. `sock_connect` bounds the connection to a node that does not answer.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WITHIN_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())


def _socket(address_info: Any) -> socket.socket:
    family, kind, protocol, *_ = address_info
    made = socket.socket(family, kind, protocol)
    for option, (level, value) in DEAD_PEER.items():
        made.setsockopt(level, option, value)
    return made


def _lost(error: Exception) -> ReplicaLost:
    lost = ReplicaLost("the replica died; it is being replaced", retry_after_s=RETRY_AFTER_S)
    lost.add_note(repr(error))
    return lost
