"""ASGI middleware that measures the answers of an ingress by route and status."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.core.clock import Clock
from cluster.observing.catalogue import HTTP_REQUEST_S
from cluster.observing.meter import Meter

NO_ROUTE = "none"
"""The route of a request that no route has answered: an unknown path, or a rejection before the routing."""
NO_STATUS = "none"
"""The status of a request whose client left before the answer began."""


class HttpMetrics:
    """Observes the time from a request's arrival at the application to the last byte of its answer.

    Args:
        app: the measured application. It puts the route that it chose into the scope, as Starlette does.
        meter: records.
        clock: measures the time.
    """

    def __init__(self, app: ASGIApp, meter: Meter, clock: Clock) -> None:
        self._app = app
        self._meter = meter
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = self._clock.now_s(), NO_STATUS

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            self._meter.observe(HTTP_REQUEST_S, self._clock.now_s() - began_s, route=route, status=status)
