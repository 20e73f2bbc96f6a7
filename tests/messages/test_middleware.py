"""What the middleware rejects or ends below `/v1/messages` has Anthropic's form."""

import json
from typing import Any

import pytest

from cluster.api.anthropic.errors import response_of
from cluster.api.openai import ErrorBoundary
from cluster.core.clock import MonotonicClock
from cluster.core.errors import BadRequest, HttpError, TooManyRequests, UpstreamFailed
from cluster.proxy.answer_progress import AnswerProgress
from cluster.proxy.load_shedding import LoadShedder, RateLimitCache
from cluster.proxy.middleware import HeaderGuard, StreamErrorTerminator

PATH = "/v1/messages"


async def answer_of(app: Any, headers: Any = ()) -> tuple[int, dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    await app({"type": "http", "method": "POST", "path": PATH, "headers": list(headers)}, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """An ingress that dies without an answer."""


def boundary(app: Any) -> ErrorBoundary:
    def as_error(error: BaseException) -> HttpError:
        return error if isinstance(error, HttpError) else HttpError("internal error")

    limits: dict[str, Any] = {"max_header_bytes": 100, "max_in_flight": 1, "limited_paths": frozenset({PATH})}
    return ErrorBoundary(app, error_map=as_error, form=response_of, **limits)


async def raising(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("secret")


@pytest.mark.parametrize(
    ("app", "headers", "status", "kind"),
    [
        (LoadShedder(nothing, 0, lambda: None), (), 503, "overloaded_error"),
        (HeaderGuard(nothing), [(b"x-a", b"\xff")], 400, "invalid_request_error"),
        (StreamErrorTerminator(nothing), (), 502, "api_error"),
        (boundary(nothing), [(b"x-a", b"a" * 200)], 431, "invalid_request_error"),
        (boundary(raising), (), 500, "api_error"),
    ],
)
async def test_a_rejection(app: Any, headers: Any, status: int, kind: str) -> None:
    answered, body = await answer_of(app, headers)
    assert (answered, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["request_id"]
    assert "secret" not in json.dumps(body)


async def test_the_cache_of_rate_limits_reads_and_repeats_the_form() -> None:
    calls = []

    async def limited(scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope)
        error = TooManyRequests("too fast", code="tenant_rate", retry_after_s=0.5)
        await response_of(scope, error)(scope, receive, send)

    cache = RateLimitCache(limited, MonotonicClock(), lambda reason: None)
    for _ in range(2):
        status, body = await answer_of(cache, [(b"x-api-key", b"k")])
        assert (status, body["error"]["type"], body["error"]["code"]) == (429, "rate_limit_error", "tenant_rate")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        (b"event: message_stop\ndata: {}\n\n", b""),
        (b"event: error\ndata: {}\n\n", b""),
        (b"event: content_block_delta\ndata: {}\n\n", b"event: error\n"),
    ],
)
def test_the_end_of_a_stream_whose_ingress_died(last: bytes, ending: bytes) -> None:
    seen = AnswerProgress()
    seen.see({"type": "http.response.start", "headers": [(b"content-type", b"text/event-stream")]})
    seen.see({"type": "http.response.body", "body": last, "more_body": True})
    made = seen.ending(PATH, UpstreamFailed("died"))
    assert made.startswith(ending)
    assert bool(made) is bool(ending)


async def test_other_paths_keep_openais_form() -> None:
    response = response_of({"type": "http", "path": "/v1/models", "headers": []}, BadRequest("no"))
    assert "type" not in json.loads(bytes(response.body))
