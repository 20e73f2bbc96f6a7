"""Tools that a request brings: only what the operator allows, only to public addresses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

import pytest

from cluster.core.errors import ToolRefused
from cluster.core.tools import Outcome, ToolCall, ToolId, ToolResult
from tests.tools.scripted import ScriptedKind, settle
from tests.waiting import WITHIN_S, until
from tools_runtime import host as hosting
from tools_runtime.host import ToolHost
from tools_runtime.kinds.http import MAX_DOCUMENT_BYTES

OpenTools = Callable[..., Awaitable[ToolHost]]

HTTP = {"kind": "http", "url": "http://127.0.0.1:9/"}


def theirs(name: str, id: str = "a") -> ToolCall:
    """A call of a tool that the request has brought."""
    return ToolCall(id, name, tool=ToolId.of_request(name))


async def refusal(open_tools: OpenTools, definitions: Any, **allowed: Any) -> str:
    host = await open_tools({"mine": {"kind": "command", "argv": ["true"]}}, **allowed)
    name = next(iter(definitions), "t")
    result = await host.run(theirs(name), definitions)
    assert result.outcome is Outcome.REFUSED
    return result.text


@pytest.mark.parametrize(
    ("definitions", "says"),
    [
        ({"t": {"kind": "command", "argv": ["ls"]}}, "of the kind 'command'"),
        ({"t": {"kind": "python", "entry": "os:system"}}, "of the kind 'python'"),
        ({"t": "ls"}, "of the kind None"),
        ({"mine": HTTP}, "'mine' cannot have this name"),
        ({"t": {**HTTP, "private_addresses": True}}, "must not set private_addresses"),
        ({"t": {**HTTP, "headers_from_environment": {"A": "HOME"}}}, "must not set headers_from_environment"),
        ({"t": {"kind": "mcp", "command": ["ls"]}}, "must not set command"),
        ({"t": {"kind": "http", "openapi": {"document": "/etc/passwd", "operation": "x"}}}, "must be a URL"),
        ({"t": {**HTTP, "deadline_s": 1e4}}, "deadline_s is at most 120"),
        ({"t": {**HTTP, "output_cap_bytes": 60 << 20}}, "output_cap_bytes is at most"),
        ({"t": {**HTTP, "concurrency": 1000}}, "concurrency is at most 64"),
        ({"t": {**HTTP, "parameters": {"properties": {"a": {"$ref": "#"}}}}}, "circular"),
        ({"t": {**HTTP, "colour": "red"}}, "colour"),
        ({"two words": HTTP}, "should match"),
        ({"mine__x": HTTP}, "must not contain '__'"),
        ({"mine_": HTTP}, "nor end with '_'"),
        ({f"t{i}": HTTP for i in range(17)}, "may bring 16 tools, not 17"),
        ({"t": {**HTTP, "description": "x" * 300_000}}, "at most"),
        ({"t": {**HTTP, "parameters": {"a": {1, 2}}}}, "not JSON"),
        ({"t": HTTP}, "'127.0.0.1' is not a public address"),
    ],
)
async def test_what_a_request_may_not_bring(open_tools: OpenTools, definitions: Any, says: str) -> None:
    assert says in await refusal(open_tools, definitions, request_kinds=["http", "mcp"])


async def test_nothing_is_allowed_unless_the_operator_says_so(open_tools: OpenTools) -> None:
    assert "of the kinds: none" in await refusal(open_tools, {"t": HTTP})


async def test_a_server_that_a_request_brings_is_at_a_public_address(open_tools: OpenTools) -> None:
    host = await open_tools({}, request_kinds=["mcp"])
    server = {"s": {"kind": "mcp", "url": "http://169.254.169.254/mcp"}}
    assert (
        "is not a public address"
        in (await host.run(ToolCall("a", "s__x", tool=ToolId.of_request("s", "x")), server)).text
    )


async def test_networks_that_the_operator_opens_and_no_others(open_tools: OpenTools) -> None:
    host = await open_tools({}, request_kinds=["http"], request_networks=["127.0.0.0/8"])
    there = await host.run(theirs("t"), {"t": HTTP})
    assert (there.outcome, "not a public address" in there.text) == (Outcome.ERROR, False)
    elsewhere = await host.run(theirs("t", "b"), {"t": {**HTTP, "url": "http://10.0.0.1:9/"}})
    assert elsewhere.outcome is Outcome.REFUSED
    own = {"t": {**HTTP, "private_networks": ["10.0.0.0/8"]}}
    assert "must not set private_networks" in (await host.run(theirs("t", "c"), own)).text


async def test_one_request_does_not_see_the_tools_of_another(open_tools: OpenTools) -> None:
    host = await open_tools(
        {"mine": {"kind": "python", "entry": "tests.tools.python_tools:add"}}, request_kinds=["http"]
    )
    assert "not a public address" in (await host.run(theirs("theirs"), {"theirs": HTTP})).text
    for definitions in (None, {"other": HTTP}):
        assert "there is no tool 'theirs'" in (await host.run(theirs("theirs"), definitions)).text
    assert (await host.run(ToolCall("a", "mine", {"a": 1, "b": 1}), {"theirs": HTTP})).text == "2"


async def test_sets_of_tools_are_kept_up_to_a_number(open_tools: OpenTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "MAX_TABLES", 2)
    host = await open_tools({}, request_kinds=["http"])
    for i in range(5):
        await host.run(theirs("t"), {"t": {**HTTP, "description": str(i)}})
    assert len(host._request_tools._tables) == 2


class Unreachable:
    """A kind that waits for ever to know its tools."""

    def __init__(self, name: str, config: Any) -> None:
        self.kind = ScriptedKind(name, lambda _: "")

    async def tool(self, name: str) -> None:
        await asyncio.Event().wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kind, name)


async def test_a_server_that_is_never_reached_is_given_up(
    open_tools: OpenTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(hosting.TOOL_KINDS), "load", lambda self, kind: Unreachable)
    host = await open_tools({"mine": {"kind": "command", "argv": ["true"]}})
    monkeypatch.setattr(hosting, "REFRESH_S", 0.01)
    monkeypatch.setattr(hosting, "REACH_S", 0.05)
    assert [offer.name for offer in await host.offers()] == ["mine"]
    await until(lambda: not host._refreshing)


class Hanging:
    """A kind whose calls do not end until the test lets them."""

    end = asyncio.Event()

    def __init__(self, name: str, config: Any) -> None:
        self.kind = ScriptedKind(name, lambda _: self.end.wait())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kind, name)


async def test_tools_of_a_tenant_that_hang_refuse_no_other_tenants(
    open_tools: OpenTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "MAX_TABLES_OF_TENANT", 3)
    monkeypatch.setattr(hosting, "MAX_TABLES", 3)
    monkeypatch.setattr(Hanging, "end", asyncio.Event())
    host = await open_tools({}, request_kinds=["http"])
    monkeypatch.setattr(type(hosting.TOOL_KINDS), "load", lambda self, kind: Hanging)

    def call(tenant: str, number: int) -> "asyncio.Task[ToolResult]":
        one = ToolCall(f"c{number}", "t", program=f"{tenant}/p", tool=ToolId.of_request("t"))
        return asyncio.create_task(host.run(one, {"t": {**HTTP, "description": str(number)}}))

    stuck = [call("bad", number) for number in range(3)]
    await settle()
    refused = await call("bad", 3)
    assert (refused.outcome, "of this tenant are in use" in refused.text) == (Outcome.REFUSED, True)
    other = call("good", 0)  # the same tools: another table all the same
    await settle()
    Hanging.end.set()
    assert [result.outcome for result in await asyncio.gather(other, *stuck)] == [Outcome.OK] * 4
    assert len(host._request_tools._tables) == 4


async def test_documents_of_requests_are_smaller(open_tools: OpenTools) -> None:
    openapi = {"document": "http://127.0.0.1:9/", "operation": "x"}
    defined = {"mine": {"kind": "http", "openapi": openapi}}
    host = await open_tools(defined, request_kinds=["http"])
    brought = host._request_tools.table({"t": {"kind": "http", "openapi": openapi}}, "")
    sizes: list[Any] = [entry.kind for table in (host._tools, brought) for entry in table.own]
    assert [kind._max_document_bytes for kind in sizes] == [MAX_DOCUMENT_BYTES, hosting.MAX_REQUEST_DOCUMENT_BYTES]


class Waiting:
    """A kind that is known, and closed, once the test lets it. Its description stands for it."""

    made: ClassVar[list["Waiting"]] = []
    unknown: ClassVar[set[str]] = set()
    """Those that are not known at the beginning."""

    def __init__(self, name: str, config: Any) -> None:
        self.kind = ScriptedKind(name, lambda _: "done")
        self.description = config.description
        self.known, self.closable, self.is_closed = asyncio.Event(), asyncio.Event(), False
        if self.description not in self.unknown:
            self.known.set()
        self.made.append(self)

    async def tool(self, name: str) -> Any:
        await self.known.wait()
        return await self.kind.tool(name)

    async def aclose(self) -> None:
        self.is_closed = True
        await self.closable.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kind, name)


@pytest.fixture
async def waiting(open_tools: OpenTools, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ToolHost]:
    """A host of one set at a time, whose kinds wait."""
    monkeypatch.setattr(hosting, "MAX_TABLES", 1)
    monkeypatch.setattr(hosting, "CLOSE_S", 0.05)
    monkeypatch.setattr(Waiting, "made", [])
    monkeypatch.setattr(Waiting, "unknown", set())
    host = await open_tools({}, request_kinds=["http"])
    monkeypatch.setattr(type(hosting.TOOL_KINDS), "load", lambda self, kind: Waiting)
    yield host
    for kind in Waiting.made:
        kind.closable.set()


def using(host: ToolHost, description: str, id: str = "a") -> "asyncio.Task[ToolResult]":
    return asyncio.create_task(host.run(theirs("t", id), {"t": {**HTTP, "description": description}}))


def closed() -> dict[str, bool]:
    return {kind.description: kind.is_closed for kind in Waiting.made}


async def test_requests_with_the_same_new_tools_share_one_set_while_another_is_closed(
    waiting: ToolHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not let go delays nobody, and nothing is lost of it."""
    monkeypatch.setattr(hosting, "CLOSE_S", WITHIN_S)
    await using(waiting, "old")
    results = await asyncio.wait_for(asyncio.gather(*(using(waiting, "new", id) for id in "bc")), WITHIN_S)
    assert [result.outcome for result in results] == [Outcome.OK] * 2
    assert closed() == {"old": True, "new": False}
    assert waiting._request_tools._closing.pending_jobs == 1
    Waiting.made[0].closable.set()
    await until(lambda: not waiting._request_tools._closing.pending_jobs)
    assert len(waiting._request_tools._tables) == 1


@pytest.mark.parametrize("by", ["a listing", "a call"])
async def test_a_set_that_is_in_use_is_not_closed(waiting: ToolHost, by: str) -> None:
    """By a listing, or by a call that has no slot yet."""
    Waiting.unknown.add("old")
    definitions = {"t": {**HTTP, "description": "old"}}
    user: asyncio.Task[Any] = asyncio.create_task(
        waiting.offers(definitions) if by == "a listing" else waiting.run(theirs("t"), definitions)
    )
    await settle()
    await using(waiting, "new", "b")
    assert closed() == {"old": False, "new": False}
    Waiting.made[0].known.set()
    await user
    await using(waiting, "newer", "c")
    assert closed() == {"old": True, "new": False, "newer": False}


async def test_what_cannot_be_closed_does_not_delay_the_end(waiting: ToolHost) -> None:
    await using(waiting, "old")
    await using(waiting, "new", "b")
    await asyncio.wait_for(waiting.aclose(), WITHIN_S)
    assert closed() == {"old": True, "new": True}


async def test_the_tools_of_a_request_are_told_with_their_servers(
    open_tools: OpenTools, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Requests reach public addresses only, of which a test has none.
    monkeypatch.setattr(hosting, "_NOT_FOR_REQUESTS", ())
    _, port = serve("mcp_server.py", "http")
    brought = {
        "s": {"kind": "mcp", "url": f"http://127.0.0.1:{port}/mcp", "private_addresses": True},
        "t": {**HTTP, "description": "Theirs.", "parameters": {"type": "object", "required": ["id"]}},
    }
    host = await open_tools({"mine": {"kind": "command", "argv": ["true"]}}, request_kinds=["http", "mcp"])
    offers = {offer.name: offer for offer in await host.offers(brought)}
    assert next(iter(offers)) == "mine"
    assert {name: offers[name].tool for name in ("mine", "t", "s__add")} == {
        "mine": ToolId.of_operator("mine"),
        "t": ToolId.of_request("t"),
        "s__add": ToolId.of_request("s", "add"),
    }
    assert (offers["t"].description, offers["t"].parameters["required"]) == ("Theirs.", ["id"])
    assert set(offers["s__add"].parameters["properties"]) == {"a", "b"}
    assert [offer.name for offer in await host.offers()] == ["mine"]
    assert (
        await host.run(ToolCall("a", "s__add", {"a": 1, "b": 2}, tool=ToolId.of_request("s", "add")), brought)
    ).text == "3"


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"s": {"kind": "mcp", "url": "http://169.254.169.254/mcp"}}, "the request's tool 's': .*not a public address"),
        ({"t": {"kind": "command", "argv": ["ls"]}}, "of the kind 'command'"),
        ({"t": {**HTTP, "parameters": {"properties": {"a": {"$ref": "#"}}}}}, "circular"),
    ],
)
async def test_a_request_whose_tools_cannot_be_told_is_refused(open_tools: OpenTools, theirs: Any, says: str) -> None:
    host = await open_tools({}, request_kinds=["http", "mcp"])
    with pytest.raises(ToolRefused, match=says):
        await host.offers(theirs)
