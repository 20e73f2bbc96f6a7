"""Output of tools that is computed while they run, end to end: tools of the cluster, and a client's own."""

import time
from typing import Any

import httpx
import pytest

from tests.serving.program_requests import until
from tests.serving.test_program_runner import ended, outputs, request, respond
from tests.serving.tool_site import LINES, ToolSite

pytestmark = pytest.mark.cluster

LS = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}
OUTPUT = "".join(LINES)


def numbers(client: httpx.Client, what: str) -> dict[str, int]:
    """The replicas' totals."""
    replicas = client.get("/admin/statistics").json()["replicas"]
    return {key: sum(replica[what][key] for replica in replicas) for key in replicas[0][what]}


def pending(client: httpx.Client) -> int:
    replicas = client.get("/admin/statistics").json()["replicas"]
    return sum(replica["early_prefill_pending"] for replica in replicas)


def held_tokens(client: httpx.Client) -> int:
    return sum(replica["held_tokens"] for replica in client.get("/admin/statistics").json()["replicas"])


def test_a_runs_tool_is_followed_while_it_runs(client: httpx.Client, site: ToolSite) -> None:
    client.post("/admin/reset")
    before = numbers(client, "early_prefill_tokens")
    site.gate.clear()
    try:
        # For longer than the policy would hold it: on a busy machine the output is computed more slowly than that.
        body = request("lines", background=True, agentic_context={"kv_retention_ttl_seconds": 60})
        response = respond(client, body, x_session_id="followed")
        # More tokens are held than the turn had: the output so far is a part of the context.
        until(lambda: held_tokens(client) > 1200, "the output's tokens")
    finally:
        site.gate.set()
    response = ended(client, response["id"])
    assert outputs(response)[0] == OUTPUT
    early = sum(numbers(client, "early_prefill_tokens").values()) - sum(before.values())
    story = client.get("/v1/programs/followed", params={"include": "token_ids"}).json()
    [run] = story["runs"]
    first, second = run["turns"][:2]
    context = first["prompt_tokens"] + first["output_tokens"]
    assert second["rendering"] == "continued"
    assert early >= second["cached_tokens"] - context > 0.8 * (second["prompt_tokens"] - context) > 900


def paused(client: httpx.Client, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A client's program whose turn has called its tool: the next turn's body without the answer, and the headers."""
    headers = {"x-session-id": name}
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "List the files."}]}
    body |= {"tools": [LS], "tool_choice": {"type": "function", "function": {"name": "ls"}}, "temperature": 0.0}
    answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 400}, headers=headers).json()
    message = answer["choices"][0]["message"]
    call = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": ""}
    return {**body, "messages": [*body["messages"], message, call], "tool_choice": "none", "max_tokens": 8}, headers


def with_output(body: dict[str, Any], output: Any) -> dict[str, Any]:
    return {**body, "messages": [*body["messages"][:-1], {**body["messages"][-1], "content": output}]}


def test_a_client_sends_its_tools_output(client: httpx.Client) -> None:
    body, headers = paused(client, "own-tools")
    path = "/v1/chat/completions"
    answers = [
        client.post(
            f"{path}/prefill", json=with_output(body, OUTPUT[: len(OUTPUT) * part // 4]), headers=headers
        ).json()
        for part in (1, 3, 2, 4)  # one comes late
    ]
    reasons = {answer["reason"] for answer in answers}
    assert {answer["object"] for answer in answers} == {"chat.completion.prefill"}
    until(lambda: not pending(client), "the end of the work")
    early = client.post(path, json=with_output(body, OUTPUT), headers=headers).json()
    client.post("/admin/reset")
    alone = client.post(path, json=with_output(body, OUTPUT)).json()
    assert early["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    # The message as the API returns it need not have the same tokens as the model's. Then it is named.
    assert reasons in ({None}, {"rewritten"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": [{"role": "user", "content": "Hello"}]}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"tools": [{**LS, "server_side": True}]}, "tools"),
        ({"model": "other"}, "model"),
    ],
)
def test_bad_bodies_name_their_field(client: httpx.Client, change: dict[str, Any], named: str) -> None:
    answer_of_tool = {"role": "tool", "tool_call_id": "a", "content": "so far"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Go"}, answer_of_tool], **change}
    answer = client.post("/v1/chat/completions/prefill", json=body, headers={"x-session-id": "bad"})
    if answer.status_code == 200:  # the program has no replica, which is found first
        assert answer.json()["reason"] == "not_held"
        started = time.monotonic()
        client.post("/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "Go"}],
                    "max_tokens": 2}, headers={"x-session-id": "bad"})  # fmt: skip
        answer = client.post("/v1/chat/completions/prefill", json=body, headers={"x-session-id": "bad"})
        assert time.monotonic() - started < 30
    assert 400 <= answer.status_code < 500, answer.text
    assert str(answer.json()["error"]["param"]).startswith(named)


def test_a_program_has_to_be_named(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/chat/completions/prefill",
        json={"model": "tiny", "messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")
