"""HTTP requests, by a URL template or by an operation of an OpenAPI document.

Unless the operator allows private addresses, the name in the URL and in every redirect is resolved once, all its
addresses are checked, and the connection goes to the checked address (`addresses`). Proxies of the environment are not
used, because a proxy would resolve the name again.
"""

import asyncio
import codecs
import json
import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import httpx
from anyio.lowlevel import checkpoint

from cluster.config.tools import HttpTool, OpenApiOperation
from cluster.core.clock import Clock
from cluster.core.errors import ConfigError, ToolFailed, ToolRefused, ToolUnknown
from cluster.core.tools import ToolOffer
from tools_runtime.addresses import Resolver
from tools_runtime.kind import Invocation, KnownTool, LoopClock, SingleTool, ToolOutput, unreported
from tools_runtime.openapi import PLACEHOLDER, Operation, find_operation, origin, read_document, read_operation
from tools_runtime.processes import text_decoder

MAX_DOCUMENT_BYTES = 8 << 20

DOCUMENT_S = 60.0
"""Seconds within which a document must be read."""

UNREADABLE_S = 30.0
"""Seconds for which a document that cannot be used, or took too long, is not read again."""

MAX_SHOWN = 100
"""Largest number of characters of an argument in an error message."""

_TEXT = re.compile(r"^(text/|application/([\w.-]+\+)?(json|xml|yaml|javascript|x-ndjson|x-www-form-urlencoded))")
_CHARSET = re.compile(
    r"utf-(8|16|32)(-sig|-[bl]e)?|iso8859-\d+|cp125\d|cp874|cp932|cp949|koi8-[rtu]|mac-roman|tis-620"
    r"|big5(hkscs)?|gb(2312|k|18030)|shift_jis|euc_(jp|kr)|iso2022_jp"
)
"""Charsets that are decoded, by Python's names. A server chooses the charset, and other codecs of Python may raise
errors, or take time that is not linear."""
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SAFE_METHODS = frozenset({"GET", "HEAD"})


class HttpKind:
    """One HTTP request.

    Args:
        name: the tool's name.
        config: its settings.
        resolver: looks up names. None makes one.
        clock: the clock of the waits between two readings of a document. None is the machine's.
        max_document_bytes: size above which a document behind a URL is rejected.

    Raises:
        ConfigError: the schema or the OpenAPI operation cannot be used, or a secret is not set.
    """

    def __init__(
        self,
        name: str,
        config: HttpTool,
        resolver: Resolver | None = None,
        clock: Clock | None = None,
        *,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
    ) -> None:
        self._name = name
        self._config = config
        self._resolver = resolver or Resolver(config.private_networks)
        self._headers = {**config.headers, **secret_headers(config.headers_from_environment)}
        self._clock = clock or LoopClock()
        self._max_document_bytes = max_document_bytes
        self._loading = asyncio.Lock()
        self._again_s = 0.0
        self._unreadable = ""
        """Why the document cannot be used, until ``_again_s`` of the clock."""
        self._client: httpx.AsyncClient | None = None
        self._tool: SingleTool | None = None
        self._operation = Operation(config.method, config.url or "", parameters=config.parameters)
        document = config.openapi.document if config.openapi else ""
        if config.openapi is None:
            self._offer_as(self._operation)
        elif not _is_url(document):
            try:
                parsed = read_document(Path(document).read_text(encoding="utf-8"))
                self._take(find_operation(parsed, config.openapi.operation, config.openapi.server, None))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"tools.defined.{name}.openapi.document: {error}") from None

    async def open(self) -> None:
        """Prepare the client, so that no call waits for it. An OpenAPI document behind a URL is fetched at the first
        call.
        """
        await checkpoint()  # imports the backend that httpx needs
        self._opened()

    def _opened(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = self._new_client()
        return self._client

    def tools(self) -> Sequence[KnownTool]:
        """Return the tool, if its document was read."""
        return self._tool.tools() if self._tool else ()

    def unusable(self) -> Sequence[ToolOffer]:
        """Return nothing: a document that cannot be used is the error of each call."""
        return ()

    async def tool(self, name: str) -> KnownTool | None:
        """Return the tool. Its document is fetched first if necessary.

        Raises:
            ToolFailed: its document cannot be fetched or used.
            ToolRefused: its document is at an address that it may not reach.
        """
        async with self._loading:
            if self._tool is None and self._config.openapi is not None:
                await self._read(self._config.openapi)
        return await self._tool.tool(name) if self._tool else None

    async def run(self, invocation: Invocation) -> ToolOutput:
        """Send the request.

        Raises:
            ToolRefused: the address may not be reached, or an argument does not fit into the URL.
            ToolFailed: there was no connection, or the status is 400 or above. The message has the answer.
            ToolUnknown: the connection was lost after a request that may have had an effect.
        """
        request = self._request(invocation.arguments)
        if invocation.idempotency_key is not None:
            request.headers.setdefault("Idempotency-Key", quote(invocation.idempotency_key, safe=""))
        if invocation.traceparent is not None:
            request.headers.setdefault("traceparent", invocation.traceparent)
        return await self._fetch(request, invocation.output_cap_bytes, invocation.report)

    async def aclose(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.aclose()
        self._resolver.close()

    def _offer_as(self, operation: Operation) -> None:
        try:
            description = self._config.description or operation.description
            self._tool = SingleTool(self._name, description, operation.parameters)
        except ValueError as error:
            raise ConfigError(f"tools.defined.{self._name}.parameters: {error}") from None

    def _take(self, operation: Operation) -> None:
        self._offer_as(operation)
        self._operation = operation

    async def _read(self, wanted: OpenApiOperation) -> None:
        """Read the document behind a URL.

        Raises:
            ToolFailed: it cannot be fetched or used, or a short time ago it could not be.
        """
        wait_s = self._again_s - self._clock.now_s()
        if wait_s > 0:
            raise ToolFailed(f"{self._unreadable}; it is read again in {wait_s:.0f} s", transient=True)
        try:
            async with asyncio.timeout(DOCUMENT_S):
                self._take(await self._operation_at(wanted))
            return
        except ConfigError as error:
            self._unreadable, is_transient = str(error), False
        except TimeoutError:
            self._unreadable, is_transient = f"the OpenAPI document was not read within {DOCUMENT_S:g} s", True
        self._again_s = self._clock.now_s() + UNREADABLE_S
        raise ToolFailed(self._unreadable, transient=is_transient)

    async def _operation_at(self, wanted: OpenApiOperation) -> Operation:
        server, document = wanted.server, wanted.document
        # Without `server`, the document's own origin is the only one that gets the headers.
        headers = self._headers if server is None or origin(server) == origin(document) else {}
        request = httpx.Request("GET", document, headers=headers)
        fetched = await self._fetch(request, self._max_document_bytes)
        if fetched.truncated:
            raise ConfigError(f"the OpenAPI document is longer than {self._max_document_bytes} bytes")
        return await read_operation(fetched.text, wanted.operation, server, document, same_origin=bool(self._headers))

    def _request(self, arguments: Mapping[str, Any]) -> httpx.Request:
        operation = self._operation
        rest = dict(arguments)
        url, used = _filled(operation.url, arguments)
        headers = httpx.Headers(self._headers)
        for name in operation.header_names & rest.keys():  # those of the configuration stay, in any spelling
            headers.setdefault(name, quote(_plain(rest[name]), safe=" !#$&'()*+,/:;=?@[]~"))
        rest = {key: value for key, value in rest.items() if key not in used | operation.header_names}
        body: Any = None
        if operation.body_name is not None and operation.body_name in rest:
            body = rest.pop(operation.body_name)
        elif self._config.openapi is None and operation.method in ("POST", "PUT", "PATCH"):
            # An operation of a document has its body in one argument; all others are parameters.
            body, rest = rest, {}
        try:
            target = httpx.URL(url)
            if fixed := sorted(rest.keys() & target.params.keys()):
                raise ToolRefused(f"the argument {fixed[0]!r} is a part of the URL that no argument can change")
            target = target.copy_merge_params({key: _query(value) for key, value in rest.items()}) if rest else target
            return httpx.Request(operation.method, target, headers=headers, json=body)
        except (httpx.InvalidURL, ValueError, TypeError) as error:
            raise ToolRefused(f"the arguments make no URL: {error}") from None

    async def _fetch(
        self, request: httpx.Request, cap_bytes: int, report: Callable[[str], object] = unreported
    ) -> ToolOutput:
        for _ in range(self._config.max_redirects + 1):
            async with AsyncExitStack() as stack:
                response = await self._send(request, stack)
                location = response.headers.get("location")
                if response.status_code not in _REDIRECTS or location is None:
                    return await _answer(response, request.method, cap_bytes, report)
            request = _redirected(request, response.status_code, location)
        raise ToolFailed(f"more than {self._config.max_redirects} redirects")

    async def _send(self, request: httpx.Request, stack: AsyncExitStack) -> httpx.Response:
        if request.url.scheme not in ("http", "https") or not request.url.host:
            raise ToolRefused(f"not a URL that tools may reach: {str(request.url)[:200]}")
        if not self._config.private_addresses:
            request = await self._resolver.pinned(request)
        # A compressed answer could expand to any size at once.
        request.headers["Accept-Encoding"] = "identity"
        try:
            response = await self._opened().send(request, stream=True)
        except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.PoolTimeout) as error:
            raise ToolFailed(f"no connection to {request.headers['Host']}: {error}", transient=True) from error
        except httpx.HTTPError as error:
            raise _lost(request.method, error) from error
        stack.push_async_callback(response.aclose)
        return response

    def _new_client(self) -> httpx.AsyncClient:
        # A connection to a checked address is not kept: another name at that address would be sent through it.
        kept = 20 if self._config.private_addresses else 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=kept)
        return httpx.AsyncClient(timeout=None, trust_env=False, limits=limits, verify=_ssl_context())


@cache
def _ssl_context() -> ssl.SSLContext:
    """Return the context of all clients of this process: each would take 30 ms to load the certificates."""
    return httpx.create_ssl_context(trust_env=False)


def _filled(template: str, arguments: Mapping[str, Any]) -> tuple[str, set[str]]:
    """Return the URL, with arguments in their places, and the names of these arguments.

    Raises:
        ToolRefused: an argument is missing, or would change the URL's path.
    """
    used: set[str] = set()

    def place(match: re.Match[str]) -> str:
        name = match[1]
        if name not in arguments:
            raise ToolRefused(f"the argument {name!r} is missing")
        used.add(name)
        return quote(_plain(arguments[name]), safe="")

    path, mark, query = template.partition("?")
    segments = path.split("/")
    for number, segment in enumerate(segments):
        names = PLACEHOLDER.findall(segment)
        filled = segments[number] = PLACEHOLDER.sub(place, segment)
        # Some servers decode a path before they divide it, and some take a backslash for a slash.
        parts = re.split(r"[/\\]", unquote(filled))
        if names and (filled == "" or not {".", ".."}.isdisjoint(parts)):
            value = _plain(arguments[names[0]])[:MAX_SHOWN]
            raise ToolRefused(f"the argument {names[0]!r} must not be {value!r}: it would change the URL's path")
    return "/".join(segments) + mark + PLACEHOLDER.sub(place, query), used


def secret_headers(variables: Mapping[str, str]) -> dict[str, str]:
    """Return headers whose values are in environment variables.

    Raises:
        ConfigError: a variable is not set.
    """
    missing = [variable for variable in variables.values() if variable not in os.environ]
    if missing:
        raise ConfigError(f"the environment variable {missing[0]} is not set")
    return {header: os.environ[variable] for header, variable in variables.items()}


def _redirected(request: httpx.Request, status: int, location: str) -> httpx.Request:
    # A pinned request names its host in the header only.
    here = request.url.copy_with(netloc=request.headers["Host"].encode("ascii"))
    try:
        url = here.join(location)
    except httpx.InvalidURL as error:
        raise ToolFailed(f"a redirect to what is no URL: {error}") from None
    if here.scheme == "https" and url.scheme != "https":
        raise ToolRefused("a redirect from https to http was not followed")
    keeps_method = status in (307, 308) or request.method in _SAFE_METHODS
    same_host = (url.scheme, url.host, url.port) == (here.scheme, here.host, here.port)
    headers = {
        key: value for key, value in request.headers.items() if same_host and key not in ("host", "content-length")
    }
    if keeps_method and request.content:
        headers["content-type"] = request.headers.get("content-type", "application/json")
        return httpx.Request(request.method, url, headers=headers, content=request.content)
    headers.pop("content-type", None)
    return httpx.Request(request.method if keeps_method else "GET", url, headers=headers)


async def _answer(response: httpx.Response, method: str, cap_bytes: int, report: Callable[[str], object]) -> ToolOutput:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise ToolFailed("the answer is compressed, although that was not asked for")
    media_type = response.headers.get("content-type", "text/plain").lower()
    shown = _TEXT.match(media_type) is not None
    charset = _charset(response)
    answer, more, decoder = bytearray(), False, text_decoder(charset)
    reported = shown and response.status_code < 400
    try:
        async for chunk in response.aiter_raw():
            answer += chunk[: cap_bytes - len(answer)] if shown else b""
            if reported:
                report(decoder.decode(chunk))
            more = shown and len(answer) == cap_bytes and (more or len(answer) < response.num_bytes_downloaded)
            if more or not shown:
                break
    except httpx.HTTPError as error:
        raise _lost(method, error) from error
    text = answer.decode(charset, errors="replace")
    if not shown:
        text = (
            f"[{media_type[:100]}, {response.headers.get('content-length', 'an unknown number of')} bytes, not shown]"
        )
    status = response.status_code
    if status >= 400:
        raise ToolFailed(text, transient=status in _TRANSIENT, note=f"HTTP status {status} {response.reason_phrase}")
    return ToolOutput(text, truncated=more)


def _charset(response: httpx.Response) -> str:
    """Return the charset of the content type, or UTF-8 if it has none that is known."""
    try:
        name = codecs.lookup(response.charset_encoding or "utf-8").name
    except (LookupError, ValueError):
        return "utf-8"
    return name if _CHARSET.fullmatch(name) else "utf-8"


def _lost(method: str, error: httpx.HTTPError) -> ToolFailed | ToolUnknown:
    reason = f"the connection was lost: {error or type(error).__name__}"
    return ToolFailed(reason, transient=True) if method in _SAFE_METHODS else ToolUnknown(reason)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


def _query(value: Any) -> str | list[str]:
    return [_plain(item) for item in value] if isinstance(value, list) else _plain(value)
