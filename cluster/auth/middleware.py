"""Authentication, authorisation and rate limits. A request's key determines its tenant, its routes and its limits.

The middleware is inside `cluster.api.openai.ErrorBoundary`, which renders its errors, and in front of every route. A
new path therefore needs a key unless it is in `OPEN_PATHS`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.auth.keys import ANYBODY, Caller, Role, key_file
from cluster.auth.tenants import TenantLimit, TenantLimits, Tenants
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock, MonotonicClock
from cluster.core.errors import Forbidden, TooManyRequests, Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready"})
"""The paths of probes, which need no key."""

CALLER: Final = "caesura.caller"
"""The key of the caller in the ASGI scope."""

CHARGE: Final = "caesura.charge"
"""The key of a function in the ASGI scope. Its argument is the number of answers of the request beyond the first."""

KEY_HEADERS = (b"authorization", b"x-api-key")
"""Headers with keys. They are removed from a request, so that no key reaches a log, a replica or a tool."""

BEARER = "bearer "

FindKey = Callable[[str], Caller | None]


class AuthMiddleware:
    """ASGI middleware that checks the key of each request and applies the tenant's limits.

    Args:
        app: the application, which serves authenticated requests.
        config: has the path of the keys' file, and the tenants' limits.
        limited_paths: the paths that make work for a replica. Limits apply to these paths only.
        on_rejection: called with the headers, the tenant and the error's code of each request that exceeds a limit.
        find: finds a key's caller; None: the keys of the configured file are used. Without a file, every caller is
            `cluster.auth.keys.ANYBODY`.
        clock: measures the limits.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: CaesuraConfig,
        limited_paths: frozenset[str],
        on_rejection: Callable[[Headers, str, str], None] = lambda headers, tenant, reason: None,
        find: FindKey | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._app = app
        self._limited_paths = limited_paths
        self._on_rejection = on_rejection
        self._limits = TenantLimits(Tenants(config).limits(), TenantLimit(), clock or MonotonicClock())
        self._find = find
        if find is None and config.auth.file is not None:
            self._find = key_file(Path(config.auth.file)).find

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope.

        Raises:
            Unauthorized: the request has no key, or an unknown or expired one.
            Forbidden: the key does not have the role that the path needs.
            TooManyRequests: the tenant exceeded a limit.
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
        except TooManyRequests as error:
            self._on_rejection(Headers(scope=scope), caller.tenant, str(error.code))
            raise

        async def with_headers(message: Message) -> None:
            if allowance is not None and message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(allowance.headers())
            await send(message)

        requests = 1

        def charge(more: int) -> None:
            nonlocal requests
            try:
                self._limits.add(caller.tenant, more)
            except TooManyRequests as error:
                self._on_rejection(Headers(scope=scope), caller.tenant, str(error.code))
                raise
            requests += more

        scope[CHARGE] = charge
        try:
            await self._app(scope, receive, with_headers)
        finally:
            self._limits.leave(caller.tenant, requests)

    def _caller(self, scope: Scope) -> Caller:
        if self._find is None:
            return ANYBODY
        key = key_of(scope)
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
    """Return the role that a path needs."""
    if path == "/admin" or path.startswith("/admin/"):
        return Role.ADMIN
    return Role.METRICS if path == "/metrics" else Role.SERVE


def caller_of(request: Request) -> Caller:
    """Return the caller of a request, or `ANYBODY` if no middleware has checked keys."""
    caller = request.scope.get(CALLER, ANYBODY)
    assert isinstance(caller, Caller)
    return caller


def charge_answers(request: Request, answers: int) -> None:
    """Count a request as one for each of its answers.

    Raises:
        TooManyRequests: the tenant exceeded a limit.
    """
    charge: Callable[[int], None] | None = request.scope.get(CHARGE)
    if charge is not None and answers > 1:
        charge(answers - 1)


def key_of(scope: Scope) -> str | None:
    """Return the key of a request, or None if it has none.

    Raises:
        Unauthorized: a header has two values.
    """
    value = _single_value(scope, b"authorization")
    if value[: len(BEARER)].lower() == BEARER:
        return value[len(BEARER) :].strip()
    return _single_value(scope, b"x-api-key").strip() or None


def _single_value(scope: Scope, header: bytes) -> str:
    """Return a header's value, or an empty text without the header.

    Two different values are rejected, since a proxy may have checked the other one.
    """
    values = {value for name, value in scope["headers"] if name == header}
    if len(values) > 1:
        raise Unauthorized(f"the header {header.decode()} is there more than once, with different keys")
    return str(b"".join(values).decode("latin-1"))


def _without_keys(scope: Scope, caller: Caller) -> Scope:
    """Remove the keys, and add the caller. The scope stays the same: outer middleware reads the route."""
    scope["headers"] = [header for header in scope["headers"] if header[0] not in KEY_HEADERS]
    scope[CALLER] = caller
    return scope
