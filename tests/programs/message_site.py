"""The routes on messages as an ASGI application, and Anthropic's own client of it."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2
from anthropic import AsyncAnthropic
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.api.anthropic.errors import response_of
from cluster.api.ray_errors import as_http_error
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import HttpError
from cluster.core.lineage import LineageIndex
from cluster.http.message_programs import MessagePrograms
from cluster.http.messages import MessageRoutes
from cluster.http.requests import TurnReader
from cluster.observing.slo_tracker import SloTracker
from cluster.runs.runner import ProgramRunner

CLOCK = {"kind": "http", "url": "https://clock.example/", "description": "a clock"}
MODEL = CaesuraConfig().model.id


class NoTurns:
    """Replicas that run no turn beside those of runs, and count the characters of a prompt."""

    def turn(self, *arguments: Any) -> AsyncIterator[Any]:
        raise AssertionError("this request is a run")

    async def plain(self, method: str, body: dict[str, Any], headers: Mapping[str, str]) -> bytes:
        assert method == "tokenize"
        return json.dumps({"count": len(body.get("tools", ()))}).encode()


def site(runner: ProgramRunner, offers: Any, **limits: Any) -> Starlette:
    """As the ingress has them. ``limits`` are those of programs."""
    fields = {"limits": {"timeout_s": 5.0}, "tools": {"defined": {"clock": CLOCK}}, "programs": limits}
    config = CaesuraConfig.model_validate(fields)
    tracker = SloTracker(config, MonotonicClock())
    programs = MessagePrograms(runner, offers, config)
    routes = MessageRoutes(NoTurns(), programs, TurnReader(config), tracker, LineageIndex(), 20.0, as_http_error)  # type: ignore[arg-type]

    async def tell(request: Request, error: Exception) -> Response:
        return response_of(request.scope, as_http_error(error))

    return Starlette(
        routes=[
            Route("/v1/messages", routes.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", routes.count_tokens, methods=["POST"]),
        ],
        exception_handlers={HttpError: tell, HTTPException: tell},
    )


def claude(app: Starlette) -> AsyncAnthropic:
    """Anthropic's client of it. Streams come whole, when they have ended."""
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    return AsyncAnthropic(api_key="none", base_url="http://site", http_client=http, max_retries=0)
