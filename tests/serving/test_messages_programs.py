"""Anthropic's own client against a real cluster that runs the tools: a server that the request brings, and its own."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types.beta import BetaMessage

from cluster.local.cluster import LocalCluster
from tests.serving.desk import Desk, fingerprint, held_by_redis, logs_with
from tests.serving.program_requests import BLOCK

pytestmark = pytest.mark.cluster

SECRET = "s3cret-of-a-message"
CALCULATOR: dict[str, Any] = {"name": "calculator", "server_side": True}
LONG = "A desk has drawers, and a drawer has pens. " * 30


@pytest.fixture
def claude(cluster: LocalCluster) -> Iterator[Anthropic]:
    """Anthropic's client of the shared cluster, as a new session."""
    session = {"x-session-id": f"messages-{uuid4().hex}"}
    with Anthropic(base_url=cluster.url, api_key="none", timeout=60, max_retries=0, default_headers=session) as client:
        yield client


def asked(desk: Desk, *names: str, messages: Any = None, **more: Any) -> dict[str, Any]:
    """A request whose first turns call these tools, and whose last one speaks."""
    server = {"type": "url", "name": "desk", "url": desk.url, "authorization_token": SECRET}
    choices = [{"type": "tool", "name": name} for name in names]
    return {
        "model": "tiny",
        "max_tokens": 400,
        "messages": messages or [{"role": "user", "content": LONG}],
        "tools": [CALCULATOR],
        "mcp_servers": [server],
        "extra_body": {"tool_choices": choices, "max_turns": len(names) + 1, "temperature": 0.0},
        **more,
    }


def counted(client: Anthropic, request: dict[str, Any]) -> int:
    fields = {name: request[name] for name in ("model", "messages", "tools", "mcp_servers")}
    return client.beta.messages.count_tokens(**fields).input_tokens


def answered(client: Anthropic, streamed: bool, request: dict[str, Any]) -> BetaMessage:
    if not streamed:
        return client.beta.messages.create(**request)
    with client.beta.messages.stream(**request) as stream:
        kinds = [event.type for event in stream]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        return stream.get_final_message()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_message_runs_tools_and_goes_on_from_its_blocks(
    claude: Anthropic, cluster: LocalCluster, desk: Desk, streamed: bool
) -> None:
    first = asked(desk, "desk__badge", "desk__move_desk", "calculator")
    message = answered(claude, streamed, first)
    calls = [block for block in message.content if block.type == "mcp_tool_use"]
    results = [block for block in message.content if block.type == "mcp_tool_result"]
    assert [(call.server_name, call.name) for call in calls] == [
        ("desk", "badge"),
        ("desk", "move.desk"),
        ("caesura", "calculator"),
    ]
    assert [result.tool_use_id for result in results] == [call.id for call in calls]
    badge, moved, _ = [result.content[0].text for result in results]  # type: ignore[union-attr]
    assert (badge, moved) == (fingerprint(SECRET), "moved")
    assert message.stop_reason in ("end_turn", "max_tokens")
    said = [{"role": "assistant", "content": message.content}, {"role": "user", "content": "And now?"}]
    again = answered(claude, streamed, asked(desk, messages=[*first["messages"], *said], max_tokens=8))
    # The rest is rendered again: this model writes a forced call otherwise than its chat template does.
    assert (again.usage.cache_read_input_tokens or 0) >= counted(claude, first) - 2 * BLOCK
    assert held_by_redis(cluster.config.redis.url, SECRET) == []
    assert logs_with(SECRET) == []


def test_a_call_of_the_client_ends_the_program(claude: Anthropic, desk: Desk) -> None:
    look = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
    request = asked(desk, "desk__badge", "look", tools=[CALCULATOR, look])
    request["extra_body"]["max_turns"] = 4
    message = answered(claude, True, request)
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content if block.type != "text"] == [
        "mcp_tool_use",
        "mcp_tool_result",
        "tool_use",
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": "word " * 9000}, "prompt is too long"),
        ({"tools": [{"name": "nobody", "server_side": True}]}, "tools.0.name: "),
        ({"mcp_servers": [{"type": "url", "name": "gone", "url": "http://127.0.0.1:9/mcp"}]}, "mcp_servers: "),
    ],
)
def test_errors_are_typed_by_the_client(claude: Anthropic, desk: Desk, change: Any, message: str, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.beta.messages.create(**asked(desk, **change), stream=stream)
    body: Any = caught.value.body
    assert message in body["error"]["message"]


def test_a_prompt_is_counted_with_the_tools_of_its_servers(claude: Anthropic, desk: Desk) -> None:
    request = asked(desk, max_tokens=4)
    usage = answered(claude, False, request).usage
    assert counted(claude, request) == usage.input_tokens + (usage.cache_read_input_tokens or 0)
