"""Chat completions whose tools the cluster runs: `/v1/chat/completions` with tools that are marked `server_side`."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.api.openai import BATCH_LINE, SSE_DONE, ErrorMap, error_event
from cluster.api.sse import ClientGone, unless_gone
from cluster.config.model_features import seeing_models
from cluster.config.schema import CaesuraConfig
from cluster.core.lineage import LineageIndex
from cluster.core.program import ProgramIdentity
from cluster.http.attributed_answers import program_headers
from cluster.http.attributed_run import attributed_run
from cluster.http.body import NO_BODY_STATUS
from cluster.http.idempotency import read_idempotency
from cluster.http.runs import Abandon, EventStream, Offers, Prepare, limits
from cluster.runs.chat_api import ChatFold, chat_spec, deltas
from cluster.runs.events import Generated
from cluster.runs.runner import ProgramRunner
from cluster.store.runs.records import Idempotency

ID_PREFIX = "chatcmpl-"


class ChatPrograms:
    """The handler of a chat completion that is a complete program.

    Args:
        runner: runs the programs.
        offers: lists the tools.
        config: the whole configuration.
        error_map: maps every exception to an HTTP error.
        lineage: finds the programs of requests without an id.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        offers: Offers,
        config: CaesuraConfig,
        error_map: ErrorMap,
        lineage: LineageIndex,
    ) -> None:
        self._runner = runner
        self._offers = offers
        self._config = config
        self._seeing = seeing_models(config)
        self._error_map = error_map
        self._abandon = Abandon(runner)
        self._lineage = lineage

    async def create(
        self,
        http: Request,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        prepare: Prepare,
        arrived_s: float | None = None,
    ) -> Response:
        """Run the program, and return its completion, or a stream of chunks if the body asks for it.

        Args:
            http: the request, whose body has been read.
            body: the body as the client has sent it, without the fields that only identify the program.
            identity: the request's identity.
            prepare: returns the body for replicas. It is called for a new program.
            arrived_s: time of the arrival by the runner's clock; None: now.

        Raises:
            HttpError: the request is invalid, or the program failed.
        """
        idempotency = read_idempotency(http, "chat")
        shown: Mapping[str, str] = {}
        if (run_id := await self._runner.repeated(identity.tenant, idempotency)) is None:
            of_batch = BATCH_LINE in http.scope
            body_for_replicas = await prepare()
            run_id, shown = await self._start(body_for_replicas, identity, idempotency, arrived_s, of_batch=of_batch)
        stays = idempotency is not None
        if body.get("stream"):
            options = body.get("stream_options")
            usage = isinstance(options, dict) and bool(options.get("include_usage"))
            pieces = self._pieces(run_id, usage, stays=stays)
            return EventStream(pieces, None if stays else lambda: self._abandon(run_id), shown)
        try:
            return JSONResponse(await unless_gone(http.receive, self._completion(run_id)), headers=shown)
        except ClientGone:
            if not stays:
                self._abandon(run_id)
            return Response(status_code=NO_BODY_STATUS)
        except asyncio.CancelledError:
            if not stays:
                self._abandon(run_id)
            raise

    async def _start(
        self,
        body: Mapping[str, Any],
        identity: ProgramIdentity,
        idempotency: Idempotency | None,
        arrived_s: float | None,
        *,
        of_batch: bool,
    ) -> tuple[str, Mapping[str, str]]:
        """Return the id of the request's run, and headers of its answer."""
        registered = {one.name: one for one in await self._offers(identity.tenant, None)}
        with attributed_run(self._lineage, body, identity, ID_PREFIX) as turn:
            spec = chat_spec(
                body,
                run_id=turn.run_id,
                created_s=time(),
                identity=turn.identity,
                model=body["model"],
                limits=limits(self._config),
                registered=registered,
                sees=body["model"] in self._seeing,
            )
            started = await self._runner.start(
                spec, idempotency=idempotency, arrived_s=arrived_s, on_end=turn.run_ended, is_repeated=of_batch
            )
            turn.is_run = started.new
        return started.run_id, program_headers(spec.program) if started.new else {}

    async def _completion(self, run_id: str) -> dict[str, Any]:
        fold = ChatFold()
        async with aclosing(self._runner.follow(run_id)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                for event in batch:
                    if not isinstance(event, Generated):
                        fold.feed(event)
        return fold.completion()

    async def _pieces(self, run_id: str, usage: bool, *, stays: bool) -> AsyncIterator[bytes]:
        """Yield the bytes of a stream of chunks. If an exception breaks the stream, its last event is an error."""
        fold = ChatFold()
        try:
            async with aclosing(self._runner.follow(run_id)) as batches:  # type: ignore[type-var]
                async for chunk in deltas(fold, batches):
                    yield _sse(chunk)
            if usage:
                yield _sse(fold.usage_chunk())
            yield SSE_DONE
        except Exception as error:  # noqa: BLE001 - mapped, and sent to the client; the status is sent
            if fold.ended is None and not stays:
                self._abandon(run_id)
            yield error_event(self._error_map(error))


def _sse(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
