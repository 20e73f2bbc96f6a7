"""The direct data plane: a replica's own HTTP surface. The same bounds, identities, errors and bodies as the ingress's.

What needs more than one replica, or the loop of turns and tools, is not here; it is refused with the name of the
configuration's key that would bring it.

The router places a turn but does not see its answer: the replica reports the turn's end to it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from time import time
from typing import Any, Self

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from cluster.api.openai import RETRY_AFTER_S, TOKEN_PATHS, TURN_PATHS, ErrorBoundary, ErrorMap, error_response, no_model
from cluster.api.sse import Answers
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest, HttpError, Overloaded, ProgramMoved
from cluster.core.program import ProgramIdentity
from cluster.core.stream import StreamChunk
from cluster.core.turn import ID_BYTES
from cluster.direct.note import RouterNote
from cluster.direct.turn_reports import SCOPE_KEY, ReportedTurns, TurnReports
from cluster.http.requests import (
    TurnReader,
    answered,
    model_card,
    passed_headers,
    version_of,
    versions,
)
from cluster.observing.slo_tracker import CountedAnswers, MeasuredAnswers, SloTracker
from cluster.observing.trace_context import child_of_program
from cluster.runs.chat_api import asks_for_loop

Pieces = AsyncGenerator[bytes | StreamChunk[bytes] | HttpError]
Answer = Callable[[str, dict[str, Any], dict[str, str], str | None, str | None, int | None], Pieces]
"""`replicas.server.ProgramServer.answer`."""


Relay = Callable[[str, dict[str, Any], dict[str, str], str], Answers]
"""Has a turn (method, body, headers, encoded identity) served where its program lives. For a program that HAProxy could
not show the router, since another header than `x-session-id` names it; and for one that has moved meanwhile."""

LIMITED_PATHS = frozenset({*TURN_PATHS.values(), *TOKEN_PATHS.values()})
ELSEWHERE = ("/v1/responses", "/v1/programs", "/v1/tools", "/admin")
"""What only the ingress serves, with all that is below."""

METHODS = ["GET", "POST", "PUT", "DELETE"]
READY_TIMEOUT_S = 5.0
EVENT = b"data: {"


def http_app(
    config: CaesuraConfig,
    answer: Answer,
    relay: Relay,
    ready: Callable[[], Awaitable[Any]],
    reports: TurnReports,
    error_map: ErrorMap,
    tracker: SloTracker,
) -> FastAPI:
    """The application.

    Args:
        config: of the replica.
        answer: serves a request here.
        relay: has it served where its program lives.
        ready: raises what keeps the model from answering.
        reports: the router's turns.
        error_map: what an exception means to a client; total.
        tracker: records the turns that clients send here.
    """

    async def refuse(_: Request, error: Exception) -> Response:
        return error_response(error_map(error))

    app = FastAPI(
        title="Caesura",
        version=version_of("caesura"),
        middleware=[
            Middleware(ReportedTurns, reports=reports),
            Middleware(
                ErrorBoundary,
                error_map=error_map,
                max_header_bytes=config.http.max_header_bytes,
                max_in_flight=config.http.max_concurrent_requests,
                limited_paths=LIMITED_PATHS,
                on_overload=tracker.record_rejection,
            ),
        ],
        exception_handlers={HttpError: refuse, HTTPException: refuse, RequestValidationError: refuse},
    )
    routes = ReplicaRoutes(config, answer, relay, ready, error_map, tracker)
    app.post(TURN_PATHS["chat"])(routes.chat)
    app.post(TURN_PATHS["completions"])(routes.completions)
    app.post(TOKEN_PATHS["tokenize"])(routes.tokenize)
    app.post(TOKEN_PATHS["detokenize"])(routes.detokenize)
    app.get("/v1/models")(routes.models)
    app.get("/v1/models/{model_id:path}")(routes.model)
    app.get("/health")(routes.health)
    app.get("/ready")(routes.ready)
    app.get("/version")(routes.version)
    for path in ELSEWHERE:
        app.api_route(path, methods=METHODS, include_in_schema=False)(routes.elsewhere)
        app.api_route(path + "/{rest:path}", methods=METHODS, include_in_schema=False)(routes.elsewhere)
    return app


class ReplicaRoutes:
    """The handlers. /docs shows the docstring of each route."""

    def __init__(
        self,
        config: CaesuraConfig,
        answer: Answer,
        relay: Relay,
        ready: Callable[[], Awaitable[Any]],
        error_map: ErrorMap,
        tracker: SloTracker,
    ) -> None:
        self._config = config
        self._answer = answer
        self._relay = relay
        self._check_ready = ready
        self._error_map = error_map
        self._tracker = tracker
        self._reader = TurnReader(config)
        self._started = int(time())
        self._ending: set[asyncio.Task[None]] = set()

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions, streaming or not, with tools that the client runs."""
        return await self._turn(request, "chat")

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions; the prompt may be token ids, and `return_token_ids` gives those generated."""
        return await self._turn(request, "completions")

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt, or of messages in the model's chat template."""
        return await self._call(request, "tokenize", await self._reader.body(request), None, None, None)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        return await self._call(request, "detokenize", await self._reader.body(request), None, None, None)

    async def models(self) -> Response:
        """OpenAI's list of models, with the one model of this replica."""
        return JSONResponse({"object": "list", "data": [model_card(self._config.model.id, self._started)]})

    async def model(self, model_id: str) -> Response:
        """One model."""
        if model_id != self._config.model.id:
            raise no_model(model_id)
        return JSONResponse(model_card(model_id, self._started))

    async def health(self) -> Response:
        """Alive: a replica's process answers. Its engine is not asked."""
        return JSONResponse({"status": "alive"})

    async def ready(self) -> Response:
        """The model answers: 200, else 503 with Retry-After."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._check_ready()
        except Exception as error:  # a probe: whatever keeps the model from answering is its answer
            reason = self._error_map(error).message
            raise Overloaded(f"the model does not answer: {reason}", retry_after_s=RETRY_AFTER_S) from error
        return JSONResponse({"status": "ready", "model": self._config.model.id})

    async def version(self) -> Response:
        """Versions of what serves."""
        return versions()

    async def elsewhere(self, request: Request) -> Response:
        """What only the ingress serves."""
        raise needs_ingress(request.url.path)

    async def _turn(self, request: Request, method: str) -> Response:
        note: RouterNote = request.scope[SCOPE_KEY]
        if note.refusal is not None:
            self._tracker.record_rejection(request.headers)
            raise note.refusal.as_error()
        arrived_s = self._tracker.arrival_s(request.headers)
        body, identity = await self._reader.identified(request)
        if method == "chat" and asks_for_loop(body):
            raise needs_ingress("a tool that the server runs", param="tools")
        identity = child_of_program(identity, self._config.tracing)
        headers = passed_headers(request.headers)
        if identity.key is None or identity.key == note.key:
            pieces = self._answer(method, body, headers, identity.key, identity.encode(), note.epoch)
            try:
                return await self._measured(LocalAnswers(pieces, self._ending), identity, arrived_s)
            except ProgramMoved:
                pass
        relayed = RelayedAnswers(self._relay(method, body, headers, identity.encode()))
        return await self._measured(relayed, identity, arrived_s)

    async def _call(
        self,
        request: Request,
        method: str,
        body: dict[str, Any],
        key: str | None,
        identity: str | None,
        epoch: int | None,
    ) -> Response:
        pieces = self._answer(method, body, passed_headers(request.headers), key, identity, epoch)
        answers = LocalAnswers(pieces, self._ending)
        return await answered(answers, self._config.http.request_timeout_s, self._error_map)

    async def _measured(self, answers: CountedAnswers, identity: ProgramIdentity, arrived_s: float) -> Response:
        turn = self._tracker.begin(self._config.model.id, identity, arrived_s)
        measured = MeasuredAnswers(answers, turn, self._error_map)
        return await answered(measured, self._config.http.request_timeout_s, self._error_map)


class LocalAnswers:
    """What this process answers, piece by piece, as `cluster.api.sse.Answers`.

    Args:
        pieces: of the answer.
        ending: keeps the tasks that end such an answer, for the event loop itself keeps none.
    """

    def __init__(self, pieces: Pieces, ending: set[asyncio.Task[None]]) -> None:
        self._pieces = pieces
        self._ending = ending
        self.output_tokens = 0
        """Of a stream, that have come."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | HttpError:
        # How far a stream has come is for whoever could go on with it; here, that ends with this process.
        piece = await anext(self._pieces)
        if not isinstance(piece, StreamChunk):
            return piece
        self.output_tokens += len(piece.progress.token_ids) // ID_BYTES
        return piece.data

    def cancel(self) -> None:
        """Stop the work on it; harmless after the end."""
        task = asyncio.ensure_future(self._pieces.aclose())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class RelayedAnswers:
    """What another replica answers, by way of the router, which passes on no more than the client is sent."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.output_tokens = 0
        """Of a stream, as many as events have come: about one a token."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | HttpError:
        piece = await anext(self._answers)
        if not isinstance(piece, HttpError):
            self.output_tokens += piece.count(EVENT)
        return piece

    def cancel(self) -> None:
        """Stop the work on it; harmless after the end."""
        self._answers.cancel()


def needs_ingress(what: str, param: str | None = None) -> BadRequest:
    """501: the other data plane has it."""
    return BadRequest(
        f"{what} is not served in the direct data plane; it needs `http.data_plane: ingress`",
        status=501,
        param=param,
        code="needs_ingress",
    )
