"""`/v1/files`: OpenAI's Files API, for the input and the output of batches."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import time
from typing import Any, Literal
from uuid import uuid4

from openai.types import FileObject
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive

from cluster.api.openai import RETRY_AFTER_S
from cluster.auth.middleware import caller_of
from cluster.batches.content import packed, pieces_of, unpacked
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import (
    BadRequest,
    Overloaded,
    RunLeaseLost,
    RunStoreUnavailable,
    RunUnknown,
    TooManyRequests,
)
from cluster.http.body import NO_BODY_STATUS
from cluster.responses.input_items import page_of
from cluster.responses.wire import to_json
from cluster.store.files import FileStore, StoredFile

MAX_FILES = 500
"""Largest number of files of a tenant."""
MOST_LISTED = 10_000
"""Largest number of files that a client may ask for in a page, which is OpenAI's."""
MAX_UPLOADS, MAX_TENANT_UPLOADS = 8, 2
"""Largest number of uploads in progress in one ingress, of all tenants and of one. Further ones get 503 and 429."""
UPLOAD_WITHIN_S = 600.0
"""Seconds within which the body of an upload must arrive."""
FORM_SLACK_BYTES = 64 << 10
"""Size that the other fields and the boundaries of a form may have together."""
MIN_KEPT_S, MAX_KEPT_S = 3600, 2_592_000
"""Bounds in seconds of the time for which a client asks to keep a file, which are OpenAI's."""
MAX_NAME_LENGTH = 256
BATCH = "batch"
"""The purpose of an upload."""
FILE_PREFIX = "file-"
_FORM = "multipart/form-data"
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")

STORE_GONE = "files cannot be reached now"


class FileRoutes:
    """The handlers of the routes of files.

    Args:
        files: has the files.
        config: the whole configuration.
        is_full: returns whether the store has no memory for more.
        used_by: returns the id of an open batch of a tenant whose input is this file, or None.
    """

    def __init__(
        self,
        files: FileStore,
        config: CaesuraConfig,
        is_full: Callable[[], bool],
        used_by: Callable[[str, str], Awaitable[str | None]],
    ) -> None:
        self._files = files
        self._limits = config.batches
        self._max_line_bytes = config.http.max_body_bytes
        self._is_full = is_full
        self._used_by = used_by
        self._uploads: Counter[str] = Counter()
        """Uploads in progress, by tenant."""

    async def create(self, request: Request) -> Response:
        """Store an uploaded file.

        Raises:
            BadRequest: the form is invalid, the file is too large, or the client went away before its end (499).
            Overloaded: the store has no memory for it, or cannot be reached, or too many are in progress.
            TooManyRequests: the tenant has too many in progress.
        """
        tenant = caller_of(request).tenant
        if self._is_full():
            message = "the store (redis) has no memory for another file; retry later"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S, code="store_full")
        if self._uploads[tenant] >= MAX_TENANT_UPLOADS:
            message = f"{MAX_TENANT_UPLOADS} files of this tenant are being uploaded; retry later"
            raise TooManyRequests(message, retry_after_s=RETRY_AFTER_S, code="tenant_concurrency")
        if self._uploads.total() >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} files are being uploaded; retry later", retry_after_s=RETRY_AFTER_S)
        self._uploads[tenant] += 1
        try:
            return await self._upload(request, tenant)
        finally:
            self._uploads[tenant] -= 1
            self._uploads += Counter()  # forgets tenants without uploads

    async def _upload(self, request: Request, tenant: str) -> Response:
        form = Request(request.scope, self._bounded(request))
        try:
            async with asyncio.timeout(UPLOAD_WITHIN_S), form.form(max_files=1, max_fields=8) as fields:
                upload = fields.get("file")
                if not isinstance(upload, UploadFile):
                    raise BadRequest("file: the form needs a file", param="file")
                purpose = fields.get("purpose")
                if purpose != BATCH:
                    raise BadRequest(f"purpose: must be {BATCH!r}", param="purpose")
                kept_s = _kept_s(fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]"))
                source, name = upload.file, _name(upload.filename)
                size, pieces = await asyncio.to_thread(_packed, source.read, self._max_line_bytes)
        except TimeoutError:
            raise BadRequest(f"the body did not come within {UPLOAD_WITHIN_S:g} s", status=408) from None
        except ClientDisconnect:
            raise BadRequest("the client went away", status=NO_BODY_STATUS) from None
        except HTTPException as error:
            raise BadRequest(f"the body is not a valid form: {error.detail}") from error
        if size > self._limits.max_file_bytes:
            raise self._too_large()
        if not size:
            raise BadRequest("file: it is empty", param="file", code="empty_file")
        now_s = time()
        expires_s = now_s + (kept_s or self._limits.retention_s)
        file = StoredFile(f"{FILE_PREFIX}{uuid4().hex}", tenant, name, BATCH, size, now_s, expires_s)
        with _reachable():
            await self._files.write(file, pieces, self._check_quota)
        return _shown(file)

    def _bounded(self, request: Request) -> Receive:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _FORM:
            raise BadRequest(f"content type {kind!r} is not supported; send {_FORM}", status=415)
        most = self._limits.max_file_bytes + FORM_SLACK_BYTES
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise self._too_large()
        size = 0

        async def receive() -> Message:
            nonlocal size
            message = await request.receive()
            size += len(message.get("body", b""))
            if size > most:
                raise self._too_large()
            return message

        return receive

    def _too_large(self) -> BadRequest:
        message = f"file: it is longer than {self._limits.max_file_bytes} bytes (batches.max_file_bytes)"
        return BadRequest(message, status=413, param="file", code="file_too_large")

    def _check_quota(self, number: int, used: int) -> None:
        """Check what a tenant has, with the new file.

        Raises:
            BadRequest: it is too much.
        """
        if number > MAX_FILES:
            message = f"file: there are {number - 1} files, and at most {MAX_FILES} are kept; delete some"
            raise BadRequest(message, param="file", code="too_many_files")
        most = self._limits.max_stored_bytes
        if used > most:
            message = f"file: all files would have {used} bytes, and at most {most} are kept; delete some"
            raise BadRequest(f"{message} (batches.max_stored_bytes)", param="file", code="storage_quota_exceeded")

    async def list(
        self,
        tenant: str,
        *,
        order: Literal["asc", "desc"],
        limit: int,
        after: str | None,
        purpose: str | None,
    ) -> Response:
        """List a tenant's files.

        Raises:
            BadRequest: the page is invalid.
            Overloaded: the store cannot be reached.
        """
        with _reachable():
            found = await self._files.listed(tenant)
        items = [_fields(file) for file in reversed(found) if purpose is None or file.purpose == purpose]
        return JSONResponse(page_of(items, order=order, limit=limit, after=after, most=MOST_LISTED))

    async def show(self, tenant: str, file_id: str) -> Response:
        """Return a file, without its content.

        Raises:
            BadRequest: there is none of this id (404).
            Overloaded: the store cannot be reached.
        """
        return _shown(await self.find(tenant, file_id))

    async def find(self, tenant: str, file_id: str, param: str = "file_id") -> StoredFile:
        """Return a file. Exceptions are those of `show`."""
        with _reachable():
            found = await self._files.find(tenant, file_id)
        if found is None:
            raise BadRequest(f"No such File object: {file_id[:256]}", status=404, param=param)
        return found

    async def delete(self, tenant: str, file_id: str) -> Response:
        """Delete a file.

        Raises:
            BadRequest: there is none of this id (404), or a batch that has not ended reads it (409).
            Overloaded: the store cannot be reached.
        """
        await self.find(tenant, file_id)
        if (batch := await self._used_by(tenant, file_id)) is not None:
            raise BadRequest(f"the batch {batch} reads this file; cancel it first", status=409, param="file_id")
        with _reachable():
            await self._files.delete(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def content(self, tenant: str, file_id: str) -> Response:
        """Return the content of a file.

        Raises:
            BadRequest: there is none of this id (404).
            Overloaded: the store cannot be reached.
        """
        file = await self.find(tenant, file_id)
        pieces = self._files.pieces(file_id)
        with _reachable():
            try:
                first = await anext(pieces)
            except (RunUnknown, StopAsyncIteration):
                raise BadRequest(f"No such File object: {file_id[:256]}", status=404, param="file_id") from None
        headers = {"content-length": str(file.bytes)}  # a client notices a content that breaks off
        return StreamingResponse(_unpacked(first, pieces), media_type="application/octet-stream", headers=headers)


async def _unpacked(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield unpacked(first)
    async for piece in rest:
        yield unpacked(piece)


def _packed(read: Callable[[int], bytes], max_line_bytes: int) -> tuple[int, "list[bytes]"]:
    """Return the size of a file, and its pieces."""
    size, pieces = 0, []
    for piece in pieces_of(read, max_line_bytes):
        size += len(piece)
        pieces.append(packed(piece))
    return size, pieces


def _kept_s(anchor: Any, seconds: Any) -> int | None:
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise BadRequest("expires_after.anchor: must be 'created_at'", param="expires_after.anchor")
    kept_s = int(seconds) if isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 10 else 0
    if not MIN_KEPT_S <= kept_s <= MAX_KEPT_S:
        message = f"expires_after.seconds: must be between {MIN_KEPT_S} and {MAX_KEPT_S}"
        raise BadRequest(message, param="expires_after.seconds")
    return kept_s


def _name(given: str | None) -> str:
    return _UNPRINTABLE.sub("", given or "")[:MAX_NAME_LENGTH] or "file.jsonl"


def _fields(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_s),
        "expires_at": int(file.expires_s),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _shown(file: StoredFile) -> Response:
    return Response(to_json(FileObject.model_validate(_fields(file))), media_type="application/json")


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except (RunStoreUnavailable, RunLeaseLost) as error:
        code = "store_unavailable"
        raise Overloaded(f"{STORE_GONE}; retry later", retry_after_s=RETRY_AFTER_S, code=code) from error
