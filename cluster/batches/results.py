"""The lines of output and error files, in OpenAI's form."""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from cluster.batches.records import Batch, Status

RETRIED = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""Statuses of a line that the cluster has no room for now. It waits for as long as its batch may take."""
_PASSING = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT})
ATTEMPTS = 3
"""How often a line is tried that fails for a reason in the cluster, such as the death of a replica."""

UNDONE: dict[Status, tuple[str, str]] = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed before the batch was cancelled."),
}
"""Code and message of lines that are not executed, by the status with which their batch ends."""


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to the request of a line."""

    status: int
    body: bytes
    """A JSON text."""
    request_id: str
    retry_after_s: float = 1.0

    @property
    def is_ok(self) -> bool:
        """Whether the line belongs to the output file."""
        return self.status == HTTPStatus.OK

    def is_final(self, attempts: int) -> bool:
        """Return whether the line is not tried again, after so many attempts."""
        if self.status in RETRIED:
            return False
        failed = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR or self.status in _PASSING
        return not failed or attempts >= ATTEMPTS


def answered(batch: Batch, number: int, custom_id: str, answer: LineAnswer) -> bytes:
    """Return the line of a request that was answered, also with an error."""
    head = {"id": _id(batch, number), "custom_id": custom_id}
    response = {"status_code": answer.status, "request_id": answer.request_id}
    # A newline is white space in JSON, since a text has none.
    body = answer.body.replace(b"\r", b" ").replace(b"\n", b" ")
    return b'%s,"response":%s,"body":%s},"error":null}\n' % (_open(head), _open(response), body)


def undone(batch: Batch, number: int, custom_id: str, status: Status) -> bytes:
    """Return the line of a request that was not executed, since the batch ended with this status before."""
    code, message = UNDONE[status]
    line = {
        "id": _id(batch, number),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _id(batch: Batch, number: int) -> str:
    return f"batch_req_{batch.id.removeprefix('batch_')}_{number}"


def _open(fields: dict[str, Any]) -> bytes:
    """Return a JSON object without its end."""
    return json.dumps(fields, separators=(",", ":")).encode()[:-1]
