"""Fields that name a session only in some clients' requests. They are read where no dialect names a program.

Other clients use the same fields for something else: a cache key that many conversations share, or the id of a user.
Only values in the form of a session's id are therefore used, and no value is an error.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.core.errors import BadRequest
from cluster.core.identity_dialects import Claim, Request, identifier

_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_ENDS_IN_UUID = re.compile(rf"(?:.*[^0-9a-fA-F])?{_UUID}", re.DOTALL)
_CLAUDE_USER = re.compile(rf"user_[^/]*_session_({_UUID})")
MAX_USER_ID_LENGTH = 4096
"""Longest `metadata.user_id` that is parsed (characters)."""
_METADATA_KEYS = ("thread_id", "session_id", "conversation_id")


def fallback_claim(request: Request, session_headers: Sequence[str]) -> Claim | None:
    """Return the program that a request names by a fallback; None: there is none.

    Args:
        request: the request, in which no dialect has found a program.
        session_headers: names of further headers, in lower case and with hyphens, whose value is a session's id.

    Raises:
        BadRequest: the value of one of ``session_headers`` is no valid id.
    """
    readers: tuple[Callable[[Mapping[str, Any]], Claim | None], ...] = (_client_metadata, _claude_user, _cache_key)
    for read in readers:
        if (claim := read(request.body)) is not None:
            return claim
    for name in session_headers:
        if (value := identifier(name, request.headers.get(name))) is not None:
            return Claim("program_id", value, name)
    return None


def _client_metadata(body: Mapping[str, Any]) -> Claim | None:
    """Read the session in Codex's `client_metadata`."""
    metadata = body.get("client_metadata")
    if not isinstance(metadata, Mapping):
        return None
    claims = (_claim(f"client_metadata.{key}", metadata.get(key)) for key in _METADATA_KEYS)
    return next((claim for claim in claims if claim is not None), None)


def _claude_user(body: Mapping[str, Any]) -> Claim | None:
    """Read the session in Claude Code's `metadata.user_id`, which is a text or JSON. Any other user is no session."""
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    if not isinstance(user, str) or len(user) > MAX_USER_ID_LENGTH:
        return None
    if (found := _CLAUDE_USER.fullmatch(user)) is not None:
        return _claim("metadata.user_id", found[1])
    try:
        fields = json.loads(user) if user.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return _claim("metadata.user_id", fields.get("session_id")) if isinstance(fields, dict) else None


def _cache_key(body: Mapping[str, Any]) -> Claim | None:
    """Read OpenAI's `prompt_cache_key` if it ends in a UUID, as agents send it. Others are shared by conversations."""
    key = body.get("prompt_cache_key")
    if not isinstance(key, str) or _ENDS_IN_UUID.fullmatch(key) is None:
        return None
    return _claim("prompt_cache_key", key)


def _claim(source: str, value: Any) -> Claim | None:
    try:
        found = identifier(source, value) if isinstance(value, str) else None
    except BadRequest:
        return None
    return None if found is None else Claim("program_id", found, source)
