"""`/v1/responses`: OpenAI's Responses API over runs, which are programs whose loop runs in the cluster.

A response in the foreground is cancelled when its client disconnects, unless the request has an Idempotency-Key, with
which the client may repeat it. A background response, or one that is read again, is read from its log, which any
ingress can do.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from time import time
from typing import Any, Literal
from uuid import uuid4

from openai.types.responses import Response as ResponseObject
from openai.types.responses import ResponseErrorEvent, ResponseStreamEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.api.openai import ErrorMap
from cluster.api.sse import ClientGone, unless_gone
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest, HttpError, RunOpen, ToolRefused
from cluster.core.program import ProgramIdentity
from cluster.core.tools import ToolOffer
from cluster.http.body import NO_BODY_STATUS
from cluster.http.runs import Abandon, EventStream, Offers, limits, read_idempotency
from cluster.observing import catalogue as metrics
from cluster.observing.meter import Meter
from cluster.responses.events import ResponseFold
from cluster.responses.input_items import input_items
from cluster.responses.offers import brought
from cluster.responses.output import RESPONSE_PREFIX
from cluster.responses.references import referred
from cluster.responses.request import CreateResponse, counted_as, read_request
from cluster.responses.spec import RequestContext, RunRequest, run_spec
from cluster.responses.tools import FunctionTool
from cluster.responses.wire import to_json
from cluster.runs.chat_api import as_error
from cluster.runs.events import RunEvent
from cluster.runs.runner import ProgramRunner
from cluster.runs.state import RunState

logger = logging.getLogger("ray.serve")


class ResponseRoutes:
    """The handlers of the routes of responses.

    Args:
        runner: runs the programs.
        offers: lists the tools.
        config: the whole configuration.
        error_map: maps every exception to an HTTP error.
    """

    def __init__(self, runner: ProgramRunner, offers: Offers, config: CaesuraConfig, error_map: ErrorMap) -> None:
        self._runner = runner
        self._offers = offers
        self._config = config
        self._error_map = error_map
        self._abandon = Abandon(runner)
        self._meter = Meter(enabled=config.metrics.enabled)

    async def create(
        self, http: Request, body: Mapping[str, Any], identity: ProgramIdentity, arrived_s: float | None = None
    ) -> Response:
        """Start a response. Return it when it has ended, as a stream of events, or at once if it runs in the
        background.

        Args:
            http: the request, whose body has been read.
            body: the body, without the fields that only identify the program.
            identity: the request's identity.
            arrived_s: time of the arrival by the runner's clock; None: now.

        Raises:
            HttpError: the request is invalid, or the response failed before any token was generated.
        """
        request = read_request(body)
        self._notice_ignored(request.ignored)
        idempotency = read_idempotency(http, "responses", body)
        run = await self._run_request(request, identity)
        secrets = run.brought.secrets or None
        started = await self._runner.start(run.spec, idempotency=idempotency, secret=secrets, arrived_s=arrived_s)
        run_id = started.run_id
        stays = run.spec.background or idempotency is not None
        if request.stream:
            return EventStream(self._events(run_id), None if stays else lambda: self._abandon(run_id))
        if request.background:
            return _whole(await self._as_it_stands(run_id, identity.tenant))
        try:
            reader = await unless_gone(http.receive, self._until_ended(run_id))
        except (ClientGone, asyncio.CancelledError) as gone:
            if not stays:
                self._abandon(run_id)
            if isinstance(gone, ClientGone):
                return Response(status_code=NO_BODY_STATUS)
            raise
        ended = reader.state.ended
        if ended is not None and ended.status == "failed" and not reader.state.turns:
            raise as_error(ended.fault)
        return _whole(reader.response)

    async def show(self, tenant: str, response_id: str, *, stream: bool, starting_after: int | None) -> Response:
        """Return a response in its current state, or stream its events after the number ``starting_after``.

        Raises:
            BadRequest: there is no response with this id (404).
        """
        log = await self._log(response_id, tenant)
        if stream:
            return EventStream(self._events(response_id, starting_after), None)
        return _whole(_read(log).response)

    async def cancel(self, tenant: str, response_id: str) -> Response:
        """Cancel a response. One that has ended does not change.

        Raises:
            BadRequest: there is no response with this id (404).
        """
        await self._log(response_id, tenant)
        if await self._runner.cancel(response_id):
            try:
                async with asyncio.timeout(self._config.limits.timeout_s):
                    return _whole((await self._until_ended(response_id)).response)
            except TimeoutError:
                pass  # the owner of the run cancels it at its next renewal
        return _whole(await self._as_it_stands(response_id, tenant))

    async def delete(self, tenant: str, response_id: str) -> Response:
        """Delete a response that has ended.

        Raises:
            BadRequest: there is no response with this id (404), or it has not ended (409).
        """
        await self._log(response_id, tenant)
        try:
            deleted = await self._runner.delete(response_id)
        except RunOpen as error:
            message = f"the response {response_id!r} is under way; cancel it first"
            raise BadRequest(message, status=409, param="response_id") from error
        if not deleted:
            raise _not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(
        self, tenant: str, response_id: str, *, order: Literal["asc", "desc"], limit: int, after: str | None
    ) -> Response:
        """List the items of a response's input.

        Raises:
            BadRequest: there is no response with this id (404), or the page is invalid.
        """
        state = _read(await self._log(response_id, tenant)).state
        return _whole(input_items(state.spec, order=order, limit=limit, after=after))

    def _notice_ignored(self, names: Sequence[str]) -> None:
        if names and self._config.http.unknown_fields == "refuse":
            raise BadRequest(f"{names[0]}: it has no effect here (http.unknown_fields is refuse)", param=names[0])
        for name in names:
            self._meter.add(metrics.IGNORED_PARTS, 1, part=counted_as(name))

    # --- what a request needs -----------------------------------------------------------------------------------------

    async def _run_request(self, request: CreateResponse, identity: ProgramIdentity) -> RunRequest:
        servers = brought(request, self._config.tools.defined)
        offered: Sequence[ToolOffer] = ()
        if servers.definitions or any(
            isinstance(one.tool, FunctionTool) and one.tool.server_side for one in request.functions
        ):
            try:
                offered = await self._offers(identity.tenant, servers.whole() or None)
            except ToolRefused as error:
                raise BadRequest(f"tools: {error}", param="tools") from error
        theirs = {label: [one for one in offered if one.owner == label] for label in servers.definitions}
        around = RequestContext(
            run_id=f"{RESPONSE_PREFIX}{uuid4().hex}",
            created_s=time(),
            identity=identity,
            model=request.model or self._config.model.id,
            limits=limits(self._config),
            registered={one.name: one for one in offered if one.owner not in theirs},
            listings=theirs,
            previous=await self._previous(request.previous_response_id, identity.tenant),
            referred=await self._referred(request, identity.tenant),
        )
        return run_spec(request, around)

    async def _referred(self, request: CreateResponse, tenant: str) -> dict[str, ResponseFold]:
        names = referred(request)
        logs = await asyncio.gather(*(self._log(name, tenant) for name in names), return_exceptions=True)
        found: dict[str, ResponseFold] = {}
        for name, log in zip(names, logs, strict=True):
            if isinstance(log, BaseException):
                if not isinstance(log, BadRequest):
                    raise log
            else:
                found[name] = _read(log)
        return found

    async def _previous(self, response_id: str | None, tenant: str) -> RunState | None:
        if response_id is None:
            return None
        try:
            return _read(await self._log(response_id, tenant)).state
        except BadRequest:
            return None  # `run_spec` reports it, with the name of the field

    async def _log(self, response_id: str, tenant: str) -> Sequence[RunEvent]:
        log = await self._runner.load(response_id, tenant)
        if not log:
            raise _not_found(response_id)
        spec = _read(log[:1]).state.spec
        if spec.api != "responses" or not spec.store:
            raise _not_found(response_id)
        return log

    # --- following ----------------------------------------------------------------------------------------------------

    async def _as_it_stands(self, run_id: str, tenant: str) -> ResponseObject:
        return _read(await self._log(run_id, tenant)).response

    async def _until_ended(self, run_id: str) -> ResponseFold:
        reader = ResponseFold()
        async with aclosing(self._runner.follow(run_id)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                for event in batch:
                    reader.feed(event)
        return reader

    async def _events(self, run_id: str, after: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes of a stream of events. If an exception breaks the stream, its last event is an error."""
        reader = ResponseFold()
        number = 0
        broken: HttpError | None = None
        try:
            async with aclosing(self._runner.follow(run_id)) as batches:  # type: ignore[type-var]
                async for batch in batches:
                    events = [one for entry in batch for one in reader.feed(entry)]
                    number += len(events)
                    if piece := b"".join(_sse(one) for one in events if after is None or one.sequence_number > after):
                        yield piece
            if reader.state.ended is None:
                broken = HttpError("the log of this response ended before it did")
        except Exception as error:
            logger.warning("the stream of response %s broke", run_id, exc_info=error)
            broken = self._error_map(error)
        if broken is not None:
            yield _sse(
                ResponseErrorEvent(
                    type="error", message=broken.message, code=broken.code, param=broken.param, sequence_number=number
                )
            )


def _read(log: Sequence[RunEvent]) -> ResponseFold:
    reader = ResponseFold()
    for event in log:
        reader.feed(event)
    return reader


def _whole(model: Any) -> Response:
    return Response(to_json(model), media_type="application/json")


def _sse(event: ResponseStreamEvent) -> bytes:
    return f"event: {event.type}\ndata: {to_json(event)}\n\n".encode()


def _not_found(response_id: str) -> BadRequest:
    return BadRequest(f"Response with id {response_id[:256]!r} not found.", status=404, param="response_id")
