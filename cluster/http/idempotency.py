"""The Idempotency-Key of a request, with the fingerprint of its body."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from cluster.core.errors import BadRequest
from cluster.store.runs.records import Idempotency

IDEMPOTENCY_KEY = "idempotency-key"
MAX_KEY_LENGTH = 255

_DIGEST = "caesura.body_digest"
"""Name in the scope of a request."""


def keep_digest(http: Request, body: Mapping[str, Any]) -> None:
    """Keep the digest of a body for `read_idempotency`, if the request has a key.

    It may take a few tenths of a second, so that it is called where large bodies are parsed.
    """
    if IDEMPOTENCY_KEY in http.headers:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        http.scope[_DIGEST] = hashlib.sha256(text.encode()).digest()


def read_idempotency(http: Request, api: str) -> Idempotency | None:
    """Return the request's Idempotency-Key with the fingerprint of its body; None: it has no key.

    Args:
        http: the request, whose body was passed to `keep_digest` as the client has sent it.
        api: the name of the API, which is a part of the fingerprint.

    Raises:
        BadRequest: the key is invalid.
    """
    key = http.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isprintable():
        message = f"an Idempotency-Key has 1 to {MAX_KEY_LENGTH} printable characters"
        raise BadRequest(message, param="Idempotency-Key")
    return Idempotency(key, hashlib.sha256(api.encode() + b":" + http.scope[_DIGEST]).digest())
