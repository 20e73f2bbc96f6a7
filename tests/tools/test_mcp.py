"""MCP tools against real servers: both eras of the protocol, pipes and HTTP, and servers that misbehave."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest

from cluster.config.tools import McpTool
from cluster.core.tools import IN_NEXT_MESSAGE, Outcome, ToolCall, ToolId, ToolResult
from tests.tools.scripted import SERVERS
from tests.waiting import until
from tools_runtime.host import ToolHost
from tools_runtime.kinds.mcp import MAX_TOOLS, McpKind

OpenTools = Callable[..., Awaitable[ToolHost]]
Serve = Callable[..., tuple["subprocess.Popen[bytes]", int]]

HANDSHAKE, STATELESS = "2025-11-25", "2026-07-28"

STDIO = [sys.executable, str(SERVERS / "mcp_server.py"), "stdio"]
BAD = [sys.executable, str(SERVERS / "mcp_bad_server.py")]


def server(**said: Any) -> dict[str, Any]:
    return {"s": {"kind": "mcp", "deadline_s": 60, "connect_timeout_s": 60, "private_addresses": True, **said}}


def kind(host: ToolHost) -> McpKind:
    found = host._tools.own[0].kind
    assert isinstance(found, McpKind)
    return found


def connection(host: ToolHost) -> Any:
    connected = kind(host)._connected
    assert connected is not None
    return connected.result()


def version(host: ToolHost) -> str | None:
    found: str | None = connection(host).client.protocol_version
    return found


async def ask(host: ToolHost, tool: str, arguments: dict[str, Any] | None = None, **said: Any) -> ToolResult:
    return await host.run(
        ToolCall(said.pop("id", "a"), f"s__{tool}", arguments or {}, tool=ToolId.of_operator("s", tool), **said)
    )


CONNECTIONS = {
    "pipes, handshake": (["stdio"], "handshake", HANDSHAKE),
    "pipes, stateless": (["stdio"], "stateless", STATELESS),
    "pipes, auto": (["stdio"], "auto", STATELESS),
    "events, handshake": (["http"], "handshake", HANDSHAKE),
    "events, stateless": (["http", "stateless"], "stateless", STATELESS),
    "JSON, handshake": (["http", "json"], "handshake", HANDSHAKE),
    "JSON, auto": (["http", "stateless", "json"], "auto", STATELESS),
}


@pytest.fixture(params=CONNECTIONS.values(), ids=CONNECTIONS.keys())
async def host(request: pytest.FixtureRequest, open_tools: OpenTools, serve: Serve) -> ToolHost:
    """A server over each transport, in each era."""
    arguments, protocol, expected = request.param
    if arguments == ["stdio"]:
        opened = await open_tools(server(command=STDIO, protocol=protocol, output_cap_bytes=100_000))
    else:
        _, port = serve("mcp_server.py", *arguments)
        url = f"http://127.0.0.1:{port}/mcp"
        opened = await open_tools(server(url=url, protocol=protocol, output_cap_bytes=100_000))
    assert version(opened) == expected
    return opened


async def test_calls_in_every_era_and_over_every_transport(host: ToolHost, tmp_path: Path) -> None:
    assert {offer.name for offer in await host.offers()} >= {"s__add", "s__slow", "s__fail"}
    calls = [ToolCall(f"c{i}", "s__add", {"a": i, "b": 1}, tool=ToolId.of_operator("s", "add")) for i in range(20)]
    assert [result.text for result in await asyncio.gather(*map(host.run, calls))] == [str(i + 1) for i in range(20)]
    wrong = await ask(host, "add", {"a": "x", "b": 1})
    assert (wrong.outcome, 'a: "x" is not of type "integer"' in wrong.text) == (Outcome.REFUSED, True)
    failed = await ask(host, "fail")
    assert (failed.outcome, failed.text) == (Outcome.ERROR, "error: Error executing tool fail")
    large = await ask(host, "large", {"size": 3_000_000})
    assert (large.outcome, large.truncated, len(large.text) <= 100_100) == (Outcome.OK, True, True)
    assert large.text.startswith("x" * 90_000)
    assert (await ask(host, "large", {"size": 40_000})).text == "x" * 40_000, "both its forms are below the cap"
    unknown = await ask(host, "ad")
    assert unknown.text.startswith("refused: there is no tool 's__ad'; there are: s__add")


async def test_images_are_kept_for_a_caller_that_can_use_them(host: ToolHost) -> None:
    """Each of these is far larger than the cap of the text."""
    shown = await ask(host, "pictures", {"sizes": [300, 4]}, images=True)
    assert (shown.outcome, shown.truncated) == (Outcome.OK, False), shown.text[:300]
    assert shown.text == f"\n{IN_NEXT_MESSAGE}\n{IN_NEXT_MESSAGE}"
    assert [image[:22] for image in shown.images] == ["data:image/png;base64,"] * 2
    assert len(shown.images[0]) > 300 * 300 * 3
    blind = await ask(host, "pictures", {"sizes": [300]})
    assert (blind.text, blind.images) == ("\n[image, not shown]", ())


async def test_images_that_cannot_be_used_are_named(open_tools: OpenTools) -> None:
    host = await open_tools(server(command=STDIO, output_cap_bytes=4096))
    broken = await ask(host, "pictures", {"sizes": [4], "broken": True}, images=True)
    assert (broken.text, broken.images) == ("\n[image left out: it is no image of a known format]", ())
    many = await ask(host, "pictures", {"sizes": [2] * 9}, images=True)
    assert len(many.images) == 8
    assert many.text.endswith(f"{IN_NEXT_MESSAGE}\n[image left out: an answer has at most 8 images]")
    huge = await ask(host, "pictures", {"sizes": [1200], "words": 9}, images=True)
    assert huge.text.startswith("xxxxxxxxx\n[image left out: the answer is longer than "), huge.text[:200]
    cut = await ask(host, "pictures", {"sizes": [2], "words": 9000}, images=True)
    assert (cut.truncated, cut.images) == (True, ())


async def test_a_server_that_wants_its_state_back_gets_it(open_tools: OpenTools) -> None:
    host = await open_tools(server(command=STDIO, protocol="stateless"))
    texts = {what: (await ask(host, "ask", {"what": what})).text for what in ("nothing", "user", "roots", "for ever")}
    assert texts == {
        "nothing": "state []",
        "user": "state ['cancel']",
        "roots": "error: the MCP server s asks for roots/list, which is not supported",
        "for ever": "error: the MCP server s asked for input 10 times",
    }


async def test_a_change_of_parameters_is_told(host: ToolHost, request: pytest.FixtureRequest) -> None:
    before = await ask(host, "add", {"a": 1, "b": 2})
    assert before.text == "3"
    assert (await ask(host, "change")).text == "changed"
    if "JSON, handshake" in request.node.name:
        # A server that answers in JSON tells of changes on a stream that may not be open yet.
        connection(host).stale.set()
    while (result := await ask(host, "add", {"a": 1, "b": 2})).outcome is not Outcome.REFUSED:
        assert result.outcome is Outcome.ERROR
        await asyncio.sleep(0.01)
    assert '"x" is a required property' in result.text
    assert result.text.endswith("(the server has changed this tool's parameters; they are now: x, y, z)")
    assert (await ask(host, "add", {"x": 1, "y": 2, "z": 3})).text == "6"


async def test_a_cancelled_call_is_cancelled_on_the_server(
    host: ToolHost, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "JSON, auto" in request.node.name:
        pytest.skip("the library's server does not notice that a client leaves before its JSON answer")
    mark = tmp_path / "mark"
    call = asyncio.create_task(ask(host, "slow", {"seconds": 1000, "mark": str(mark)}, id="s"))
    assert (await ask(host, "add", {"a": 1, "b": 1})).text == "2", "a slow call delays no other"
    await until(lambda: any(run.attempts for run in host.executor._runs.values()))
    await ask(host, "add", {"a": 1, "b": 1})
    host.executor.cancel("", "s")
    assert (await call).outcome is Outcome.CANCELLED
    await until(mark.exists)


async def test_a_server_that_dies_in_a_call_leaves_its_effect_unknown(host: ToolHost, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    other = asyncio.create_task(ask(host, "slow", {"seconds": 1000}, id="s"))
    await ask(host, "add", {"a": 1, "b": 1})
    died = await ask(host, "die", {"mark": str(mark)})
    assert mark.read_text() == "done"
    assert (died.outcome, died.text) == (Outcome.UNKNOWN, "unknown: the MCP server s went away during the call")
    # The other call ends with its connection; where each call has one of its own, with the server.
    assert (await other).outcome is Outcome.UNKNOWN


async def test_a_process_that_died_is_started_again(open_tools: OpenTools, tmp_path: Path) -> None:
    host = await open_tools(server(command=STDIO))
    assert (await ask(host, "die", {"mark": str(tmp_path / "mark")})).outcome is Outcome.UNKNOWN
    assert (await ask(host, "add", {"a": 1, "b": 1})).text == "2"


async def test_a_server_that_is_not_there_is_told_and_tried_again(open_tools: OpenTools, serve: Serve) -> None:
    process, port = serve("mcp_server.py", "http")
    host = await open_tools(server(url=f"http://127.0.0.1:{port}/mcp"))
    process.kill()
    process.wait()
    texts = [(await ask(host, "add", {"a": 1, "b": 1})).text for _ in range(3)]
    assert any("cannot be reached" in text and "is tried again in" in text for text in texts), texts


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["sleep", "1000"], "it did not answer in time"),
        (["yes"], "it did not answer in time"),
        (["true"], "Connection closed"),
        (["/no/such/server"], "cannot be started: No such file or directory"),
    ],
)
async def test_what_is_no_server_is_told_and_hurts_nobody(open_tools: OpenTools, command: list[str], says: str) -> None:
    good = {"kind": "mcp", "command": STDIO}
    host = await open_tools({**server(command=command, connect_timeout_s=1, protocol="handshake"), "good": good})
    result = await ask(host, "add")
    assert result.outcome is Outcome.ERROR
    assert "the MCP server s cannot be reached" in result.text
    assert says in result.text
    assert (
        await host.run(ToolCall("g", "good__add", {"a": 1, "b": 1}, tool=ToolId.of_operator("good", "add")))
    ).text == "2"


@pytest.mark.parametrize("protocol", ["auto", "handshake", "stateless"])
@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "404 Not Found", "502 Bad Gateway"])
async def test_the_http_status_of_a_server_that_refuses_is_told(
    open_tools: OpenTools, protocol: str, status: str
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if (length := re.search(rb"content-length: (\d+)", head, re.IGNORECASE)) is not None:
            await reader.readexactly(int(length[1]))
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: 7\r\nConnection: close\r\n\r\nnot you" % status.encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as refusing:
        url = f"http://127.0.0.1:{refusing.sockets[0].getsockname()[1]}/mcp"
        host = await open_tools(server(url=url, protocol=protocol))
        text = (await ask(host, "add", {"a": 1, "b": 1})).text
    assert text.startswith(f"error: the MCP server s answers with HTTP {status}"), text


@pytest.mark.parametrize("method", ["tools/list", "tools/call"])
async def test_the_http_status_of_one_method_is_told(open_tools: OpenTools, serve: Serve, method: str) -> None:
    _, port = serve("mcp_server.py", "http", "stateless", "json", "401", method)
    host = await open_tools(server(url=f"http://127.0.0.1:{port}/mcp"))
    text = (await ask(host, "add", {"a": 1, "b": 1})).text
    assert text.startswith("error: the MCP server s answers with HTTP 401 Unauthorized"), text


async def test_private_addresses_are_refused_unless_allowed(open_tools: OpenTools, serve: Serve) -> None:
    _, port = serve("mcp_server.py", "http")
    host = await open_tools(server(url=f"http://127.0.0.1:{port}/mcp", private_addresses=False))
    assert "'127.0.0.1' is not a public address" in (await ask(host, "add", {"a": 1, "b": 1})).text


async def test_only_allowed_tools_are_offered(open_tools: OpenTools) -> None:
    host = await open_tools(server(command=STDIO, allowed_tools=["add"]))
    assert [offer.name for offer in await host.offers()] == ["s__add"]
    assert (await ask(host, "fail")).outcome is Outcome.REFUSED


async def test_an_allowed_tool_is_found_behind_any_number_of_others(
    open_tools: OpenTools, caplog: pytest.LogCaptureFixture
) -> None:
    host = await open_tools(server(command=[*BAD, "7"], allowed_tools=["t3", "good", "misspelt"]))
    assert [offer.name for offer in await host.offers()] == ["s__t3", "s__good"]
    assert (await ask(host, "good")).text == "good"
    assert "the MCP server s does not list allowed tools: 'misspelt'" in caplog.text


async def test_no_more_than_the_largest_number_of_tools_is_listed(open_tools: OpenTools) -> None:
    host = await open_tools(server(command=[*BAD, "7"]))
    offers = await host.offers()
    assert len([offer for offer in offers if offer.unusable is None]) == MAX_TOOLS
    assert [offer.server_tool for offer in offers if offer.unusable is not None][:2] == ["t512", "t513"]


async def test_a_server_gets_only_the_variables_that_it_is_given(
    open_tools: OpenTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "1")
    monkeypatch.setenv("KEPT", "1")
    host = await open_tools(server(command=STDIO, environment={"SET": "1"}, environment_from=["GIVEN"]))
    names = (await ask(host, "environment")).text.split("\n")
    assert {"GIVEN", "SET"} <= set(names)
    assert "KEPT" not in names
    assert "KEPT" in os.environ


@pytest.fixture
async def bad(open_tools: OpenTools) -> ToolHost:
    return await open_tools(server(command=BAD, protocol="auto", output_cap_bytes=10_000))


async def test_tools_whose_schemas_are_bombs_are_left_out(bad: ToolHost) -> None:
    offers = await bad.offers()
    names = {offer.name for offer in offers if offer.unusable is None}
    assert {"s__good", "s__dots_and_strokes", "s__slow_output", "s__circular"} <= names
    assert {offer.server_tool: offer.unusable for offer in offers if offer.unusable is not None} == {
        "deep": "its parameters are a schema nested deeper than 32",
        "n" * 100: f"its name 's__{'n' * 100}' is too long, or taken",
        "dots/and/strokes": "its name 's__dots_and_strokes' is too long, or taken",
    }


async def test_a_recursive_schema_is_checked_to_its_first_level(bad: ToolHost) -> None:
    [offer] = [offer for offer in await bad.offers() if offer.name == "s__circular"]
    assert offer.parameters["properties"] == {"a": {"description": "As #.", "type": "object"}}
    assert (await ask(bad, "circular", {"a": {"a": {"a": {}}}})).text == "good"
    refused = await ask(bad, "circular", {"a": 1})
    assert (refused.outcome, 'a: 1 is not of type "object"' in refused.text) == (Outcome.REFUSED, True)


@pytest.mark.parametrize(
    ("tool", "outcome", "text"),
    [
        ("good", Outcome.OK, "good"),
        ("slow_output", Outcome.OK, "t"),
        ("id_last", Outcome.OK, "xxxx"),
        ("no_id", Outcome.OK, "after a long notification"),
        ("garbage", Outcome.OK, "after garbage"),
        ("odd_ids", Outcome.OK, "after odd ids"),
        ("too_deep", Outcome.ERROR, "error: the MCP server s says: not a message"),
        ("wrong", Outcome.ERROR, "error: the MCP server's answer is not one"),
    ],
)
async def test_whatever_a_server_says_is_an_outcome(bad: ToolHost, tool: str, outcome: Outcome, text: str) -> None:
    result = await ask(bad, tool, deadline_s=20)
    assert result.outcome is outcome, result.text
    assert result.text.startswith(text)
    assert (await ask(bad, "good")).text == "good", "and the connection lives on"


async def test_a_listing_that_failed_is_read_again(bad: ToolHost) -> None:
    assert (await ask(bad, "break_listing")).text == "the next listing fails"
    connection(bad).stale.set()
    failed = await ask(bad, "good")
    assert failed.text == "error: the MCP server s does not list its tools: out of order"
    assert (await ask(bad, "new")).text == "good"


async def test_a_listing_that_is_not_answered_is_given_up(bad: ToolHost) -> None:
    """Whoever waits for it, which may be nobody's call, keeps no call from its own."""
    await ask(bad, "silence_listing")
    connection(bad).stale.set()
    patient = kind(bad)._config
    kind(bad)._config = patient.model_copy(update={"connect_timeout_s": 0.05})
    failed = await ask(bad, "good")
    assert failed.text == "error: the MCP server s did not list its tools within 0.05 s"
    assert not connection(bad).listing.locked()
    kind(bad)._config = patient
    assert (await ask(bad, "new")).text == "good"


async def test_calls_go_on_while_a_long_listing_is_checked() -> None:
    """Each tool may have a schema that takes some milliseconds."""
    one = McpKind("s", McpTool.model_validate({"kind": "mcp", "url": "https://example.com/mcp"}))
    listed = [types.Tool(name=f"t{number}", input_schema={"type": "object"}) for number in range(50)]
    taking, turns = asyncio.create_task(one._take(listed)), 0
    while not taking.done():
        await asyncio.sleep(0)
        turns += 1
    assert (len(one.tools()), turns >= len(listed)) == (50, True)


async def test_an_answer_without_its_type_is_complete(open_tools: OpenTools) -> None:
    host = await open_tools(server(command=BAD, protocol="stateless"))
    assert version(host) == STATELESS
    assert (await ask(host, "good")).text == "good"
    assert "answer is not one" in (await ask(host, "wrong")).text


async def test_a_server_that_stops_answering_costs_a_deadline(bad: ToolHost) -> None:
    assert (await ask(bad, "silent", deadline_s=0.5)).outcome is Outcome.TIMEOUT
