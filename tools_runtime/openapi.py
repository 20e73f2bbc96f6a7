"""One operation of an OpenAPI 3 document: its URL, where its arguments go, and their schema."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin

import yaml

from cluster.errors import ConfigError
from tools_runtime.schemas import resolved

BODY = "body"
"""The argument that is the request's JSON body, unless a parameter has that name."""

MAX_INLINED_VALUES = 20_000
MAX_DOCUMENT_BYTES = 8 << 20

METHODS = ("get", "post", "put", "patch", "delete")


@dataclass(frozen=True, slots=True)
class Operation:
    """An HTTP request, of which the arguments are still to be filled in."""

    method: str
    url: str
    """Template, with `{name}` for arguments."""
    header_names: frozenset[str] = frozenset()
    """Arguments that are sent as headers of the same name."""
    body_name: str | None = None
    """The argument that is the whole JSON body."""
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments."""


def read_document(text: str) -> Any:
    """An OpenAPI document, JSON or YAML.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return yaml.safe_load(text)  # JSON is YAML
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"not an OpenAPI document: {str(error)[:200]}") from None


def find_operation(document: Any, operation_id: str, server: str | None, base_url: str | None) -> Operation:
    """The operation ``operation_id``.

    Args:
        document: the document, parsed.
        operation_id: which operation.
        server: URL of the server; None takes the document's first.
        base_url: where the document came from, for a server that is relative to it.

    Raises:
        ConfigError: there is no such operation, or no server, or it leads to another document.
    """
    try:
        path, method, shared, operation = _find(document, operation_id)
        if server is None:
            server = str(document["servers"][0]["url"])
            server = urljoin(base_url, server) if base_url else server
        if not server.startswith(("http://", "https://")):
            raise ConfigError(f"the server {server!r} is not an absolute URL; set openapi.server")
        inline = _Inliner(document)
        parameters = [inline.whole(parameter) for parameter in (*shared, *operation.get("parameters", ()))]
        return _operation(server.rstrip("/") + path, method, operation, parameters, inline)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"the OpenAPI operation {operation_id!r} cannot be used: {error!r}") from error


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
    for parameter in parameters:
        name = parameter["name"]
        properties[name] = {**parameter.get("schema", {}), "description": parameter.get("description", "")}
        if parameter.get("required"):
            required.append(name)
        if parameter["in"] == "header":
            headers.add(name)
        elif parameter["in"] == "cookie":
            raise ConfigError(f"the OpenAPI parameter {name!r} is a cookie, which is not supported")
    content = inline.whole(operation.get("requestBody", {}))
    schema = content.get("content", {}).get("application/json", {}).get("schema")
    body_name = None if schema is None or BODY in properties else BODY
    if body_name is not None:
        properties[body_name] = schema
        required += [body_name] if content.get("required") else []
    return Operation(
        method,
        url,
        frozenset(headers),
        body_name,
        operation.get("description") or operation.get("summary") or "",
        {"type": "object", "properties": properties, "required": required, "additionalProperties": False},
    )


class _Inliner:
    """Puts in the place of each reference what it stands for, up to a size."""

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
