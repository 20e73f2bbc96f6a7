"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

A request is one turn. It is translated to a chat completion, placed, predicted, measured and continued on another
replica as any other turn, and its pieces are folded into Anthropic's events. A request with tools that the cluster runs
is a run (`cluster.http.message_programs`), whose events are folded into the same answer.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.api.anthropic.answer import PING, MessageFold
from cluster.api.anthropic.errors import ANTHROPIC_REQUEST_ID, error_event, in_anthropics_words, sse
from cluster.api.anthropic.request import (
    MessagesRequest,
    Prompt,
    chat_body,
    check_headers,
    read_messages,
    read_prompt,
    retention_s,
    tokenize_fields,
)
from cluster.api.openai import REQUEST_ID, RETRY_AFTER_S, ErrorMap
from cluster.api.sse import ClientGone, EventStream, unless_gone
from cluster.auth.middleware import caller_of
from cluster.core.errors import BadRequest, HttpError, UpstreamFailed
from cluster.core.lineage import Attributed, LineageIndex
from cluster.core.program import ProgramIdentity
from cluster.core.slo import Outcome
from cluster.core.turn import Continuation, TurnDone, TurnPiece
from cluster.http.attributed_answers import PROGRAM_HEADER, attributed_pieces, reported_program
from cluster.http.body import NO_BODY_STATUS
from cluster.http.message_programs import MessagePrograms
from cluster.http.requests import TurnReader, passed_headers
from cluster.observing.slo_tracker import SloTracker, outcome_of
from cluster.runs.messages_api import MessagesFold

logger = logging.getLogger("ray.serve")

PING_S = 10.0
"""Seconds without an event after which a stream gets a `ping`."""

LEFT_OUT = "x-caesura-tools-left-out"
"""The header that names the types of tools that nobody here can run."""


class Turns(Protocol):
    """Runs turns: `cluster.dispatch.replica_clients.ReplicaClients`."""

    def turn(
        self,
        key: str | None,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        continuation: Continuation | None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[TurnPiece | HttpError]:
        """Return the pieces of a turn."""
        ...

    async def plain(self, method: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
        """Return the answer of any replica to a request that is no turn."""
        ...


class Fold(Protocol):
    """Builds a message: `MessageFold` from the pieces of a turn, `MessagesFold` from the events of a run."""

    done: bool
    output_tokens: int

    def take(self, piece: Any) -> list[dict[str, Any]]:
        """Process a piece. Return Anthropic's events that it makes."""
        ...

    def message(self) -> dict[str, Any]:
        """Return the message as it is now."""
        ...


class Measured(Protocol):
    """Records how an answer goes on: `MeasuredTurn` for a turn, `RunClient` for a run."""

    def received(self, tokens: int) -> None:
        """Record the number of tokens so far."""
        ...

    def takes_alone(self, alone_s: float | None) -> None:
        """Record the seconds that a turn's first token would take alone; None: they are unknown."""
        ...

    def over(self, outcome: Outcome | None) -> None:
        """Record the end with its outcome; None: the request does not count as a turn."""
        ...

    def gone(self) -> None:
        """Record that the client has disconnected. It has no effect after the end."""
        ...


class MessageRoutes:
    """The handlers of the routes.

    Args:
        turns: runs turns.
        programs: starts the runs of requests with tools that the cluster runs.
        reader: reads requests within their limits.
        tracker: measures turns.
        lineage: finds the programs of requests without an id.
        timeout_s: maximum duration of an answer in seconds.
        error_map: maps every exception to an HTTP error.
    """

    def __init__(
        self,
        turns: Turns,
        programs: MessagePrograms,
        reader: TurnReader,
        tracker: SloTracker,
        lineage: LineageIndex,
        timeout_s: float,
        error_map: ErrorMap,
    ) -> None:
        self._turns = turns
        self._programs = programs
        self._reader = reader
        self._tracker = tracker
        self._lineage = lineage
        self._timeout_s = timeout_s
        self._error_map = error_map

    async def create(self, http: Request) -> Response:
        """Answer a request, with a message or with a stream of events.

        Raises:
            HttpError: the request is invalid, or the turn failed before its first event.
        """
        arrived_s = self._tracker.arrival_s(http.headers)
        check_headers(http.headers)
        read: list[tuple[MessagesRequest, Prompt]] = []

        def translate(body: Mapping[str, Any]) -> dict[str, Any]:
            request, prompt = read_messages(body)
            read.append((request, prompt))
            return chat_body(request, prompt)

        try:
            body, identity = await self._reader.identified(http, translate)
        except BadRequest as error:
            places = read[0][1].tools.places if read else ()
            raise in_anthropics_words(error, places) from None
        [(request, prompt)] = read
        attributed = self._lineage.attribute(_with_retention(identity, request), body)
        headers = passed_headers(http.headers)
        if prompt.runs_here:
            answer = await self._run(http, request, prompt, body, attributed, arrived_s)
        else:
            answer = self._turn(body, attributed, headers, arrived_s, prompt.tools.places)
        shown = {ANTHROPIC_REQUEST_ID: headers[REQUEST_ID]}
        if (program := reported_program(attributed)) is not None:
            shown[PROGRAM_HEADER] = program
        if prompt.tools.left_out:
            shown[LEFT_OUT] = ", ".join(sorted(set(prompt.tools.left_out)))[:1000]
        if request.stream:
            events = answer.events(headers[REQUEST_ID])
            first = await anext(events)
            return EventStream(_after(first, events), answer.gone, headers=shown)
        try:
            return JSONResponse(await unless_gone(http.receive, answer.whole()), headers=shown)
        except ClientGone:
            return Response(status_code=NO_BODY_STATUS)

    def _turn(
        self,
        body: Mapping[str, Any],
        attributed: Attributed,
        headers: Mapping[str, str],
        arrived_s: float,
        places: Sequence[int],
    ) -> "_Answer":
        """Return the answer of a request that is one turn. ``places`` are those of its tools."""
        identity = attributed.identity
        pieces = self._turns.turn(identity.key, body, identity, None, headers)
        return _Answer(
            attributed_pieces(pieces, self._lineage, attributed),
            MessageFold(f"msg_{uuid4().hex}", body["model"]),
            self._tracker.begin(body["model"], identity, arrived_s),
            self._error_map,
            asyncio.get_running_loop().time() + self._timeout_s,
            places,
        )

    async def _run(
        self,
        http: Request,
        request: MessagesRequest,
        prompt: Prompt,
        body: Mapping[str, Any],
        attributed: Attributed,
        arrived_s: float,
    ) -> "_Answer":
        """Return the answer of a request whose tools the cluster runs.

        Raises:
            HttpError: the request is invalid, or its run was not accepted.
        """
        try:
            begun = await self._programs.begin(http, request, prompt, body, attributed.identity, arrived_s)
        except BaseException:
            self._lineage.ended(attributed, served=False)
            raise
        return _Answer(
            attributed_pieces(begun.events, self._lineage, attributed),
            MessagesFold(prompt.tools.places),
            begun.client,
            self._error_map,
            asyncio.get_running_loop().time() + begun.wall_s + self._timeout_s,
        )

    async def count_tokens(self, http: Request) -> Response:
        """Return the number of tokens of a prompt, with the model's chat template and the tools.

        Raises:
            HttpError: the request is invalid.
        """
        check_headers(http.headers)

        read: list[Prompt] = []

        def translate(body: Mapping[str, Any]) -> dict[str, Any]:
            read.append(read_prompt(body))
            return tokenize_fields(read[0])

        body = await self._reader.body(http, translate)
        if read[0].runs_here:
            offers = await self._programs.offered(read[0], body, caller_of(http).tenant)
            body["tools"] = [{"type": "function", "function": offer.function} for offer in offers]
        headers = passed_headers(http.headers)
        async with asyncio.timeout(self._timeout_s):
            answer = json.loads(await self._turns.plain("tokenize", body, headers))
        shown = {ANTHROPIC_REQUEST_ID: headers[REQUEST_ID]}
        return JSONResponse({"input_tokens": answer["count"]}, headers=shown)


def model_info(model_id: str, created_s: int) -> dict[str, Any]:
    """Return a model in Anthropic's form. ``created_s`` is a Unix time in seconds."""
    created = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": model_id, "display_name": model_id, "created_at": created}


def model_list(model_ids: list[str], created_s: int) -> dict[str, Any]:
    """Return the list of models in Anthropic's form."""
    ends = {"first_id": model_ids[0] if model_ids else None, "last_id": model_ids[-1] if model_ids else None}
    return {"data": [model_info(one, created_s) for one in model_ids], "has_more": False, **ends}


def _with_retention(identity: ProgramIdentity, request: MessagesRequest) -> ProgramIdentity:
    asked_s = retention_s(request)
    if asked_s is None or identity.hints.retention_s is not None:
        return identity
    return replace(identity, hints=replace(identity.hints, retention_s=asked_s))


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(rest):  # type: ignore[type-var]
        yield first
        async for event in rest:
            yield event


class _Answer:
    """The answer of one turn or one run. Its end is recorded once, however it ends.

    Args:
        pieces: the turn, or the events of the run.
        fold: builds the message.
        measured: records the end.
        error_map: maps every exception to an HTTP error.
        deadline_s: the deadline, as a time of the running event loop's clock.
        places: the place of each tool of the turn in the request, for errors.
    """

    def __init__(
        self,
        pieces: AsyncIterator[Any],
        fold: Fold,
        measured: Measured,
        error_map: ErrorMap,
        deadline_s: float,
        places: Sequence[int] = (),
    ) -> None:
        self._pieces = pieces
        self._fold = fold
        self._measured = measured
        self._error_map = error_map
        self._deadline_s = deadline_s
        self._places = places
        self.gone: Callable[[], None] = measured.gone
        """Record that the client has disconnected."""

    async def whole(self) -> dict[str, Any]:
        """Return the message.

        Raises:
            HttpError: the turn failed.
            TimeoutError: the deadline passed.
        """
        try:
            async with asyncio.timeout_at(self._deadline_s), aclosing(self._pieces):  # type: ignore[type-var]
                async for piece in self._pieces:
                    self._take(piece)
            self._check_complete()
            return self._fold.message()
        finally:
            self._measured.gone()  # it has no effect after the recorded end

    async def events(self, request_id: str) -> AsyncIterator[bytes]:
        """Yield the bytes of the stream. After the first event, an error is the last event.

        Raises:
            HttpError: the turn failed before its first event.
            TimeoutError: the deadline passed before it.
        """
        begun = False
        waiting: asyncio.Future[Any] | None = None
        try:
            while not self._fold.done:
                waiting = waiting or asyncio.ensure_future(_next(self._pieces))
                # No asyncio.timeout: the first event and the others are awaited by different tasks.
                left_s = self._deadline_s - asyncio.get_running_loop().time()
                done, _ = await asyncio.wait({waiting}, timeout=max(0.0, min(PING_S, left_s)))
                if not done and left_s <= PING_S:
                    raise TimeoutError
                if not done:
                    begun = True  # a proxy would close a silent connection, so that the status is sent now
                    yield sse("ping", PING)
                    continue
                piece, waiting = waiting.result(), None
                for event in self._take(piece):
                    begun = True
                    yield sse(event["type"], event)
        except Exception as error:
            mapped = self._failed(error)
            if not begun:
                raise
            logger.warning("a stream of messages broke: %s", mapped.message)
            yield error_event(mapped, request_id)
        finally:
            if waiting is not None:
                waiting.cancel()
                await asyncio.wait({waiting})
            await self._pieces.aclose()  # type: ignore[attr-defined]
            self._measured.gone()

    def _take(self, piece: Any) -> list[dict[str, Any]]:
        if isinstance(piece, HttpError):
            self._measured.over(outcome_of(piece))
            raise in_anthropics_words(piece, self._places)
        events = self._fold.take(piece)
        self._measured.received(self._fold.output_tokens)
        if isinstance(piece, TurnDone):
            self._measured.takes_alone(piece.alone_s)
        if self._fold.done:
            self._measured.over(Outcome.OK)
        return events

    def _check_complete(self) -> None:
        if not self._fold.done:
            error = UpstreamFailed("the replica ended without an answer", retry_after_s=RETRY_AFTER_S)
            self._measured.over(outcome_of(error))
            raise error

    def _failed(self, error: Exception) -> HttpError:
        mapped = self._error_map(error)
        self._measured.over(outcome_of(mapped))
        return mapped


async def _next(pieces: AsyncIterator[Any]) -> Any:
    """Return the next piece.

    Raises:
        UpstreamFailed: there is none.
    """
    try:
        return await anext(pieces)
    except StopAsyncIteration:
        raise UpstreamFailed("the replica ended without an answer", retry_after_s=RETRY_AFTER_S) from None
