"""An operation of an OpenAPI 3 document, as an HTTP request whose arguments are not filled in yet.

Documents may come from anybody. JSON is read in a thread. YAML takes much longer, and a short text may stand for any
amount of data: it is read in another process, whose memory and time are limited (`openapi_worker`).
"""

import asyncio
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

import yaml
from pydantic_core import from_json, to_json

from cluster.core.errors import ConfigError
from tools_runtime.processes import read_bounded, spawn
from tools_runtime.schemas import resolved

BODY = "body"
"""The argument that is the request's JSON body. If a parameter has that name, `request_` is put before it."""

MAX_INLINED_VALUES = 20_000
MAX_ANSWER_BYTES = 8 << 20
"""Largest size of an operation that another process has found, in bytes of JSON."""

WORKERS = 2
"""Largest number of documents that are read in other processes at a time."""

PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
"""The place of an argument in a URL."""

METHODS = ("get", "post", "put", "patch", "delete")

IGNORED_HEADERS = frozenset({"accept", "content-type", "authorization"})
"""Header parameters that OpenAPI says to ignore."""
RESERVED_HEADERS = frozenset((
    "connection", "content-length", "cookie", "expect", "host", "keep-alive", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade",
))  # fmt: skip
"""Headers that decide where a request goes, or where it ends. No argument can set them."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An HTTP request whose arguments are not filled in yet."""

    method: str
    url: str
    """URL template, with `{name}` for arguments."""
    header_names: frozenset[str] = frozenset()
    """Arguments that are sent as headers of the same name."""
    body_name: str | None = None
    """The argument that is the whole JSON body, or None if there is none."""
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments."""


def read_document(text: str) -> Any:
    """Parse an OpenAPI document, as JSON or YAML, in this process.

    Raises:
        ConfigError: it is neither.
    """
    with suppress(ValueError):
        return from_json(text)
    try:
        return yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"not an OpenAPI document: {str(error)[:200]}") from None


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A loader that makes plain values only. The one in C is ten times as fast."""


async def read_operation(
    text: str, operation_id: str, server: str | None, base_url: str | None, *, same_origin: bool
) -> Operation:
    """Return an operation of a document that may be hostile; see `find_operation`.

    Raises:
        ConfigError: it is no document, it costs too much, or the operation cannot be used.
    """
    operation = await asyncio.to_thread(_in_json, text, operation_id, server, base_url, same_origin)
    if operation is None:
        async with _workers:
            operation = await _in_worker(text, operation_id, server, base_url, same_origin)
    return operation


_workers = asyncio.Semaphore(WORKERS)


def _in_json(
    text: str, operation_id: str, server: str | None, base_url: str | None, same_origin: bool
) -> Operation | None:
    try:
        document = from_json(text)
    except ValueError:
        return None
    return find_operation(document, operation_id, server, base_url, same_origin=same_origin)


async def _in_worker(
    text: str, operation_id: str, server: str | None, base_url: str | None, same_origin: bool
) -> Operation:
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PATH") if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    argv = [sys.executable, "-m", "tools_runtime.openapi_worker"]
    child = await spawn(argv, environment, feed=True, join_errors=False)
    asked = {
        "text": text,
        "operation_id": operation_id,
        "server": server,
        "base_url": base_url,
        "same_origin": same_origin,
    }
    try:
        assert child.process.stdin is not None
        with suppress(ConnectionError):  # that it died shows when its answer is read
            child.process.stdin.write(to_json(asked))
            await child.process.stdin.drain()
            child.process.stdin.close()
        answer, _ = await read_bounded(child.output, MAX_ANSWER_BYTES)
    finally:
        child.end()
    try:
        found = from_json(answer)
    except ValueError:
        raise ConfigError("an OpenAPI document that takes too much memory or time to read") from None
    if "error" in found:
        raise ConfigError(found["error"])
    return Operation(**{**found, "header_names": frozenset(found["header_names"])})


def origin(url: str) -> tuple[str, str]:
    """Return the scheme and the authority of a URL, without the scheme's own port."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower().removesuffix({"http": ":80", "https": ":443"}.get(parts.scheme, ""))


def find_operation(
    document: Any, operation_id: str, server: str | None, base_url: str | None, *, same_origin: bool = False
) -> Operation:
    """Return the operation ``operation_id``.

    Args:
        document: the parsed document.
        operation_id: the id of the operation.
        server: URL of the server. None is the document's first.
        base_url: URL of the document, for a server that is relative to it. None: the document is a file.
        same_origin: whether only a server of the document counts that has the origin of ``base_url``.

    Raises:
        ConfigError: there is no such operation or no server, its path has another host, or a reference leads to another
            document.
    """
    try:
        path, method, shared, operation = _find(document, operation_id)
        if not path.startswith("/"):
            raise ConfigError(f"the path {path!r} does not begin with '/', so that it could change the server")
        if server is None:
            server = _server(document, base_url, same_origin)
        if not server.startswith(("http://", "https://")):
            raise ConfigError(f"the server {server!r} is not an absolute URL; set openapi.server")
        if PLACEHOLDER.search(server):
            raise ConfigError(f"the server {server!r} has variables, which no argument can be; set openapi.server")
        inline = _Inliner(document)
        parameters = [inline.whole(parameter) for parameter in (*shared, *operation.get("parameters", ()))]
        return _operation(server.rstrip("/") + path, method, operation, parameters, inline)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the OpenAPI operation {operation_id!r} cannot be used: {error!r}") from error


def _server(document: Any, base_url: str | None, same_origin: bool) -> str:
    servers = [str(server["url"]) for server in document["servers"]]
    if base_url is None:
        return servers[0]
    servers = [urljoin(base_url, server) for server in servers]
    if not same_origin:
        return servers[0]
    own = next((server for server in servers if origin(server) == origin(base_url)), None)
    if own is None:
        raise ConfigError(
            f"the document has no server at {'://'.join(origin(base_url))}, and the configured headers are not sent to"
            " another host that it chooses; set openapi.server"
        )
    return own


def _find(document: Any, operation_id: str) -> tuple[str, str, list[Any], dict[str, Any]]:
    known = []
    for path, item in document["paths"].items():
        for method in METHODS:
            operation = item.get(method)
            if operation is not None:
                known.append(str(operation.get("operationId")))
                if operation.get("operationId") == operation_id:
                    return path, method.upper(), item.get("parameters", []), operation
    raise ConfigError(f"there is no OpenAPI operation {operation_id!r}; there are: {', '.join(known)[:500]}")


def _operation(
    url: str, method: str, operation: dict[str, Any], parameters: list[Any], inline: "_Inliner"
) -> Operation:
    properties: dict[str, Any] = {}
    required: list[str] = []
    headers: set[str] = set()
    for name, parameter in _by_name(parameters).items():
        properties[name] = {**parameter.get("schema", {}), "description": parameter.get("description", "")}
        if parameter.get("required"):
            required.append(name)
        if parameter["in"] == "header":
            headers.add(name)
    body = inline.whole(operation.get("requestBody", {}))
    body_name = None
    if content := body.get("content"):
        body_name = BODY
        while body_name in properties:
            body_name = f"request_{body_name}"
        properties[body_name] = _json_schema(content)
        required += [body_name] if body.get("required") else []
    return Operation(
        method,
        url,
        frozenset(headers),
        body_name,
        operation.get("description") or operation.get("summary") or "",
        {"type": "object", "properties": properties, "required": required, "additionalProperties": False},
    )


def _by_name(parameters: list[Any]) -> dict[str, Any]:
    """Return the parameters that are used, by their names. The last of those with one name and one place replaces the
    others.

    An argument has one place. Of parameters with one name in different places, the required one is used, or else the
    last.
    """
    last: dict[tuple[str, str], Any] = {}
    for parameter in parameters:
        name, place = parameter["name"], parameter["in"]
        if place == "header" and name.lower() in IGNORED_HEADERS:
            continue
        if place == "header" and name.lower() in RESERVED_HEADERS:
            raise ConfigError(f"the OpenAPI parameter {name!r} is a header that no argument can set")
        if place == "cookie":
            raise ConfigError(f"the OpenAPI parameter {name!r} is a cookie, which is not supported")
        last[name.lower() if place == "header" else name, place] = parameter
    used: dict[str, Any] = {}
    for parameter in last.values():
        name = parameter["name"]
        is_required = used.get(name, {}).get("required")
        if is_required and parameter.get("required"):
            raise ConfigError(f"the OpenAPI parameter {name!r} is required in two places, and an argument has one")
        if not is_required:
            used[name] = parameter
    return used


def _json_schema(content: dict[str, Any]) -> Any:
    """Return the schema of a request's JSON body. A body that may have any media type may be JSON."""
    media_types = {media_type.partition(";")[0].strip().lower(): media_type for media_type in content}
    for accepted in ("application/json", "application/*", "*/*"):
        if accepted in media_types:
            return content[media_types[accepted]].get("schema", {})
    raise ConfigError(f"the OpenAPI request body has no application/json, only {', '.join(content)[:200]}")


class _Inliner:
    """Replaces each reference by its target, up to a size."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._values = 0

    def whole(self, part: Any, open_references: tuple[str, ...] = ()) -> Any:
        self._values += 1
        if self._values > MAX_INLINED_VALUES:
            raise ValueError(f"its schemas amount to more than {MAX_INLINED_VALUES} values")
        if isinstance(part, list):
            return [self.whole(item, open_references) for item in part]
        if not isinstance(part, dict):
            return part
        reference = part.get("$ref")
        if not isinstance(reference, str):
            return dict(self._members(part, open_references))
        if reference in open_references:
            return {}  # a schema that contains itself: from the second level on, anything goes
        return self.whole(resolved(self._document, reference), (*open_references, reference))

    def _members(self, part: dict[Any, Any], open_references: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
        for key, value in part.items():
            yield key, self.whole(value, open_references)
