"""The routes on responses as an ASGI application, and clients of it: OpenAI's own, and one that goes away."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.api.openai import ErrorBoundary, error_response
from cluster.api.ray_errors import as_http_error
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import HttpError, ToolRefused
from cluster.core.identity import identify
from cluster.core.lineage import LineageIndex
from cluster.core.tools import ToolId, ToolOffer, function_object
from cluster.http.conversations import ConversationRoutes, Conversations
from cluster.http.idempotency import keep_digest
from cluster.http.responses import ResponseRoutes
from cluster.http.runs import Prepare
from cluster.http.stored_responses import StoredResponses
from cluster.runs.runner import ProgramRunner
from cluster.store.conversations import ConversationStore

TENANT = "default"


def registered(name: str) -> ToolOffer:
    """A tool of the operator's."""
    return ToolOffer(name, function_object(name, "a tool", None), here=True, tool=ToolId.of_operator(name))


def served_by(label: str, name: str) -> ToolOffer:
    """A tool of an MCP server that a request brings."""
    function = function_object(f"{label}__{name}", "a tool", None)
    return ToolOffer(f"{label}__{name}", function, here=True, server_tool=name, tool=ToolId.of_request(label, name))


def known(*tools: ToolOffer, seen: list[Any] | None = None) -> Callable[[str, Mapping[str, Any] | None], Any]:
    """A tool runtime that knows these tools; servers are listed only for requests that bring them."""

    async def offers(tenant: str, definitions: Mapping[str, Any] | None) -> Sequence[ToolOffer]:
        if seen is not None:
            seen.append(definitions)
        if definitions and "down" in definitions:
            raise ToolRefused("the MCP server down cannot be reached")
        brought = definitions or {}
        return [tool for tool in tools if tool.server_tool is None or (tool.tool and tool.tool.entry in brought)]

    return offers


def as_sent(body: dict[str, Any]) -> Prepare:
    """A request that names its model and has no images."""

    async def prepare() -> dict[str, Any]:
        return body

    return prepare


NOWHERE = "redis://127.0.0.1:1"


def site(
    runner: ProgramRunner,
    offers: Any = None,
    http: Mapping[str, Any] | None = None,
    redis_url: str = NOWHERE,
    lineage: LineageIndex | None = None,
) -> Starlette:
    """As the ingress has them."""
    config = CaesuraConfig.model_validate({"limits": {"timeout_s": 5.0}, "http": http or {}})

    async def plain(method: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
        assert method == "tokenize"
        return json.dumps({"count": len(json.dumps(body))}).encode()

    store = ConversationStore(redis_url, timeout_s=2.0, retention_s=60.0, tenant_bytes=1 << 20, clock=MonotonicClock())
    conversations = Conversations(store, StoredResponses(runner), lambda: runner.memory.is_full_for_storing)
    lineage = LineageIndex() if lineage is None else lineage
    routes = ResponseRoutes(runner, offers or known(), config, as_http_error, conversations, plain, lineage)

    async def create(request: Request) -> Response:
        body = json.loads(await request.body())
        keep_digest(request, body)
        identified = identify(request.headers, body, TENANT)
        return await routes.create(request, identified.body, identified.identity, as_sent(identified.body))

    async def count(request: Request) -> Response:
        identified = identify(request.headers, json.loads(await request.body()), TENANT)
        return await routes.count_tokens(request, identified.body, identified.identity)

    async def compact(request: Request) -> Response:
        identified = identify(request.headers, json.loads(await request.body()), TENANT)
        return await routes.compact(request, identified.body, identified.identity)

    async def show(request: Request) -> Response:
        query = request.query_params
        after = query.get("starting_after")
        return await routes.show(
            TENANT,
            request.path_params["id"],
            stream=query.get("stream") == "true",
            starting_after=None if after is None else int(after),
        )

    async def cancel(request: Request) -> Response:
        return await routes.cancel(TENANT, request.path_params["id"])

    async def delete(request: Request) -> Response:
        return await routes.delete(TENANT, request.path_params["id"])

    async def items(request: Request) -> Response:
        query = request.query_params
        order: Any = query.get("order", "desc")
        limit = int(query.get("limit", 20))
        return await routes.input_items(
            TENANT, request.path_params["id"], order=order, limit=limit, after=query.get("after")
        )

    async def tell(_: Request, error: Exception) -> Response:
        return error_response(as_http_error(error))

    return Starlette(
        routes=[
            Route("/v1/responses", create, methods=["POST"]),
            Route("/v1/responses/input_tokens", count, methods=["POST"]),
            Route("/v1/responses/compact", compact, methods=["POST"]),
            Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", items),
            Route("/v1/responses/{id}", show),
            Route("/v1/responses/{id}", delete, methods=["DELETE"]),
            *_conversation_routes(ConversationRoutes(conversations)),
        ],
        middleware=[
            Middleware(
                ErrorBoundary,
                error_map=as_http_error,
                max_header_bytes=1 << 16,
                max_in_flight=64,
                limited_paths=frozenset(),
            )
        ],
        exception_handlers={HttpError: tell, HTTPException: tell},
    )


def _conversation_routes(routes: ConversationRoutes) -> list[Route]:
    async def body(request: Request) -> Any:
        return json.loads(await request.body())

    async def create(request: Request) -> Response:
        return await routes.create(TENANT, await body(request))

    async def one(request: Request) -> Response:
        name = request.path_params["id"]
        match request.method:
            case "DELETE":
                return await routes.delete(TENANT, name)
            case "POST":
                return await routes.update(TENANT, name, await body(request))
        return await routes.show(TENANT, name)

    async def items(request: Request) -> Response:
        name, query = request.path_params["id"], request.query_params
        if request.method == "POST":
            return await routes.add_items(TENANT, name, await body(request))
        order: Any = query.get("order", "desc")
        return await routes.items(
            TENANT, name, order=order, limit=int(query.get("limit", 20)), after=query.get("after")
        )

    async def item(request: Request) -> Response:
        act = routes.delete_item if request.method == "DELETE" else routes.item
        return await act(TENANT, request.path_params["id"], request.path_params["item"])

    return [
        Route("/v1/conversations", create, methods=["POST"]),
        Route("/v1/conversations/{id}", one, methods=["GET", "POST", "DELETE"]),
        Route("/v1/conversations/{id}/items", items, methods=["GET", "POST"]),
        Route("/v1/conversations/{id}/items/{item}", item, methods=["GET", "DELETE"]),
    ]


def openai(app: Starlette) -> AsyncOpenAI:
    """OpenAI's client of it. Streams come whole, when they have ended."""
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return AsyncOpenAI(api_key="none", base_url="http://site/v1", http_client=http, max_retries=0)


class Visitor:
    """A client that reads as it comes, and may go away."""

    def __init__(self, app: Starlette, body: Mapping[str, Any], path: str = "/v1/responses", **headers: str) -> None:
        self.sent: list[dict[str, Any]] = []
        self._gone = asyncio.Event()
        self._asked = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        names = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(name.encode(), text.encode()) for name, text in names.items()],
            "client": ("client", 1),
            "server": ("site", 80),
        }
        self.answered = asyncio.create_task(app(scope, self._receive, self._send))

    @property
    def text(self) -> str:
        """All that was sent."""
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    def go(self) -> None:
        """Close the connection."""
        self._gone.set()

    async def _receive(self) -> Any:
        if self._asked:
            return self._asked.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
