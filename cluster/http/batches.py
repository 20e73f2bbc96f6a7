"""`/v1/batches`: OpenAI's Batch API."""

import re
from collections.abc import Mapping
from time import time
from typing import Any, Literal
from uuid import uuid4

from openai.types import Batch as ShownBatch
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.api.validation import validated
from cluster.auth.middleware import caller_of
from cluster.batches.records import Batch, Endpoint, Progress
from cluster.batches.runner import BatchRunner
from cluster.core.errors import BadRequest
from cluster.http.files import BATCH, MAX_KEPT_S, MIN_KEPT_S, FileRoutes
from cluster.http.idempotency import read_idempotency
from cluster.responses.input_items import page_of
from cluster.responses.request import Metadata
from cluster.responses.tools import OpenPart
from cluster.responses.wire import to_json

BATCH_PREFIX = "batch_"
MAX_WINDOW_H = 72
"""Largest completion window in hours."""
_WINDOW = re.compile(r"^([1-9]\d{0,2})h$")


class OutputExpiry(OpenPart):
    """How long the output is kept."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_KEPT_S, le=MAX_KEPT_S)


class CreateBatch(OpenPart):
    """The body of a new batch."""

    input_file_id: str = Field(min_length=1, max_length=256)
    endpoint: Endpoint
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


class BatchRoutes:
    """The handlers of the routes of batches.

    Args:
        batches: works on batches.
        files: has the input files.
    """

    def __init__(self, batches: BatchRunner, files: FileRoutes) -> None:
        self._batches = batches
        self._files = files

    async def create(self, http: Request, body: Mapping[str, Any]) -> Response:
        """Start a batch. A repeated request has its earlier batch.

        Raises:
            BadRequest: a field is invalid, or the input file cannot be used.
            IdempotencyConflict: the key was used with another body.
            Overloaded: too many batches are open, or the store is full or cannot be reached.
        """
        wanted = validated(CreateBatch, body)
        tenant, now_s = caller_of(http).tenant, time()
        window_s = _window_s(wanted.completion_window)
        idempotency = read_idempotency(http, "batches")
        if (earlier := await self._batches.repeated(tenant, idempotency)) is not None:
            return await self.show(tenant, earlier)
        file = await self._files.find(tenant, wanted.input_file_id, "input_file_id")
        if file.purpose != BATCH:
            message = f"input_file_id: the file has the purpose {file.purpose!r}, not {BATCH!r}"
            raise BadRequest(message, param="input_file_id")
        if file.expires_s < now_s + window_s:
            message = "input_file_id: the file expires before the completion window ends; upload it with a later expiry"
            raise BadRequest(message, param="input_file_id", code="input_file_expires")
        kept = wanted.output_expires_after
        batch = Batch(
            id=f"{BATCH_PREFIX}{uuid4().hex}",
            tenant=tenant,
            endpoint=wanted.endpoint,
            input_file_id=file.id,
            completion_window=wanted.completion_window,
            created_s=now_s,
            expires_s=now_s + window_s,
            metadata=wanted.metadata,
            output_kept_s=None if kept is None else float(kept.seconds),
        )
        batch_id = await self._batches.start(batch, idempotency)
        return await self.show(tenant, batch_id)

    async def show(self, tenant: str, batch_id: str) -> Response:
        """Return a batch.

        Raises:
            BadRequest: there is none of this id (404).
            Overloaded: the store cannot be reached.
        """
        shown = ShownBatch.model_validate(_fields(*await self._find(tenant, batch_id)))
        return Response(to_json(shown), media_type="application/json")

    async def list(self, tenant: str, *, limit: int, after: str | None) -> Response:
        """List a tenant's batches, the newest first.

        Raises:
            BadRequest: the page is invalid.
            Overloaded: the store cannot be reached.
        """
        items = [_fields(*one) for one in reversed(await self._batches.listed(tenant))]
        return JSONResponse(page_of(items, order="desc", limit=limit, after=after))

    async def cancel(self, tenant: str, batch_id: str) -> Response:
        """Cancel a batch. Its lines in flight are stopped, and those that have ended are in its files.

        Raises:
            BadRequest: there is none of this id (404), or it has ended (409).
            Overloaded: the store cannot be reached.
        """
        _, progress = await self._find(tenant, batch_id)
        if progress.ended_s is not None and progress.status != "cancelled":
            message = f"Cannot cancel a batch with status '{progress.status}'."
            raise BadRequest(message, status=409, param="batch_id")
        await self._batches.cancel(batch_id)
        return await self.show(tenant, batch_id)

    async def _find(self, tenant: str, batch_id: str) -> tuple[Batch, Progress]:
        found = await self._batches.show(tenant, batch_id)
        if found is None:
            raise BadRequest(f"No batch found with id {batch_id[:256]!r}.", status=404, param="batch_id")
        return found


def _window_s(window: str) -> float:
    found = _WINDOW.match(window)
    if found is None or int(found[1]) > MAX_WINDOW_H:
        message = f"completion_window: must be a number of hours such as '24h', at most '{MAX_WINDOW_H}h'"
        raise BadRequest(message, param="completion_window")
    return 3600.0 * int(found[1])


def _fields(batch: Batch, progress: Progress) -> dict[str, Any]:
    ended_at = _whole(progress.ended_s)
    errors = [
        {"code": error.code, "message": error.message, "line": error.line, "param": error.param}
        for error in progress.errors
    ]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": progress.status,
        "output_file_id": progress.output_file_id,
        "error_file_id": progress.error_file_id,
        "created_at": int(batch.created_s),
        "in_progress_at": _whole(progress.began_s),
        "expires_at": int(batch.expires_s),
        "finalizing_at": _whole(progress.finalizing_s),
        "completed_at": ended_at if progress.status == "completed" else None,
        "failed_at": ended_at if progress.status == "failed" else None,
        "expired_at": ended_at if progress.status == "expired" else None,
        "cancelling_at": _whole(progress.cancelling_s),
        "cancelled_at": ended_at if progress.status == "cancelled" else None,
        "request_counts": {"total": progress.total, "completed": progress.completed, "failed": progress.failed},
        "metadata": batch.metadata,
        "caesura": {"paused": progress.paused},
    }


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
