"""The only place that reads vLLM's request models and errors, and maps them to those of the cluster.

The ingress does not import it, so that it starts without importing vLLM.
"""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import pydantic
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.api.structured_output_limits import CODE, TO_COMPILE
from cluster.api.validation import validated
from cluster.core.errors import CONTEXT_LENGTH_EXCEEDED, BadRequest, HttpError, Overloaded, ReplicaLost
from cluster.core.program import WIRE_KEY
from replicas.token_requests import token_request

ERROR_EVENT = b'data: {"error"'
RETRY_AFTER_S = 1
_TOO_LONG = ("maximum context length", "maximum model length")
"""Parts of vLLM's messages about a prompt that does not fit into the context window."""
OVERLOAD_STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def parse_request(method: str, body: Mapping[str, Any]) -> Any:
    """Parse the body of a call of ``method`` as vLLM's model.

    ``method``: ``chat``, ``completions``, ``generate``, ``tokenize`` or ``detokenize``.

    Raises:
        BadRequest: vLLM's models reject it, or the method is unknown. ``param`` is the path of the wrong field.
    """
    try:
        match method:
            case "chat":
                if not isinstance(body.get("messages"), list):
                    raise BadRequest("messages must be a list", param="messages")
                return _read_through(validated(ChatCompletionRequest, body))
            case "completions":
                return validated(CompletionRequest, body)
            case "generate":
                return token_request(body)
            case "tokenize" if "messages" in body:
                return validated(TokenizeChatRequest, body)
            case "tokenize":
                return validated(TokenizeCompletionRequest, body)
            case "detokenize":
                return validated(DetokenizeRequest, body)
    except VLLMClientError as error:
        raise as_refusal(error) from error
    except (TypeError, AttributeError, KeyError) as error:
        # vLLM's validators look into the raw body before its types have been checked.
        raise BadRequest(f"a field of the request has the wrong type: {error}") from error
    raise BadRequest(f"unknown method {method!r}", status=HTTPStatus.NOT_FOUND)


def _read_through(request: ChatCompletionRequest) -> ChatCompletionRequest:
    """Validate those parts of the messages that pydantic validates only when they are read. Return the request."""
    for number, message in enumerate(request.messages):
        for field in ("content", "tool_calls"):
            value = message.get(field)
            if value is not None and not isinstance(value, str):
                try:
                    message[field] = list(value)
                except pydantic.ValidationError as error:
                    path = f"messages.{number}.{field}"
                    raise BadRequest(f"{path}: {error.errors(include_url=False)[0]['msg']}", param=path) from error
    return request


def attach_program(request: Any, headers: Mapping[str, str], key: str | None, identity: str | None) -> None:
    """Attach the program's identity to a request for the scheduler. Do nothing without an identity."""
    if identity is not None:
        request.request_id = headers["x-request-id"]
        request.session_id = key
        request.vllm_xargs = {**(request.vllm_xargs or {}), WIRE_KEY: identity}


def as_refusal(error: Exception) -> HttpError:
    """Return the HTTP error that an exception of vLLM's request handling means.

    An unknown exception gives a plain 500.
    """
    match error:
        case HttpError():
            return error
        case EngineDeadError():
            return ReplicaLost("the replica's engine died; it is being replaced", retry_after_s=RETRY_AFTER_S)
        case VLLMClientError():
            # str() of it quotes the whole value at fault, which may be the prompt.
            message = str(error.args[0]) if error.args else "the request is not valid"
            return BadRequest(message, param=getattr(error, "parameter", None), code=_code(message))
    return of_response(create_error_response(error))


def of_response(answer: ErrorResponse) -> HttpError:
    """Convert vLLM's error body to an HTTP error."""
    refusal = answer.error
    if refusal.code in OVERLOAD_STATUSES:
        return Overloaded(refusal.message, status=refusal.code, retry_after_s=RETRY_AFTER_S)
    if refusal.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return HttpError("internal error", status=refusal.code, code="internal_error")
    return BadRequest(refusal.message, status=refusal.code, param=refusal.param, code=_code(refusal.message))


def _code(message: str) -> str | None:
    """Return the code that clients know, for example to shorten their history; None: the error has none."""
    if TO_COMPILE in message:
        return CODE
    return CONTEXT_LENGTH_EXCEEDED if any(part in message for part in _TOO_LONG) else None


def of_first_event(event: bytes) -> HttpError | None:
    """Return vLLM's error if a stream begins with it, else None. Its status can still be sent, as nothing was yet."""
    if not event.startswith(ERROR_EVENT):
        return None
    answer = json.loads(event.partition(b"\n\n")[0].removeprefix(b"data: "))
    return of_response(ErrorResponse.model_validate(answer))


def naming_field(refusal: HttpError, body: Mapping[str, Any]) -> HttpError:
    """Set ``param`` of an error where vLLM's message only begins with the field's name. Return the error."""
    word = refusal.message.partition(" ")[0].strip("`'\"")
    if refusal.param is None and word in body:
        refusal.param = word
    return refusal
