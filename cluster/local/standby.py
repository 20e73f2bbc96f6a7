"""Answers on the port of a local cluster while no ingress listens: during the start, and after an ingress died."""

import asyncio
import logging
import math
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Self

from starlette.types import Receive, Scope, Send

from cluster.api.anthropic.errors import response_of
from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import Overloaded
from cluster.http.server import HttpServer

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two looks for ingresses that listen."""
START_S = 60.0
"""Time of a start that `Retry-After` assumes (seconds): on two cores, with a small model, it takes 40 to 70 s."""
RESTART_S = 15.0
"""Time in which Ray replaces an ingress that died (seconds), until one was measured: 13 s on two cores under load."""
OVERDUE_S = 5.0
"""The least `Retry-After` (seconds). An ingress that takes longer than expected may come at any time."""
WEB_SOCKET_BYTES = 1 << 16
LISTENS = "0A"


class Standby:
    """A thread that answers each request with 503 and `Retry-After` while no ingress listens, as a context manager.

    It shares the port with the ingresses (`SO_REUSEPORT`), and leaves it to them as soon as one of them listens.

    Args:
        host: the address of the server.
        port: its port.
        clock: measures how long no ingress has listened.
    """

    def __init__(self, host: str, port: int, clock: Clock | None = None) -> None:
        self._host, self._port = host, port
        self._clock = clock or MonotonicClock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()), name="standby", daemon=True)
        self._server: HttpServer | None = None
        self._since_s = self._clock.now_s()
        """Since when no ingress has listened, while `_server` runs."""
        self._expected_s = START_S

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the port for good. A second call does nothing."""
        self._stopping.set()
        self._thread.join()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http":
            error = Overloaded("no ingress is ready; retry later", retry_after_s=self.retry_after_s, code="starting")
            await response_of(scope, error)(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1013, "reason": "no ingress is ready; retry later"})

    @property
    def retry_after_s(self) -> int:
        """Seconds after which an ingress is expected to answer."""
        left_s = self._expected_s - (self._clock.now_s() - self._since_s)
        return math.ceil(max(OVERDUE_S, left_s))

    async def _watch(self) -> None:
        restarts_s: list[float] = []
        try:
            while not self._stopping.is_set():
                others = listeners(self._host, self._port) - (self._server is not None)
                if others > 0 and self._server is not None:
                    restarts_s.append(self._clock.now_s() - self._since_s)
                    await self._leave()
                elif others <= 0 and self._server is None:
                    self._take_over(restarts_s[1:] if restarts_s else None)
                await asyncio.sleep(POLL_S)
        except OSError as error:
            logger.warning("requests are not answered while no ingress listens: %s", error)
        finally:
            await self._leave()

    def _take_over(self, restarts_s: list[float] | None) -> None:
        """Begin to listen. ``restarts_s``: how long earlier restarts took; None: the cluster starts."""
        if restarts_s is not None:
            self._expected_s = max(restarts_s, default=RESTART_S)
            logger.warning("no ingress listens; requests get 503 until Ray has started another one")
        self._since_s = self._clock.now_s()
        self._server = HttpServer(self, self._host, self._port, WEB_SOCKET_BYTES)

    async def _leave(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.aclose()


def listeners(host: str, port: int, proc: Path = Path("/proc/net")) -> int:
    """Return the number of sockets of this machine that listen on an address.

    Raises:
        OSError: the address cannot be resolved, or ``proc`` cannot be read.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4][0]
    packed = socket.inet_pton(family, str(address))
    words = struct.unpack(f"{'<' if sys.byteorder == 'little' else '>'}{len(packed) // 4}I", packed)
    wanted = "".join(f"{word:08X}" for word in words) + f":{port:04X}"
    found = 0
    with (proc / ("tcp6" if family == socket.AF_INET6 else "tcp")).open() as rows:
        next(rows)  # the head
        for row in rows:
            _, local, _, state, *_ = row.split(maxsplit=4)
            if state != LISTENS:
                break  # the kernel lists sockets that listen first
            found += local == wanted
    return found
