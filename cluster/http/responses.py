"""`/v1/responses`: OpenAI's Responses API over runs, which are programs whose loop runs in the cluster.

A response in the foreground is cancelled when its client disconnects, unless the request has an Idempotency-Key, with
which the client may repeat it. A background response, or one that is read again, is read from its log, which any
ingress can do.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import msgspec
from openai.types.responses import Response as ResponseObject
from openai.types.responses import ResponseErrorEvent, ResponseStreamEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.api.openai import BATCH_LINE, CONNECTION, ErrorMap
from cluster.api.sse import ClientGone, unless_gone
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest, HttpError, RunOpen
from cluster.core.lineage import LineageIndex
from cluster.core.program import ProgramIdentity
from cluster.http.attributed_answers import program_headers
from cluster.http.attributed_run import attributed_run
from cluster.http.body import NO_BODY_STATUS
from cluster.http.connection_responses import ConnectionResponses
from cluster.http.conversations import Conversations
from cluster.http.idempotency import read_idempotency
from cluster.http.requests import passed_headers
from cluster.http.response_requests import ResponseRequests
from cluster.http.runs import Abandon, EventStream, Offers, Prepare
from cluster.http.stored_responses import StoredResponses, not_found, replayed
from cluster.responses.compaction import compacted_response
from cluster.responses.events import ResponseFold, usage
from cluster.responses.input_items import input_items
from cluster.responses.output import RESPONSE_PREFIX
from cluster.responses.request import CreateResponse
from cluster.responses.spec import RunRequest
from cluster.responses.wire import to_json
from cluster.runs.chat_api import as_error
from cluster.runs.compaction import CUT
from cluster.runs.events import Compaction, RunSpec
from cluster.runs.runner import ProgramRunner
from cluster.runs.state import RunState, begin, is_whole_summary
from cluster.runs.turn_request import prompt_fields
from cluster.store.runs.records import Idempotency

logger = logging.getLogger("ray.serve")


class ResponseRoutes:
    """The handlers of the routes of responses.

    Args:
        runner: runs the programs.
        offers: lists the tools.
        config: the whole configuration.
        error_map: maps every exception to an HTTP error.
        conversations: has the conversations.
        plain: answers a request that is no turn, see `ReplicaClients.plain`.
        lineage: finds the programs of requests without an id.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        offers: Offers,
        config: CaesuraConfig,
        error_map: ErrorMap,
        conversations: Conversations,
        plain: Callable[[str, dict[str, Any], dict[str, str]], Awaitable[bytes]],
        lineage: LineageIndex,
    ) -> None:
        self._runner = runner
        self._stored = StoredResponses(runner)
        self._conversations = conversations
        self._requests = ResponseRequests(self._stored, conversations, offers, config)
        self._config = config
        self._error_map = error_map
        self._abandon = Abandon(runner)
        self._plain = plain
        self._lineage = lineage

    async def create(
        self,
        http: Request,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        prepare: Prepare,
        arrived_s: float | None = None,
    ) -> Response:
        """Start a response. Return it when it has ended, as a stream of events, or at once if it runs in the
        background.

        Args:
            http: the request, whose body has been read.
            body: the body as the client has sent it, without the fields that only identify the program.
            identity: the request's identity.
            prepare: returns the body for replicas. It is called for a new response.
            arrived_s: time of the arrival by the runner's clock; None: now.

        Raises:
            HttpError: the request is invalid, or the response failed before any token was generated. For a line of a
                batch: or it failed later, or was cancelled.
        """
        idempotency = read_idempotency(http, "responses")
        shown: Mapping[str, str] = {}
        if (run_id := await self._runner.repeated(identity.tenant, idempotency)) is None:
            body = await prepare()
        request = self._requests.read(body)
        own: ConnectionResponses | None = http.scope.get(CONNECTION)
        if run_id is None:
            run_id, shown = await self._start(http, request, body, identity, idempotency, arrived_s)
        if own is not None and request.store is False:
            own.began(run_id)
        stays = bool(request.background) or idempotency is not None
        if request.stream:
            return EventStream(self._events(run_id), None if stays else lambda: self._abandon(run_id), shown)
        if request.background:
            return _whole(await self._as_it_stands(run_id, identity.tenant), shown)
        try:
            reader = await unless_gone(http.receive, self._until_ended(run_id))
        except (ClientGone, asyncio.CancelledError) as gone:
            if not stays:
                self._abandon(run_id)
            if isinstance(gone, ClientGone):
                return Response(status_code=NO_BODY_STATUS)
            raise
        _require_answer(reader.state, of_batch=BATCH_LINE in http.scope)
        return _whole(reader.response, shown)

    async def _start(
        self,
        http: Request,
        request: CreateResponse,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        idempotency: Idempotency | None,
        arrived_s: float | None,
    ) -> tuple[str, Mapping[str, str]]:
        """Return the id of the request's run, and headers of its answer. If the request has come twice at the same
        time, both have one run.
        """
        own: ConnectionResponses | None = http.scope.get(CONNECTION)
        with attributed_run(self._lineage, body, identity, RESPONSE_PREFIX) as turn:
            try:
                run = await self._sized(await self._requests.run(request, turn.identity, own, turn.run_id), http)
            except BadRequest:
                if (run_id := await self._runner.repeated(identity.tenant, idempotency)) is None:
                    raise
                return run_id, {}

            def run_ended(state: RunState) -> None:
                turn.run_ended(state)
                if own is not None:
                    own.ended(state)

            started = await self._runner.start(
                run.spec,
                idempotency=idempotency,
                secret=run.brought.secrets or None,
                arrived_s=arrived_s,
                on_end=run_ended,
                admit=None if run.conversation is None else partial(self._conversations.add_response, run),
                is_repeated=BATCH_LINE in http.scope,
            )
            turn.is_run = started.new
        return started.run_id, program_headers(run.spec.program) if started.new else {}

    async def count_tokens(self, http: Request, body: Mapping[str, Any], identity: ProgramIdentity) -> Response:
        """Return the number of tokens of the first turn's prompt, with the model's chat template and the tools.

        Raises:
            HttpError: the request is invalid.
        """
        run = await self._requests.run(self._requests.read(body), identity)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": await self._count(run.spec, http)})

    async def _count(self, spec: RunSpec, http: Request) -> int:
        async with asyncio.timeout(self._config.http.request_timeout_s):
            answer = await self._plain("tokenize", prompt_fields(spec), passed_headers(http.headers))
        return int(json.loads(answer)["count"])

    async def _sized(self, run: RunRequest, http: Request) -> RunRequest:
        """Return the run with the size of its conversation, where that decides what the run does first."""
        if run.spec.compaction is None:
            return run
        compaction = msgspec.structs.replace(run.spec.compaction, tokens=await self._count(run.spec, http))
        return replace(run, spec=msgspec.structs.replace(run.spec, compaction=compaction))

    async def compact(
        self, http: Request, body: Mapping[str, Any], identity: ProgramIdentity, arrived_s: float | None = None
    ) -> Response:
        """Return the conversation of a request with a summary, which a turn of its program writes.

        The arguments are those of `create`, but the body is that for replicas.

        Raises:
            HttpError: the request is invalid, or the turn failed.
        """
        request = self._requests.read(body)
        with attributed_run(self._lineage, body, identity, RESPONSE_PREFIX) as turn:
            run = await self._requests.run(request, turn.identity, run_id=turn.run_id)
            if run.spec.approved:
                raise BadRequest("input: an approved call runs only in a response, not in a compaction", param="input")
            alone = Compaction(threshold=0, alone=True)
            spec = msgspec.structs.replace(run.spec, compaction=alone, store=False, background=False, generate=True)
            started = await self._runner.start(spec, arrived_s=arrived_s, on_end=turn.run_ended)
            turn.is_run = True
        try:
            reader = await unless_gone(http.receive, self._until_ended(started.run_id))
        except ClientGone:
            self._abandon(started.run_id)
            return Response(status_code=NO_BODY_STATUS)
        except asyncio.CancelledError:
            self._abandon(started.run_id)
            raise
        state = reader.state
        if state.ended is None or state.ended.status != "completed":
            raise as_error(None if state.ended is None else state.ended.fault)
        written = state.turns[-1]
        summary = written.content if is_whole_summary(written) else f"{written.content}\n{CUT}"
        return JSONResponse(compacted_response(spec, spec.messages, summary, usage(state)))

    async def show(self, tenant: str, response_id: str, *, stream: bool, starting_after: int | None) -> Response:
        """Return a response in its current state, or stream its events after the number ``starting_after``.

        Raises:
            BadRequest: there is no response with this id (404).
        """
        log = await self._stored.log(response_id, tenant)
        if stream:
            return EventStream(self._events(response_id, starting_after), None)
        return _whole((await replayed(log)).response)

    async def cancel(self, tenant: str, response_id: str) -> Response:
        """Cancel a response. One that has ended does not change.

        Raises:
            BadRequest: there is no response with this id (404).
        """
        await self._stored.log(response_id, tenant)
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
        await self._stored.log(response_id, tenant)
        try:
            deleted = await self._runner.delete(response_id)
        except RunOpen as error:
            message = f"the response {response_id!r} is under way; cancel it first"
            raise BadRequest(message, status=409, param="response_id") from error
        if not deleted:
            raise not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(
        self, tenant: str, response_id: str, *, order: Literal["asc", "desc"], limit: int, after: str | None
    ) -> Response:
        """List the items of a response's input.

        Raises:
            BadRequest: there is no response with this id (404), or the page is invalid.
        """
        log = await self._stored.log(response_id, tenant)
        return _whole(input_items(begin(log[0]).spec, order=order, limit=limit, after=after))

    # --- following ----------------------------------------------------------------------------------------------------

    async def _as_it_stands(self, run_id: str, tenant: str) -> ResponseObject:
        return (await replayed(await self._stored.log(run_id, tenant))).response

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


def _require_answer(state: RunState, *, of_batch: bool) -> None:
    """Check that a run that has ended is an answer with the status 200.

    A client sees how far a failed response came. A line of a batch is tried again, or is in the error file.

    Raises:
        HttpError: it is none.
    """
    if (ended := state.ended) is None:
        return
    if ended.status == "failed" and (of_batch or not state.turns):
        raise as_error(ended.fault)
    if ended.status == "cancelled" and of_batch:
        raise HttpError("the response was cancelled", code="cancelled")


def _whole(model: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(model), media_type="application/json", headers=headers)


def _sse(event: ResponseStreamEvent) -> bytes:
    return f"event: {event.type}\ndata: {to_json(event)}\n\n".encode()
