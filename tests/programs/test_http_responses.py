"""OpenAI's client against the routes on responses, over a runner with a real log."""

import asyncio
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, UnprocessableEntityError
from starlette.applications import Starlette

from cluster.core.errors import BadRequest
from cluster.core.lineage import LineageIndex
from cluster.core.tools import ToolCall, ToolId
from cluster.core.turn import PromptMode, TurnBegan, TurnDelta, pack_ids
from cluster.http import response_requests
from cluster.observing.catalogue import IGNORED_PARTS
from cluster.runs.runner import ProgramRunner
from tests.observing.recorded import Recorded
from tests.programs.response_site import Visitor, known, openai, registered, served_by, site
from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, ScriptedTools, says
from tests.waiting import until

ADD: Any = {"type": "function", "name": "add", "server_side": True}
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
DOCS: Any = {
    "type": "mcp",
    "server_label": "docs",
    "server_url": "https://docs.example/mcp",
    "authorization": "token-1",
}
TOOLS = known(registered("add"), served_by("docs", "read"))


def waits(*said: str) -> list[Any]:
    """A turn that says something and does not end, and the event that would end it."""
    deltas = [TurnDelta(pack_ids([1]), text) for text in said]
    return [TurnBegan(PromptMode.FIRST, pack_ids([1])), *deltas, asyncio.Event()]


class Site:
    """A runner, and clients of its routes."""

    def __init__(
        self, runner: ProgramRunner, replicas: ScriptedReplicas, app: Starlette, lineage: LineageIndex
    ) -> None:
        self.runner = runner
        self.lineage = lineage
        self.replicas = replicas
        self.app = app

    @property
    def client(self) -> AsyncOpenAI:
        return openai(self.app)

    async def run_id(self) -> str:
        """Of the run begun last."""
        heads = await self.runner.runs("default")
        return heads[0].id

    async def events(self, response_id: str, **query: Any) -> list[Any]:
        stream = await self.client.responses.retrieve(response_id, stream=True, **query)
        return [event async for event in stream]


@pytest.fixture
def served(runners: Runners) -> Any:
    def make(*turns: Any, tools: Any = None, offers: Any = TOOLS) -> Site:
        replicas = ScriptedReplicas(list(turns))
        runner = runners(replicas, ScriptedTools(tools or {}))
        lineage = LineageIndex()
        return Site(runner, replicas, site(runner, offers, lineage=lineage), lineage)

    return make


async def test_a_response_in_the_foreground_and_what_is_kept_of_it(served: Any) -> None:
    there = served(says("", ("add", '{"a": 1}')), says("it is 2", first_id=200), tools={"add": lambda call: "2"})
    made = await there.client.responses.create(model="m", input="1 + 1?", tools=[ADD], metadata={"k": "v"})
    assert (made.status, made.output_text, made.metadata) == ("completed", "it is 2", {"k": "v"})
    assert [item.type for item in made.output] == ["mcp_call", "message"]
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (20, 4)
    assert await there.client.responses.retrieve(made.id) == made
    items = await there.client.responses.input_items.list(made.id)
    assert [item.content[0].text for item in items.data] == ["1 + 1?"]  # type: ignore[union-attr]
    await there.client.responses.delete(made.id)
    with pytest.raises(NotFoundError):
        await there.client.responses.retrieve(made.id)


@pytest.mark.parametrize("form", ["plain", "stream", "background"])
@pytest.mark.parametrize("tool", [LOOK, ADD], ids=["the caller's", "ours"])
async def test_half_a_call_is_an_incomplete_item_of_an_incomplete_response(served: Any, tool: Any, form: str) -> None:
    ran: list[Any] = []
    there = served(says("let me", (tool["name"], '{"a": '), finish="length"), tools={"add": ran.append})
    create = there.client.responses.create
    if form == "stream":
        events = [event async for event in await create(model="m", input="1 + 1?", tools=[tool], stream=True)]
        kinds = [event.type for event in events]
        assert not any(kind.endswith("call_arguments.done") for kind in kinds)
        made = events[-1].response
        assert events[-1].type == "response.incomplete"
    else:
        made = await create(model="m", input="1 + 1?", tools=[tool], background=form == "background")
        async for _ in there.runner.follow(made.id):
            pass
        made = await there.client.responses.retrieve(made.id)
    assert ran == []
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    said, call = made.output
    kind = "function_call" if tool is LOOK else "mcp_call"
    assert (said.status, call.type, call.status, call.arguments) == ("completed", kind, "incomplete", '{"a": ')
    # What was cut is no call of the conversation, for whoever goes on from it with or without its id.
    there.replicas.turns += [says("well"), says("well")]
    kept = [item.model_dump(exclude_none=True) for item in made.output]
    for rest in (
        {"previous_response_id": made.id, "input": "Go on."},
        {"input": [*kept, {"role": "user", "content": "Go on."}]},
    ):
        await create(model="m", tools=[tool], **rest)
        assert not any("tool_calls" in message for message in there.replicas.asked[-1]["messages"])


async def test_consent_names_itself_to_whoever_runs_the_tool(served: Any) -> None:
    """One consent, answered by three requests, is three runs; the executor runs the tool once."""
    seen: list[ToolCall] = []
    docs = {**DOCS, "require_approval": "always"}
    there = served(says("", ("docs__read", "{}")), *(says("read") for _ in range(3)), tools={"docs__read": seen.append})
    create = there.client.responses.create
    asked = await create(model="m", input="read", tools=[docs])
    [request] = asked.output[-1:]
    consent = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
    for kept in ({"previous_response_id": asked.id, "input": [consent]}, {"input": ["read", request, consent]}):
        items = [{"role": "user", "content": item} if isinstance(item, str) else item for item in kept["input"]]
        items = [item if isinstance(item, dict) else item.model_dump() for item in items]
        await create(model="m", tools=[docs], **{**kept, "input": items})
    assert [(call.target, call.consent) for call in seen] == [
        (ToolId.of_request("docs", "read"), f"default/{request.id}")
    ] * 2


async def test_a_stream_and_the_rest_of_it_later(served: Any) -> None:
    there = served(says("hello"))
    stream = await there.client.responses.create(model="m", input="hi", stream=True)
    events = [event async for event in stream]
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == "hello"
    again = await there.events(events[0].response.id)
    rest = await there.events(events[0].response.id, starting_after=3)
    assert (again, rest) == (events, events[4:])


async def test_openais_own_reader_of_streams_understands_it(served: Any) -> None:
    there = served(says("let me see", ("look", "{}")))
    async with there.client.responses.stream(model="m", input="hi", tools=[LOOK]) as stream:
        kinds = [event.type async for event in stream]
        whole = await stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    assert whole.output_text == "let me see"


async def test_in_the_background_until_it_is_cancelled(served: Any) -> None:
    there = served(waits("I th"))
    made = await there.client.responses.create(model="m", input="hi", background=True)
    assert made.status in ("queued", "in_progress")
    await until(lambda: there.replicas.asked)
    cancelled = await there.client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert (await there.client.responses.cancel(made.id)).status == "cancelled"
    events = await there.events(made.id)
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].response.status == "cancelled"


async def test_what_is_under_way_cannot_be_deleted(served: Any) -> None:
    there = served(waits("I th"))
    made = await there.client.responses.create(model="m", input="hi", background=True)
    with pytest.raises(APIStatusError) as caught:
        await there.client.responses.delete(made.id)
    assert caught.value.status_code == 409
    await there.client.responses.cancel(made.id)
    await there.client.responses.delete(made.id)


# --- clients that go away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_goes_away_takes_its_response_with_it(served: Any, stream: bool) -> None:
    there = served(waits("I th"))
    visitor = Visitor(there.app, {"input": "hi", "stream": stream})
    await until(lambda: there.replicas.asked and (not stream or "I th" in visitor.text))
    visitor.go()
    await visitor.answered
    response_id = await there.run_id()
    assert (await there.events(response_id))[-1].response.status == "cancelled"
    assert there.replicas.closed == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_that_is_stopped_stops_its_response(served: Any, stream: bool) -> None:
    """As Ray Serve does it for a client that has gone."""
    there = served(waits("I th"))
    visitor = Visitor(there.app, {"input": "hi", "stream": stream})
    await until(lambda: there.replicas.asked and (not stream or "I th" in visitor.text))
    visitor.answered.cancel()
    await asyncio.wait({visitor.answered})
    assert (await there.events(await there.run_id()))[-1].response.status == "cancelled"


@pytest.mark.parametrize(
    ("body", "headers"),
    [({"background": True, "stream": True}, {}), ({"stream": True}, {"idempotency_key": "k1"})],
    ids=["background", "a key"],
)
async def test_a_response_stays_for_a_client_that_may_come_again(served: Any, body: Any, headers: Any) -> None:
    turn = waits("hel") + says("lo")[1:]
    there = served(turn)
    visitor = Visitor(there.app, {"input": "hi", **body}, **headers)
    await until(lambda: "hel" in visitor.text)
    visitor.go()
    await visitor.answered
    turn[2].set()
    events = await there.events(await there.run_id())
    assert events[-1].response.output_text == "hello"


async def test_the_same_key_is_the_same_response(served: Any) -> None:
    there = served(says("hello"))
    again = {"Idempotency-Key": "k2"}
    first = await there.client.responses.create(model="m", input="hi", extra_headers=again)
    second = await there.client.responses.create(model="m", input="hi", extra_headers=again)
    assert first == second
    assert len(there.replicas.asked) == 1
    with pytest.raises(UnprocessableEntityError):
        await there.client.responses.create(model="m", input="other", extra_headers=again)
    with pytest.raises(BadRequestError):
        await there.client.responses.create(model="m", input="hi", extra_headers={"Idempotency-Key": "k" * 300})


# --- conversations ----------------------------------------------------------------------------------------------------


async def test_a_conversation_over_three_responses(served: Any) -> None:
    there = served(says("", ("look", "{}")), says("a bird", first_id=200), says("bye", first_id=300))
    first = await there.client.responses.create(model="m", input="what is there?", tools=[LOOK])
    call = first.output[0]
    seen: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "feathers"}
    second = await there.client.responses.create(model="m", previous_response_id=first.id, input=[seen], tools=[LOOK])
    third = await there.client.responses.create(model="m", previous_response_id=second.id, input="thanks")
    assert (second.output_text, third.output_text) == ("a bird", "bye")
    roles = [[message["role"] for message in asked["messages"]] for asked in there.replicas.asked]
    assert roles == [
        ["user"],
        ["user", "assistant", "tool"],
        ["user", "assistant", "tool", "assistant", "user"],
    ]
    # The second turn goes on from ids; the third has no tools any more, and its prompt is another.
    assert [bool(ids) for ids in there.replicas.prior] == [False, True, False]
    assert len({identity.program_id for identity in there.replicas.identities}) == 1


async def test_a_prompt_is_counted_with_its_history_and_tools(served: Any) -> None:
    there = served(says("a bird"))
    first = await there.client.responses.create(model="m", input="what is there?")
    count = there.client.responses.input_tokens.count
    alone = await count(model="m", input="thanks")
    after = await count(model="m", input="thanks", previous_response_id=first.id)
    tooled = await count(model="m", input="thanks", tools=[LOOK], instructions="be kind")
    assert (alone.object, alone.input_tokens < after.input_tokens < tooled.input_tokens) == (
        "response.input_tokens",
        True,
    )
    assert len(there.replicas.asked) == 1
    with pytest.raises(BadRequestError):
        await count(model="m", input="")


async def test_a_conversation_is_compacted_by_a_turn_of_its_program(served: Any) -> None:
    there = served(says("", ("look", "{}")), says("a bird, brown", first_id=200), says("yes", first_id=300))
    create, compact = there.client.responses.create, there.client.responses.compact
    session: Any = {"extra_headers": {"x-session-id": "birds"}}
    first = await create(model="m", input="what is there?", tools=[LOOK], instructions="be kind", **session)
    seen: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "feathers"}
    more: Any = {"tools": [LOOK]}
    made = await compact(
        model="m", previous_response_id=first.id, input=[seen], instructions="be kind", extra_body=more, **session
    )
    assert (made.object, [item.type for item in made.output]) == ("response.compaction", ["message", "compaction"])
    assert made.usage.output_tokens == 2
    asked = there.replicas.asked[-1]
    assert [message["role"] for message in asked["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert asked["tool_choice"] == "none"
    # It continues from the ids of the turn before it, in the same program.
    assert there.replicas.prior[-1]
    assert {identity.program_id for identity in there.replicas.identities} == {"birds"}
    kept: Any = [item.to_dict() for item in made.output]
    await create(model="m", input=[*kept, {"role": "user", "content": "sure?"}], instructions="be kind")
    assert [message["content"] for message in there.replicas.asked[-1]["messages"]] == [
        "be kind",
        "what is there?",
        "[Summary of the conversation so far]\na bird, brown",
        "sure?",
    ]


async def test_a_compaction_that_is_cut_says_so_to_the_model(served: Any) -> None:
    there = served(says("a bird, bro", finish="length"), says("yes", first_id=200))
    made = await there.client.responses.compact(model="m", input="what is there?")
    kept: Any = [item.to_dict() for item in made.output]
    await there.client.responses.create(model="m", input=[*kept, {"role": "user", "content": "sure?"}])
    summary = there.replicas.asked[-1]["messages"][1]["content"]
    assert summary == "[Summary of the conversation so far]\na bird, bro\n[The summary was cut here.]"


async def test_a_compaction_needs_its_turn_whatever_generate_is(served: Any) -> None:
    there = served(says("a summary"))
    body: Any = {"generate": False}
    made = await there.client.responses.compact(model="m", input="hi", extra_body=body)
    assert [item.type for item in made.output] == ["message", "compaction"]


async def test_a_compaction_runs_no_approved_call(served: Any) -> None:
    ran: list[ToolCall] = []
    there = served(says("", ("docs__read", "{}")), says("a summary"), tools={"docs__read": ran.append})
    docs = {**DOCS, "require_approval": "always"}
    asked = await there.client.responses.create(model="m", input="read", tools=[docs])
    consent: Any = {"type": "mcp_approval_response", "approval_request_id": asked.output[-1].id, "approve": True}
    compact = there.client.responses.compact
    with pytest.raises(BadRequestError, match="approved call") as caught:
        await compact(model="m", previous_response_id=asked.id, input=[consent], extra_body={"tools": [docs]})
    assert (caught.value.param, ran, len(there.replicas.asked)) == ("input", [], 1)
    consent["approve"] = False
    made = await compact(model="m", previous_response_id=asked.id, input=[consent], extra_body={"tools": [docs]})
    assert [item.type for item in made.output] == ["message", "compaction"]


async def test_a_compacted_conversation_keeps_the_images_of_the_user(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_requests, "seeing_models", lambda config: frozenset({"m"}))
    there = served(says("a summary"), says("a bird", first_id=200))
    image: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    asked: Any = {"role": "user", "content": [{"type": "input_text", "text": "what is there?"}, image]}
    made = await there.client.responses.compact(model="m", input=[asked])
    assert made.output[0].to_dict()["content"] == [*asked["content"][:1], image | {"detail": "auto"}]
    kept: Any = [item.to_dict() for item in made.output]
    await there.client.responses.create(model="m", input=kept)
    seen, summary = there.replicas.asked[-1]["messages"]
    assert seen == there.replicas.asked[0]["messages"][0]
    assert summary["content"].endswith("a summary")


async def test_a_response_without_a_turn_keeps_the_ids_of_the_one_before(served: Any) -> None:
    there = served(says("hello"), says("again", first_id=200))
    create = there.client.responses.create
    first = await create(model="m", input="hi")
    without: Any = {"generate": False}
    second = await create(model="m", input="and?", previous_response_id=first.id, extra_body=without)
    assert (second.status, second.output, second.usage.output_tokens) == ("completed", [], 0)
    await create(model="m", input=[], previous_response_id=second.id)
    asked = there.replicas.asked[-1]["messages"]
    assert [message["content"] for message in asked] == ["hi", "hello", "and?"]
    assert [bool(ids) for ids in there.replicas.prior] == [False, True]


async def test_a_failed_compaction_is_an_error(served: Any) -> None:
    there = served([BadRequest("too long", code="context_length_exceeded")], says(""))
    for status in (400, 502):
        with pytest.raises(APIStatusError) as caught:
            await there.client.responses.compact(model="m", input="hi")
        assert caught.value.status_code == status


async def test_a_response_compacts_a_long_conversation_by_itself(served: Any) -> None:
    there = served(says("we met"), says("hello again", first_id=200))
    rule: Any = [{"type": "compaction", "compact_threshold": 400}]
    made = await there.client.responses.create(model="m", input="hi " * 200, context_management=rule)
    assert [item.type for item in made.output] == ["compaction", "message"]
    assert made.output_text == "hello again"
    assert [message["content"][:9] for message in there.replicas.asked[-1]["messages"]] == ["hi hi hi ", "[Summary "]
    short = served(says("hello"))
    made = await short.client.responses.create(model="m", input="hi", context_management=rule)
    assert [item.type for item in made.output] == ["message"]


async def test_items_of_stored_responses_are_named_by_their_ids(served: Any) -> None:
    there = served(
        says("let me see", ("look", "{}")), says("a bird", first_id=200), says("well", first_id=300),
        tools={"add": lambda call: "2"},
    )  # fmt: skip
    create = there.client.responses.create
    first = await create(model="m", input="what is there?", tools=[LOOK])
    [asked] = (await there.client.responses.input_items.list(first.id)).data
    named: list[Any] = [{"type": "item_reference", "id": item.id} for item in (asked, *first.output)]
    seen: Any = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "feathers"}
    second = await create(model="m", input=[*named, seen], tools=[LOOK])
    assert second.output_text == "a bird"
    assert [message["role"] for message in there.replicas.asked[-1]["messages"]] == ["user", "assistant", "tool"]
    assert there.replicas.asked[-1]["messages"][1]["content"] == "let me see"
    # The items of that request are its own now, and can be named, too.
    items = [item.id async for item in there.client.responses.input_items.list(second.id, order="asc")]
    third = await create(model="m", input=[*({"id": one} for one in items), {"role": "user", "content": "And?"}])
    assert [message["role"] for message in there.replicas.asked[-1]["messages"]] == [
        "user",
        "assistant",
        "tool",
        "user",
    ]
    for gone in (third.output[0].id + "x", "msg_" + "0" * 32 + "_0000", "msg_1"):
        with pytest.raises(NotFoundError) as caught:
            await create(model="m", input=[{"type": "item_reference", "id": gone}])
        assert caught.value.param == "input.0.id"


async def test_a_client_that_keeps_its_history_itself(served: Any) -> None:
    there = served(says("", ("add", "{}")), says("2", first_id=200), says("4", first_id=300),
                   tools={"add": lambda call: "2"})  # fmt: skip
    first = await there.client.responses.create(model="m", input="1 + 1?", tools=[ADD], store=False)
    history: Any = [
        {"role": "user", "content": "1 + 1?"},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "and twice that?"},
    ]
    second = await there.client.responses.create(model="m", input=history, tools=[ADD], store=False)
    assert second.output_text == "4"
    assert [message["role"] for message in there.replicas.asked[-1]["messages"]] == [
        *("user", "assistant", "tool", "assistant", "user"),
    ]
    with pytest.raises(NotFoundError):
        await there.client.responses.retrieve(first.id)


async def test_a_call_of_a_tool_that_the_model_invented_can_be_sent_back(served: Any) -> None:
    there = served(says("", ("repo.search", "{}")), *(says("well", first_id=100 * n) for n in (2, 3)))
    create, fixed = there.client.responses.create, {"model": "m", "tools": [LOOK]}
    first = await create(input="what is there?", **fixed)
    [call] = first.output
    assert (call.type, call.name) == ("function_call", "repo.search")
    missing: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "there is no such tool"}
    for sent in (call.to_dict(), {"type": "item_reference", "id": call.id}):
        asked: Any = [{"role": "user", "content": "what is there?"}, sent, missing]
        assert (await create(input=asked, **fixed)).output_text == "well"
        assert there.replicas.asked[-1]["messages"][1]["tool_calls"][0]["function"]["name"] == "repo.search"


async def test_a_response_that_is_not_stored_is_repeated_too(served: Any) -> None:
    there = served(says("once"), says("twice"))
    create, headers = there.client.responses.create, {"Idempotency-Key": "unstored"}
    first = await create(model="m", input="hi", store=False, extra_headers=headers)
    await until(lambda: not there.runner.open_runs)
    again = await create(model="m", input="hi", store=False, extra_headers=headers)
    assert (again.id, again.output_text) == (first.id, "once")
    with pytest.raises(NotFoundError):
        await there.client.responses.retrieve(first.id)


async def test_consent_to_a_call_of_a_server(served: Any) -> None:
    definitions: list[Any] = []
    tools = known(served_by("docs", "read"), seen=definitions)
    there = served(says("", ("docs__read", "{}")), says("it says so", first_id=200),
                   tools={"docs__read": lambda call: "the text"}, offers=tools)  # fmt: skip
    first = await there.client.responses.create(model="m", input="read", tools=[DOCS])
    assert [item.type for item in first.output] == ["mcp_list_tools", "mcp_approval_request"]
    assert "token-1" not in first.to_json()
    assert definitions[0]["docs"]["headers"] == {"Authorization": "Bearer token-1"}
    consent: Any = {
        "type": "mcp_approval_response",
        "approval_request_id": first.output[1].id,
        "approve": True,
    }
    second = await there.client.responses.create(
        model="m", previous_response_id=first.id, input=[consent], tools=[DOCS]
    )
    ran, said = second.output
    assert (ran.output, ran.approval_request_id, said.type) == ("the text", first.output[1].id, "message")


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def test_a_request_that_the_first_turn_refuses_is_refused(served: Any) -> None:
    there = served([BadRequest("the prompt is too long", param="input")])
    with pytest.raises(BadRequestError) as caught:
        await there.client.responses.create(model="m", input="hi")
    assert (caught.value.param, caught.value.status_code) == ("input", 400)


async def test_the_same_in_a_stream_is_its_last_event(served: Any) -> None:
    there = served([BadRequest("the prompt is too long", param="input")])
    events = [event async for event in await there.client.responses.create(model="m", input="hi", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the prompt is too long"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"previous_response_id": "resp_no"}, 400, "previous_response_id"),
        ({"tools": [DOCS | {"server_label": "down"}]}, 400, "tools"),
        ({"tools": [ADD | {"name": "no"}]}, 400, "tools.0.name"),
        ({"prompt": {"id": "p"}}, 400, "prompt"),
    ],
)
async def test_nothing_is_begun_for_a_bad_request(served: Any, body: Any, status: int, param: str) -> None:
    there = served()
    before = len(await there.runner.runs("default", limit=1000))
    with pytest.raises(APIStatusError) as caught:
        await there.client.responses.create(model="m", input="hi", **body)
    assert (caught.value.status_code, caught.value.body["param"]) == (status, param)  # type: ignore[index]
    assert len(await there.runner.runs("default", limit=1000)) == before


async def test_what_has_no_effect_is_counted_or_refused(runners: Runners, recorded: Recorded) -> None:
    runner = runners(ScriptedReplicas([says("hi")]), ScriptedTools({}))
    unusual: Any = {"model": "m", "input": "hi", "tools": [{"type": "web_search"}], "extra_body": {"tone": "kind"}}
    made = await openai(site(runner)).responses.create(**unusual)
    assert made.to_dict()["caesura"] == {"ignored": ["tone", "tools.web_search"]}
    assert recorded.of(IGNORED_PARTS) == {("field",): 1.0, ("tools",): 1.0}
    with pytest.raises(BadRequestError, match="tone: it has no effect here") as caught:
        await openai(site(runner, http={"unknown_fields": "refuse"})).responses.create(**unusual)
    assert caught.value.param == "tone"


async def test_nobody_knows_a_response_that_there_is_not(served: Any) -> None:
    responses = served().client.responses
    for ask in (responses.retrieve, responses.cancel, responses.delete, responses.input_items.list):
        with pytest.raises(NotFoundError):
            await ask("resp_no")


# --- the program of a response that names none ------------------------------------------------------------------------


async def test_a_client_that_sends_the_whole_history_goes_on_in_its_program(served: Any) -> None:
    there = served(says("", ("look", "{}")), says("a bird", first_id=200), says("brown", first_id=300))
    create, fixed = there.client.responses.create, {"model": "m", "tools": [LOOK], "store": False}
    history: Any = [{"role": "user", "content": "what is there?"}]
    first = await create(input=history, **fixed)
    history += [item.to_dict() for item in first.output]
    history += [{"type": "function_call_output", "call_id": first.output[0].call_id, "output": "feathers"}]
    second = await create(input=history, **fixed)
    history += [item.to_dict() for item in second.output] + [{"role": "user", "content": "which colour?"}]
    third = await create(input=history, stream=True, **fixed)
    assert [event async for event in third][-1].type == "response.completed"
    assert third.response.headers["x-caesura-program"] == first.id
    assert [identity.program_id for identity in there.replicas.identities] == [first.id] * 3
    other = served(says("no"))
    await other.client.responses.create(input=history, **fixed)
    assert other.replicas.identities[0].program_id != first.id


async def test_the_end_of_a_run_is_the_end_of_its_turn_also_in_the_background(served: Any) -> None:
    answer = waits("slow")
    there = served(answer, says("b", first_id=200), says("c", first_id=300), says("d", first_id=400))
    create, history = there.client.responses.create, [{"role": "user", "content": "hi"}]
    first = await create(model="m", input=history, background=True)
    await until(lambda: there.replicas.identities)
    sample = await create(model="m", input=history)
    assert sample.id != first.id
    await there.client.responses.cancel(first.id)
    await until(lambda: not any(program.active for program in there.lineage._programs.values()))
    later: Any = [*history, {"role": "assistant", "content": "slow"}, {"role": "user", "content": "more"}]
    await create(model="m", input=later)
    # Both have ended, so that the oldest one goes on.
    assert [one.program_id for one in there.replicas.identities] == [first.id, sample.id, first.id]


async def test_a_request_that_is_refused_begins_no_program(served: Any) -> None:
    there = served(says("hello"))
    create = there.client.responses.create
    with pytest.raises(BadRequestError):
        await create(model="m", input="hi", tool_choice={"type": "function", "name": "nowhere"})
    assert len(there.lineage) == 0
    await create(model="m", input="hi")
    assert len(there.lineage) == 1
    failing = served([BadRequest("too long", code="context_length_exceeded")])
    with pytest.raises(BadRequestError):
        await failing.client.responses.create(model="m", input="hi")
    await until(lambda: len(failing.lineage) == 0)
    there.lineage.check_integrity()
