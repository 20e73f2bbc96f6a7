"""A replica's HTTP server for turns, in the event loop of the engine's client. Only ingresses call it.

It listens on a port of the node. A random bearer token protects it. Ingresses get the token by a call of Ray, which
authenticates them.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from hmac import compare_digest
from http import HTTPStatus
from secrets import token_urlsafe

from aiohttp import web

from cluster.core.errors import BadRequest, Overloaded
from cluster.core.frames import TURN_PATH, Answer, TurnCall, decode_call, encode_frame
from cluster.core.turn_address import TurnAddress

logger = logging.getLogger("ray.serve")

KEPT_ALIVE_S = 24 * 3600.0
"""Seconds for which an idle connection stays open. The ingress closes it long before, so that a request never meets a
connection that this end has just closed."""
RETRY_AFTER_S = 1
SHUTDOWN_S = 1.0


class TurnServer:
    """Serves turns.

    Args:
        answer: serves one call. It yields the pieces of the answer, and raises nothing.
        max_turns: largest number of turns at a time. Others wait in their order.
        max_waiting: largest number of turns that wait; None: no limit. Another one is rejected as Overloaded.
    """

    def __init__(
        self, answer: Callable[[TurnCall], AsyncGenerator[Answer]], *, max_turns: int, max_waiting: int | None
    ) -> None:
        self._answer = answer
        self._slots = asyncio.Semaphore(max_turns)
        self._max_waiting = max_waiting
        self._waiting = 0
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._token = token_urlsafe(32)
        self._stack = AsyncExitStack()
        self._address: TurnAddress | None = None

    @property
    def address(self) -> TurnAddress:
        """Where it listens, and its token."""
        assert self._address is not None, "the server has not started"
        return self._address

    async def start(self, host: str) -> None:
        """Listen on a free port of ``host``, which is an address of this node.

        Raises:
            OSError: it cannot listen.
        """
        app = web.Application(client_max_size=0)  # the ingress has checked the size
        app.router.add_post(TURN_PATH, self._serve)
        runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEPT_ALIVE_S,
            shutdown_timeout=SHUTDOWN_S,
        )
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        await web.SockSite(runner, listener).start()
        self._address = TurnAddress(host, listener.getsockname()[1], self._token)

    async def aclose(self) -> None:
        """Wait until no turn is open, then stop."""
        await self._none_open.wait()
        await self._stack.aclose()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        sent = request.headers.get("authorization", "")
        if not compare_digest(sent.encode(errors="surrogateescape"), f"Bearer {self._token}".encode()):
            return web.Response(status=HTTPStatus.UNAUTHORIZED)
        self._open += 1
        self._none_open.clear()
        try:
            return await self._answered(request)
        finally:
            self._open -= 1
            if not self._open:
                self._none_open.set()

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        async with aclosing(self._pieces(await request.read())) as pieces:
            async for piece in pieces:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(encode_frame(piece))
        return response

    async def _pieces(self, data: bytes) -> AsyncGenerator[Answer]:
        try:
            call = decode_call(data)
        except ValueError as error:
            yield BadRequest(f"not a call of this version: {error}")
            return
        if self._slots.locked() and self._max_waiting is not None and self._waiting >= self._max_waiting:
            yield Overloaded("too many requests wait for this replica; retry later", retry_after_s=RETRY_AFTER_S)
            return
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            async with aclosing(self._answer(call)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._slots.release()
