"""The HTTP application: the middleware of every request, and the paths of the routes."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response

from cluster.api.anthropic.errors import response_of
from cluster.api.openai import (
    BATCHES,
    CONVERSATIONS,
    FILES,
    LIMITED_PATHS,
    MESSAGE_PATHS,
    PREFILL,
    RESPONSE_COMPACTION,
    RESPONSE_TOKENS,
    RESPONSES,
    TOKEN_PATHS,
    TURN_PATHS,
    ErrorBoundary,
)
from cluster.api.ray_errors import as_http_error
from cluster.auth.middleware import AuthMiddleware
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import HttpError
from cluster.http.browsers import cors, foreign_pages_rejected
from cluster.http.requests import version_of
from cluster.observing.http_metrics import HttpMetrics
from cluster.observing.meter import Meter
from cluster.observing.slo_tracker import record_rejection

Route = Callable[[FastAPI], Callable[[Any], Any]]


def application(config: CaesuraConfig, handler: Callable[[str], Any], host: str | None = None) -> FastAPI:
    """Make the application with the routes and the middleware that ``config`` needs.

    Args:
        config: the configuration.
        handler: returns the handler of a route by its name.
        host: the address that its server listens on; None: a proxy listens. The server itself answers to web pages of
            other origins (`cluster.proxy.middleware.guarded`), so that they can read its rejections too.
    """
    app = FastAPI(
        title="Caesura",
        version=version_of("caesura"),
        middleware=[
            *(cors(config.http.cors_origins) if host is None else []),
            Middleware(
                HttpMetrics,
                meter=Meter(enabled=config.metrics.enabled),
                clock=MonotonicClock(),
                paths=LIMITED_PATHS,
            ),
            Middleware(
                ErrorBoundary,
                error_map=as_http_error,
                max_header_bytes=config.http.max_header_bytes,
                max_in_flight=config.http.max_concurrent_requests,
                limited_paths=LIMITED_PATHS,
                on_overload=record_rejection,
                form=response_of,
            ),
            *foreign_pages_rejected(config, host),
            Middleware(AuthMiddleware, config=config, limited_paths=LIMITED_PATHS, on_rejection=record_rejection),
        ],
        exception_handlers={
            HttpError: _error_response,
            HTTPException: _error_response,
            RequestValidationError: _error_response,
        },
    )
    endpoints: dict[str, Route] = {
        "chat": lambda app: app.post(TURN_PATHS["chat"]),
        "prefill": lambda app: app.post(PREFILL),
        "completions": lambda app: app.post(TURN_PATHS["completions"]),
        "generate": lambda app: app.post(TURN_PATHS["generate"]),
        "tokenize": lambda app: app.post(TOKEN_PATHS["tokenize"]),
        "detokenize": lambda app: app.post(TOKEN_PATHS["detokenize"]),
        "models": lambda app: app.get("/v1/models"),
        "model": lambda app: app.get("/v1/models/{model_id:path}"),
        "create_message": lambda app: app.post(MESSAGE_PATHS["create_message"]),
        "count_tokens": lambda app: app.post(MESSAGE_PATHS["count_tokens"]),
        "create_response": lambda app: app.post(RESPONSES),
        "count_response_tokens": lambda app: app.post(RESPONSE_TOKENS),
        "compact_response": lambda app: app.post(RESPONSE_COMPACTION),
        "response": lambda app: app.get(RESPONSES + "/{response_id}"),
        "cancel_response": lambda app: app.post(RESPONSES + "/{response_id}/cancel"),
        "delete_response": lambda app: app.delete(RESPONSES + "/{response_id}"),
        "input_items": lambda app: app.get(RESPONSES + "/{response_id}/input_items"),
        "create_conversation": lambda app: app.post(CONVERSATIONS),
        "conversation": lambda app: app.get(CONVERSATIONS + "/{conversation_id}"),
        "update_conversation": lambda app: app.post(CONVERSATIONS + "/{conversation_id}"),
        "delete_conversation": lambda app: app.delete(CONVERSATIONS + "/{conversation_id}"),
        "add_conversation_items": lambda app: app.post(CONVERSATIONS + "/{conversation_id}/items"),
        "conversation_items": lambda app: app.get(CONVERSATIONS + "/{conversation_id}/items"),
        "conversation_item": lambda app: app.get(CONVERSATIONS + "/{conversation_id}/items/{item_id}"),
        "delete_conversation_item": lambda app: app.delete(CONVERSATIONS + "/{conversation_id}/items/{item_id}"),
        "create_file": lambda app: app.post(FILES),
        "files": lambda app: app.get(FILES),
        "file": lambda app: app.get(FILES + "/{file_id}"),
        "delete_file": lambda app: app.delete(FILES + "/{file_id}"),
        "file_content": lambda app: app.get(FILES + "/{file_id}/content"),
        "create_batch": lambda app: app.post(BATCHES),
        "batches": lambda app: app.get(BATCHES),
        "batch": lambda app: app.get(BATCHES + "/{batch_id}"),
        "cancel_batch": lambda app: app.post(BATCHES + "/{batch_id}/cancel"),
        "programs": lambda app: app.get("/v1/programs"),
        "cancel_program": lambda app: app.post("/v1/programs/{program_id:path}/cancel"),
        "token_records": lambda app: app.get("/v1/records"),
        "program_tokens": lambda app: app.get("/v1/programs/{program_id:path}/tokens"),
        "delete_program_tokens": lambda app: app.delete("/v1/programs/{program_id:path}/tokens"),
        "program": lambda app: app.get("/v1/programs/{program_id:path}"),
        "tools": lambda app: app.get("/v1/tools"),
        "metrics": lambda app: app.get("/metrics"),
        "health": lambda app: app.get("/health"),
        "ready": lambda app: app.get("/ready"),
        "version": lambda app: app.get("/version"),
    }
    if config.http.admin:
        endpoints |= {
            "policy": lambda app: app.get("/admin/policy"),
            "set_policy": lambda app: app.put("/admin/policy"),
            "reset": lambda app: app.post("/admin/reset"),
            "statistics": lambda app: app.get("/admin/statistics"),
            "drain": lambda app: app.post("/admin/drain"),
            "router": lambda app: app.get("/admin/router"),
            "usage": lambda app: app.get("/admin/usage"),
            "predictor": lambda app: app.get("/admin/predictor"),
            "weights": lambda app: app.get("/admin/weights"),
            "update_weights": lambda app: app.post("/admin/weights"),
            "pause": lambda app: app.post("/admin/pause"),
            "resume": lambda app: app.post("/admin/resume"),
        }
    for name, route in endpoints.items():
        route(app)(handler(name))
    return app


async def _error_response(request: Request, error: Exception) -> Response:
    return response_of(request.scope, as_http_error(error))
