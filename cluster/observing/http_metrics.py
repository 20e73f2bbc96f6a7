"""ASGI middleware that measures the answers of an ingress by route and status, and counts errors by their code."""

import json
import re
from collections.abc import Collection
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.core.clock import Clock
from cluster.observing.catalogue import HTTP_REFUSALS, HTTP_REQUEST_S
from cluster.observing.meter import Meter

NO_ROUTE = "none"
"""The route of a request that no route has answered: an unknown path, or a rejection before the routing."""
NO_STATUS = "none"
"""The status of a request whose client left before the answer began."""
CLIENT_GONE = 499
"""The status of a request whose client left while its body was read or its answer was made. It is no refusal."""
PROBES = frozenset({"/health", "/ready"})
"""Routes whose errors are no refusals: an ingress is not ready while it starts."""
NO_CODE, OTHER_CODE = "none", "other"
"""The codes of an error without a code, and of one that is no word or comes after `MAX_CODES` others."""
MAX_CODES = 100
"""Largest number of different codes of one ingress. Some codes are a replica's."""
MAX_ERROR_BYTES = 1 << 16
"""Largest size of an error's body whose code is read."""
_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def error_code(body: bytes) -> str:
    """Return the code of an error's body in OpenAI's or Anthropic's form, or its type if it has no code."""
    try:
        error = json.loads(body)["error"]
        named = next((error[key] for key in ("code", "type") if isinstance(error.get(key), str)), NO_CODE)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return NO_CODE
    return named if _CODE.fullmatch(named) else OTHER_CODE


class HttpMetrics:
    """Observes the time from a request's arrival at the application to the last byte of its answer. It counts refusals.

    Args:
        app: the measured application. It puts the route that it chose into the scope, as Starlette does.
        meter: records.
        clock: measures the time.
        paths: paths that name the route of a request that was refused before the routing.
    """

    def __init__(self, app: ASGIApp, meter: Meter, clock: Clock, paths: Collection[str] = ()) -> None:
        self._app = app
        self._paths = paths
        self._codes: set[str] = set()
        self._meter = meter
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = self._clock.now_s(), NO_STATUS
        error: bytearray | None = None

        async def observed(message: Message) -> None:
            nonlocal status, error
            if message["type"] == "http.response.start":
                status = str(message["status"])
                is_error = message["status"] >= HTTPStatus.BAD_REQUEST and message["status"] != CLIENT_GONE
                error = bytearray() if is_error else None
            elif error is not None and len(error) < MAX_ERROR_BYTES:
                error += message.get("body", b"")
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            self._meter.observe(HTTP_REQUEST_S, self._clock.now_s() - began_s, route=route, status=status)
            if error is not None:
                self._refused(scope, status, bytes(error))

    def _refused(self, scope: Scope, status: str, error: bytes) -> None:
        path = scope["path"]
        route = str(getattr(scope.get("route"), "path", path if path in self._paths else NO_ROUTE))
        if route in PROBES:
            return
        code = error_code(error)
        if code not in self._codes and len(self._codes) >= MAX_CODES:
            code = OTHER_CODE
        self._codes.add(code)
        self._meter.add(HTTP_REFUSALS, 1, route=route, status=status, code=code)
