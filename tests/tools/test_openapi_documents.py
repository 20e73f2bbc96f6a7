"""OpenAPI documents behind URLs: what is read of them, where, and how often. They may be hostile."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import yaml

from cluster.config.tools import HttpTool
from cluster.core.clock import ManualClock
from cluster.core.errors import ToolFailed
from tests.tools.servers.http_server import OPENAPI
from tests.waiting import WITHIN_S
from tools_runtime.kinds import http
from tools_runtime.kinds.http import HttpKind

OTHER = OPENAPI.replace("putItem", "getItem")

YAML = """
servers: [{url: https://api.test/v1}]
shared: &shared {type: string}
paths:
  /items/{id}:
    get:
      operationId: putItem
      summary: Read an item.
      parameters:
        - {name: id, in: path, required: true, schema: {<<: *shared, example: 2020-01-01}}
        - {name: X-Trace, in: header}
"""


def billions(depth: int) -> str:
    """A mapping that amounts to 10 to the power of ``depth`` members."""
    lines = ["v0: &v0 {a: 1}"]
    for level in range(1, depth):
        merged = ", ".join([f"*v{level - 1}"] * 10)
        lines.append(f"v{level}: &v{level} {{<<: [{merged}]}}")
    return "\n".join(lines)


class Documents:
    """A server of one document, and the kinds that read it."""

    def __init__(self, stack: AsyncExitStack, clock: ManualClock) -> None:
        self._stack, self._clock = stack, clock
        self.document = ""
        self.fetched = 0

    async def open(self) -> None:
        server = await self._stack.enter_async_context(await asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/openapi"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.fetched += 1
        body = self.document.encode()
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    def kind(self, document: str, **bounds: Any) -> HttpKind:
        self.document = document
        openapi = {"document": self.url, "operation": "putItem"}
        config = HttpTool.model_validate({"kind": "http", "openapi": openapi, "private_addresses": True})
        kind = HttpKind("t", config, clock=self._clock, **bounds)
        self._stack.push_async_callback(kind.aclose)
        return kind


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def documents(clock: ManualClock) -> AsyncIterator[Documents]:
    async with AsyncExitStack() as stack:
        made = Documents(stack, clock)
        await made.open()
        yield made


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, whose event loop others need, reads no YAML."""
    for name in ("load", "safe_load"):
        monkeypatch.setattr(yaml, name, lambda *_, **__: pytest.fail("YAML is read in this process"))


async def said(kind: HttpKind) -> str:
    with pytest.raises(ToolFailed) as failed:
        await asyncio.wait_for(kind.tool("t"), WITHIN_S)
    return str(failed.value)


async def test_a_document_in_json_is_read(documents: Documents, elsewhere: None) -> None:
    known = await documents.kind(OPENAPI).tool("t")
    assert known is not None
    assert known.offer.description == "Change an item."


async def test_a_document_in_yaml_is_read_in_another_process(documents: Documents, elsewhere: None) -> None:
    kind = documents.kind(YAML)
    known = await kind.tool("t")
    assert known is not None
    assert known.offer.description == "Read an item."
    assert known.check.schema["properties"]["id"] == {"type": "string", "example": "2020-01-01", "description": ""}
    assert (kind._operation.method, kind._operation.url) == ("GET", "https://api.test/v1/items/{id}")
    assert kind._operation.header_names == {"X-Trace"}
    assert (await kind.tool("t"), documents.fetched) == (known, 1)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (billions(10), "takes too much memory or time"),
        ("x: &x [*x]\npaths: *x", "cannot be used"),
        ("paths: {/a: {get: &a {operationId: putItem, parameters: [*a, {schema: &b [*b]}]}}}", "cannot be used"),
        ("paths: [" * 20_000, ""),
        ("a: b: c", "not an OpenAPI document"),
        ("\x00\x01", "not an OpenAPI document"),
    ],
    ids=["merged mappings", "a circle", "an inner circle", "depth", "no YAML", "no text"],
)
async def test_a_hostile_document_costs_another_process(
    documents: Documents, elsewhere: None, document: str, says: str
) -> None:
    assert says in await said(documents.kind(document))


async def test_a_document_that_cannot_be_used_is_read_again_after_a_while(
    documents: Documents, clock: ManualClock
) -> None:
    kind = documents.kind(OTHER)
    wrong = "there is no OpenAPI operation 'putItem'; there are: getItem"
    assert await said(kind) == wrong
    clock.advance(10)
    assert await said(kind) == f"{wrong}; it is read again in 20 s"
    assert documents.fetched == 1
    documents.document = OPENAPI
    clock.advance(21)
    assert await kind.tool("t") is not None
    assert documents.fetched == 2


async def test_a_document_that_takes_too_long_is_read_again_after_a_while(
    documents: Documents, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(*_: object) -> None:
        await asyncio.Event().wait()

    kind = documents.kind(OPENAPI)
    with monkeypatch.context() as slow:
        slow.setattr(http, "DOCUMENT_S", 0.05)
        slow.setattr(http, "read_operation", read)
        assert await said(kind) == "the OpenAPI document was not read within 0.05 s"
    assert await said(kind) == "the OpenAPI document was not read within 0.05 s; it is read again in 30 s"
    clock.advance(31)
    assert await kind.tool("t") is not None


@pytest.mark.parametrize("document", [OPENAPI, YAML, json.dumps("x" * 1000)])
async def test_a_document_has_a_largest_size(documents: Documents, document: str) -> None:
    assert await said(documents.kind(document, max_document_bytes=100)) == (
        "the OpenAPI document is longer than 100 bytes"
    )


async def test_a_fetch_that_failed_is_tried_again(documents: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = documents.kind(OPENAPI)
    answer: Callable[..., Any] = kind._fetch

    async def fails(*_: object) -> None:
        raise ToolFailed("no connection", transient=True)

    monkeypatch.setattr(kind, "_fetch", fails)
    assert await said(kind) == "no connection"
    monkeypatch.setattr(kind, "_fetch", answer)
    assert await kind.tool("t") is not None
