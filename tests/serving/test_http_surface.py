"""The HTTP surface, end to end, on a real cluster with two replicas."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from cluster.core.registry import POLICIES
from cluster.local.cluster import LocalCluster
from tests.serving.conftest import CONTEXT_TOKENS
from tests.waiting import wait_until

MODEL = "tiny"

pytestmark = pytest.mark.cluster

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello", "max_tokens": 8, **fields}


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must be complete."""
    *data, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in data]


def await_idle(client: httpx.Client) -> None:
    """No turn runs or waits, also none whose client has gone."""

    def idle() -> bool:
        replicas = client.get("/admin/statistics").json()["replicas"]
        return all(replica["running"] + replica["waiting"] == 0 for replica in replicas)

    wait_until(idle, "a replica still works", poll_s=0.1)


def test_probes_and_version(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "alive"}
    assert client.get("/ready").json() == {"status": "ready", "model": MODEL}
    assert {"caesura", "vllm", "ray"} == client.get("/version").json().keys()
    assert client.get("/docs").status_code == 200
    assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]


def test_models(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert card["max_model_len"] == CONTEXT_TOKENS
    assert client.get(f"/v1/models/{MODEL}").json() == card
    assert client.get("/v1/models/other").status_code == 404


def test_tokenize_and_back(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"model": MODEL, "prompt": "Hello there"}).json()["tokens"]
    assert client.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json()["prompt"] == "Hello there"
    assert client.post("/tokenize", json={"model": MODEL, "messages": HELLO}).json()["count"] > 1


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", chat()), ("/v1/completions", completion())])
def test_the_stream_says_what_the_answer_says(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    body = {**body, "temperature": 0}
    whole = client.post(path, json=body)
    assert whole.status_code == 200
    assert whole.json()["usage"]["completion_tokens"] == 8
    stream = client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert stream.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = events(stream.text)
    parts = [c["choices"][0].get("text") or c["choices"][0].get("delta", {}).get("content") or "" for c in chunks]
    choice = whole.json()["choices"][0]
    assert "".join(parts) == choice.get("text", choice.get("message", {}).get("content"))
    assert usage["usage"]["completion_tokens"] == 8


def test_token_ids_in_and_out(client: httpx.Client) -> None:
    body = completion(prompt=[5, 6, 7], return_token_ids=True, ignore_eos=True, temperature=0)
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["token_ids"]) == 8
    stream = events(client.post("/v1/completions", json={**body, "stream": True}).text)
    streamed = [token for event in stream for token in event["choices"][0].get("token_ids") or []]
    assert streamed == choice["token_ids"]


def test_a_named_tool_is_called(client: httpx.Client) -> None:
    body = chat(tools=[TOOL], tool_choice=NAMED, max_tokens=200, temperature=0)
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert "city" in json.loads(call["function"]["arguments"])


def test_the_openai_client_streams_with_tools(client: httpx.Client) -> None:
    with openai.OpenAI(base_url=str(client.base_url.join("/v1")), api_key="none", max_retries=0) as unchanged:
        # Greedy: of random texts, xgrammar lets a few through that have control characters, which is no valid JSON.
        asked = chat(tools=[TOOL], tool_choice=NAMED, max_tokens=200, temperature=0.0)
        stream = unchanged.chat.completions.create(**asked, stream=True)
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert calls[0].function.name == "weather"
        assert "city" in json.loads("".join(call.function.arguments or "" for call in calls))
        assert [model.id for model in unchanged.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError) as caught:
            unchanged.chat.completions.create(model="other", messages=HELLO)
        assert caught.value.param == "model"


def test_a_programs_turns_meet_on_one_replica_and_are_told(client: httpx.Client) -> None:
    for _ in range(3):
        client.post("/v1/chat/completions", json=chat(), headers={"x-session-id": "surface/1"})
    story = client.get("/v1/programs/surface/1").json()
    assert story["num_turns"] == 3
    assert [turn["output_tokens"] > 0 for turn in story["turns"]] == [True] * 3
    assert client.get("/v1/programs/nobody").json()["error"]["param"] == "program_id"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_without_any_id_is_one_program(client: httpx.Client, stream: bool) -> None:
    messages = [{"role": "user", "content": f"Without an id, {stream=}"}]
    names = []
    for _ in range(3):
        answer = client.post("/v1/chat/completions", json=chat(messages=messages, stream=stream))
        names.append(answer.headers["x-caesura-program"])
        messages += [{"role": "assistant", "content": "I see."}, {"role": "user", "content": "And then?"}]
    assert len(set(names)) == 1
    assert client.get(f"/v1/programs/{names[0]}").json()["num_turns"] == 3
    assert client.get("/admin/router").json()["programs_found"]["continued"] >= 2


@pytest.mark.parametrize("stream", [False, True])
def test_completions_that_repeat_the_last_answer_are_one_program(client: httpx.Client, stream: bool) -> None:
    body = {"model": MODEL, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, "stream": stream}
    prompt, names = [11, 12, 13 + stream] * 40, []
    for _ in range(3):
        answer = client.post("/v1/completions", json={**body, "prompt": prompt})
        names.append(answer.headers["x-caesura-program"])
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        ids = [one for event in events for choice in event["choices"] for one in choice.get("token_ids") or ()]
        assert len(ids) == 8
        prompt = [*prompt, *ids, 20, 21]
    assert len(set(names)) == 1
    assert client.get(f"/v1/programs/{names[0]}").json()["num_turns"] == 3


def test_responses_with_the_whole_history_are_one_program(client: httpx.Client) -> None:
    history: list[dict[str, Any]] = [{"role": "user", "content": "Without an id, with items"}]
    names, ids = [], []
    for _ in range(3):
        body = {"model": MODEL, "input": history, "max_output_tokens": 8, "store": False, "temperature": 0}
        answer = client.post("/v1/responses", json=body)
        names.append(answer.headers["x-caesura-program"])
        ids.append(answer.json()["id"])
        assert answer.json()["output"], "a history without an answer begins another program"
        history += [*answer.json()["output"], {"role": "user", "content": "And then?"}]
    assert names == [ids[0]] * 3
    assert client.get(f"/v1/programs/{names[0]}").json()["num_turns"] == 3


def test_the_sessions_that_clients_run_are_listed_in_pages(client: httpx.Client) -> None:
    for number in range(3):
        for _ in range(2):
            client.post("/v1/chat/completions", json=chat(), headers={"x-session-id": f"listed-{number}"})
    first = client.get("/v1/programs", params={"limit": 2}).json()
    assert [one["id"] for one in first["data"]] == ["listed-2", "listed-1"]
    assert (first["has_more"], first["last_id"], first["missing_replicas"]) == (True, "listed-1", 0)
    newest = first["data"][0]
    assert (newest["turns"], newest["status"]) == (2, "paused")
    assert newest["replica"] and newest["model"] == MODEL and newest["cached_share"] >= 0
    second = client.get("/v1/programs", params={"limit": 1, "after": first["last_id"]}).json()
    assert [one["id"] for one in second["data"]] == ["listed-0"]
    for query, param in (({"limit": 0}, "limit"), ({"after": "nobody"}, "after")):
        refused = client.get("/v1/programs", params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_title_request_is_no_turn_of_the_session_that_it_names(client: httpx.Client) -> None:
    session = {"x-session-id": "with-title"}
    client.post("/v1/chat/completions", json=chat(tools=[TOOL]), headers=session)
    title = [{"role": "system", "content": "You write titles."}, {"role": "user", "content": "Title this."}]
    side = client.post("/v1/chat/completions", json=chat(messages=title), headers=session)
    assert side.headers["x-caesura-program"] != "with-title"
    assert client.get("/v1/programs/with-title").json()["num_turns"] == 1


def test_a_clients_own_wire_key_does_not_count(client: httpx.Client) -> None:
    forged = json.dumps({"program_id": "forged", "tenant": "other"})
    client.post("/v1/completions", json=completion(vllm_xargs={"caesura": forged, "session_id": "honest"}))
    assert client.get("/v1/programs/forged").status_code == 404


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models/other"])
def test_the_request_id_comes_back(client: httpx.Client, path: str) -> None:
    assert client.get(path, headers={"x-request-id": "mine-1"}).headers.get_list("x-request-id") == ["mine-1"]
    assert client.get(path).headers["x-request-id"]


def test_every_policy_can_be_switched_to_on_every_replica(client: httpx.Client) -> None:
    before = client.get("/admin/policy").json()["replicas"]
    assert [replica["name"] for replica in before] == ["continuum"] * 2
    for name in POLICIES:
        switched = client.put("/admin/policy", json={"name": name, "parameters": {}})
        assert [replica["name"] for replica in switched.json()["replicas"]] == [name] * 2
        assert {replica["policy"] for replica in client.get("/admin/statistics").json()["replicas"]} == {name}
        answer = client.post("/v1/completions", json=completion(), headers={"x-session-id": f"under-{name}"})
        assert answer.status_code == 200
    refused = client.put("/admin/policy", json={"name": "nobodys", "parameters": {}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
    client.put("/admin/policy", json={"name": "continuum", "parameters": {}})


def test_a_reset_frees_every_block(client: httpx.Client) -> None:
    await_idle(client)
    for number in range(4):
        client.post("/v1/chat/completions", json=chat(), headers={"x-session-id": f"reset-{number}"})
    assert [replica["reset"] for replica in client.post("/admin/reset").json()["replicas"]] == [True, True]
    for replica in client.get("/admin/statistics").json()["replicas"]:
        assert (replica["held_blocks"], replica["free_blocks"]) == (0, replica["total_blocks"])


def test_a_reset_beside_turns_says_which_replica_it_leaves_and_why(client: httpx.Client) -> None:
    await_idle(client)
    body = completion(stream=True, max_tokens=4000, ignore_eos=True)
    with client.stream("POST", "/v1/completions", json=body, headers={"x-session-id": "unreset"}) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        reset = client.post("/admin/reset")
        del pieces
    assert reset.status_code == 409, reset.text
    done, left = sorted(reset.json()["replicas"], key=lambda replica: replica["reset"], reverse=True)
    assert (done["reset"], left["reset"], left["reason"]) == (True, False, "turns that use the cache: 1")
    assert done["replica"] != left["replica"]


def test_a_client_that_goes_away_is_forgotten(client: httpx.Client) -> None:
    await_idle(client)
    body = completion(stream=True, max_tokens=4000, ignore_eos=True)
    with client.stream("POST", "/v1/completions", json=body) as stream:
        pieces = stream.iter_bytes()
        next(pieces)
        running = client.get("/admin/statistics").json()["replicas"]
        assert sum(replica["running"] for replica in running) == 1
        del pieces
    await_idle(client)


async def test_above_the_limit_503_with_retry_after(cluster: LocalCluster) -> None:
    body = completion(max_tokens=300, ignore_eos=True)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(96)))
        assert (await http.get("/health")).status_code == 200
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    assert {answer.status_code for answer in refused} == {503}
    assert all(answer.headers["retry-after"] == "1" for answer in refused)
    assert refused[0].json()["error"]["type"] == "overloaded_error"
