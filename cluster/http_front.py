"""What stands before Ray's HTTP proxy, in the proxy's process: headers that are text, and a bounded X-Request-Id.

Ray decodes headers before any application sees the request; one that is not UTF-8 would be a bare 500. A cluster loads
this by ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``. Ray's proxy itself puts X-Request-Id on every response, and makes
one where there is none.
"""

import re
from uuid import uuid4

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import BadRequest
from cluster.http_errors import error_response

IMPORT_PATH = "cluster.http_front.middlewares"

REQUEST_ID = "x-request-id"

ROUTE = "/internal/route"
"""Where HAProxy asks for a replica in the direct data plane: a path of Ray's, on a port of its own."""

MAX_REQUEST_ID_LENGTH = 128
_NOT_PRINTABLE = re.compile(r"[^!-~]")


def middlewares() -> list[Middleware]:
    """What Ray's proxy calls for."""
    return [Middleware(HeaderGuard)]


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
                scope["headers"] = [_checked(name, value) for name, value in scope["headers"]]
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
