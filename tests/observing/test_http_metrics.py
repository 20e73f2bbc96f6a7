"""The time of each answer of an ingress, by route and status."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, StreamingResponse

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import ManualClock
from cluster.http.ingress import application
from cluster.observing.catalogue import HTTP_REQUEST_S
from cluster.observing.http_metrics import HttpMetrics
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
