"""Anthropic's client against the routes on messages whose tools the cluster runs, over a runner with a real log."""

import asyncio
from operator import attrgetter
from typing import Any

import pytest
from anthropic import APIStatusError, AsyncAnthropic
from anthropic.types.beta import BetaMessage

from cluster.core.errors import BadRequest, HttpError
from cluster.core.tools import Outcome, ToolCall, ToolId, ToolResult
from cluster.core.turn import PromptMode, TurnBegan, TurnDelta, TurnDone, pack_ids
from cluster.http import messages
from tests.programs.message_site import MODEL, claude, site
from tests.programs.response_site import Visitor, known, registered, served_by
from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, ScriptedTools, says
from tests.waiting import WITHIN_S, until

ADD: Any = {"name": "add", "server_side": True}
LOOK: Any = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
UNIQUE: Any = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
UNENFORCED: Any = {"name": "look", "input_schema": UNIQUE, "strict": True}
DOCS: Any = {"type": "url", "name": "docs", "url": "https://docs.example/mcp", "authorization_token": "token-1"}
OFFERED = (registered("add"), served_by("docs", "read"), served_by("docs", "write"))
GO: Any = {"role": "user", "content": "Go."}


class Site:
    """A runner, and a client of its routes."""

    def __init__(self, runners: Runners, turns: list[Any], tools: dict[str, Any], limits: dict[str, Any]) -> None:
        self.replicas = ScriptedReplicas(turns)
        self.tools = ScriptedTools(tools)
        self.definitions: list[Any] = []
        self.runner = runners(self.replicas, self.tools, **limits)
        self.app = site(self.runner, known(*OFFERED, seen=self.definitions), **limits)
        self.client: AsyncAnthropic = claude(self.app)

    async def ask(self, *, streamed: bool = False, **fields: Any) -> BetaMessage:
        """The message, in one piece or from a stream."""
        asked = {"model": MODEL, "max_tokens": 400, "messages": [GO], **fields}
        if not streamed:
            return await self.client.beta.messages.create(**asked)
        async with self.client.beta.messages.stream(**asked) as stream:
            return await stream.get_final_message()


@pytest.fixture
def served(runners: Runners) -> Any:
    def make(*turns: Any, tools: Any = None, **limits: Any) -> Site:
        return Site(runners, list(turns), tools or {}, limits)

    return make


def blocks(message: BetaMessage) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True, exclude={"citations"}) for block in message.content]


def use(call_id: str, name: str, arguments: Any, server: str = "caesura") -> dict[str, Any]:
    return {"type": "mcp_tool_use", "id": call_id, "name": name, "server_name": server, "input": arguments}


def result(call_id: str, text: str, *, is_error: bool = False) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    return {"type": "mcp_tool_result", "tool_use_id": call_id, "is_error": is_error, "content": content}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def thinks(thought: str, words: str) -> list[Any]:
    began = TurnBegan(PromptMode.FIRST, pack_ids([1]))
    return [
        began,
        TurnDelta(pack_ids([2]), reasoning=thought),
        TurnDelta(pack_ids([3]), words),
        TurnDone("stop", 10, 8, 2),
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_blocks_stand_in_the_order_of_the_turns(served: Any, streamed: bool) -> None:
    there = served(
        says("Let me add.", ("add", '{"a": 1}'), ("docs__read", "")),
        thinks("hm", "It is 2."),
        tools={"add": lambda call: "2", "docs__read": lambda call: "a page"},
    )
    message = await there.ask(streamed=streamed, tools=[ADD], mcp_servers=[DOCS])
    said, add, read, *results, thought, last = blocks(message)
    assert (said, last) == (text("Let me add."), text("It is 2."))
    assert [add, read] == [use("call_100_0", "add", {"a": 1}), use("call_100_1", "read", {}, "docs")]
    assert sorted(results, key=str) == sorted([result("call_100_0", "2"), result("call_100_1", "a page")], key=str)
    assert (thought["thinking"], bool(thought["signature"])) == ("hm", True)
    assert (message.stop_reason, message.usage.input_tokens, message.usage.cache_read_input_tokens) == (
        "end_turn",
        4,
        16,
    )
    assert message.usage.output_tokens == 4
    assert [call.target for call in there.tools.ran] == [ToolId.of_operator("add"), ToolId.of_request("docs", "read")]


@pytest.mark.parametrize("streamed", [False, True])
async def test_blocks_that_come_back_are_the_conversation_that_the_run_had(served: Any, streamed: bool) -> None:
    async def slow(call: ToolCall) -> str:
        await asyncio.sleep(0.05)
        return "written"

    there = served(
        says("Two at once.", ("docs__write", '{"page":1}'), ("add", '{"a": 1}')),
        says("And one.", ("nothing", "{}"), first_id=200),
        thinks("hm", "Done."),
        says("Well.", first_id=300),
        tools={"add": lambda call: "2", "docs__write": slow},
    )
    offered: Any = {"tools": [ADD], "mcp_servers": [DOCS], "system": "Be brief."}
    message = await there.ask(streamed=streamed, **offered)
    had = there.replicas.asked[2]["messages"]
    again: Any = [GO, {"role": "assistant", "content": message.content}, {"role": "user", "content": "And?"}]
    await there.ask(messages=again, **offered)
    sent = there.replicas.asked[3]["messages"]
    assert sent[: len(had)] == [with_plain_arguments(one) for one in had]
    assert sent[len(had) :] == [
        {"role": "assistant", "content": "Done.", "reasoning": "hm"},
        {"role": "user", "content": "And?"},
    ]
    assert there.replicas.asked[3]["tools"] == there.replicas.asked[2]["tools"]
    assert len({identity.program_id for identity in there.replicas.identities}) == 1


def with_plain_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Chat templates get the parsed arguments, so that their white space is in no prompt."""
    if message["content"] == "Two at once.":
        message["tool_calls"][0]["function"]["arguments"] = '{"page": 1}'
    return message


async def test_both_stream_helpers_of_the_client_keep_the_input_of_a_call(served: Any) -> None:
    for helper in ("messages", "beta.messages"):
        there = served(says("", ("add", '{"a": 1}')), says("2."), tools={"add": lambda call: "2"})
        stream = attrgetter(helper)(there.client).stream
        async with stream(model=MODEL, max_tokens=400, messages=[GO], tools=[ADD]) as events:
            call, *_ = (await events.get_final_message()).content
        assert (call.type, call.input) == ("mcp_tool_use", {"a": 1})


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_of_the_client_ends_the_run_after_the_clusters_own(served: Any, streamed: bool) -> None:
    there = served(says("", ("look", '{"at": "x"}'), ("add", "{}")), says("Ah."), tools={"add": lambda call: "2"})
    message = await there.ask(streamed=streamed, tools=[LOOK, ADD])
    look = {"type": "tool_use", "id": "call_100_0", "name": "look", "input": {"at": "x"}}
    assert blocks(message) == [look, use("call_100_1", "add", {}), result("call_100_1", "2")]
    assert message.stop_reason == "tool_use"
    answer = {"type": "tool_result", "tool_use_id": "call_100_0", "content": "seen"}
    history: Any = [GO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [answer]}]
    await there.ask(messages=history, tools=[LOOK, ADD])
    assert [one["role"] for one in there.replicas.asked[1]["messages"]] == ["user", "assistant", "tool", "tool"]


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [("length", None, "max_tokens", None), ("stop", "END", "stop_sequence", "END"), ("stop", None, "end_turn", None)],
)
async def test_stop_reasons(served: Any, finish: str, stop: str | None, reason: str, sequence: str | None) -> None:
    turn = [TurnBegan(PromptMode.FIRST, b""), TurnDelta(pack_ids([1]), "Hi"), TurnDone(finish, 10, 8, 1, stop)]
    message = await served(turn).ask(tools=[ADD])
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


async def test_half_a_call_and_those_before_it_are_in_no_message(served: Any) -> None:
    ran: list[Any] = []
    there = served(says("Wait.", ("add", "{}"), ("add", '{"a": '), finish="length"), tools={"add": ran.append})
    message = await there.ask(tools=[ADD])
    assert (blocks(message), message.stop_reason, ran) == ([text("Wait.")], "max_tokens", [])


async def test_a_run_that_is_out_of_time_pauses_and_goes_on_from_its_blocks(served: Any) -> None:
    async def sleeps(call: ToolCall) -> str:
        await asyncio.sleep(60)
        return "late"

    there = served(says("", ("add", "{}")), says("Go on."), tools={"add": sleeps}, max_wall_s=0.3)
    message = await there.ask(tools=[ADD])
    assert message.stop_reason == "pause_turn"
    [call, answer] = blocks(message)
    assert (call["type"], answer["is_error"]) == ("mcp_tool_use", True)
    history: Any = [GO, {"role": "assistant", "content": message.content}]
    again = await there.ask(messages=history, tools=[ADD])
    assert blocks(again) == [text("Go on.")]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_run_that_is_out_of_time_while_the_model_writes_is_cut_and_does_not_pause(
    served: Any, streamed: bool
) -> None:
    writes = [TurnBegan(PromptMode.FIRST, b""), TurnDelta(pack_ids([1]), "Once upon"), asyncio.Event()]
    there = served(writes, says("Go on."), max_wall_s=0.3)
    message = await there.ask(tools=[ADD], streamed=streamed)
    assert (blocks(message), message.stop_reason) == ([text("Once upon")] * streamed, "max_tokens")
    history: Any = [GO, {"role": "assistant", "content": message.content}, {"role": "user", "content": "On."}]
    assert blocks(await there.ask(messages=history, tools=[ADD])) == [text("Go on.")]


async def test_out_of_time_with_a_call_of_the_client_it_is_the_clients_turn(served: Any) -> None:
    tools = {"add": lambda call: asyncio.sleep(60)}
    there = served(says("", ("look", "{}"), ("add", "{}")), says("Ah."), tools=tools, max_wall_s=0.3)
    message = await there.ask(tools=[LOOK, ADD])
    assert [block["type"] for block in blocks(message)] == ["tool_use", "mcp_tool_use", "mcp_tool_result"]
    assert message.stop_reason == "tool_use"
    answer = {"type": "tool_result", "tool_use_id": "call_100_0", "content": "seen"}
    history: Any = [GO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [answer]}]
    assert blocks(await there.ask(messages=history, tools=[LOOK, ADD])) == [text("Ah.")]


async def test_out_of_time_an_asynchronous_call_gets_a_second_result_and_the_run_pauses(served: Any) -> None:
    there = served(says("", ("slowly", "{}")), says("I wait."), says("Well."), tools={"slowly": str}, max_wall_s=0.3)
    there.client = claude(site(there.runner, known(registered("slowly")), max_wall_s=0.3))
    tool: Any = {"name": "slowly", "server_side": True}
    message = await there.ask(tools=[tool])
    *_, last = blocks(message)
    assert (last["type"], last["is_error"], message.stop_reason) == ("mcp_tool_result", True, "pause_turn")
    history: Any = [GO, {"role": "assistant", "content": message.content}]
    assert blocks(await there.ask(messages=history, tools=[tool])) == [text("Well.")]


async def test_a_late_answer_is_a_second_result_and_the_same_message_again(served: Any) -> None:
    there = served(
        says("", ("slowly", "{}")), says("I wait."), says("Thanks.", first_id=300), says("Well."), tools={"slowly": str}
    )
    offered = [registered("slowly")]
    there.client = claude(site(there.runner, known(*offered)))
    tool = {"name": "slowly", "server_side": True}

    asking = asyncio.create_task(there.ask(tools=[tool]))
    await until(lambda: len(there.replicas.asked) >= 2 and there.tools.late)
    [future] = there.tools.late.values()
    future.set_result(ToolResult(next(iter(there.tools.late)), "slowly", Outcome.OK, "done", statistics_name="slowly"))
    message = await asking
    assert [block["type"] for block in blocks(message)] == [
        "mcp_tool_use",
        "mcp_tool_result",
        "text",
        "mcp_tool_result",
        "text",
    ]
    history: Any = [GO, {"role": "assistant", "content": message.content}, {"role": "user", "content": "And?"}]
    had = there.replicas.asked[2]["messages"]
    await there.ask(messages=history, tools=[tool])
    assert there.replicas.asked[3]["messages"][: len(had)] == had


async def test_forced_choices_apply_to_the_first_turns(served: Any) -> None:
    there = served(says("", ("add", "{}")), says("Done."), tools={"add": lambda call: "2"})
    await there.ask(tools=[ADD], tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True})
    first, second = there.replicas.asked
    assert first["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert "tool_choice" not in second
    assert first["parallel_tool_calls"] is False


async def test_a_run_has_the_settings_of_its_request(served: Any) -> None:
    there = served(says("Hi."))
    own = {"cache_salt": "s", "vllm_xargs": {"a": 1}, "chat_template_kwargs": {"style": "dry"}}
    await there.ask(tools=[ADD], output_config={"effort": "low"}, extra_body=own)
    [asked] = there.replicas.asked
    assert {name: asked[name] for name in own} == own
    assert asked["reasoning_effort"] == "low"


async def test_the_token_reaches_the_servers_definition_and_no_log(served: Any) -> None:
    there = served(says("Hi."))
    toolset = {"type": "mcp_toolset", "mcp_server_name": "docs", "configs": {"write": {"enabled": False}}}
    await there.ask(tools=[toolset], mcp_servers=[DOCS])
    url, token = "https://docs.example/mcp", {"headers": {"Authorization": "Bearer token-1"}}
    assert there.definitions == [{"docs": {"kind": "mcp", "url": url, **token}}]
    [tool] = there.replicas.asked[0]["tools"]
    assert tool["function"]["name"] == "docs__read"


@pytest.mark.parametrize(
    ("toolset", "configuration", "names"),
    [
        (None, None, ["read", "write"]),
        (None, {"allowed_tools": ["read"]}, ["read"]),
        ({"default_config": {"enabled": False}, "configs": {"write": {"enabled": True}}}, None, ["write"]),
        ({"configs": {"write": {"enabled": False, "defer_loading": False}}}, None, ["read"]),
        ({}, {"enabled": True}, ["read", "write"]),
    ],
)
async def test_which_tools_of_a_server_are_offered(served: Any, toolset: Any, configuration: Any, names: Any) -> None:
    there = served(says("Hi."))
    tools = [] if toolset is None else [{"type": "mcp_toolset", "mcp_server_name": "docs", **toolset}]
    server = DOCS if configuration is None else {**DOCS, "tool_configuration": configuration}
    await there.ask(tools=tools, mcp_servers=[server])
    assert [tool["function"]["name"] for tool in there.replicas.asked[0]["tools"]] == [
        f"docs__{name}" for name in names
    ]
    counted = await there.client.beta.messages.count_tokens(
        model=MODEL, messages=[GO], tools=tools, mcp_servers=[server]
    )
    assert counted.input_tokens == len(names)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"name": "rm", "server_side": True}]}, "tools.0.name"),
        ({"tools": [ADD, {**LOOK, "name": "add"}]}, "tools.1.name"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "rm"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choices": [{"type": "tool", "name": "rm"}]}, "tool_choices.0.name"),
        ({"tools": [ADD], "max_turns": 0}, "max_turns"),
        ({"mcp_servers": [DOCS, DOCS]}, "mcp_servers.1.name"),
        ({"mcp_servers": [{**DOCS, "name": "a__b"}]}, "mcp_servers.0.name"),
        ({"mcp_servers": [{**DOCS, "name": "clock"}]}, "mcp_servers.0.name"),
        ({"mcp_servers": [{**DOCS, "url": "ftp://a"}]}, "mcp_servers.0.url"),
        ({"mcp_servers": [{**DOCS, "authorization_token": "a\nb"}]}, "mcp_servers.0.authorization_token"),
        ({"mcp_servers": [{**DOCS, "name": "down"}]}, "mcp_servers"),
        ({"mcp_servers": [{**DOCS, "name": str(n)} for n in range(21)]}, "mcp_servers"),
        ({"tools": [{**LOOK, "name": "docs__read"}], "mcp_servers": [DOCS]}, "mcp_servers.0.name"),
        ({"tools": [ADD, SEARCH, UNENFORCED]}, "tools.2.input_schema.properties.a.uniqueItems"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": UNIQUE}}},
            "output_config.format.schema.properties.a.uniqueItems",
        ),
        ({"tools": [{"type": "mcp_toolset"}]}, "tools.0.mcp_server_name"),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "docs"}]}, "tools.0.mcp_server_name"),
        (
            {"tools": [{"type": "mcp_toolset", "mcp_server_name": "docs"}] * 2, "mcp_servers": [DOCS]},
            "tools.1.mcp_server_name",
        ),
        ({"tools": [ADD], "messages": [GO, {"role": "assistant", "content": "Hm."}]}, "messages.1"),
        ({"tools": [ADD, {**LOOK, "input_schema": {"type": "object", "maxProperties": 1 << 70}}]}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_is_named_and_nothing_is_run(served: Any, fields: Any, param: Any, stream: bool) -> None:
    there = served()
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": [GO]}
    with pytest.raises(APIStatusError) as refused:
        await there.client.beta.messages.create(**asked, stream=stream, extra_body=fields)
    body: Any = refused.value.body
    assert (refused.value.status_code, body["type"]) == (400, "error")
    assert body["error"].get("param") == param
    assert "token-1" not in refused.value.response.text
    assert there.replicas.asked == []


TOO_LONG = (
    "This model's maximum context length is 4096 tokens. However, you requested 9 output tokens and your prompt "
    "contains 9000 input tokens"
)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_first_turn_that_fails_is_the_answer_of_the_request(served: Any, streamed: bool) -> None:
    with pytest.raises(APIStatusError, match="prompt is too long: 9000 tokens > 4096") as refused:
        await served([BadRequest(TOO_LONG)]).ask(tools=[ADD], streamed=streamed)
    assert refused.value.status_code == 400


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_later_turn_that_fails_is_an_error_of_the_stream(served: Any, streamed: bool) -> None:
    turns = [says("Wait.", ("add", "{}")), *[[HttpError("lost", status=502)]] * 3]
    with pytest.raises(APIStatusError, match="was lost") as failed:
        await served(*turns, tools={"add": lambda call: "2"}).ask(tools=[ADD], streamed=streamed)
    assert failed.value.body["error"]["type"] == "api_error"  # type: ignore[index]


async def test_a_lost_attempt_is_in_no_whole_message(served: Any) -> None:
    began = TurnBegan(PromptMode.FIRST, b"")
    lost = [began, TurnDelta(pack_ids([1]), "Once upon"), HttpError("lost", status=502)]
    assert blocks(await served(lost, says("Twice.")).ask(tools=[ADD])) == [text("Twice.")]
    streamed = await served(lost, says("Twice.")).ask(tools=[ADD], streamed=True)
    assert blocks(streamed) == [text("Once upon"), text("Twice.")]


async def test_a_stream_gets_pings_while_tools_run(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PING_S", 0.02)

    async def slow(call: ToolCall) -> str:
        await until(lambda: visitor.text.count("event: ping") >= 3)
        return "2"

    there = served(says("", ("add", "{}")), says("Done."), tools={"add": slow})
    body = {"model": MODEL, "max_tokens": 9, "messages": [GO], "tools": [ADD], "stream": True}
    visitor = Visitor(there.app, body, "/v1/messages")
    await visitor.answered
    called, _, answered = visitor.text.partition("mcp_tool_result")
    assert "mcp_tool_use" in called
    assert called.count("event: ping") >= 3
    assert answered.endswith('data: {"type":"message_stop"}\n\n')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stays", [False, True])
async def test_a_client_that_goes_cancels_its_program_unless_it_may_ask_again(
    served: Any, stream: bool, stays: bool
) -> None:
    began, ready = asyncio.Event(), asyncio.Event()

    async def slow(call: ToolCall) -> str:
        began.set()
        await ready.wait()
        return "2"

    there = served(says("Wait.", ("add", "{}")), says("Done."), tools={"add": slow})
    body = {"model": MODEL, "max_tokens": 9, "messages": [GO], "tools": [ADD], "stream": stream}
    headers = {"idempotency_key": f"k-{stream}"} if stays else {}
    visitor = Visitor(there.app, body, "/v1/messages", **headers)
    async with asyncio.timeout(WITHIN_S):
        await began.wait()
        visitor.go()
        await visitor.answered
    ready.set()
    await until(lambda: not there.runner.open_runs)
    assert there.runner.counters["completed" if stays else "cancelled"] == 1


async def test_a_repeated_request_has_its_message_also_if_its_tools_are_gone(runners: Runners) -> None:
    offered = [registered("add")]

    async def offers(tenant: str, definitions: Any) -> Any:
        return tuple(offered)

    replicas = ScriptedReplicas([says("Done.")])
    create = claude(site(runners(replicas), offers)).beta.messages.create
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": [GO], "tools": [ADD]}
    again = {"Idempotency-Key": "tools-gone"}
    first = await create(**asked, extra_headers=again)
    offered.clear()
    assert (await create(**asked, extra_headers=again)).id == first.id
    assert len(replicas.asked) == 1
    with pytest.raises(APIStatusError) as caught:
        await create(**asked)
    assert caught.value.status_code == 400
