"""Reads a request's body within limits of size and time, and parses it strictly."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from starlette.types import Receive

from cluster.core.errors import BadRequest

JSON_TYPES = ("application/json", "text/json")

BODY_WITHIN_S = 60.0
"""Seconds from the headers within which the body must arrive. A request whose body arrives slowly uses one of
`http.max_concurrent_requests`."""

NO_BODY_STATUS = 499
"""Status of a request whose client disconnected before it was complete. It appears only in our log."""

MAX_KEYS = 40_000
"""Maximum number of keys of all objects of a body."""
MAX_CONTAINERS = 40_000
"""Maximum number of objects and lists of a body."""
MAX_ITEMS = 1_000_000
"""Maximum number of items of all lists and objects of a body, such as the ids of a prompt.

Python's parser does not let other threads run while it reads one object or list, and so do the garbage collector and
the end of a large value. The ingress also reads the messages of a turn in the event loop, to find its program. These
three limits bound each of these times to 50 ms."""

_LONE_SURROGATE_SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(receive: Receive, headers: Mapping[str, str], max_bytes: int) -> bytes:
    """Read the complete body of an ASGI request.

    Args:
        receive: the ASGI function of the request.
        headers: the headers of the request.
        max_bytes: maximum size of the body.

    Raises:
        BadRequest: the body is longer than ``max_bytes`` (413), its content type is not JSON (415), or it has not
            arrived within BODY_WITHIN_S (408).
    """
    # A web page may send a body without a type, or with another one, to a server that has not allowed it.
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in JSON_TYPES and not kind.endswith("+json"):
        raise BadRequest(f"content type {kind!r} is not supported; send application/json", status=415)
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            return await _all_of(receive, max_bytes)
    except TimeoutError:
        raise BadRequest(f"the body did not come within {BODY_WITHIN_S:g} s", status=408) from None


async def _all_of(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the client went away", status=NO_BODY_STATUS)
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse_object(raw: bytes, max_depth: int) -> dict[str, Any]:
    """Parse the JSON object in ``raw``, in a time that is linear in its length.

    Raises:
        BadRequest: it is not UTF-8, not JSON (NaN and Infinity are not), or not an object; or it has too many parts, a
            key twice in one object, text that is not Unicode, or a depth above ``max_depth``.
    """
    check_parts(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start} is invalid", code="invalid_utf8") from error
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError as error:
        raise _too_deep(max_depth) from error
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    # Counting brackets is fast, and a body that has no more of them than the limit cannot be too deep.
    if raw.count(b"{") + raw.count(b"[") > max_depth and _deeper_than(value, max_depth):
        raise _too_deep(max_depth)
    if _LONE_SURROGATE_SUSPECT.search(raw):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise BadRequest("the body has a lone surrogate, which is not text", code="invalid_unicode") from error
    return value


def check_parts(raw: bytes) -> None:
    """Check the number of keys, containers and items of a JSON text, before it is parsed.

    Raises:
        BadRequest: it has too many.
    """
    limits = ((b":", MAX_KEYS, "keys"), (b"{[", MAX_CONTAINERS, "objects and lists"), (b",", MAX_ITEMS, "items"))
    # Signs within texts count here too, so that only few bodies have to be read closely.
    if all(sum(raw.count(sign) for sign in _each(signs)) <= most for signs, most, _ in limits):
        return
    found = _outside_texts(raw)
    for signs, most, what in limits:
        if sum(int(found[sign]) for sign in signs) > most:
            raise BadRequest(f"the body has more than {most} {what}", code="json_too_many_parts")


def _each(signs: bytes) -> Iterator[bytes]:
    return (signs[place : place + 1] for place in range(len(signs)))


def _outside_texts(raw: bytes) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Return how often each byte occurs in a JSON text outside of its strings."""
    text = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    is_outside = np.cumsum(text == ord('"'), dtype=np.int32) & 1 == 0
    return np.bincount(text[is_outside], minlength=256)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key[:64]!r} stands twice in one object")
            seen.add(key)
    return found


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [child for parent in level for child in _children(parent) if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(parent: dict[str, Any] | list[Any]) -> Any:
    return parent.values() if isinstance(parent, dict) else parent


def _too_large(max_bytes: int) -> BadRequest:
    return BadRequest(f"the body is longer than {max_bytes} bytes", status=413, code="body_too_large")


def _too_deep(max_depth: int) -> BadRequest:
    return BadRequest(f"the JSON is nested deeper than {max_depth}", code="json_too_deep")
