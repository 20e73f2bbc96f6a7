"""The direct data plane: what can be seen of a request through HAProxy. Pure; whatever it is, it is no error."""

import json
from collections.abc import Mapping
from json import JSONDecodeError, JSONDecoder
from typing import Any

from cluster.errors import HttpError
from cluster.identity import identify
from cluster.program import DEFAULT_TENANT, ProgramIdentity

TELLING_HEADERS = ("x-session-id",)
"""Headers of the client that HAProxy passes on and that say something of a program."""


def seen_turn(headers: Mapping[str, str], raw: bytes) -> tuple[ProgramIdentity, dict[str, Any]]:
    """Whose turn it is, and its body, as far as they can be seen. A request that is wrong is refused by the replica."""
    told = {name: headers[name] for name in TELLING_HEADERS if name in headers}
    body = visible_fields(raw)
    for seen in (body, {}):
        try:
            return identify(told, seen, DEFAULT_TENANT).identity, body
        except HttpError:
            continue
    return ProgramIdentity(), body


def visible_fields(raw: bytes) -> dict[str, Any]:
    """The fields of a JSON object that are there, also when its end is missing; none of what is no object."""
    text = raw.decode("utf-8", errors="ignore")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return _fields_before_the_cut(text)
    return whole if isinstance(whole, dict) else {}


def _fields_before_the_cut(text: str) -> dict[str, Any]:
    decoder = JSONDecoder()
    found: dict[str, Any] = {}
    at = _after(text, 0, "{")
    while at is not None:
        try:
            key, at = decoder.raw_decode(text, at)
            value_at = _after(text, at, ":")
            if value_at is None or not isinstance(key, str):
                break
            value, at = decoder.raw_decode(text, value_at)
        except (JSONDecodeError, RecursionError):
            break
        end = _behind_space(text, at)
        if text[end : end + 1] not in (",", "}"):
            break  # a number may go on behind the cut, which may also be in the middle of its exponent
        found[key] = value
        at = _after(text, at, ",")
    return found


def _after(text: str, at: int, mark: str) -> int | None:
    """Where the next value begins, if ``mark`` stands before it."""
    at = _behind_space(text, at)
    return _behind_space(text, at + 1) if text[at : at + 1] == mark else None


def _behind_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
