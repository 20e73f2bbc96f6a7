"""The door: whose request it is, by its key, and whether the tenant may have it served now.

Stands behind `http_errors.Boundary`, which tells its refusals, and before every route: a path that is added is closed
until it is written into `OPEN_PATHS`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.clock import Clock, MonotonicClock
from cluster.config import CaesuraConfig
from cluster.errors import Forbidden, TooManyRequests, Unauthorized
from cluster.key_file import key_file
from cluster.keys import ANYBODY, Caller, Role
from cluster.tenant_limits import TenantLimit, TenantLimits
from cluster.tenants import Tenants

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Without a key: what probes ask."""

CALLER: Final = "caesura.caller"
"""Where in the ASGI scope the caller is."""

KEY_HEADERS = (b"authorization", b"x-api-key")
"""Taken off before a route sees the request: no key may reach a log, a replica or a tool."""

BEARER = "bearer "

FindKey = Callable[[str], Caller | None]


class KeyDoor:
    """Pure ASGI middleware.

    Args:
        app: what is behind the door.
        config: the keys' file, and the tenants' limits.
        limited_paths: the paths that make work for a replica; the others are not counted.
        on_refusal: told the headers and the tenant of each request that is over a limit.
        find: whose key it is; None: as the configuration's file says, and where there is none, everybody is
            `keys.ANYBODY`.
        clock: that limits go by.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: CaesuraConfig,
        limited_paths: frozenset[str],
        on_refusal: Callable[[Headers, str], None] = lambda headers, tenant: None,
        find: FindKey | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._app = app
        self._limited_paths = limited_paths
        self._on_refusal = on_refusal
        self._limits = TenantLimits(Tenants(config).limits(), TenantLimit(), clock or MonotonicClock())
        self._find = find
        if find is None and config.keys.file is not None:
            self._find = key_file(Path(config.keys.file)).find

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry.

        Raises:
            Unauthorized: no key, or one that opens nothing.
            Forbidden: a key that does not open this.
            TooManyRequests: more than the tenant may.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in OPEN_PATHS:
            await self._app(_without_keys(scope, ANYBODY), receive, send)
            return
        caller = self._caller(scope)
        scope = _without_keys(scope, caller)
        if scope["path"] not in self._limited_paths:
            await self._app(scope, receive, send)
            return
        try:
            allowance = self._limits.enter(caller.tenant)
        except TooManyRequests:
            self._on_refusal(Headers(scope=scope), caller.tenant)
            raise

        async def tell(message: Message) -> None:
            if allowance is not None and message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(allowance.headers())
            await send(message)

        try:
            await self._app(scope, receive, tell)
        finally:
            self._limits.leave(caller.tenant)

    def _caller(self, scope: Scope) -> Caller:
        if self._find is None:
            return ANYBODY
        key = _key_of(scope)
        if key is None:
            raise Unauthorized("no API key: send it as `Authorization: Bearer KEY`")
        caller = self._find(key)
        if caller is None:
            raise Unauthorized("this API key is unknown or has expired")
        role = role_of(scope["path"])
        if not caller.may(role):
            raise Forbidden(f"this API key has no role {role.value!r}")
        return caller


def role_of(path: str) -> Role:
    """What a key must have to open a path."""
    if path == "/admin" or path.startswith("/admin/"):
        return Role.ADMIN
    return Role.METRICS if path == "/metrics" else Role.SERVE


def caller_of(request: Request) -> Caller:
    """Whose request it is. The direct data plane has no door, as it has no keys: there it is anybody's."""
    caller = request.scope.get(CALLER, ANYBODY)
    assert isinstance(caller, Caller)
    return caller


def _key_of(scope: Scope) -> str | None:
    said = _said_once(scope, b"authorization")
    if said[: len(BEARER)].lower() == BEARER:
        return said[len(BEARER) :].strip()
    return _said_once(scope, b"x-api-key").strip() or None


def _said_once(scope: Scope, header: bytes) -> str:
    """What a header says; nothing where it is not there. Which of two is meant, a proxy may see otherwise."""
    values = {value for name, value in scope["headers"] if name == header}
    if len(values) > 1:
        raise Unauthorized(f"the header {header.decode()} is there more than once, with different keys")
    return str(b"".join(values).decode("latin-1"))


def _without_keys(scope: Scope, caller: Caller) -> Scope:
    kept = [header for header in scope["headers"] if header[0] not in KEY_HEADERS]
    return {**scope, "headers": kept, CALLER: caller}
