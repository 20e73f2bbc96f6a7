"""What stands before Ray's HTTP proxy, in the proxy's process: headers that are text, a bounded X-Request-Id, and
answers that are ended (`cluster.http_ends`).

Ray decodes headers before any application sees the request; one that is not UTF-8 would be a bare 500. A cluster loads
this by ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``. Ray's proxy itself puts X-Request-Id on every response, and makes
one where there is none. It would also let a client decide how long it waits and whether a client that goes away is
noticed: those headers are taken off. Below the headers, connections are `http_wire`'s.
"""

import asyncio
import re
from collections import Counter
from functools import partial
from uuid import uuid4

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.clock import MonotonicClock
from cluster.errors import BadRequest
from cluster.goodput import Outcome
from cluster.heap import keep_trimmed
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

TOLD_AFTER_S = 0.2
"""How late refusals are in the metrics."""

MAX_REQUEST_ID_LENGTH = 128
_NOT_PRINTABLE = re.compile(r"[^!-~]")


def middlewares() -> list[Middleware]:
    """What Ray's proxy calls for, before it listens."""
    from cluster import proxy_memory  # it imports Ray Serve, which whoever starts a cluster must not have done yet

    install_wire()
    proxy_memory.install()
    keep_trimmed()
    refusals = Refusals(Meter())
    return [  # the innermost first: Ray puts each around those before it
        Middleware(EndedInWords),
        Middleware(HeaderGuard),
        Middleware(RushBound, most=bound(), on_refusal=partial(refusals.count, "rush")),
        # Outside the bound of all: those whose refusal waits must not fill it.
        Middleware(RefusedAgain, clock=MonotonicClock(), on_refusal=refusals.count),
    ]


class Refusals:
    """Counts refusals by reason; of which model, tenant and program each is, is not known here.

    Ray's metrics are told of several at once: telling them of each took a third of the time of refusing it.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._untold: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        """One more; in an event loop."""
        if not self._untold:
            asyncio.get_running_loop().call_later(TOLD_AFTER_S, self._tell)
        self._untold[reason] += 1

    def _tell(self) -> None:
        untold, self._untold = self._untold, Counter()
        for reason, number in untold.items():
            self._meter.add(REFUSALS, number, model="", reason=reason)
        self._meter.add(REQUESTS, untold.total(), model="", tenant="", outcome=Outcome.REJECTED.value)


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
