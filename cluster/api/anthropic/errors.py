"""Anthropic's error form, `{"type": "error", "error": {"type", "message"}, "request_id"}`, as a response and an event.

The error object also has `param` and `code` where they are known, as OpenAI's form has.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from cluster.api.openai import (
    MAX_MESSAGE_LENGTH,
    MESSAGE_PATHS,
    REQUEST_ID,
    clean_request_id,
    error_response,
    retry_headers,
)
from cluster.core.errors import CONTEXT_LENGTH_EXCEEDED, BadRequest, HttpError

MESSAGES = MESSAGE_PATHS["create_message"]

VERSION_HEADER = "anthropic-version"
BETA_HEADER = "anthropic-beta"
ANTHROPIC_REQUEST_ID = "request-id"
"""The header in which Anthropic's clients look for the id of a request."""


FIELDS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
}
"""Fields of a Messages request by the field of the chat completion that is made of it."""

_SCHEMA = re.compile(r"response_format\.json_schema\.schema(?=\.|$)")
_TOOL = re.compile(r"tools\.(\d+)(?=\.|$)(\.function(?:\.parameters)?(?=\.|$))?")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_TOO_LONG = re.compile(
    r"maximum context length is (\d+) tokens.*?requested (\d+) output tokens.*?contains (at least )?(\d+) (\w+)", re.S
)
"""vLLM's message about a prompt that does not fit the context."""


def _own_path(param: str, places: Sequence[int]) -> str:
    """Return the path of a field of the request, by the path of the chat completion's field that is made of it.

    Args:
        param: the path in the chat completion.
        places: the place of each of its tools in the request.
    """
    if param in FIELDS:
        return FIELDS[param]
    if _SCHEMA.match(param):
        return _SCHEMA.sub("output_config.format.schema", param, count=1)
    if (found := _TOOL.match(param)) is None or int(found[1]) >= len(places):
        return param
    schema = ".input_schema" if (found[2] or "").endswith(".parameters") else ""
    return f"tools.{places[int(found[1])]}{schema}{param[found.end() :]}"


def in_anthropics_words(error: HttpError, places: Sequence[int] = ()) -> HttpError:
    """Return an error with the names of the request's own fields.

    Args:
        error: the error of the chat completion that is made of a Messages request.
        places: the place of each of its tools in the request.

    The error of a prompt that does not fit is worded as Anthropic does, since Claude Code reads the numbers in it. It
    then compacts the conversation, or repeats the request with fewer output tokens.
    """
    found = _TOO_LONG.search(error.message) if error.status == 400 else None
    if found is None:
        param = error.param or ""
        if (own := _own_path(param, places)) != param:
            error.message, error.param = error.message.replace(param, own, 1), own
        return error
    window, output, prompt = int(found[1]), int(found[2]), int(found[4])
    if found[3] and 2 * output <= window:
        # The tokenizer stopped at the maximum, and `max_tokens` takes the smaller part of the window.
        message = f"prompt is too long: at least {prompt} tokens > {window - output} tokens maximum"
    elif found[5] != "input" or prompt >= window:
        message = f"prompt is too long: {prompt} {found[5].replace('input', 'tokens')} > {window} tokens maximum"
    else:
        message = (
            f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {window}, "
            "decrease input length or `max_tokens` and try again"
        )
    return BadRequest(message, param="messages", code=error.code or CONTEXT_LENGTH_EXCEEDED)


def is_messages(path: str) -> bool:
    """Return whether a path belongs to the Messages API, whose errors have Anthropic's form."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def error_type(status: int) -> str:
    """Return Anthropic's type of an error with this HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_body(error: HttpError, request_id: str | None) -> dict[str, Any]:
    """Return the body of an error."""
    details: dict[str, Any] = {"type": error_type(error.status), "message": error.message[:MAX_MESSAGE_LENGTH]}
    details |= {name: value for name, value in (("param", error.param), ("code", error.code)) if value is not None}
    return {"type": "error", "error": details, "request_id": request_id}


def error_event(error: HttpError, request_id: str | None = None) -> bytes:
    """Return an error as the last event of a stream, whose status has already been sent."""
    return sse("error", error_body(error, request_id))


def sse(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def response_of(scope: Scope, error: HttpError) -> Response:
    """Make the response of an error, in the form that clients of the request's path read."""
    if not is_messages(scope["path"]):
        return error_response(error)
    request_id = clean_request_id(Headers(scope=scope).get(REQUEST_ID, ""))
    headers = {**retry_headers(error), ANTHROPIC_REQUEST_ID: request_id}
    return JSONResponse(error_body(error, request_id), status_code=error.status, headers=headers)
