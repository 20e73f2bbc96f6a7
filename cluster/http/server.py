"""An ingress's own HTTP server. Several ingresses of a node share one port: the kernel distributes the connections.

It runs where Ray Serve's proxies are disabled. Otherwise a proxy has the clients' connections, which is one hop more.
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from cluster.api.openai import RESPONSES
from cluster.proxy.http_protocol import HardenedHttpProtocol

BACKLOG = 2048
"""Maximum number of connections that the kernel keeps until this process accepts them."""
IDLE_CONNECTION_S = 90
"""Seconds after which an idle connection is closed. Ray Serve's proxy uses the same time."""


class HttpServer:
    """Serves an application until `aclose`.

    Args:
        app: the ASGI application.
        host: the address to listen on.
        port: the port to listen on.
        max_message_bytes: maximum size of a message over a WebSocket in bytes.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, max_message_bytes: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=True)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="websockets-sansio",
                ws_max_size=max_message_bytes,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=IDLE_CONNECTION_S,
            )
        )
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    @property
    def failed(self) -> tuple[str, ...]:
        """The server's name, if it has ended although it was not closed."""
        return ("HTTP server",) if self._task.done() else ()

    def stop_accepting(self) -> None:
        """Close the port. Connections that are open stay so."""
        for server in self._server.servers:
            server.close()

    async def aclose(self) -> None:
        """Accept no more connections, and return when all requests have been answered."""
        self._server.should_exit = True
        await self._task


class _Protocol(HardenedHttpProtocol):
    upgraded_path = RESPONSES.encode()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to Ray."""
        yield
