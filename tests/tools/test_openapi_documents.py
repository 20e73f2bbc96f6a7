"""OpenAPI documents behind URLs: what is read of them, where, and how often. They may be hostile."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.config.tools import HttpTool
from cluster.core.clock import ManualClock
from cluster.core.errors import ConfigError, ToolFailed
from tests.tools.servers.http_server import OPENAPI
from tests.waiting import WITHIN_S
from tools_runtime.kinds import http
from tools_runtime.kinds.http import HttpKind
from tools_runtime.openapi import Operation, find_operation, origin

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
        self.heads: list[str] = []
        """What each request for the document says before its body."""

    async def open(self) -> None:
        server = await self._stack.enter_async_context(await asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/openapi"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        self.fetched += 1
        body = self.document.encode()
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    def kind(
        self, document: str, *, server: str | None = None, headers: dict[str, str] | None = None, **bounds: Any
    ) -> HttpKind:
        self.document = document
        openapi = {"document": self.url, "operation": "putItem", "server": server}
        config = HttpTool.model_validate(
            {"kind": "http", "openapi": openapi, "headers": headers or {}, "private_addresses": True}
        )
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
    async def read(*_: object, **__: object) -> None:
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


SECRET = {"Authorization": "secret"}


def served_by(*servers: str, path: str = "/items") -> str:
    """A document of these servers."""
    return json.dumps({
        "servers": [{"url": server} for server in servers],
        "paths": {path: {"get": {"operationId": "putItem"}}},
    })  # fmt: skip


async def test_a_document_of_another_host_is_fetched_without_the_headers(documents: Documents) -> None:
    kind = documents.kind(OPENAPI, server="https://api.test", headers=SECRET)
    assert await kind.tool("t") is not None
    assert "secret" not in documents.heads[0]
    request = kind._request({"id": 1})
    assert (request.url.host, request.headers["Authorization"]) == ("api.test", "secret")


async def test_a_document_of_the_servers_own_host_is_fetched_with_the_headers(documents: Documents) -> None:
    server = documents.url.replace("/openapi", "/api")
    assert await documents.kind(OPENAPI, server=server, headers=SECRET).tool("t") is not None
    assert await documents.kind(served_by("/api"), headers=SECRET).tool("t") is not None
    assert [head.count("secret") for head in documents.heads] == [1, 1]


@pytest.mark.parametrize("form", ["json", "yaml"])
@pytest.mark.parametrize(
    "server",
    ["https://evil.test", "//evil.test", "{scheme}{host}@evil.test", "{scheme}{host}.evil.test", "https:{host}"],
)
async def test_a_document_does_not_choose_who_gets_the_headers(documents: Documents, form: str, server: str) -> None:
    scheme, host = "http://", documents.url.removeprefix("http://").removesuffix("/openapi")
    document = served_by(server.format(scheme=scheme, host=host))
    document = yaml.safe_dump(json.loads(document)) if form == "yaml" else document
    assert await said(documents.kind(document, headers=SECRET)) == (
        f"the document has no server at {scheme}{host}, and the configured headers are not sent to another host that it"
        " chooses; set openapi.server"
    )
    document = served_by("https://evil.test", documents.url.replace("/openapi", "/v1"))
    kind = documents.kind(document, headers=SECRET)
    assert await kind.tool("t") is not None
    assert kind._operation.url == f"{scheme}{host}/v1/items"


@pytest.mark.parametrize("path", ["@evil.test/x", ".evil.test/x", ":81/x", "{id}/x", ""])
async def test_a_path_does_not_change_the_host(documents: Documents, path: str) -> None:
    kind = documents.kind(served_by(path=path), server="https://api.test", headers=SECRET)
    assert "does not begin with '/'" in await said(kind)


def test_an_origin_has_no_port_of_its_scheme() -> None:
    assert origin("HTTPS://Api.Test:443/x?y") == origin("https://api.test/") == ("https", "api.test")
    assert origin("https://api.test:80") != origin("https://api.test") != origin("http://api.test")


def request_of(tmp_path: Path, operation: dict[str, Any], arguments: dict[str, Any]) -> httpx.Request:
    """The request that a tool makes of an operation in a file."""
    operation = {"operationId": "x", **operation}
    document = {"servers": [{"url": "https://api.test"}], "paths": {"/pet/{id}": {"post": operation}}}
    (tmp_path / "api.json").write_text(json.dumps(document))
    openapi = {"document": str(tmp_path / "api.json"), "operation": "x"}
    return HttpKind("t", HttpTool.model_validate({"kind": "http", "openapi": openapi}))._request(arguments)


ID = {"name": "id", "in": "path", "required": True}


def test_an_operation_without_a_body_has_its_parameters_in_the_query(tmp_path: Path) -> None:
    parameters = [ID, {"name": "status", "in": "query"}]
    request = request_of(tmp_path, {"parameters": parameters}, {"id": 7, "status": "sold"})
    assert (request.method, str(request.url), request.content) == ("POST", "https://api.test/pet/7?status=sold", b"")


@pytest.mark.parametrize("media_type", ["application/json", "application/json; charset=utf-8", "*/*"])
def test_an_operation_with_a_body_has_its_other_parameters_in_the_query(tmp_path: Path, media_type: str) -> None:
    parameters = [ID, {"name": "body", "in": "query"}]
    operation = {"parameters": parameters, "requestBody": {"content": {media_type: {}}}}
    request = request_of(tmp_path, operation, {"id": 7, "body": "x", "request_body": [1]})
    assert (str(request.url), request.content) == ("https://api.test/pet/7?body=x", b"[1]")
    assert request_of(tmp_path, operation, {"id": 7}).content == b""


@pytest.mark.parametrize("media_type", ["application/x-www-form-urlencoded", "multipart/form-data", "text/plain"])
def test_an_operation_with_a_body_that_is_not_json_cannot_be_used(tmp_path: Path, media_type: str) -> None:
    with pytest.raises(ConfigError, match="no application/json"):
        request_of(tmp_path, {"requestBody": {"content": {media_type: {"schema": {}}}}}, {"id": 7})


def found(shared: list[dict[str, Any]], own: list[dict[str, Any]]) -> Operation:
    """The operation with these parameters of its path and of its own."""
    item = {"parameters": shared, "post": {"operationId": "x", "parameters": own}}
    return find_operation({"paths": {"/pet/{id}": item}}, "x", "https://api.test", None)


def test_a_parameter_of_the_operation_replaces_that_of_its_path() -> None:
    limit = {"name": "limit", "in": "query", "required": True}
    operation = found([ID, limit], [{**ID, "schema": {"type": "integer"}}, {**limit, "required": False}])
    assert operation.parameters["required"] == ["id"]
    assert operation.parameters["properties"]["id"]["type"] == "integer"


@pytest.mark.parametrize("own_place", ["header", "query"])
def test_of_two_places_of_one_argument_the_required_or_the_operations_own_is_used(own_place: str) -> None:
    shared_place = "query" if own_place == "header" else "header"
    shared, own = {"name": "v", "in": shared_place}, {"name": "v", "in": own_place}
    assert found([shared], [own]).header_names == ({"v"} if own_place == "header" else set())
    operation = found([{**shared, "required": True}], [own])
    assert operation.header_names == ({"v"} if shared_place == "header" else set())
    assert operation.parameters["required"] == ["v"]
    with pytest.raises(ConfigError, match="'v' is required in two places"):
        found([{**shared, "required": True}], [{**own, "required": True}])


def test_an_override_of_a_header_may_be_spelt_otherwise() -> None:
    operation = found([{"name": "X-Trace", "in": "header", "required": True}], [{"name": "x-trace", "in": "header"}])
    assert operation.header_names == {"x-trace"}
    assert operation.parameters["required"] == []
