"""Conversations over HTTP, with OpenAI's own client, a real Redis and replicas that follow a script."""

import asyncio
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, ConflictError, InternalServerError, NotFoundError

from cluster.core.errors import BadRequest
from tests.programs.response_site import known, openai, registered, site
from tests.programs.runners import Runners
from tests.programs.scripted_runs import Script, ScriptedReplicas, ScriptedTools, says
from tests.waiting import until

ADD: Any = {"type": "function", "name": "add", "server_side": True}
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


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
