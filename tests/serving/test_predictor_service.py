"""Forecasts in a real cluster: asked of the service, learnt from, and done without when the service is killed."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from served import served

from cluster.embedded_redis import EmbeddedRedis

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CONFIG = """
http: {{port: 0}}
replicas: {{kv_cache_bytes: 16777216}}
engine: {{max_model_len: 2048, max_num_seqs: 8}}
store: {{url: "{url}"}}
predictor: {{mode: service, share_s: 0.2, deadline_s: 0.05}}
"""
CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "nothing to see here"}
USER = {"role": "user", "content": "Look around."}


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def client(redis: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file = tmp_path_factory.mktemp("predictor") / "caesura.yaml"
    file.write_text(CONFIG.format(url=redis.url), encoding="utf-8")
    with served(file) as url, httpx.Client(base_url=url, timeout=120) as http:
        yield http


def turn(client: httpx.Client, program: str, number: int, *, last: bool = False, **more: Any) -> httpx.Response:
    """A program's turn whose earlier ones each called `look`."""
    body = {"messages": [USER, *[CALL, RESULT] * number], "max_tokens": 4, "tools": TOOLS, "tool_choice": "none"}
    headers = {"x-session-id": program} | ({"x-dynamo-session-final": "true"} if last else {})
    return client.post(CHAT, json=body | more, headers=headers)


def run(client: httpx.Client, program: str, turns: int = 3, **more: Any) -> None:
    for number in range(turns):
        answer = turn(client, program, number, last=number == turns - 1, **more)
        assert answer.status_code == 200, answer.text


def told(client: httpx.Client) -> dict[str, Any]:
    view: dict[str, Any] = client.get("/admin/predictor").json()
    return view


def eventually(holds: Any, within_s: float = 60.0) -> None:
    """Wait until it does."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come to be"
        time.sleep(0.2)


def service_process() -> psutil.Process:
    """Ray names an actor's process by its class."""
    found = [one for one in psutil.process_iter() if "ServeReplica:caesura:Predictor" in _title(one)]
    assert len(found) == 1, found
    return found[0]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_turns_are_forecast_by_the_service_and_learnt_from(client: httpx.Client) -> None:
    for number in range(4):
        run(client, f"plain-{number}")
        run(client, f"stream-{number}", stream=True)
    eventually(lambda: told(client)["compared"]["output_tokens"] >= 24)
    view = told(client)
    assert view["answered"]["service"] > 0
    assert view["compared"]["pause_s"] >= 16
    assert view["unread"] == 0
    # Whether a turn's answer is whole or a stream, what it generated is known: four tokens, each time.
    eventually(lambda: told(client)["local"]["writers"] == 1)
    for number in range(3):
        run(client, f"again-{number}")
    before = told(client)
    run(client, "close", turns=6)
    after = told(client)
    compared = after["compared"]["output_tokens"] - before["compared"]["output_tokens"]
    errors = [
        view["mean_absolute_error"]["output_tokens"] * view["compared"]["output_tokens"] for view in (before, after)
    ]
    assert compared == 6
    assert (errors[1] - errors[0]) / compared < 30


def test_turns_of_programs_that_the_cluster_runs_are_forecast_and_learnt_from(client: httpx.Client) -> None:
    before = told(client)
    answer = client.post("/v1/responses", json={"model": "tiny", "input": "Look around.", "max_output_tokens": 5})
    assert answer.status_code == 200, answer.text
    after = told(client)
    assert after["compared"]["output_tokens"] == before["compared"]["output_tokens"] + 1
    assert sum(after["answered"].values()) == sum(before["answered"].values()) + 1


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": None}]}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "x" * 900_000}]},
        {"messages": [USER], "tools": [{"function": {"name": "\ud800" * 300}}, None, 3]},
        {"messages": "no"},
        {"messages": [[USER]]},
    ],
)
def test_whatever_a_client_sends_a_forecast_is_never_what_fails(client: httpx.Client, body: dict[str, Any]) -> None:
    headers = {"x-session-id": "odd", "content-type": "application/json"}
    answer = client.post(CHAT, content=json.dumps({"max_tokens": 2, **body}), headers=headers)
    assert answer.status_code in (200, 400, 422), answer.text
    assert told(client)["unread"] == 0
    assert turn(client, "sane", 0).status_code == 200


def test_a_run_in_which_the_service_is_killed_serves_every_program_and_loses_nothing(
    client: httpx.Client, redis: EmbeddedRedis
) -> None:
    run(client, "before")
    eventually(lambda: told(client)["queued"] == 0 and told(client)["local"]["writers"] >= 1)
    service = service_process()
    before = told(client)["answered"]
    for number in range(12):
        if number == 6:
            service.kill()
        run(client, f"through-{number}")
    after = told(client)["answered"]
    assert sum(after.values()) - sum(before.values()) == 36
    assert sum(n for kind, n in after.items() if kind != "service") > sum(
        n for kind, n in before.items() if kind != "service"
    )
    assert "nobody" not in after
    served_before = after.get("service", 0)

    def served_again() -> bool:
        run(client, f"later-{time.monotonic()}", turns=1)
        return bool(told(client)["answered"]["service"] > served_before)

    eventually(served_again, within_s=120.0)
    # The part of the service that was killed is still read.
    eventually(lambda: told(client)["local"]["writers"] >= 2)
