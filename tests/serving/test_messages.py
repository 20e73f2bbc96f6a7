"""Anthropic's own client against a real cluster: messages, streams, tools, counting, errors."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from cluster.local.cluster import LocalCluster

pytestmark = pytest.mark.cluster

LS: dict[str, Any] = {
    "name": "ls",
    "description": "List a folder.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string", "enum": ["/", "/tmp"]}},
        "required": ["path"],
        "additionalProperties": False,
    },
}
FORCED: dict[str, Any] = {"tools": [LS], "tool_choice": {"type": "tool", "name": "ls"}}
HELLO: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "Say hello."}]}
LONG = "A folder has files, and a file has lines. " * 40


@pytest.fixture
def claude(cluster: LocalCluster) -> Iterator[Anthropic]:
    """Anthropic's client of the shared cluster, as a new session."""
    session = {"x-session-id": f"messages-{uuid4().hex}"}
    with Anthropic(base_url=cluster.url, api_key="none", timeout=60, max_retries=0, default_headers=session) as client:
        yield client


def test_a_message_is_cut_at_max_tokens_and_has_its_usage(claude: Anthropic) -> None:
    message = claude.messages.create(**HELLO, extra_query={"beta": "true"})
    assert (message.type, message.role, message.model, message.stop_reason) == (
        "message",
        "assistant",
        "tiny",
        "max_tokens",
    )
    assert message.usage.output_tokens == 12
    assert message.usage.input_tokens > 0
    assert message.id.startswith("msg_")
    assert message._request_id


def test_a_stream_has_the_same_message(claude: Anthropic) -> None:
    whole = claude.messages.create(**HELLO, extra_body={"temperature": 0.0})
    with claude.messages.stream(**HELLO, extra_body={"temperature": 0.0}) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.to_dict()["text"] for block in streamed.content] == [
        block.to_dict()["text"] for block in whole.content
    ]
    assert streamed.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_tokens_are_counted_as_they_are_used(claude: Anthropic) -> None:
    prompt: dict[str, Any] = {
        "model": "tiny",
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Which files are there?"}]}],
        "tools": [LS],
    }
    counted = claude.messages.count_tokens(**prompt).input_tokens
    usage = claude.messages.create(**prompt, max_tokens=4).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_loop_of_three_turns_reuses_its_prefix(claude: Anthropic, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": LONG}]
    for turn in range(3):
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": messages, **FORCED}
        if streamed:
            with claude.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = claude.messages.create(**asked)
        assert answer.stop_reason == "tool_use"
        [call] = [block for block in answer.content if block.type == "tool_use"]
        assert call.name == "ls"
        assert call.input in ({"path": "/"}, {"path": "/tmp"})
        assert turn == 0 or (answer.usage.cache_read_input_tokens or 0) > 0
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a.txt", "is_error": turn == 1}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]


@pytest.mark.parametrize("budget", [3, 5, 8])
def test_half_a_call_is_no_tool_use(claude: Anthropic, budget: int) -> None:
    asked: dict[str, Any] = {**HELLO, "max_tokens": budget, **FORCED}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "max_tokens"
        assert not [block for block in message.content if block.type == "tool_use"]


def test_a_block_that_changes_with_each_request_does_not_cost_the_prefix(claude: Anthropic) -> None:
    def ask(number: int) -> int:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        system: list[Any] = [billing, {"type": "text", "text": LONG}]
        return claude.messages.create(**HELLO, system=system).usage.cache_read_input_tokens or 0

    ask(1)
    assert ask(2) > 100


def test_an_image_for_a_model_that_sees_none_is_a_text(claude: Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content: list[Any] = [{"type": "text", "text": "Look."}, {"type": "image", "source": source}]
    prompt: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    usage = claude.messages.create(**prompt, max_tokens=2).usage
    counted = claude.messages.count_tokens(**prompt).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_hosted_tool_is_left_out_and_named(claude: Anthropic) -> None:
    tools: list[Any] = [{"type": "web_search_20250305", "name": "web_search"}, LS]
    raw = claude.messages.with_raw_response.create(**HELLO, tools=tools)
    assert raw.headers["x-caesura-tools-left-out"] == "web_search_20250305"
    assert raw.parse().type == "message"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "'nobody'"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens: "),
        ({"messages": [{"role": "wizard", "content": "a"}]}, anthropic.BadRequestError, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, anthropic.BadRequestError, "content.0.text"),
        ({"tools": [{**LS, "name": "a b"}]}, anthropic.BadRequestError, "tools.0.name: "),
        ({"extra_headers": {"anthropic-beta": "a b!"}}, anthropic.BadRequestError, "anthropic-beta: "),
        ({"system": "word " * 9000}, anthropic.BadRequestError, "prompt is too long"),
        ({"max_tokens": 4090}, anthropic.BadRequestError, "exceed context limit"),
        ({"system": "x" * (2 << 20)}, anthropic.RequestTooLargeError, "1048576"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_typed_by_the_client(claude: Anthropic, change: Any, error: Any, message: str, stream: bool) -> None:
    with pytest.raises(error) as caught:
        claude.messages.create(**{**HELLO, **change}, stream=stream)
    body = caught.value.body
    assert (body["type"], sorted(body["error"])[-1]) == ("error", "type")
    assert message in body["error"]["message"]
    assert body["request_id"] == caught.value.response.headers["request-id"]


def test_paths_below_messages_have_anthropics_errors_and_models_both_forms(client: httpx.Client) -> None:
    assert client.get("/v1/messages").json()["type"] == "error"
    assert client.post("/v1/messages/batches", json={}).json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/models").json()["object"] == "list"
    listed = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (listed["data"][0]["type"], listed["first_id"]) == ("model", "tiny")


def test_turns_without_an_id_are_one_program(cluster: LocalCluster) -> None:
    first = {"role": "user", "content": f"{uuid4().hex}: which files are there?"}
    with Anthropic(base_url=cluster.url, api_key="none", timeout=60, max_retries=0) as client:
        whole = client.messages.with_raw_response.create(model="tiny", max_tokens=8, messages=[first])
        said = "".join(block.to_dict().get("text", "") for block in whole.parse().content) or "Hm."
        history = [first, {"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
        after = client.messages.with_raw_response.create(model="tiny", max_tokens=8, messages=history)
    assert whole.headers["x-caesura-program"] == after.headers["x-caesura-program"]
    assert (after.parse().usage.cache_read_input_tokens or 0) > 0
