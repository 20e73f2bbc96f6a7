"""Responses over a WebSocket: OpenAI's own client, an ingress's own server, a real Redis, and scripted replicas."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from cluster.api.openai import ErrorBoundary
from cluster.api.ray_errors import as_http_error
from cluster.auth.keys import Caller
from cluster.auth.middleware import AuthMiddleware
from cluster.config.schema import CaesuraConfig
from cluster.http import response_sockets
from cluster.http.connection_responses import MAX_KEPT
from cluster.http.response_sockets import MAX_WAITING, TENANT_SHARE, ResponseSockets
from cluster.http.server import HttpServer
from cluster.proxy.http_protocol import HardenedHttpProtocol
from cluster.runs import ended_runs
from tests.programs.response_site import known, registered, site
from tests.programs.runners import Runners
from tests.programs.scripted_runs import Script, ScriptedReplicas, ScriptedTools, says
from tests.waiting import WITHIN_S

HOST = "127.0.0.1"
MESSAGE_BYTES = 1 << 16
KEY, OTHER_KEY = "secret", "other secret"
KEYS = {KEY: Caller("default"), OTHER_KEY: Caller("other")}
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def guarded(app: Starlette) -> Starlette:
    """The application behind keys, as in the ingress, with the path that is asked first."""

    async def version(request: Request) -> Response:
        return JSONResponse({})

    limits: Any = {"limited_paths": frozenset()}
    boundary = Middleware(ErrorBoundary, error_map=as_http_error, max_header_bytes=10_000, max_in_flight=10, **limits)
    keys = Middleware(AuthMiddleware, config=CaesuraConfig(), find=KEYS.get, **limits)
    return Starlette(routes=[Route("/version", version), Mount("/", app)], middleware=[boundary, keys])


class Sockets:
    """A server, and what its replicas were asked."""

    def __init__(self, runners: Runners, turns: tuple[Script, ...], most: int) -> None:
        self.replicas = ScriptedReplicas(list(turns))
        self.runner = runners(self.replicas, ScriptedTools({"add": lambda call: "2"}))
        with socket.create_server((HOST, 0)) as listener:
            self.port = listener.getsockname()[1]
        app = guarded(site(self.runner, known(registered("add")), redis_url=runners.url))
        served = ResponseSockets(app, ["http://page.example"], most, MESSAGE_BYTES)
        self.server = HttpServer(served, HOST, self.port, MESSAGE_BYTES)

    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(api_key=KEY, base_url=f"http://{HOST}:{self.port}/v1", max_retries=0)

    def connect(self, path: str = "/v1/responses", key: str = KEY, **headers: str) -> connect:
        named = {"Authorization": f"Bearer {key}"} | headers
        return connect(f"ws://{HOST}:{self.port}{path}", additional_headers=named)


@pytest.fixture
async def sockets(runners: Runners) -> AsyncIterator[Any]:
    made: list[Sockets] = []

    def make(*turns: Script, most: int = 64) -> Sockets:
        made.append(Sockets(runners, turns, most))
        return made[-1]

    yield make
    for one in made:
        await one.server.aclose()


async def ask(to: ClientConnection, **fields: Any) -> None:
    await to.send(json.dumps({"type": "response.create", "model": "m", **fields}))


async def until_end(of: ClientConnection) -> dict[str, Any]:
    """The last event of a response, or an error. TimeoutError: there was none in time."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            event: dict[str, Any] = json.loads(await of.recv())
            if event["type"] in ("response.completed", "response.incomplete", "response.failed", "error"):
                return event


async def test_a_loop_of_turns_over_one_connection_with_openais_client(sockets: Any) -> None:
    there = sockets(says("", ("look", "{}")), says("a bird", first_id=200))
    async with there.openai().responses.connect() as connection:
        await connection.response.create(model="m", input="what is there?", tools=[LOOK], store=False)
        first = None
        async for event in connection:
            if event.type == "response.completed":
                first = event.response
                break
        assert first is not None
        call = first.output[0]
        assert call.type == "function_call"
        seen: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "feathers"}
        await connection.response.create(
            model="m", input=[seen], tools=[LOOK], store=False, previous_response_id=first.id
        )
        text = ""
        async for event in connection:
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type == "response.completed":
                break
    assert text == "a bird"
    # What is not stored goes on from its exact ids, in the same program.
    assert [bool(ids) for ids in there.replicas.prior] == [False, True]
    assert len({identity.program_id for identity in there.replicas.identities}) == 1


async def test_what_is_not_stored_can_be_continued_on_its_own_connection_only(sockets: Any) -> None:
    there = sockets(says("hello"), says("again", first_id=200))
    async with there.connect() as one, there.connect() as other:
        await ask(one, input="hi", store=False)
        made = (await until_end(one))["response"]["id"]
        await ask(other, input="and?", previous_response_id=made)
        refused = await until_end(other)
        assert (refused["type"], refused["status"]) == ("error", 400)
        assert refused["error"]["code"] == "previous_response_not_found"
        await ask(one, input="and?", previous_response_id=made, store=False)
        assert (await until_end(one))["response"]["status"] == "completed"


async def test_what_is_not_stored_can_be_continued_after_its_log_is_deleted(
    sockets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_runs, "KEPT_S", 0.0)
    count = MAX_KEPT + 1
    there = sockets(*(says(f"{n}", first_id=100 * (n + 1)) for n in range(count)), says("on", first_id=900))
    async with there.connect() as to:
        made = []
        for number in range(count):
            await ask(to, input=f"{number}", store=False)
            made.append((await until_end(to))["response"]["id"])
        async with asyncio.timeout(WITHIN_S):
            while any([await there.runner.load(name, "default") for name in made]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        oldest, kept, *_ = made
        await ask(to, input="and?", previous_response_id=oldest, store=False)
        assert (await until_end(to))["error"]["code"] == "previous_response_not_found"
        await ask(to, input="and?", previous_response_id=kept, store=False)
        assert (await until_end(to))["response"]["status"] == "completed"
    assert [message["content"] for message in there.replicas.asked[-1]["messages"]] == ["1", "1", "and?"]
    assert there.replicas.prior[-1], "it goes on from its exact ids"


async def test_a_response_without_a_turn_is_continued_by_one_with_a_turn(sockets: Any) -> None:
    there = sockets(says("hello"))
    async with there.connect() as to:
        await ask(to, input=[], instructions="Be brief.", tools=[LOOK], store=False, generate=False)
        kinds = [json.loads(await to.recv()) for _ in range(3)]
        assert [event["type"] for event in kinds] == ["response.created", "response.in_progress", "response.completed"]
        warm = kinds[-1]["response"]
        assert (warm["output"], warm["usage"]["total_tokens"]) == ([], 0)
        assert not there.replicas.asked
        await ask(to, input="hi", store=False, generate=False, previous_response_id=warm["id"])
        second = (await until_end(to))["response"]
        await ask(to, input=[], instructions="Be brief.", store=False, previous_response_id=second["id"])
        answered = (await until_end(to))["response"]
    assert answered["output"][0]["content"][0]["text"] == "hello"
    (body,) = there.replicas.asked
    assert [message["content"] for message in body["messages"]] == ["Be brief.", "hi"]
    (identity,) = there.replicas.identities
    assert identity.program_id == warm["id"]


async def test_messages_that_come_during_a_response_wait_for_it(sockets: Any) -> None:
    there = sockets(says("one"), says("two", first_id=200))
    async with there.connect() as to:
        await ask(to, input="first")
        await ask(to, input="second")
        answers = [await until_end(to) for _ in range(2)]
    texts = [answer["response"]["output"][0]["content"][0]["text"] for answer in answers]
    assert texts == ["one", "two"]


async def test_too_many_waiting_messages_are_refused(sockets: Any) -> None:
    gate = asyncio.Event()
    script = says("slow")
    there = sockets([*script[:2], gate, *script[2:]], *(says("x", first_id=300 + n) for n in range(MAX_WAITING)))
    async with there.connect() as to:
        for number in range(MAX_WAITING + 2):
            await ask(to, input=f"{number}")
            if number == 0:
                while json.loads(await to.recv())["type"] != "response.output_text.delta":
                    pass
        assert (await until_end(to))["status"] == 429
        gate.set()
        ends = [await until_end(to) for _ in range(MAX_WAITING + 1)]
    assert {end["type"] for end in ends} == {"response.completed"}


async def test_waiting_messages_are_bounded_in_bytes(sockets: Any) -> None:
    gate = asyncio.Event()
    script = says("slow")
    there = sockets([*script[:2], gate, *script[2:]], says("two", first_id=200), says("three", first_id=300))
    large = "\u00e4" * (MESSAGE_BYTES // 4)  # two bytes each
    async with there.connect() as to:
        await ask(to, input="hi")
        while json.loads(await to.recv())["type"] != "response.output_text.delta":
            pass
        for text in ("b" * (MESSAGE_BYTES // 2), large):
            await to.send(json.dumps({"type": "response.create", "model": "m", "input": text}, ensure_ascii=False))
        refused = await until_end(to)
        assert (refused["status"], refused["error"]["code"]) == (429, "too_many_messages")
        gate.set()
        assert [(await until_end(to))["type"] for _ in range(2)] == ["response.completed"] * 2
        await ask(to, input="b" * (MESSAGE_BYTES // 2))
        assert (await until_end(to))["type"] == "response.completed"


async def test_a_connection_keeps_a_bounded_number_of_bytes_and_the_last_response(sockets: Any) -> None:
    there = sockets(*(says(f"{n}", first_id=100 * (n + 1)) for n in range(3)))
    async with there.connect() as to:
        made = []
        for number in range(2):
            await ask(to, input=f"{number}" * (MESSAGE_BYTES // 2), store=False)
            made.append((await until_end(to))["response"]["id"])
        await ask(to, input="and?", previous_response_id=made[0], store=False)
        assert (await until_end(to))["error"]["code"] == "previous_response_not_found"
        await ask(to, input="and?", previous_response_id=made[1], store=False)
        assert (await until_end(to))["response"]["status"] == "completed"


async def refused(attempt: connect) -> InvalidStatus:
    with pytest.raises(InvalidStatus) as caught:
        async with attempt:
            pass
    return caught.value


async def test_one_tenant_has_a_share_of_the_connections(sockets: Any) -> None:
    there = sockets(says("hello"), most=2 * TENANT_SHARE)
    async with there.connect() as first, there.connect():
        too_many = (await refused(there.connect())).response
        assert (too_many.status_code, too_many.headers["retry-after"]) == (429, "1")
        assert json.loads(too_many.body)["error"]["code"] == "too_many_connections"
        async with there.connect(key=OTHER_KEY) as other:
            await ask(other, input="hi")
            assert (await until_end(other))["type"] == "response.completed"
        await first.close()
        async with asyncio.timeout(WITHIN_S), there.connect():
            pass


async def test_all_tenants_together_have_a_bounded_number_of_connections(sockets: Any) -> None:
    there = sockets(most=1)
    async with there.connect():
        too_many = (await refused(there.connect(key=OTHER_KEY))).response
    assert (too_many.status_code, too_many.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("busy", [False, True])
async def test_a_connection_ends_after_an_hour_but_not_within_a_response(
    sockets: Any, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr(response_sockets, "MAX_AGE_S", 0.5)
    gate = asyncio.Event()
    script = says("slow")
    there = sockets([*script[:2], gate, *script[2:]])
    async with there.connect() as to:
        if busy:
            await ask(to, input="hi")
            while json.loads(await to.recv())["type"] != "response.output_text.delta":
                pass
            await ask(to, input="it waits")
            await asyncio.sleep(0.6)
            gate.set()
            assert (await until_end(to))["type"] == "response.completed"
        ended = await until_end(to)
        assert (ended["type"], ended["status"]) == ("error", 400)
        assert ended["error"]["code"] == "websocket_connection_limit_reached"
        await to.wait_closed()
        assert to.close_code == 1000
    assert len(there.replicas.asked) == busy


BAD: list[tuple[str, str, int, str | None]] = [
    ("no JSON", "{", 400, None),
    ("no object", "[]", 400, None),
    ("another event", '{"type": "response.steer"}', 400, "type"),
    ("in the background", '{"type": "response.create", "input": "a", "background": true}', 400, "background"),
    (
        "neither with nor without a turn",
        '{"type": "response.create", "input": "a", "generate": "maybe"}',
        400,
        "generate",
    ),
    ("an invalid field", '{"type": "response.create", "input": "a", "temperature": 9}', 400, "temperature"),
    ("nesting without end", '{"type": "response.create", "input": ' + "[" * 9000 + "]" * 9000 + "}", 400, None),
]


@pytest.mark.parametrize(("text", "status", "param"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
async def test_a_bad_message_gets_an_error_and_the_connection_stays(
    sockets: Any, text: str, status: int, param: str | None
) -> None:
    there = sockets(says("hello"))
    async with there.connect() as to:
        await to.send(text)
        error = await until_end(to)
        assert (error["type"], error["status"], error["error"]["param"]) == ("error", status, param)
        await ask(to, input="hi")
        assert (await until_end(to))["type"] == "response.completed"


async def test_a_client_that_leaves_cancels_its_response(sockets: Any) -> None:
    gate = asyncio.Event()
    script = says("slow")
    there = sockets([*script[:2], gate, *script[2:]])
    async with there.connect() as to:
        await ask(to, input="hi")
        event = json.loads(await to.recv())
        while event["type"] != "response.output_text.delta":
            event = json.loads(await to.recv())
    async with asyncio.timeout(WITHIN_S):
        while (await there.runner.runs("default"))[0].status != "cancelled":  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/responses", {"Authorization": "Bearer wrong"}, 401),
        ("/v1/responses", {"Origin": "http://evil.example"}, 403),
        ("/v1/conversations/conv_0", {}, 404),
    ],
)
async def test_who_may_not_connect_is_told_why(sockets: Any, path: str, headers: dict[str, str], status: int) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with sockets().connect(path, **headers):
            pass
    assert caught.value.response.status_code == status
    assert json.loads(caught.value.response.body)["error"]["message"]


async def test_a_page_of_an_allowed_origin_connects(sockets: Any) -> None:
    async with sockets(says("hello")).connect(Origin="http://page.example") as to:
        await ask(to, input="hi")
        assert (await until_end(to))["type"] == "response.completed"


async def test_a_message_above_the_bound_ends_the_connection(sockets: Any) -> None:
    async with sockets().connect() as to:
        await ask(to, input="x" * MESSAGE_BYTES)
        await to.wait_closed()
        assert to.close_code == 1009


async def test_an_idle_connection_stays(sockets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    expect_head = HardenedHttpProtocol._expect_head

    def noted(protocol: HardenedHttpProtocol) -> None:
        expect_head(protocol)
        limits.append(protocol._late)

    monkeypatch.setattr(HardenedHttpProtocol, "_expect_head", noted)
    async with sockets(says("hello")).connect() as to:
        assert limits and all(limit.cancelled() for limit in limits), "the time for headers goes on"
        await ask(to, input="hi")
        assert (await until_end(to))["type"] == "response.completed"
