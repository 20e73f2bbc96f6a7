"""Whatever a client sends that cannot be served is told so at once, in JSON, and the engine lives on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("_engine_lives")]

MODEL = "tiny"
HUGE = 10**30
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def _engine_lives(client: httpx.Client) -> Iterator[None]:
    """After each request that cannot be served, both replicas still serve."""
    yield
    for number in range(2):
        answer = client.post(COMPLETIONS, json=body_of(COMPLETIONS, {}), headers={"x-session-id": f"alive-{number}"})
        assert answer.status_code == 200, answer.text
    assert len(client.get("/admin/statistics").json()["replicas"]) == 2


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


TABLE: list[tuple[str, str, dict[str, Any], int, str | None]] = [
    ("seed on CPU", COMPLETIONS, {"seed": 1}, 400, "seed"),
    ("seed on CPU in a chat", CHAT, {"seed": 1}, 400, "seed"),
    ("an unknown model", CHAT, {"model": "other"}, 404, "model"),
    ("a model that is no name", CHAT, {"model": 5}, 400, "model"),
    ("a model in a list", CHAT, {"model": ["tiny"]}, 400, "model"),
    ("an unknown class", CHAT, {"model": "auto:coding"}, 404, "model"),
    ("no messages", CHAT, {"messages": None}, 400, "messages"),
    ("empty messages", CHAT, {"messages": []}, 400, None),
    ("messages as text", CHAT, {"messages": "Hello"}, 400, "messages"),
    ("an unknown role", CHAT, {"messages": [{"role": "wizard", "content": {}}]}, 400, "messages.0"),
    ("content of a wrong type", CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
    ("a part of content without its type", CHAT, {"messages": [{"role": "user", "content": [{}]}]}, 400, "messages"),
    ("tool calls of a wrong type", CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, 400, None),
    (
        "an image",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages.0.content.0.image_url.url",
    ),
    ("n of zero", COMPLETIONS, {"n": 0}, 400, "n"),
    ("negative n", COMPLETIONS, {"n": -1}, 400, "n"),
    ("huge n", COMPLETIONS, {"n": HUGE}, 400, "n"),
    ("many n", COMPLETIONS, {"n": 10_000_000}, 400, "n"),
    ("best_of", COMPLETIONS, {"best_of": 5_000_000, "n": "x"}, 400, "n"),
    ("negative max_tokens", COMPLETIONS, {"max_tokens": -5}, 400, "max_tokens"),
    ("huge max_tokens", COMPLETIONS, {"max_tokens": HUGE}, 400, "max_tokens"),
    ("max_tokens above the context", COMPLETIONS, {"max_tokens": 1_000_000}, 400, None),
    ("max_tokens as text", COMPLETIONS, {"max_tokens": "many"}, 400, "max_tokens"),
    ("negative min_tokens", COMPLETIONS, {"min_tokens": -1}, 400, "min_tokens"),
    ("temperature below zero", COMPLETIONS, {"temperature": -1}, 400, "temperature"),
    ("top_p above one", COMPLETIONS, {"top_p": 7}, 400, "top_p"),
    ("top_k of minus five", COMPLETIONS, {"top_k": -5}, 400, "top_k"),
    ("a huge penalty", COMPLETIONS, {"presence_penalty": 1e300}, 400, "presence_penalty"),
    ("huge logprobs", COMPLETIONS, {"logprobs": 1_000_000}, 400, "logprobs"),
    ("logprobs as text", COMPLETIONS, {"logprobs": "all"}, 400, "logprobs"),
    ("huge top_logprobs", CHAT, {"logprobs": True, "top_logprobs": 1_000_000}, 400, None),
    ("logit_bias of junk", COMPLETIONS, {"logit_bias": {"x": "y"}}, 400, "logit_bias"),
    ("logit_bias out of the vocabulary", COMPLETIONS, {"logit_bias": {"99999999": 1.0}}, 400, None),
    ("logit_bias of a negative token", COMPLETIONS, {"logit_bias": {"-1": 1.0}}, 400, None),
    ("allowed tokens out of the vocabulary", COMPLETIONS, {"allowed_token_ids": [99_999_999]}, 400, None),
    ("no allowed tokens", COMPLETIONS, {"allowed_token_ids": []}, 400, None),
    ("stop tokens that are none", COMPLETIONS, {"stop_token_ids": ["x"]}, 400, "stop_token_ids"),
    ("stop of a wrong type", COMPLETIONS, {"stop": {"a": 1}}, 400, "stop"),
    ("an empty stop", COMPLETIONS, {"stop": [""]}, 400, None),
    ("bad words of a wrong type", COMPLETIONS, {"bad_words": [5]}, 400, "bad_words.0"),
    (
        "stream_options without a stream",
        COMPLETIONS,
        {"stream": False, "stream_options": {"include_usage": True}},
        400,
        "stream_options",
    ),
    ("stream of a wrong type", COMPLETIONS, {"stream": "perhaps"}, 400, "stream"),
    ("an empty prompt", COMPLETIONS, {"prompt": ""}, 400, None),
    ("no prompt", COMPLETIONS, {"prompt": None}, 400, "prompt"),
    ("an empty list of tokens", COMPLETIONS, {"prompt": []}, 400, None),
    ("a prompt of a wrong type", COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt"),
    ("a token out of the vocabulary", COMPLETIONS, {"prompt": [1, 99_999_999]}, 400, None),
    ("a negative token", COMPLETIONS, {"prompt": [1, -1]}, 400, "prompt.1"),
    ("a huge token", COMPLETIONS, {"prompt": [HUGE]}, 400, None),
    ("a prompt longer than the context", COMPLETIONS, {"prompt": [5] * 5000}, 400, None),
    ("a text longer than the context", COMPLETIONS, {"prompt": "word " * 20_000}, 400, None),
    ("prompt embeddings of junk", COMPLETIONS, {"prompt_embeds": "AAAA"}, 400, None),
    ("truncation below minus one", COMPLETIONS, {"truncate_prompt_tokens": -7}, 400, "truncate_prompt_tokens"),
    ("a priority of text", COMPLETIONS, {"priority": "high"}, 400, "priority"),
    ("xargs of a wrong type", COMPLETIONS, {"vllm_xargs": 5}, 400, "vllm_xargs"),
    ("xargs nested", COMPLETIONS, {"vllm_xargs": {"a": {"b": 1}}}, 400, "vllm_xargs.a"),
    ("a program id that is too long", COMPLETIONS, {"program_id": "x" * 1000}, 400, "program_id"),
    ("a grammar of junk", COMPLETIONS, {"structured_outputs": {"grammar": "root ::= ((((("}}, 400, None),
    ("a regex of junk", COMPLETIONS, {"structured_outputs": {"regex": "((("}}, 400, None),
    ("a schema of junk", COMPLETIONS, {"structured_outputs": {"json": {"type": "nonsense"}}}, 400, None),
    ("no choice", COMPLETIONS, {"structured_outputs": {"choice": []}}, 400, None),
    ("a structural tag of junk", COMPLETIONS, {"structured_outputs": {"structural_tag": "{"}}, 400, None),
    ("structured outputs of a wrong type", COMPLETIONS, {"structured_outputs": 5}, 400, None),
    (
        "a response format without its schema",
        CHAT,
        {"response_format": {"type": "json_schema"}},
        400,
        "response_format",
    ),
    ("a response format of a wrong type", CHAT, {"response_format": 5}, 400, "response_format"),
    ("tools of a wrong type", CHAT, {"tools": 5}, 400, "tools"),
    ("a tool without a name", CHAT, {"tools": [{"type": "function", "function": {}}]}, 400, "tools.0.function"),
    ("a choice of no tool", CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, None),
    (
        "a choice of another tool",
        CHAT,
        {"tools": tool(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
        400,
        None,
    ),
    ("parameters of a wrong type", CHAT, {"tools": tool(parameters=5)}, 400, "tools.0.function.parameters"),
    ("a deep schema", CHAT, {"tools": tool(parameters=nested(50)), "tool_choice": "required"}, 400, None),
    ("a template of the client", CHAT, {"chat_template": "{{ 1 // 0 }}"}, 400, None),
    ("a LoRA that is not there", CHAT, {"model": "tiny:lora"}, 404, "model"),
]


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    base = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello"}
    return {"model": MODEL, "max_tokens": 4, **base, **fields}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "fields", "status", "param"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_a_body_that_cannot_be_served(
    client: httpx.Client, path: str, fields: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    body = body_of(path, {**({"stream": True} if stream else {}), **fields})
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] in ("invalid_request_error", "not_found_error")
    if param is not None:
        assert (error["param"] or "").startswith(param), error


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"", {}, 400),
        (b"[]", {}, 400),
        (b'{"prompt": "\xff"}', {}, 400),
        (b'{"prompt": "\\ud800"}', {}, 400),
        (b'{"prompt": "a", "temperature": NaN}', {}, 400),
        (b'{"prompt": "a", "temperature": 1e999}', {}, 400),
        (b'{"prompt": "a", "prompt": "b"}', {}, 400),
        (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", {}, 400),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, 400),
        (b'{"prompt": "' + b"a" * (1 << 20) + b'"}', {}, 413),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"x-long": "a" * 40_000}, 431),
    ],
)
def test_a_request_that_is_no_request(
    client: httpx.Client, content: bytes, headers: dict[str, str], status: int
) -> None:
    answer = client.post(COMPLETIONS, content=content, headers={"content-type": "application/json", **headers})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"x-session-id": "x" * 1000},
        {"x-session-id": b"\xff\xfe"},
        {"x-request-id": b"\xff\xfe"},
        {"serve_multiplexed_model_id": "other"},
        {"x-data-parallel-rank": "99"},
        {"x-vllm-priority": "1" * 400},
        {"x-request-id": "a" * 4000},
    ],
)
def test_headers_of_junk_never_break_anything(client: httpx.Client, headers: dict[str, Any]) -> None:
    answer = client.post(COMPLETIONS, json=body_of(COMPLETIONS, {}), headers=headers)
    assert answer.status_code in (200, 400), answer.text
    assert answer.json()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": "Hello"}, "messages"),
        ("/detokenize", {"tokens": "Hello"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, None),
        ("/detokenize", {"tokens": [HUGE]}, None),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_tokens_of_junk(client: httpx.Client, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400, answer.text
    assert param is None or answer.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize(("method", "path"), [("GET", "/nowhere"), ("DELETE", "/v1/models"), ("GET", CHAT)])
def test_routes_that_are_none(client: httpx.Client, method: str, path: str) -> None:
    answer = client.request(method, path)
    assert answer.status_code in (404, 405)
    assert json.loads(answer.text)["error"]["type"]
