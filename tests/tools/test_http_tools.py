"""HTTP tools against a real server; and which addresses they do not reach."""

import asyncio
import ipaddress
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from cluster.config.tools import HttpTool
from cluster.core.errors import ConfigError, ToolFailed, ToolRefused
from cluster.core.tools import Outcome, ToolCall, ToolResult
from tests.tools.servers.http_server import OPENAPI
from tests.waiting import WITHIN_S
from tools_runtime.addresses import Resolver, is_public
from tools_runtime.host import ToolHost
from tools_runtime.kind import Invocation
from tools_runtime.kinds import http
from tools_runtime.kinds.http import HttpKind
from tools_runtime.openapi import Operation, find_operation

OpenTools = Callable[..., Awaitable[ToolHost]]
Serve = Callable[..., tuple["subprocess.Popen[bytes]", int]]
Ask = Callable[..., Awaitable[ToolResult]]


@pytest.fixture
def base(serve: Serve) -> str:
    return f"http://127.0.0.1:{serve('http_server.py')[1]}"


@pytest.fixture
def ask(open_tools: OpenTools, base: str) -> Ask:
    """Calls a tool of that URL on the real server."""

    async def run(path: str, arguments: dict[str, Any] | None = None, **said: Any) -> ToolResult:
        tool = {"kind": "http", "url": base + path, "private_addresses": True, **said}
        host = await open_tools({"t": tool})
        return await host.run(ToolCall("a", "t", arguments or {}))

    return run


async def test_arguments_go_into_the_path_and_the_query(ask: Ask) -> None:
    arguments = {"id": "a/b?c#d e\u00e9%", "tags": ["x", "y&z"], "deep": {"k": [1]}, "yes": True}
    seen = json.loads((await ask("/items/{id}/parts", arguments)).text)
    path, _, query = seen["path"].partition("?")
    assert path == "/items/a%2Fb%3Fc%23d%20e%C3%A9%25/parts"
    assert query == "tags=x&tags=y%26z&deep=%7B%22k%22%3A+%5B1%5D%7D&yes=true"
    assert (seen["method"], seen["body"]) == ("GET", "")


async def test_arguments_go_into_the_body_of_a_post(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "Bearer s3cret")
    headers = {"headers": {"X-Fixed": "1"}, "headers_from_environment": {"Authorization": "THE_KEY"}}
    seen = json.loads((await ask("/items/{id}", {"id": 7, "name": "n"}, method="POST", **headers)).text)
    assert (seen["method"], seen["path"], json.loads(seen["body"])) == ("POST", "/items/7", {"name": "n"})
    assert (seen["headers"]["x-fixed"], seen["headers"]["authorization"]) == ("1", "Bearer s3cret")


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        *(("/items/{id}/x", {"id": value}) for value in ("..", ".", "", "../x", "x/..", "x/../../y", "..\\x", "./x")),
        ("/items/{a}{b}/x", {"a": ".", "b": "."}),
        ("/items/.{a}", {"a": "."}),
        ("/items/.{a}", {"a": ""}),
        ("/{a}", {"a": "../admin"}),
    ],
)
async def test_an_argument_cannot_climb_out_of_its_place(ask: Ask, path: str, arguments: dict[str, str]) -> None:
    result = await ask(path, arguments)
    assert (result.outcome, "would change the URL's path" in result.text) == (Outcome.REFUSED, True)


@pytest.mark.parametrize("value", ["a/b", "...", "a..b", ".hidden", "-x", "--help", "a?b#c", "@evil.test", "//x"])
async def test_an_argument_that_is_one_segment_is_sent_as_it_is(ask: Ask, value: str) -> None:
    seen = json.loads((await ask("/items/{id}/x?q={q}", {"id": value, "q": ".."})).text)
    assert seen["path"] == f"/items/{quote(value, safe='')}/x?q=.."


async def test_an_argument_cannot_change_what_the_url_fixes(ask: Ask) -> None:
    """A model could otherwise choose another `user` or scope than the operator."""
    result = await ask("/items?user=me&id={id}", {"id": "1", "user": "root"})
    assert result.text.startswith("refused: the argument 'user' is a part of the URL")
    seen = json.loads((await ask("/items?user=me&id={id}", {"id": "1&user=root", "User": "x"})).text)
    assert seen["path"] == "/items?user=me&id=1%26user%3Droot&User=x"


def operation(parameter: dict[str, Any], server: str = "https://api.test") -> Operation:
    document = {"paths": {"/x": {"get": {"operationId": "x", "parameters": [parameter]}}}}
    return find_operation(document, "x", server, None)


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding", "Cookie", "Connection"])
def test_no_argument_is_a_header_that_decides_where_a_request_goes(name: str) -> None:
    with pytest.raises(ConfigError, match="is a header that no argument can set"):
        operation({"name": name, "in": "header"})


def test_headers_that_openapi_ignores_are_no_arguments() -> None:
    made = operation({"name": "authorization", "in": "header"})
    assert (made.header_names, made.parameters["properties"]) == (frozenset(), {})


def test_no_argument_is_a_part_of_the_servers_name() -> None:
    with pytest.raises(ConfigError, match="has variables"):
        operation({"name": "host", "in": "query"}, "https://{host}/v1")


def test_an_argument_does_not_add_to_a_header_of_the_configuration(tmp_path: Path) -> None:
    parameter = {"name": "x-scope", "in": "header", "schema": {"type": "string"}}
    document = {"paths": {"/x": {"get": {"operationId": "x", "parameters": [parameter]}}}}
    (tmp_path / "api.json").write_text(json.dumps(document))
    openapi = {"document": str(tmp_path / "api.json"), "operation": "x", "server": "https://api.test"}
    config = HttpTool.model_validate({"kind": "http", "openapi": openapi, "headers": {"X-Scope": "read"}})
    request = HttpKind("t", config)._request({"x-scope": "write"})
    assert request.headers.get_list("x-scope") == ["read"]


async def test_a_missing_argument_is_told(ask: Ask) -> None:
    assert (await ask("/items/{id}")).text == "refused: the argument 'id' is missing"


@pytest.mark.parametrize(
    ("path", "outcome", "text"),
    [
        ("/teapot", Outcome.ERROR, "error: short and stout\n[HTTP status 418 I'm a Teapot]"),
        ("/image", Outcome.OK, "[image/png, 4 bytes, not shown]"),
        ("/gzip", Outcome.ERROR, "error: the answer is compressed, although that was not asked for"),
    ],
)
async def test_what_a_server_answers_is_told(ask: Ask, path: str, outcome: Outcome, text: str) -> None:
    result = await ask(path)
    assert (result.outcome, result.text) == (outcome, text)


@pytest.mark.parametrize(
    ("content_type", "content", "text"),
    [
        ("text/plain; charset=ISO-8859-1", "é" * 2, "é" * 2),
        ('text/html; charset="windows-1252"', "€", "€"),
        ("text/plain;charset=utf-16-le", "é☂", "é☂"),
        ("text/plain; charset=no-such", "é", "é"),
        ("text/plain; charset=rot13", "é", "é"),
        ("text/plain; charset=undefined", "é", "é"),
        ("application/json", "é", "é"),
    ],
)
async def test_an_answer_is_read_in_its_charset(ask: Ask, content_type: str, content: str, text: str) -> None:
    charset = {"ISO": "iso-8859-1", "win": "cp1252", "utf": "utf-16-le"}.get(
        content_type.partition("charset=")[2].strip('"')[:3], "utf-8"
    )
    result = await ask("/charset", {"type": content_type, "hex": content.encode(charset).hex()})
    assert (result.outcome, result.text) == (Outcome.OK, text)


async def test_output_so_far_is_read_in_its_charset() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield "é".encode("utf-16-le")[:1]
        yield "é☂".encode("utf-16-le")[1:]

    seen: list[str] = []
    headers = {"content-type": "text/plain; charset=utf-16-le"}
    answer = await http._answer(httpx.Response(200, headers=headers, content=pieces()), "GET", 100, seen.append)
    assert (answer.text, "".join(seen)) == ("é☂", "é☂")


async def test_a_connection_lost_after_a_post_leaves_the_effect_unknown(ask: Ask) -> None:
    assert (await ask("/lost", method="POST")).outcome is Outcome.UNKNOWN
    assert (await ask("/lost", method="GET")).outcome is Outcome.ERROR


async def test_only_an_idempotent_tool_is_tried_again(ask: Ask) -> None:
    once = await ask("/flaky")
    assert (once.outcome, once.attempts) == (Outcome.ERROR, 1)
    again = await ask("/flaky", idempotent=True, retry_backoff_s=0.0)
    assert (again.outcome, again.text, again.attempts) == (Outcome.OK, "3", 2)


async def test_no_server_is_told(open_tools: OpenTools) -> None:
    host = await open_tools({"t": {"kind": "http", "url": "http://127.0.0.1:9/", "private_addresses": True}})
    assert (await host.run(ToolCall("a", "t"))).text.startswith("error: no connection to 127.0.0.1:9")


async def test_a_slow_server_delays_nobody_else(open_tools: OpenTools, base: str) -> None:
    tools = {
        name: {"kind": "http", "url": base + path, "private_addresses": True}
        for name, path in (("slow", "/slow"), ("quick", "/"))
    }
    host = await open_tools(tools)
    slow = [asyncio.create_task(host.run(ToolCall(f"s{i}", "slow", {"s": 30}, deadline_s=60))) for i in range(16)]
    await asyncio.sleep(0)
    assert (await host.run(ToolCall("q", "quick"))).outcome is Outcome.OK
    assert not any(task.done() for task in slow)
    assert (await host.run(ToolCall("t", "slow", {"s": 30}, deadline_s=0.1))).outcome is Outcome.TIMEOUT
    assert all(host.executor.cancel("", f"s{i}") for i in range(16))
    assert {(await task).outcome for task in slow} == {Outcome.CANCELLED}


async def test_the_idempotency_key_reaches_the_server(open_tools: OpenTools, base: str) -> None:
    host = await open_tools({"t": {"kind": "http", "url": base + "/x", "method": "POST", "private_addresses": True}})
    result = await host.run(ToolCall("a", "t", idempotency_key="k 1"))
    assert json.loads(result.text)["headers"]["idempotency-key"] == "k%201"


@pytest.mark.parametrize("where", ["file", "url"])
async def test_an_openapi_operation(open_tools: OpenTools, base: str, tmp_path: Path, where: str) -> None:
    document = f"{base}/openapi.json"
    openapi = {"document": document, "operation": "putItem"}
    if where == "file":
        (tmp_path / "api.json").write_text(OPENAPI)
        openapi = {"document": str(tmp_path / "api.json"), "operation": "putItem", "server": f"{base}/api"}
    host = await open_tools({"put": {"kind": "http", "openapi": openapi, "private_addresses": True}})
    wrong = await host.run(ToolCall("a", "put", {"id": "x", "body": {}}))
    assert wrong.outcome is Outcome.REFUSED
    assert 'id: "x" is not of type "integer"' in wrong.text
    assert 'body: "name" is a required property' in wrong.text
    assert (await host.offers())[0].description == "Change an item."
    arguments = {"id": 3, "dry": True, "X-Trace": "t\r\nEvil: 1", "body": {"name": "n", "parent": {"name": "p"}}}
    seen = json.loads((await host.run(ToolCall("a", "put", arguments))).text)
    assert (seen["method"], seen["path"]) == ("PUT", "/api/items/3?dry=true")
    assert json.loads(seen["body"]) == arguments["body"]
    assert seen["headers"]["x-trace"] == "t%0D%0AEvil: 1"


NOT_PUBLIC = """127.0.0.1 127.9.9.9 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.100.100.200 0.0.0.0 224.0.0.1
    255.255.255.255 198.18.0.1 192.0.2.1 240.0.0.1 ::1 :: fe80::1 fd00:ec2::254 ::ffff:127.0.0.1 ::ffff:169.254.169.254
    ::127.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 2002:7f00:1:: ff02::1 2001:db8::1 fec0::1""".split()  # noqa: SIM905


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


SPELLINGS = [
    "127.0.0.1",
    "localhost",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "127.1",
    "[::1]",
    "[::ffff:7f00:1]",
    "[::]",
    "0",
]


@pytest.mark.parametrize("host", SPELLINGS)
async def test_no_spelling_of_an_address_gets_through(open_tools: OpenTools, base: str, host: str) -> None:
    port = base.rpartition(":")[2]
    tools = await open_tools({"t": {"kind": "http", "url": f"http://{host}:{port}/"}})
    result = await tools.run(ToolCall("a", "t"))
    assert result.outcome is Outcome.REFUSED, result.text
    assert "is not a public address" in result.text or "Invalid IPv4 address" in result.text


class OneName(Resolver):
    """DNS in which one name, `start.test`, is this machine, as if it were public."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def public_address(self, host: str, port: int) -> str:
        self.asked.append(host)
        return "127.0.0.1" if host == "start.test" else await super().public_address(host, port)


@pytest.fixture
async def guarded(base: str) -> Any:
    port = base.rpartition(":")[2]
    kinds: list[HttpKind] = []

    def make(path: str, **said: Any) -> tuple[HttpKind, OneName]:
        resolver = OneName()
        config = HttpTool.model_validate({"kind": "http", "url": f"http://start.test:{port}{path}", **said})
        kinds.append(HttpKind("t", config, resolver))
        return kinds[-1], resolver

    yield make
    for kind in kinds:
        await kind.aclose()


def invocation(**arguments: Any) -> Invocation:
    return Invocation("t", arguments, 10_000)


async def test_no_call_loads_certificates_once_the_tool_is_open(guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, _ = guarded("/x")
    await kind.open()
    monkeypatch.setattr(httpx, "create_ssl_context", lambda **_: pytest.fail("certificates are loaded in a call"))
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: pytest.fail("a client is made in a call"))
    assert json.loads((await kind.run(invocation())).text)["headers"]["host"].startswith("start.test:")


async def test_the_checked_address_is_connected_to_under_the_name(guarded: Any) -> None:
    kind, resolver = guarded("/x")
    seen = json.loads((await kind.run(invocation())).text)
    assert seen["headers"]["host"].startswith("start.test:")
    assert resolver.asked == ["start.test"], "looked up once: what was checked is what is connected to"


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:9/", "http://169.254.169.254/latest/meta-data", "http://2130706433/", "//localhost/"]
)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_every_redirect_is_checked(guarded: Any, target: str, status: int) -> None:
    kind, resolver = guarded("/redirect")
    with pytest.raises(ToolRefused, match="not a public address"):
        await kind.run(invocation(to=target, status=status))
    assert len(resolver.asked) == 2


async def test_a_redirect_is_followed_without_our_headers_to_another_host(guarded: Any, base: str) -> None:
    kind, _ = guarded("/redirect", headers={"X-Key": "s3cret"})
    here = json.loads((await kind.run(invocation(to="/there"))).text)
    assert (here["path"], here["headers"]["x-key"]) == ("/there", "s3cret")
    port = base.rpartition(":")[2]
    private, _ = guarded("/redirect", headers={"X-Key": "s3cret"}, private_addresses=True, url=f"{base}/redirect")
    there = json.loads((await private.run(invocation(to=f"http://localhost:{port}/there"))).text)
    assert (there["path"], "x-key" in there["headers"]) == ("/there", False)


async def test_redirects_end(guarded: Any) -> None:
    kind, resolver = guarded("/redirect?to=" + quote("/redirect?to=/redirect", safe=""), max_redirects=1)
    with pytest.raises(Exception, match="more than 1 redirects"):
        await kind.run(invocation())
    assert len(resolver.asked) == 2


@pytest.mark.parametrize("target", ["file:///etc/passwd", "gopher://x/", "http://", "http://[::1"])
async def test_a_redirect_to_what_is_no_url_is_refused(guarded: Any, target: str) -> None:
    kind, _ = guarded("/redirect")
    with pytest.raises(Exception, match=r"URL|redirect"):
        await kind.run(invocation(to=target))


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    """The URL of a server that accepts connections, and says nothing until the client ends them."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/openapi.json"


async def test_a_document_that_does_not_come_is_given_up(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "DOCUMENT_S", 0.05)
    openapi = {"document": silent, "operation": "putItem"}
    kind = HttpKind("t", HttpTool.model_validate({"kind": "http", "openapi": openapi, "private_addresses": True}))
    with pytest.raises(ToolFailed, match=r"was not read within 0\.05 s"):
        await asyncio.wait_for(kind.tool("t"), WITHIN_S)
    assert not kind._loading.locked()
    await kind.aclose()
