"""What web pages may do: those of configured origins may call the server, and others cannot drive one without keys.

A browser sends requests of any page to servers of its own machine. The page cannot read the answer, but the request has
its effect. Where keys are needed, a page has none.
"""

from collections.abc import Collection, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.anthropic.errors import ANTHROPIC_REQUEST_ID
from cluster.api.openai import REQUEST_ID, RETRY_AFTER_MS
from cluster.auth.tenants import Allowance
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import Forbidden
from cluster.http.attributed_answers import PROGRAM_HEADER
from cluster.http.messages import LEFT_OUT

LOCALHOST = "localhost"


def cors(origins: Sequence[str]) -> list[Middleware]:
    """Return the middleware that allows browsers to call this server from pages of these origins."""
    if not origins:
        return []
    limits = Allowance(limit=0, remaining=0, reset_s=0.0).headers()
    exposed = [REQUEST_ID, ANTHROPIC_REQUEST_ID, PROGRAM_HEADER, LEFT_OUT, "retry-after", RETRY_AFTER_MS, *limits]
    everything = ["*"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=everything,
            allow_headers=everything,
            expose_headers=exposed,
        )
    ]


def foreign_pages_rejected(config: CaesuraConfig, host: str | None) -> list[Middleware]:
    """Return the middleware that rejects foreign web pages, where no key does. ``host``: see `WebPages`."""
    if config.auth.file is not None:
        return []
    return [Middleware(WebPages, host=host, origins=config.http.cors_origins)]


class WebPages:
    """ASGI middleware that rejects requests of foreign web pages.

    A page is foreign if its origin is neither allowed nor the address that it calls. A page can give its own name the
    address of this machine, so a server on loopback also rejects requests to other names than its own.

    Args:
        app: serves the other requests.
        host: the address that the server listens on; None: a proxy in front of it listens.
        origins: origins whose pages are allowed. `*`: all.
    """

    def __init__(self, app: ASGIApp, *, host: str | None, origins: Collection[str]) -> None:
        self._app = app
        self._host = host
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope.

        Raises:
            Forbidden: a foreign page has sent the request.
        """
        if scope["type"] == "http" and "*" not in self._origins:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            self._check(headers.get(b"origin"), headers.get(b"host", ""))
        await self._app(scope, receive, send)

    def _check(self, origin: str | None, called: str) -> None:
        if origin is not None and origin not in self._origins and origin.partition("://")[2] != called:
            raise Forbidden("pages of this origin may not call this server: see http.cors_origins")
        if self._host is not None and is_loopback(self._host):
            name = _name_of(called)
            if name is not None and name != self._host and not is_loopback(name):
                raise Forbidden(
                    f"a server without keys on {self._host} is not called {name[:200]!r}: call it by its address, or "
                    "set auth.file or http.host"
                )


def _name_of(called: str) -> str | None:
    """Return the name or address of a `Host` header without its port; None if it is empty."""
    try:
        return urlsplit(f"//{called}").hostname
    except ValueError:
        return called


def is_loopback(name: str) -> bool:
    """Return whether a host name or an address is that of the machine itself."""
    if name == LOCALHOST or name.endswith(f".{LOCALHOST}"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
