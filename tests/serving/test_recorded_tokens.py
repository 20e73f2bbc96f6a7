"""Recorded tokens, and requests of token ids, on a real cluster."""

import json
from typing import Any

import httpx
import pytest

from tests.serving.test_http_surface import events

pytestmark = pytest.mark.cluster

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"model": "tiny", "temperature": 0.0}


def recorded(client: httpx.Client, program: str) -> list[dict[str, Any]]:
    answer = client.get(f"/v1/programs/{program}/tokens")
    assert answer.is_success, answer.text
    return list(answer.json()["data"])


def test_token_ids_in_and_out(client: httpx.Client) -> None:
    sampling = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    # TRL's client sends the fields `output_kind` and `features`.
    body = {"model": "tiny", "token_ids": [330, 512, 77], "sampling_params": {**sampling, "output_kind": 2}}
    body["features"] = None
    headers = {"x-session-id": "ids-1", "x-record": "tokens"}
    whole = client.post("/inference/v1/generate", json=body, headers=headers).json()
    [choice] = whole["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"] == 6
    text = client.post("/inference/v1/generate", json={**body, "stream": True}, headers=headers).text
    assert [one for event in events(text) for one in event["choices"][0]["token_ids"]] == choice["token_ids"]
    reference = {**GREEDY, "prompt": [330, 512, 77], "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    completion = client.post("/v1/completions", json=reference).json()
    assert completion["choices"][0]["token_ids"] == choice["token_ids"]

    turns = recorded(client, "ids-1")
    assert [(turn["turn"], turn["method"], turn["status"]) for turn in turns] == [
        (1, "generate", "completed"),
        (2, "generate", "completed"),
    ]
    for turn in turns:
        [answer] = turn["answers"]
        assert (turn["prompt_token_ids"], answer["token_ids"]) == ([330, 512, 77], choice["token_ids"])
        assert answer["logprobs"] == pytest.approx([one["logprob"] for one in choice["logprobs"]["content"]], abs=1e-2)
        assert [span["from"] for span in answer["weights"]] == [0]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"token_ids": "Hello"}, 400, "token_ids"),
        ({"token_ids": [10**9]}, 400, None),
        ({"sampling_params": {"temperature": -1}}, 400, "sampling_params.temperature"),
        ({"sampling_params": {"seed": 1}}, 400, "sampling_params.seed"),
        ({"sampling_params": {"n": 1000}}, 400, "sampling_params.n"),
        ({"sampling_params": {"extra_args": {}}}, 400, "sampling_params.extra_args"),
        ({"model": "other"}, 404, "model"),
    ],
)
def test_a_request_of_token_ids_that_is_refused(
    client: httpx.Client, change: dict[str, Any], status: int, param: str | None
) -> None:
    body = {"model": "tiny", "token_ids": [1, 2], "sampling_params": {"max_tokens": 2}, **change}
    answer = client.post("/inference/v1/generate", json=body)
    assert answer.status_code == status, answer.text
    assert param is None or answer.json()["error"]["param"] == param


def test_chat_and_completions_are_recorded_as_the_client_got_them(client: httpx.Client) -> None:
    headers = {"x-session-id": "record-1", "x-record": "tokens"}
    body = {**GREEDY, "messages": HELLO, "max_tokens": 8, "return_token_ids": True}
    whole = client.post("/v1/chat/completions", json=body, headers=headers).json()
    streamed = events(client.post("/v1/chat/completions", json={**body, "stream": True}, headers=headers).text)
    several = client.post("/v1/completions", headers=headers, json={
        "model": "tiny", "prompt": "Hello", "n": 2, "max_tokens": 5, "temperature": 1.0, "return_token_ids": True,
    }).json()  # fmt: skip
    first, second, third = recorded(client, "record-1")
    assert first["prompt_token_ids"] == second["prompt_token_ids"] == whole["prompt_token_ids"]
    assert first["answers"][0]["token_ids"] == whole["choices"][0]["token_ids"]
    ids = [one for event in streamed for choice in event["choices"] for one in choice.get("token_ids") or ()]
    assert second["answers"][0]["token_ids"] == ids
    assert [answer["token_ids"] for answer in third["answers"]] == [one["token_ids"] for one in several["choices"]]
    for turn in (first, second, third):
        for answer in turn["answers"]:
            assert len(answer["logprobs"]) == len(answer["token_ids"]) > 0
            assert all(logprob <= 0 for logprob in answer["logprobs"])
    assert "logprobs" not in whole["choices"][0] or whole["choices"][0]["logprobs"] is None

    listed = client.get("/v1/records", params={"limit": 1000}).json()["data"]
    assert "record-1" in [one["id"] for one in listed]
    assert client.delete("/v1/programs/record-1/tokens", params={"last_turn": 2}).status_code == 409
    assert client.delete("/v1/programs/record-1/tokens", params={"last_turn": 3}).json()["deleted"]
    assert client.get("/v1/programs/record-1/tokens").status_code == 404


def test_every_turn_of_a_run_is_recorded(client: httpx.Client) -> None:
    body = {
        **GREEDY,
        "input": "What is 6 times 7?",
        "tools": [{"type": "function", "name": "calculator", "server_side": True}],
        "tool_choices": [{"type": "function", "name": "calculator"}],
        "max_output_tokens": 300,
    }
    answer = client.post("/v1/responses", json=body, headers={"x-session-id": "run-1", "x-record": "tokens"})
    assert answer.is_success, answer.text
    turns = recorded(client, "run-1")
    runs = client.get("/v1/programs/run-1", params={"include": "token_ids"}).json()["runs"]
    known = [turn for run in runs for turn in run["turns"]]
    assert len(turns) == len(known) >= 2
    assert {turn["method"] for turn in turns} == {"turn"}
    later, earlier = turns[1], turns[0]
    context = earlier["prompt_token_ids"] + earlier["answers"][0]["token_ids"]
    assert later["prompt_token_ids"][: len(context)] == context, json.dumps(runs)[:500]


def test_what_is_not_asked_for_is_not_recorded_and_what_is_unknown_is_refused(client: httpx.Client) -> None:
    body = {**GREEDY, "messages": HELLO, "max_tokens": 2}
    client.post("/v1/chat/completions", json=body, headers={"x-session-id": "silent"})
    assert client.get("/v1/programs/silent/tokens").status_code == 404
    refused = client.post("/v1/chat/completions", json=body, headers={"x-record": "text"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-record")
    bad = client.post("/v1/chat/completions", json={**body, "messages": 5}, headers={
        "x-session-id": "bad", "x-record": "tokens",
    })  # fmt: skip
    assert bad.status_code == 400
