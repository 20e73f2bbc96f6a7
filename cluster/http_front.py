"""What stands before Ray's HTTP proxy, in the proxy's process: headers that are text, a bounded X-Request-Id, and
answers that are ended (`cluster.http_ends`).

Ray decodes headers before any application sees the request; one that is not UTF-8 would be a bare 500. A cluster loads
this by ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``. Ray's proxy itself puts X-Request-Id on every response, and makes
one where there is none. It would also let a client decide how long it waits and whether a client that goes away is
noticed: those headers are taken off. Below the headers, connections are `http_wire`'s.
"""

import re
from collections.abc import Callable
from uuid import uuid4

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.clock import MonotonicClock
from cluster.errors import BadRequest
from cluster.goodput import Outcome
from cluster.http_ends import EndedInWords
from cluster.http_errors import error_response
from cluster.http_refused import RefusedAgain
from cluster.http_rush import RushBound, bound
from cluster.http_wire import install as install_wire
from cluster.metrics import REFUSALS, REQUESTS
from cluster.observing.meter import Meter

IMPORT_PATH = "cluster.http_front.middlewares"

REQUEST_ID = "x-request-id"

ROUTE = "/internal/route"
"""Where HAProxy asks for a replica in the direct data plane: a path of Ray's, on a port of its own."""

FOR_RAY = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
"""Ray's own headers, which no client has a say in."""

MAX_REQUEST_ID_LENGTH = 128
_NOT_PRINTABLE = re.compile(r"[^!-~]")


def middlewares() -> list[Middleware]:
    """What Ray's proxy calls for, before it listens."""
    install_wire()
    meter = Meter()

    def refused(reason: str) -> Callable[[], None]:
        """Counts one. Of which model and tenant is not known here, nor of which program."""

        def count() -> None:
            meter.add(REFUSALS, 1.0, model="", reason=reason)
            meter.add(REQUESTS, 1.0, model="", tenant="", outcome=Outcome.REJECTED.value)

        return count

    return [
        # Outside the bound of all: those whose refusal waits must not fill it.
        Middleware(RefusedAgain, clock=MonotonicClock(), on_refusal=refused("tenant_concurrency")),
        Middleware(RushBound, most=bound(), on_refusal=refused("rush")),
        Middleware(HeaderGuard),
        Middleware(EndedInWords),
    ]


def clean_request_id(said: str) -> str:
    """The client's id as far as it is printable and short; a new one if nothing is left."""
    return _NOT_PRINTABLE.sub("", said)[:MAX_REQUEST_ID_LENGTH] or uuid4().hex


class HeaderGuard:
    """Pure ASGI middleware: refuses headers that are not UTF-8, cleans X-Request-Id.

    From a question of HAProxy it only takes them away: the replica is to refuse the request, in words.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http":
            if scope["path"] == ROUTE:
                scope["headers"] = [header for header in scope["headers"] if _is_text(*header)]
            try:
                scope["headers"] = [_checked(*header) for header in scope["headers"] if header[0] not in FOR_RAY]
            except BadRequest as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _checked(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    if name == REQUEST_ID.encode():
        return name, clean_request_id(value.decode(errors="ignore")).encode()
    if not _is_text(name, value):
        raise BadRequest(f"the header {name[:64]!r} is not UTF-8", code="invalid_header")
    return name, value


def _is_text(name: bytes, value: bytes) -> bool:
    try:
        name.decode()
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
