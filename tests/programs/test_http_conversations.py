"""Conversations over HTTP, with OpenAI's own client, a real Redis and replicas that follow a script."""

import asyncio
import time
from typing import Any

import pytest
import redis.asyncio
from openai import (
    APIStatusError,
    AsyncOpenAI,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    UnprocessableEntityError,
)

from cluster.core.errors import BadRequest, Overloaded
from cluster.http import conversations
from cluster.responses.conversation_entries import added
from cluster.responses.input_items import ITEM_TYPES, Message
from cluster.responses.spec import RunRequest
from cluster.store import conversations as stored_conversations
from cluster.store.client import StoreFailure, StoreMemory, StoreUnavailable
from tests.programs.response_site import known, openai, registered, site
from tests.programs.runners import Runners
from tests.programs.scripted_runs import Script, ScriptedReplicas, ScriptedTools, says
from tests.waiting import until

ADD: Any = {"type": "function", "name": "add", "server_side": True}
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


async def unavailable(*_arguments: Any, **_options: Any) -> None:
    raise StoreUnavailable(StoreFailure.TIMEOUT)


class Site:
    """The routes, and what their replicas were asked."""

    def __init__(self, runners: Runners, turns: tuple[Script, ...]) -> None:
        self.replicas = ScriptedReplicas(list(turns))
        tools = ScriptedTools({"add": lambda call: "2"})
        self.runner = runners(self.replicas, tools)
        self.client: AsyncOpenAI = openai(site(self.runner, known(registered("add")), redis_url=runners.url))

    async def respond(self, **fields: Any) -> Any:
        return await self.client.responses.create(model="m", **fields)

    async def items(self, name: str) -> list[Any]:
        return [item async for item in self.client.conversations.items.list(name, order="asc", limit=2)]

    def seen(self) -> list[tuple[str, str]]:
        """What the last turn's model read."""
        return [(message["role"], message["content"]) for message in self.replicas.asked[-1]["messages"]]


async def test_a_conversation_has_the_items_of_its_responses(runners: Runners) -> None:
    there = Site(runners, (says("", ("add", "{}")), says("two", first_id=200), says("bye", first_id=300)))
    made = await there.client.conversations.create(items=[user("1 + 1?")], metadata={"topic": "sums"})
    first = await there.respond(conversation=made.id, tools=[ADD])
    assert first.conversation.id == made.id
    await there.client.conversations.items.create(made.id, items=[user("well done")])
    second = await there.respond(conversation={"id": made.id}, tools=[ADD], input="Any more?")
    assert there.seen() == [
        ("user", "1 + 1?"), ("assistant", ""), ("tool", "2"), ("assistant", "two"), ("user", "well done"),
        ("user", "Any more?"),
    ]  # fmt: skip
    # The second response continues from the exact ids of the first, in the same program.
    assert [bool(ids) for ids in there.replicas.prior] == [False, True, True]
    assert {identity.program_id for identity in there.replicas.identities} == {made.id}
    items = await there.items(made.id)
    assert [item.type for item in items] == ["message", "mcp_call", "message", "message", "message", "message"]
    assert len({item.id for item in items}) == 6
    assert items[1].output == "2"
    assert items[-1].content[0].text == second.output_text == "bye"
    one = await there.client.conversations.items.retrieve(items[0].id, conversation_id=made.id)
    assert one == items[0]


async def test_the_responses_of_a_conversation_in_use_are_kept_as_long_as_it_is(runners: Runners) -> None:
    """The logs of a response would expire in a second; the conversation, which is listed now, in a minute."""
    there = Site(runners, (says("hello"), says("bye", first_id=300)))
    made = await there.client.conversations.create()
    first = await there.respond(conversation=made.id, input="I am Ada.")
    direct = redis.asyncio.from_url(runners.url)
    keys = await direct.keys(f"*:{first.id}")
    assert len(keys) == 2
    await until(lambda: not there.runner.open_runs)
    for key in keys:
        assert await direct.pexpire(key, 1_000)
    assert len(await there.items(made.id)) == 2
    assert all([await direct.pttl(key) > 60_000 for key in keys])
    ended = dict(await direct.zrange("caesura:v1:{runs}:ended", 0, -1, withscores=True))
    [ends_us] = [value for place, value in ended.items() if place.decode().endswith(first.id)]
    assert ends_us / 1e6 - time.time() > 60
    await direct.aclose()
    await there.respond(conversation=made.id, input="Who am I?")
    assert [text for _, text in there.seen()] == ["I am Ada.", "hello", "Who am I?"]


@pytest.mark.parametrize("failing", ["memory", "renewal"])
async def test_a_conversation_is_read_although_its_responses_cannot_be_renewed(
    runners: Runners, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    there = Site(runners, (says("hello"),))
    made = await there.client.conversations.create()
    await there.respond(conversation=made.id, input="I am Ada.")
    await until(lambda: not there.runner.open_runs)
    direct = redis.asyncio.from_url(runners.url)
    if failing == "memory":
        await direct.config_set("maxmemory", 1)
    else:
        monkeypatch.setattr(stored_conversations.ConversationStore, "renewed", unavailable)
    try:
        assert len(await there.items(made.id)) == 2
    finally:
        await direct.config_set("maxmemory", 0)
        await direct.aclose()


async def test_a_response_in_progress_is_renewed_at_the_first_use_after_its_end(runners: Runners) -> None:
    gate = asyncio.Event()
    there = Site(runners, ([gate, *says("hello")],))
    made = await there.client.conversations.create()
    first = await there.respond(conversation=made.id, input="I am Ada.", background=True)
    assert await there.items(made.id) == []  # its response is in progress
    gate.set()
    await until(lambda: not there.runner.open_runs)
    direct = redis.asyncio.from_url(runners.url)
    keys = await direct.keys(f"*:{first.id}")
    for key in keys:
        assert await direct.pexpire(key, 1_000)
    assert len(await there.items(made.id)) == 2
    assert all([await direct.pttl(key) > 60_000 for key in keys])
    await direct.aclose()


async def test_what_is_deleted_is_not_read_again(runners: Runners) -> None:
    there = Site(runners, (says("a bird"), says("yes", first_id=200)))
    made = await there.client.conversations.create(items=[user("what is there?"), user("my password is x")])
    await there.respond(conversation=made.id)
    items = await there.items(made.id)
    await there.client.conversations.items.delete(items[1].id, conversation_id=made.id)
    with pytest.raises(NotFoundError):
        await there.client.conversations.items.delete(items[1].id, conversation_id=made.id)
    await there.respond(conversation=made.id, input="Sure?")
    assert there.seen() == [("user", "what is there?"), ("assistant", "a bird"), ("user", "Sure?")]
    assert there.replicas.prior[-1] == []


async def test_an_item_that_is_added_again_after_its_deletion_is_there(runners: Runners) -> None:
    there = Site(runners, (says("a bird"),))
    first, other = ({**user(text), "id": name} for text, name in (("what is there?", "msg_1"), ("and there?", "msg_2")))
    made = await there.client.conversations.create(items=[first, other])
    await there.client.conversations.items.delete("msg_1", conversation_id=made.id)
    again: Any = {**first, "content": "what is it?"}
    await there.client.conversations.items.create(made.id, items=[again])
    assert [item.id for item in await there.items(made.id)] == ["msg_2", "msg_1"]
    await there.respond(conversation=made.id)
    assert there.seen() == [("user", "and there?"), ("user", "what is it?")]


async def test_a_call_of_a_tool_that_the_model_invented_stays_after_a_deletion(runners: Runners) -> None:
    there = Site(runners, (says("", ("repo.search", "{}")), says("well", first_id=200)))
    made = await there.client.conversations.create(items=[user("my password is x")])
    first = await there.respond(conversation=made.id, input="what is there?", tools=[LOOK])
    [secret, *_] = await there.items(made.id)
    await there.client.conversations.items.delete(secret.id, conversation_id=made.id)
    missing: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "no such tool"}
    assert (await there.respond(conversation=made.id, input=[missing], tools=[LOOK])).output_text == "well"
    assert there.seen() == [("user", "what is there?"), ("assistant", ""), ("tool", "no such tool")]


async def test_a_clients_call_is_answered_in_the_conversation(runners: Runners) -> None:
    there = Site(runners, (says("", ("look", "{}")), says("a bird", first_id=200)))
    made = await there.client.conversations.create()
    first = await there.respond(conversation=made.id, input="what is there?", tools=[LOOK])
    with pytest.raises(BadRequestError, match="No tool output found"):
        await there.respond(conversation=made.id, input="well?", tools=[LOOK])
    seen: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "feathers"}
    await there.client.conversations.items.create(made.id, items=[seen])
    assert (await there.respond(conversation=made.id, tools=[LOOK])).output_text == "a bird"


async def test_two_responses_at_once_are_one_too_many(runners: Runners) -> None:
    gate = asyncio.Event()
    there = Site(runners, ([*says("slow")[:2], gate, *says("slow")[2:]], says("quick", first_id=200)))
    made = await there.client.conversations.create()
    first = asyncio.create_task(there.respond(conversation=made.id, input="one"))
    await until(lambda: there.replicas.asked)
    with pytest.raises(ConflictError) as caught:
        await there.respond(conversation=made.id, input="two")
    assert (caught.value.code, caught.value.param) == ("conversation_locked", "conversation")
    gate.set()
    assert (await first).output_text == "slow"
    assert (await there.respond(conversation=made.id, input="two")).output_text == "quick"


async def test_a_repeated_request_of_a_conversation_has_the_same_response(runners: Runners) -> None:
    gate = asyncio.Event()
    slow = says("a bird", first_id=200)
    there = Site(runners, (says("", ("look", "{}")), [*slow[:2], gate, *slow[2:]]))
    made = await there.client.conversations.create()
    first = await there.respond(conversation=made.id, input="what is there?", tools=[LOOK])
    seen: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "feathers"}
    again: Any = {"conversation": made.id, "tools": [LOOK], "extra_headers": {"Idempotency-Key": "conversation-1"}}
    asked = asyncio.create_task(there.respond(input=[seen], **again))
    await until(lambda: len(there.replicas.asked) == 2)
    during = asyncio.create_task(there.respond(input=[seen], **again))
    with pytest.raises(UnprocessableEntityError):
        await there.respond(input="other", **again)
    with pytest.raises(ConflictError):
        await there.respond(conversation=made.id, input=[seen], tools=[LOOK])
    gate.set()
    answers = await asyncio.gather(asked, during)
    after = await there.respond(input=[seen], **again)
    assert {one.id for one in answers} == {after.id}
    assert after.output_text == "a bird"
    assert len(there.replicas.asked) == 2
    with pytest.raises(BadRequestError, match="No tool call found"):
        await there.respond(conversation=made.id, input=[seen], tools=[LOOK])


async def test_of_responses_that_begin_together_one_stays(runners: Runners) -> None:
    there = Site(runners, (says("a"), says("b", first_id=200), says("c", first_id=300)))
    made = await there.client.conversations.create()
    asked = [there.respond(conversation=made.id, input=f"{n}") for n in range(3)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    kept = [one for one in answers if not isinstance(one, Exception)]
    assert kept
    assert all(isinstance(one, ConflictError) for one in answers if isinstance(one, Exception))
    items = await there.items(made.id)
    assert len(items) == 2 * len(kept)


@pytest.mark.parametrize("failure", ["another response came first", "the store did not answer"])
async def test_a_response_that_is_not_added_is_tried_anew(
    runners: Runners, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    there = Site(runners, (says("fine"),))
    made = await there.client.conversations.create()
    add = conversations.Conversations.add_response

    async def fails(self: conversations.Conversations, run: RunRequest) -> None:
        if failure == "the store did not answer":
            raise Overloaded("the store does not answer")
        await self.add(run.spec.tenant, made.id, added([Message(role="user", content="meanwhile")]))
        await add(self, run)

    again: Any = {"conversation": made.id, "input": "one", "extra_headers": {"Idempotency-Key": failure}}
    monkeypatch.setattr(conversations.Conversations, "add_response", fails)
    with pytest.raises(APIStatusError) as caught:
        await there.respond(**again)
    assert caught.value.status_code in (409, 503)
    assert not there.replicas.asked, "no turn is asked for a response that is in no conversation"
    assert await there.runner.runs("default", program=made.id) == []
    monkeypatch.setattr(conversations.Conversations, "add_response", add)
    answer = await there.respond(**again)
    assert (answer.status, answer.output_text) == ("completed", "fine")
    assert answer.id == (await there.respond(**again)).id
    assert [item.content[0].text for item in await there.items(made.id)][-2:] == ["one", "fine"]


async def test_a_failed_response_adds_nothing(runners: Runners) -> None:
    there = Site(runners, ([BadRequest("too long")], says("fine", first_id=200)))
    made = await there.client.conversations.create()
    with pytest.raises(BadRequestError):
        await there.respond(conversation=made.id, input="one")
    assert await there.items(made.id) == []
    await there.respond(conversation=made.id, input="two")
    assert there.seen() == [("user", "two")]


async def test_metadata_changes_and_a_conversation_ends(runners: Runners) -> None:
    conversations = Site(runners, ()).client.conversations
    made = await conversations.create(metadata={"a": "b"})
    assert (await conversations.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
    assert (await conversations.retrieve(made.id)).created_at == made.created_at
    assert (await conversations.delete(made.id)).deleted
    for ask in (conversations.retrieve, conversations.delete, lambda name: conversations.update(name, metadata={})):
        with pytest.raises(NotFoundError):
            await ask(made.id)


async def test_a_full_store_takes_no_items(runners: Runners) -> None:
    there = Site(runners, (says("still here"),))
    conversations = there.client.conversations
    made = await conversations.create(items=[user("one")])
    there.runner.memory.memory = StoreMemory(60, 100)
    for ask in (conversations.create(), conversations.items.create(made.id, items=[user("two")])):
        with pytest.raises(InternalServerError) as refused:
            await ask
        assert (refused.value.status_code, refused.value.code) == (503, "store_full")
        assert refused.value.response.headers["retry-after"]
    # What is in the store can be used.
    await there.respond(conversation=made.id)
    assert there.seen() == [("user", "one")]
    [first, *_] = await there.items(made.id)
    await conversations.items.delete(first.id, conversation_id=made.id)
    there.runner.memory.memory = StoreMemory(50, 100)
    await conversations.items.create(made.id, items=[user("two")])


async def test_the_conversations_of_a_tenant_are_bounded(runners: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Site(runners, ()).client.conversations
    made = await client.create(items=[user("x" * 600_000)])
    refusals = []
    for ask in (client.create(items=[user("x" * 500_000)]), client.items.create(made.id, items=[user("x" * 500_000)])):
        with pytest.raises(BadRequestError) as refused:
            await ask
        refusals.append(refused.value.code)
    with monkeypatch.context() as patched, pytest.raises(BadRequestError) as refused:
        patched.setattr(stored_conversations, "MAX_CONVERSATIONS", 1)
        await client.create()
    assert [*refusals, refused.value.code] == ["storage_quota_exceeded"] * 2 + ["too_many_conversations"]
    await client.delete(made.id)
    await client.create(items=[user("x" * 500_000)])


IMAGE: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
PARTS: Any = [
    {"type": "input_text", "text": "a"},
    IMAGE,
    IMAGE | {"detail": "huge"},
    {"type": "input_file", "filename": "a.md", "file_data": "IyBIZWxsbw==", "detail": 5},
    {"type": "refusal", "refusal": "no"},
]
CALL: Any = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
CUSTOM: Any = {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"}
RAN: Any = {"type": "mcp_call", "server_label": "docs", "name": "read", "arguments": "{}"}
CONSENT: Any = [
    {"type": "mcp_approval_request", "id": "r1", "server_label": "docs", "name": "read", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "r1", "approve": False},
]
ITEMS: dict[str, list[Any]] = {
    "message": [
        {"role": role, "content": content}
        for role in ("user", "system", "developer", "assistant")
        for content in ("hi", PARTS)
    ],
    "function_call": [CALL, {"type": "function_call_output", "call_id": "c1", "output": "a bird"}],
    "function_call_output": [CALL, {"type": "function_call_output", "call_id": "c1", "output": PARTS}],
    "custom_tool_call": [CUSTOM, {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}],
    "custom_tool_call_output": [CUSTOM, {"type": "custom_tool_call_output", "call_id": "c2", "output": PARTS}],
    "reasoning": [
        {"type": "reasoning", "summary": []},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "so"}],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
    ],
    "mcp_call": [RAN | {"output": "a page"}, RAN | {"error": {"type": "http_error", "code": 500, "message": "broken"}}],
    "mcp_list_tools": [{"type": "mcp_list_tools", "server_label": "docs", "tools": []}],
    "mcp_approval_request": CONSENT,
    "mcp_approval_response": CONSENT,
    "compaction": [{"type": "compaction", "encrypted_content": "caesura1.d2UgbWV0"}],
}


@pytest.mark.parametrize("kind", sorted(ITEM_TYPES.keys() - {"item_reference"}))
async def test_items_of_every_type_are_listed(runners: Runners, kind: str) -> None:
    there, items = Site(runners, ()), ITEMS[kind]
    types = [item.get("type", "message") for item in items]
    assert kind in types
    client = there.client.conversations
    one, other = await client.create(items=items), await client.create()
    added = await client.items.create(other.id, items=items)
    assert [item.type for item in added.data] == types
    for name in (one.id, other.id):
        listed = await there.items(name)
        assert [item.type for item in listed] == types
        for item in listed:
            assert await client.items.retrieve(item.id, conversation_id=name) == item
    response = await there.respond(input=items, extra_body={"generate": False})
    shown = [item async for item in there.client.responses.input_items.list(response.id, order="asc", limit=2)]
    assert [item.type for item in shown] == types


async def test_an_image_is_listed_with_its_detail(runners: Runners) -> None:
    there = Site(runners, ())
    made = await there.client.conversations.create(items=[{"role": "user", "content": PARTS}])
    [item] = await there.items(made.id)
    text, image, other, file, refusal = item.content
    assert (image.image_url, image.detail, other.detail) == (IMAGE["image_url"], "auto", "auto")
    assert (text.text, file.filename, refusal.text) == ("a", "a.md", "no")


async def test_items_whose_list_cannot_be_shown_are_not_added(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Site(runners, ())
    made = await there.client.conversations.create()
    with monkeypatch.context() as broken:
        broken.setattr(conversations, "shown_item", lambda item: {**item, "content": None})
        with pytest.raises(InternalServerError):
            await there.client.conversations.items.create(made.id, items=[user("hi")])
    assert await there.items(made.id) == []


async def test_items_of_hosted_tools_are_not_listed(runners: Runners) -> None:
    there = Site(runners, (says("a bird"),))
    made = await there.client.conversations.create()
    searched = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "birds"},
    }
    response = await there.respond(conversation=made.id, input=[user("hi"), searched, {"type": "local_shell_call"}])
    assert [item.type for item in await there.items(made.id)] == ["message", "message"]
    assert [item.type async for item in there.client.responses.input_items.list(response.id)] == ["message"]


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("nobody's", {"conversation": "conv_0"}, 404, "conversation"),
    ("two histories", {"conversation": "conv_0", "previous_response_id": "resp_0"}, 400, "conversation"),
    ("not stored", {"conversation": "conv_0", "store": False}, 400, "conversation"),
    ("a number", {"conversation": 3}, 400, "conversation"),
]


@pytest.mark.parametrize(("body", "status", "param"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
async def test_a_bad_request_names_its_field(runners: Runners, body: Any, status: int, param: str) -> None:
    there = Site(runners, ())
    with pytest.raises(APIStatusError) as caught:
        await there.respond(input="hi", **body)
    assert (caught.value.status_code, caught.value.body["param"]) == (status, param)  # type: ignore[index]


async def test_bad_items_are_refused(runners: Runners) -> None:
    conversations = Site(runners, ()).client.conversations
    made = await conversations.create()
    many = [user("hi")] * 21
    for items, param in (([{"type": "item_reference", "id": "msg_1"}], "items.0.type"), (many, "items"), ([], "items")):
        with pytest.raises(BadRequestError) as caught:
            await conversations.items.create(made.id, items=items)
        assert caught.value.param == param


async def test_without_the_store_the_client_is_told_to_come_again(runners: Runners) -> None:
    client = openai(site(runners(ScriptedReplicas([]))))
    with pytest.raises(InternalServerError) as caught:
        await client.conversations.create()
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"]
