"""The direct data plane: which replica gets a request that HAProxy holds. The request itself does not come by here.

HAProxy, which Ray Serve runs, asks `POST /internal/route` of this deployment. Then it forwards the client's connection
to the replica's own HTTP port (`cluster.direct.http_app`), so that no byte of an answer passes through another process.
This replaces ray.llm's LLMRouter of Ray 2.60.0, which knows a program only by `x-session-id` and does not place
programs (tests/contracts/test_direct_contracts.py holds the private names).

HAProxy sends the request's body and, of its headers, `x-session-id` and `x-request-id`; not the path. It accepts a
replica, and headers to add. Any other status than 200 becomes a 503 of its own, in plain text.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response

from cluster.api.openai import RETRY_AFTER_S, error_response
from cluster.api.ray_errors import as_http_error
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import HttpError, Overloaded, ReplicaGone, UpstreamFailed
from cluster.core.identity import seen_turn
from cluster.core.program import ProgramIdentity
from cluster.core.supervision import SupervisedTasks
from cluster.direct.note import NOTE, RefusalNote, RouterNote
from cluster.direct.open_turns import OpenTurns
from cluster.dispatch.placed_calls import MAX_HOPS, turn_request
from cluster.dispatch.placement_service import PlacementService
from cluster.dispatch.predictions import NullPredictions
from cluster.dispatch.replica_client import ReplicaClient
from cluster.proxy.middleware import ROUTE
from router.decisions import TurnRequest
from router.placement import Placement

logger = logging.getLogger("ray.serve")

SWEEP_S = 5.0
"""How often turns are looked for of which nobody knows any more."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A replica's own HTTP port."""

    host: str
    port: int
    replica: str
    """Unique id."""
    full_id: str
    """As HAProxy knows it."""


def router_class() -> type[Any]:
    """The deployment class of the router."""
    app = FastAPI(title="Caesura's router", docs_url=None, redoc_url=None, openapi_url=None)
    route = app.post(ROUTE)(DirectRouter.route)
    made: type[Any] = serve.ingress(app)(type("DirectRouter", (DirectRouter,), {"route": route}))
    return made


class DirectRouter:
    """Answers HAProxy's question. One of it runs beside each HAProxy."""

    async def __init__(self, server: DeploymentHandle, config: CaesuraConfig) -> None:  # type: ignore[misc]
        clock, name = MonotonicClock(), f"direct-{uuid4().hex}"
        self._server = server
        self._placing = PlacementService(server, config, clock)
        placer, quarantine = self._placing.placer, self._placing.quarantine
        self._calls = ReplicaClient(server, placer, quarantine, config.limits.timeout_s, NullPredictions())
        self._turns = OpenTurns(clock, name)
        self._placing.open()
        self._tasks = SupervisedTasks("direct router", clock)
        self._tasks.start("sweep", self._sweep_for_ever)

    async def __del__(self) -> None:
        """Called by Ray Serve when this process is to end."""
        async with AsyncExitStack() as stack:
            if hasattr(self, "_placing"):
                stack.push_async_callback(self._placing.aclose)
            if hasattr(self, "_tasks"):
                stack.push_async_callback(self._tasks.aclose)

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces this process if it raises.

        Raises:
            RuntimeError: a background loop keeps failing.
        """
        if failed := (*self._tasks.failed, *self._placing.failed):
            raise RuntimeError(f"background loops keep failing: {', '.join(failed)}")

    async def route(self, request: Request) -> Response:
        """The replica for a request, and the note that the replica gets with it."""
        identity, body = seen_turn(request.headers, await request.body())
        try:
            try:
                placement, endpoint = await self._placed(turn_request(identity, body))
            except Overloaded as error:
                # HAProxy could only say 503. The refusal goes to the client by way of a replica, if there is one.
                endpoint, note = await self._endpoint(""), RouterNote(refusal=RefusalNote.of(error))
            else:
                note = RouterNote(identity.key, placement.epoch, self._turns.opened(placement, endpoint.replica))
        except Exception as error:  # noqa: BLE001 - the boundary: HAProxy makes a 503 of it
            logger.warning("no replica for a request: %s", error)
            return error_response(as_http_error(error))
        return JSONResponse(
            {
                "host": endpoint.host,
                "port": endpoint.port,
                "replica_id": endpoint.full_id,
                "request_headers": {NOTE: note.encode()},
            }
        )

    async def _placed(self, request: TurnRequest) -> tuple[Placement, Endpoint]:
        for _ in range(MAX_HOPS):
            placement = await self._placing.placer.place(request)
            try:
                return placement, await self._endpoint(placement.session)
            except ReplicaGone:
                placement.end()
                request = replace(request, avoid=request.avoid | {placement.session})
            except BaseException:
                placement.end()
                raise
        raise UpstreamFailed("every replica that was chosen is gone", retry_after_s=RETRY_AFTER_S)

    async def _endpoint(self, session: str) -> Endpoint:
        # Nothing is reserved: the request does not come through Serve, so that its count of them means nothing.
        async with self._server.options(session_id=session).choose_replica(_reserve=False) as selection:
            chosen = selection._replica
            if chosen.backend_http_endpoint is None:
                raise UpstreamFailed("the replica does not listen yet", retry_after_s=RETRY_AFTER_S)
            host, port = chosen.backend_http_endpoint
            return Endpoint(host, port, selection.replica_id, chosen.replica_id.to_full_id_str())

    # --- called by name, from outside ---------------------------------------------------------------------------------

    async def answers(
        self, method: str, body: dict[str, Any], headers: dict[str, str], identity: str
    ) -> AsyncIterator[bytes | HttpError]:
        """A turn whose program HAProxy could not show, or that has moved since: served where it lives, by handle."""
        answers = self._calls.answers(method, body, headers, ProgramIdentity.decode(identity))
        try:
            async for piece in answers:
                yield piece
        finally:
            answers.cancel()

    async def turns(self, replica: str, ended: Sequence[tuple[str, bool]], there: Iterable[str] | None) -> None:
        """What a replica says of its turns; see `cluster.direct.open_turns.OpenTurns.told`."""
        self._turns.told(replica, ended, there)

    async def view(self) -> dict[str, Any]:
        """For operators: what `GET /admin/router` tells in the other data plane, and the turns under way."""
        return {**self._placing.view(), "open": len(self._turns)}

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._turns.sweep()
