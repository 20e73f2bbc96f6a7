"""The requests of the lines of batches, which take the same way through the ingress as those of clients."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from cluster.api.openai import BATCH_LINE, REQUEST_ID, RETRY_AFTER_S, ErrorMap, error_body
from cluster.auth.keys import Caller, Role
from cluster.auth.middleware import CALLER
from cluster.batches.input_lines import LineRequest
from cluster.batches.records import Batch, Endpoint
from cluster.batches.results import LineAnswer
from cluster.core.errors import BadRequest, HttpError, RunError
from cluster.http.idempotency import IDEMPOTENCY_KEY
from cluster.runs.chat_api import asks_for_loop

SESSION = "x-session-id"
Handler = Callable[[Request], Awaitable[Response]]


class _Fields(msgspec.Struct):
    """What decides how the request of a line is sent."""

    stream: Any = None
    background: Any = None
    store: Any = None
    tools: Any = None


_fields: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)


class LineRequests:
    """Answers the requests of lines.

    A line that is a program of the cluster has an idempotency key: if the ingress dies, the next one gets the answer of
    the same program, and no tool is run twice.

    Args:
        handlers: the handler of each route.
        error_map: maps every exception to an HTTP error.
        forget: deletes the run of a tenant's idempotency key, if it has ended.
        cancel: cancels the run of a tenant's idempotency key.
    """

    def __init__(
        self,
        handlers: Mapping[Endpoint, Handler],
        error_map: ErrorMap,
        forget: Callable[[str, str], Awaitable[object]],
        cancel: Callable[[str, str], Awaitable[object]],
    ) -> None:
        self._handlers = handlers
        self._error_map = error_map
        self._forget = forget
        self._cancel = cancel

    async def answer(self, batch: Batch, number: int, request: LineRequest) -> LineAnswer:
        """Return the answer to a line. It raises nothing but the cancellation of the calling task."""
        body = bytes(request.body)
        name, is_program = _name(batch, number), False
        try:
            is_program = _is_program(batch.endpoint, body)
            response = await self._handlers[batch.endpoint](_request(batch, name, body, is_program=is_program))
            return LineAnswer(response.status_code, bytes(response.body), name)
        except Exception as error:  # noqa: BLE001 - whatever it is becomes the answer
            mapped = self._error_map(error)
            text = json.dumps(error_body(mapped)).encode()
            answer = LineAnswer(mapped.status, text, name, mapped.retry_after_s or RETRY_AFTER_S)
            if is_program and not answer.is_final(1):
                await self._forgotten(batch, number)  # otherwise the next attempt would get the same answer
            return answer

    async def recorded(self, batch: Batch, number: int, request: LineRequest) -> None:
        """Delete the run of a line, unless the request asks to store it."""
        body = bytes(request.body)
        with suppress(BadRequest):
            if _is_program(batch.endpoint, body) and _fields.decode(body).store is not True:
                await self._forgotten(batch, number)

    async def _forgotten(self, batch: Batch, number: int) -> None:
        with suppress(RunError):
            await self._forget(batch.tenant, _name(batch, number))

    async def cancelled(self, batch: Batch, number: int) -> None:
        """Cancel the run of a line, if it is one."""
        with suppress(HttpError, RunError):
            await self._cancel(batch.tenant, _name(batch, number))


def _name(batch: Batch, number: int) -> str:
    return f"{batch.id}-{number}"


def _is_program(endpoint: Endpoint, body: bytes) -> bool:
    """Return whether a run answers the request.

    Raises:
        BadRequest: it asks for what a batch cannot give.
    """
    try:
        fields = _fields.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    for field in ("stream", "background"):
        if getattr(fields, field):
            raise BadRequest(f"{field}: a line of a batch is answered as a whole", param=field)
    return endpoint == "/v1/responses" or asks_for_loop({"tools": fields.tools})


def _request(batch: Batch, name: str, body: bytes, *, is_program: bool) -> Request:
    headers = {"content-type": "application/json", REQUEST_ID: name}
    if is_program:
        headers |= {IDEMPOTENCY_KEY: name, SESSION: name}
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": batch.endpoint,
        "query_string": b"",
        "headers": [(key.encode(), value.encode()) for key, value in headers.items()],
        CALLER: Caller(batch.tenant, frozenset((Role.SERVE,)), "batch"),
        BATCH_LINE: True,
    }
    left = [body]

    async def receive() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        await asyncio.Event().wait()  # the client of a line never goes away
        raise AssertionError

    return Request(scope, receive)
