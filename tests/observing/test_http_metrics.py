"""The time of each answer of an ingress, by route and status."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import ManualClock
from cluster.http.application import application
from cluster.observing.catalogue import HTTP_REFUSALS, HTTP_REQUEST_S
from cluster.observing.http_metrics import MAX_CODES, MAX_ERROR_BYTES, HttpMetrics, error_code
from cluster.observing.meter import Meter
from tests.observing.recorded import Recorded


def measured(clock: ManualClock) -> httpx.AsyncClient:
    app = FastAPI(middleware=[Middleware(HttpMetrics, meter=Meter(), clock=clock)])

    @app.get("/items/{name}")
    async def item(name: str) -> JSONResponse:
        clock.advance(2.0)
        return JSONResponse({"name": name}, status_code=404 if name == "none" else 200)

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(3):
                clock.advance(1.0)
                yield b"piece"

        return StreamingResponse(pieces())

    @app.get("/broken")
    async def broken() -> JSONResponse:
        clock.advance(5.0)
        raise asyncio.CancelledError

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress")


async def test_an_answer_counts_by_its_route_and_status(recorded: Recorded) -> None:
    async with measured(ManualClock()) as client:
        for name in ("a", "b", "none"):
            await client.get(f"/items/{name}")
        await client.get("/unknown")
    assert ("none", "404") in recorded.series(HTTP_REQUEST_S)
    assert recorded.of(HTTP_REQUEST_S) == {
        ("/items/{name}", "200"): 4.0,
        ("/items/{name}", "404"): 2.0,
    }


async def test_a_stream_counts_to_its_end(recorded: Recorded) -> None:
    async with measured(ManualClock()) as client:
        await client.get("/stream")
    assert recorded.of(HTTP_REQUEST_S) == {("/stream", "200"): 3.0}


async def test_a_request_without_an_answer_counts_too(recorded: Recorded) -> None:
    async with measured(ManualClock()) as client:
        with pytest.raises(asyncio.CancelledError):
            await client.get("/broken")
    assert recorded.of(HTTP_REQUEST_S) == {("/broken", "none"): 5.0}


async def test_the_route_is_seen_through_the_ingress_s_own_middleware(recorded: Recorded) -> None:
    async def handler() -> JSONResponse:
        return JSONResponse({})

    transport = httpx.ASGITransport(application(CaesuraConfig(), lambda name: handler))
    async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
        await client.get("/health")
        await client.get("/unknown")
    assert set(recorded.series(HTTP_REQUEST_S)) == {("/health", "200"), ("none", "404")}


def refusing(status: int, content: Any, paths: tuple[str, ...] = ()) -> httpx.AsyncClient:
    """An ingress that answers `/turn` so, and `/code/{code}` with this code; `/early` is refused before the routing."""
    inner = FastAPI()

    @inner.get("/turn")
    @inner.get("/ready")
    async def turn() -> JSONResponse:
        return JSONResponse(content, status_code=status)

    @inner.get("/code/{code}")
    async def coded(code: str) -> JSONResponse:
        return JSONResponse({"error": {"code": code}}, status_code=400)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/early":
            await JSONResponse(content, status_code=status)(scope, receive, send)
        else:
            await inner(scope, receive, send)

    measured_app = HttpMetrics(app, Meter(), ManualClock(), paths)
    return httpx.AsyncClient(transport=httpx.ASGITransport(measured_app), base_url="http://ingress")


async def test_refusals_count_by_route_status_and_code(recorded: Recorded) -> None:
    error = {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}}
    async with refusing(400, error, ("/early",)) as client:
        for path in ("/turn", "/turn", "/early", "/unknown"):
            await client.get(path)
    assert recorded.of(HTTP_REFUSALS) == {
        ("context_length_exceeded", "/turn", "400"): 2,
        ("context_length_exceeded", "/early", "400"): 1,
        ("none", "none", "404"): 1,
    }


@pytest.mark.parametrize(("status", "path"), [(200, "/turn"), (499, "/turn"), (503, "/ready")])
async def test_answers_clients_that_left_and_probes_are_no_refusals(recorded: Recorded, status: int, path: str) -> None:
    async with refusing(status, {"error": {"code": "x"}}) as client:
        await client.get(path)
    assert recorded.of(HTTP_REFUSALS) == {}


async def test_codes_beyond_a_number_are_counted_together(recorded: Recorded) -> None:
    async with refusing(400, {}) as client:
        for number in range(MAX_CODES + 2):
            await client.get(f"/code/c{number}")
        await client.get("/code/c0")
    counts = recorded.of(HTTP_REFUSALS)
    assert counts["other", "/code/{code}", "400"] == 2
    assert counts["c0", "/code/{code}", "400"] == 2
    assert len(counts) == MAX_CODES + 1


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": {"code": "rate_limited", "type": "t"}}', "rate_limited"),
        (b'{"type": "error", "error": {"type": "overloaded_error", "code": null}}', "overloaded_error"),
        (b'{"error": {"code": 400, "type": "BadRequestError"}}', "BadRequestError"),
        (b'{"error": {"code": "what a code"}}', "other"),
        (b'{"error": {"code": "' + b"x" * 65 + b'"}}', "other"),
        (b'{"error": {}}', "none"),
        (b'{"error": "no"}', "none"),
        (b"[]", "none"),
        (b"Not found", "none"),
        (b"[" * MAX_ERROR_BYTES, "none"),
        (b"", "none"),
    ],
)
def test_the_code_of_an_error(body: bytes, code: str) -> None:
    assert error_code(body) == code
