"""A line's request takes the way of a client's, yields to other work, and is forgotten when its answer is stored."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cluster.api.ray_errors import as_http_error
from cluster.auth.middleware import caller_of
from cluster.batches.input_lines import LineRequest
from cluster.batches.records import Batch, Endpoint
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest, Overloaded, UpstreamFailed
from cluster.core.program import ProgramIdentity
from cluster.http.batch_lines import LineRequests
from cluster.http.requests import TurnReader

READER = TurnReader(CaesuraConfig())


def batch(endpoint: Endpoint) -> Batch:
    return Batch("batch_1", "acme", endpoint, "file-1", "24h", 0.0, 10.0)


def line(**body: Any) -> LineRequest:
    return LineRequest("a", "POST", "/x", msgspec.Raw(json.dumps(body).encode()))


class Site:
    """The handlers of an ingress."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self.forgotten: list[tuple[str, str]] = []
        self.cancelled: list[tuple[str, str]] = []
        handlers: dict[Endpoint, Any] = dict.fromkeys(
            ("/v1/chat/completions", "/v1/completions", "/v1/responses"), answer
        )
        self.requests = LineRequests(handlers, as_http_error, self._forget, self._cancel)

    async def _forget(self, tenant: str, key: str) -> None:
        self.forgotten.append((tenant, key))

    async def _cancel(self, tenant: str, program: str) -> None:
        self.cancelled.append((tenant, program))
        raise BadRequest("no such program", status=404)


class Seen:
    """Keeps what the reader of turns makes of a line's request."""

    def __init__(self) -> None:
        self.identity = ProgramIdentity()
        self.headers: dict[str, str] = {}

    async def __call__(self, request: Request) -> Response:
        body, self.identity = await READER.identified(request)
        self.headers = dict(request.headers)
        return JSONResponse({"id": "resp_1", "tenant": caller_of(request).tenant, "max": body.get("max_tokens")})


@pytest.mark.parametrize("hints", [{}, {"priority": -5}, {"agentic_context": {"priority": 9}}, {"priority": 0}])
async def test_whatever_it_says_a_line_yields_to_others(hints: dict[str, Any]) -> None:
    seen = Seen()
    answer = await Site(seen).requests.answer(batch("/v1/completions"), 3, line(prompt="Hi", max_tokens=2, **hints))
    assert json.loads(answer.body) == {"id": "resp_1", "tenant": "acme", "max": 2}
    assert seen.identity.hints.priority == 1 and seen.identity.hints.sheddable
    assert seen.identity.program_id is None and seen.identity.tenant == "acme"
    assert "idempotency-key" not in seen.headers


async def test_a_lower_priority_stays() -> None:
    seen = Seen()
    await Site(seen).requests.answer(batch("/v1/completions"), 3, line(prompt="Hi", priority=7))
    assert seen.identity.hints.priority == 7


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/chat/completions", {"messages": [], "tools": [{"type": "function", "server_side": True}]}),
    ],
)
async def test_a_line_that_is_a_program_is_run_once_and_forgotten(endpoint: Endpoint, body: dict[str, Any]) -> None:
    async def answer(request: Request) -> Response:
        assert request.headers["idempotency-key"] == request.headers["x-session-id"] == "batch_1-4"
        return JSONResponse({"id": "resp_1"})

    site = Site(answer)
    given = await site.requests.answer(batch(endpoint), 4, line(**body))
    assert given.is_ok, given.body
    await site.requests.recorded(batch(endpoint), 4, line(**body, store=True))
    await site.requests.recorded(batch("/v1/completions"), 4, line(prompt="Hi"))
    await site.requests.recorded(batch(endpoint), 4, line(**body, stream=True))
    assert site.forgotten == []
    await site.requests.recorded(batch(endpoint), 4, line(**body))
    assert site.forgotten == [("acme", "batch_1-4")]
    await site.requests.cancelled(batch(endpoint), 4)
    assert site.cancelled == [("acme", "batch_1-4")]


@pytest.mark.parametrize(("error", "is_forgotten"), [(UpstreamFailed("died"), True), (BadRequest("wrong"), False)])
async def test_a_program_that_failed_in_the_cluster_is_run_anew(error: Exception, is_forgotten: bool) -> None:
    async def fails(request: Request) -> Response:
        raise error

    site = Site(fails)
    await site.requests.answer(batch("/v1/responses"), 4, line(input="Hi"))
    assert site.forgotten == [("acme", "batch_1-4")] * is_forgotten


@pytest.mark.parametrize("field", ["stream", "background"])
async def test_a_line_is_answered_as_a_whole(field: str) -> None:
    answer = await Site(Seen()).requests.answer(batch("/v1/responses"), 1, line(input="Hi", **{field: True}))
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, field)
    assert answer.is_final(1)


@pytest.mark.parametrize(
    ("error", "status", "final"),
    [
        (Overloaded("full", retry_after_s=7.0), 503, (False, False)),
        (UpstreamFailed("died"), 502, (False, True)),
        (BadRequest("wrong", param="prompt"), 400, (True, True)),
        (TimeoutError(), 408, (False, True)),
        (RuntimeError("bug"), 500, (False, True)),
    ],
)
async def test_errors_are_answers(error: Exception, status: int, final: tuple[bool, bool]) -> None:
    async def fails(request: Request) -> Response:
        raise error

    answer = await Site(fails).requests.answer(batch("/v1/completions"), 1, line(prompt="Hi"))
    assert answer.status == status and "error" in json.loads(answer.body)
    assert (answer.is_final(1), answer.is_final(3)) == final
    assert answer.retry_after_s == (7.0 if status == 503 else 1)
