"""Ingresses with files and batches over one Redis, each as if it were in a process of its own, and OpenAI's client."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

import httpx
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.api.openai import ErrorBoundary, error_response
from cluster.api.ray_errors import as_http_error
from cluster.auth.keys import Caller
from cluster.auth.middleware import CALLER
from cluster.batches.input_lines import LineRequest
from cluster.batches.records import Batch
from cluster.batches.results import LineAnswer
from cluster.batches.runner import BatchRunner
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import HttpError
from cluster.http.batches import BatchRoutes
from cluster.http.files import FileRoutes
from cluster.http.idempotency import keep_digest
from cluster.store.files import FileStore
from cluster.store.runs.records import LogKind
from cluster.store.runs.store import RunStore

LEASE_S = 0.6
CHAT = "/v1/chat/completions"
WITHIN_S = 30.0


@dataclass
class Replicas:
    """Answers each line with its custom id, unless the test says otherwise."""

    calls: Counter[str] = field(default_factory=Counter)
    """By custom id."""
    statuses: dict[str, list[int]] = field(default_factory=dict)
    """By custom id: the statuses of its next answers."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    retry_after_s: float = 0.01
    """Of each answer."""
    free: int = 1 << 30
    """So many lines do not wait for the gate."""
    most: int = 0
    """Largest number of lines at once."""
    stopped: list[int] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    _now: int = 0

    async def answer(self, batch: Batch, number: int, request: LineRequest) -> LineAnswer:
        self.calls[request.custom_id] += 1
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            if self.free > 0:
                self.free -= 1
                await asyncio.sleep(0)
            else:
                await self.gate.wait()
        finally:
            self._now -= 1
        left = self.statuses.get(request.custom_id)
        status = left.pop(0) if left else 200
        return LineAnswer(status, json.dumps({"said": request.custom_id}).encode(), f"r-{number}", self.retry_after_s)

    async def recorded(self, batch: Batch, number: int, request: LineRequest) -> None:
        self.forgotten.append(request.custom_id)

    async def cancelled(self, batch: Batch, number: int) -> None:
        self.stopped.append(number)


class Ingress:
    """One ingress. ``wall`` is its Unix time, which a test may move."""

    def __init__(self, url: str, name: str, replicas: Any = None, **batches: Any) -> None:
        self.replicas = replicas or Replicas()
        self.ahead_s = 0.0
        self.is_full = False
        config = CaesuraConfig.model_validate({"batches": batches})
        clock = MonotonicClock()
        self.store = RunStore(url, owner=name, timeout_s=2.0, lease_s=LEASE_S, retention_s=3600.0, kind=LogKind.BATCHES)
        self.files = FileStore(url, owner=name, timeout_s=2.0, clock=clock)
        self.batches = BatchRunner(
            name=name,
            store=self.store,
            files=self.files,
            requests=self.replicas,
            config=config.batches,
            lease_s=LEASE_S,
            clock=clock,
            is_full=lambda: self.is_full,
            wall=lambda: time() + self.ahead_s,
        )
        files = FileRoutes(self.files, config, lambda: self.is_full, self.batches.uses)
        self.app = _application(files, BatchRoutes(self.batches, files))
        self.batches.attend()

    def client(self, tenant: str = "default") -> AsyncOpenAI:
        """OpenAI's client of a tenant."""
        transport = httpx.ASGITransport(self.app)
        http = httpx.AsyncClient(transport=transport, headers={"tenant": tenant})
        return AsyncOpenAI(api_key="none", base_url="http://site/v1", http_client=http, max_retries=0)

    async def die(self) -> None:
        """As by SIGKILL: nothing is released, and nothing is written any more."""
        batches = self.batches
        await batches._background.aclose()
        for name in batches._working:
            batches._tasks[name].abandon()
        for work in (*batches._working.values(), *batches._lines):
            work.cancel()

    async def aclose(self) -> None:
        await self.batches.aclose()
        await self.files.close()
        await self.store.close()


def _application(files: FileRoutes, batches: BatchRoutes) -> Starlette:
    def tenant(request: Request) -> str:
        name = request.headers.get("tenant", "default")
        request.scope[CALLER] = Caller(name)
        return name

    async def upload(request: Request) -> Response:
        tenant(request)
        return await files.create(request)

    async def listed(request: Request) -> Response:
        query = request.query_params
        return await files.list(
            tenant(request), order="desc", limit=int(query.get("limit", 100)), after=query.get("after"),
            purpose=query.get("purpose"),
        )  # fmt: skip

    async def file(request: Request) -> Response:
        act = files.delete if request.method == "DELETE" else files.show
        return await act(tenant(request), request.path_params["id"])

    async def content(request: Request) -> Response:
        return await files.content(tenant(request), request.path_params["id"])

    async def create(request: Request) -> Response:
        tenant(request)
        body = json.loads(await request.body())
        keep_digest(request, body)
        return await batches.create(request, body)

    async def all_batches(request: Request) -> Response:
        query = request.query_params
        return await batches.list(tenant(request), limit=int(query.get("limit", 20)), after=query.get("after"))

    async def batch(request: Request) -> Response:
        return await batches.show(tenant(request), request.path_params["id"])

    async def cancel(request: Request) -> Response:
        return await batches.cancel(tenant(request), request.path_params["id"])

    async def failed(_: Request, error: Exception) -> Response:
        return error_response(as_http_error(error))

    boundary = Middleware(
        ErrorBoundary,
        error_map=as_http_error,
        max_header_bytes=1 << 16,
        max_in_flight=64,
        limited_paths=frozenset(),
    )
    return Starlette(
        routes=[
            Route("/v1/files", upload, methods=["POST"]),
            Route("/v1/files", listed),
            Route("/v1/files/{id}", file, methods=["GET", "DELETE"]),
            Route("/v1/files/{id}/content", content),
            Route("/v1/batches", create, methods=["POST"]),
            Route("/v1/batches", all_batches),
            Route("/v1/batches/{id}", batch),
            Route("/v1/batches/{id}/cancel", cancel, methods=["POST"]),
        ],
        middleware=[boundary],
        exception_handlers={HttpError: failed},
    )


def lines(*ids: str, url: str = CHAT, **body: Any) -> bytes:
    """An input file."""
    requests = ({"custom_id": one, "method": "POST", "url": url, "body": {"model": "tiny", **body}} for one in ids)
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def names(count: int) -> list[str]:
    return [f"line-{number}" for number in range(count)]


async def begin(client: AsyncOpenAI, content: bytes, **fields: Any) -> Any:
    """Upload a file, and start a batch of it."""
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        **{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
    )


async def ended(client: AsyncOpenAI, batch_id: str) -> Any:
    """The batch when it has ended."""
    return await until(client, batch_id, lambda one: one.status in ("completed", "failed", "expired", "cancelled"))


async def until(client: AsyncOpenAI, batch_id: str, is_so: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(WITHIN_S):
        while True:
            if is_so(found := await client.batches.retrieve(batch_id)):
                return found
            await asyncio.sleep(0.02)


async def results(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file; none if there is no file."""
    if file_id is None:
        return []
    text = (await client.files.content(file_id)).text
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


async def ids(client: AsyncOpenAI, *file_ids: str | None) -> Sequence[str]:
    """The custom ids of all lines of these files."""
    return [line["custom_id"] for one in file_ids for line in await results(client, one)]
